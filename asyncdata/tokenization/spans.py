"""Ranges of characters in a text, and the ranges of tokens that they cover. Pure functions, without a tokenizer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import msgspec

NOT_TRAINED = -100
"""The label of a token that is not trained: what losses ignore by default."""

Span = tuple[int, int]
"""``[start, stop)``, of characters or of tokens. Lists of spans are rising and disjoint."""


class Offsets(NamedTuple):
    """The characters of each token of a text: ``[starts[i], stops[i])``. Neither the starts nor the stops ever fall."""

    starts: Sequence[int]
    stops: Sequence[int]

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Offsets:
        """From the characters of each token."""
        return cls([start for start, _ in spans], [stop for _, stop in spans])


def token_spans(offsets: Offsets, blocks: Iterable[Span]) -> list[Span]:
    """The tokens that lie in the blocks.

    A token belongs to a block if no character of it lies outside. So one that straddles a border belongs to none, and
    every part of a character that is split over several tokens belongs to the block of the character. A token of no
    characters belongs where the next one does.

    :param blocks: ranges of characters, rising and disjoint.
    """
    spans = [_inside(offsets, start, stop) for start, stop in blocks]
    return join((first, last) for first, last in spans if first < last)


def trained_tokens(offsets: Offsets, blocks: Iterable[Span], text: str) -> tuple[list[Span], list[int]]:
    """The tokens that are trained of the blocks of a text, and those that are not, though they hold a part of one.

    They are the tokens that lie in the blocks, and one more kind: a token that holds a block's first character with
    nothing but white space in front of it, as a reply's first word and the space before it are one token of many
    tokenizers. A model that is asked for the reply writes that token. Any other token that straddles a border is
    not trained: the model could not have written just its part.

    :param blocks: as for :func:`token_spans`.
    :param text: the text that both are ranges of.
    """
    starts, stops = offsets
    spans, straddling = [], set[int]()
    for start, stop in blocks:
        first = bisect_left(starts, start)
        last = bisect_left(starts, stop, first)
        if first >= last or stops[last - 1] > stop or (first and stops[first - 1] > start):  # a token straddles
            first, last, partly = _uneven(offsets, (start, stop), text)
            straddling.update(partly)
        if first < last:
            spans.append((first, last))
            if straddling:
                straddling.difference_update(range(first, last))
    return join(spans), sorted(straddling)


def _uneven(offsets: Offsets, block: Span, text: str) -> tuple[int, int, list[int]]:
    """The tokens that are trained of a block, as their first and the one after their last, and those that straddle."""
    starts, stops = offsets
    start, stop = block
    first, last = _inside(offsets, start, stop)
    last = max(first, last)
    while first and start < stops[first - 1] <= stop and text[starts[first - 1] : start].isspace():
        first -= 1
    return first, last, _partly_inside(offsets, block, (first, last)) if start < stop else []


def _inside(offsets: Offsets, start: int, stop: int) -> Span:
    """The tokens of which no character lies outside of a block; it may be empty."""
    starts, stops = offsets
    first = bisect_left(starts, start)
    return first, min(bisect_left(starts, stop), bisect_right(stops, stop))


def _partly_inside(offsets: Offsets, block: Span, tokens: Span) -> list[int]:
    """The tokens beside ``tokens``, which are a block's, that have a character of the block."""
    (start, stop), (first, last) = block, tokens
    starts, stops = offsets
    found = []
    while first and stops[first - 1] > start:
        first -= 1
        found.append(first)
    while last < len(starts) and starts[last] < stop:
        found.append(last)
        last += 1
    return found


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
    """Where the labels are of trained tokens."""
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
