"""Ranges of a text, and the ranges of its tokens that they come to. Pure: nothing here knows a tokenizer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = (
    "NOT_TRAINED",
    "Span",
    "clip",
    "common_prefix",
    "common_suffix",
    "encode_spans",
    "join",
    "token_spans",
    "trained_runs",
)

NOT_TRAINED = -100
"""The label of a token that is not trained: what losses ignore by default."""

Span = tuple[int, int]
"""``[start, stop)``, of characters or of tokens. Lists of spans are rising and disjoint."""

_START, _STOP = itemgetter(0), itemgetter(1)


def token_spans(offsets: Sequence[Span], blocks: Iterable[Span]) -> list[Span]:
    """The tokens that lie in the blocks.

    A token belongs to a block if no character of it lies outside. So one that straddles a border belongs to none, and
    every part of a character that is split over several tokens belongs to the block of the character. A token of no
    characters belongs where the next one does.

    :param offsets: the characters of each token; neither the starts nor the stops ever fall.
    :param blocks: ranges of characters, rising and disjoint.
    """
    spans = []
    for start, stop in blocks:
        first = bisect_left(offsets, start, key=_START)
        last = min(bisect_left(offsets, stop, key=_START), bisect_right(offsets, stop, key=_STOP))
        if first < last:
            spans.append((first, last))
    return join(spans)


def join(spans: Iterable[Span]) -> list[Span]:
    """The same with no two that touch, and none that is empty."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined


def clip(spans: Iterable[Span], start: int, stop: int) -> list[Span]:
    """What of the spans lies in ``[start, stop)``, counted from ``start``."""
    cut = ((max(first, start) - start, min(last, stop) - start) for first, last in spans)
    return [(first, last) for first, last in cut if first < last]


def trained_runs(labels: Sequence[int]) -> list[Span]:
    """Where the labels are those of trained tokens."""
    spans, start = [], 0
    for is_trained, run in groupby(labels, key=NOT_TRAINED.__ne__):
        stop = start + sum(1 for _ in run)
        if is_trained:
            spans.append((start, stop))
        start = stop
    return spans


def encode_spans(spans: Sequence[Span]) -> bytes:
    """The spans as JSON: what a sample's ``spans`` column holds."""
    return msgspec.json.encode(spans)


def common_prefix(one: str, other: str) -> int:
    """How many characters the two begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(one: str, other: str) -> int:
    """How many characters the two end with alike."""
    return common_prefix(one[::-1], other[::-1])
