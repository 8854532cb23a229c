"""Spans against the plainest thing that does the same: one truth value for every character and every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from tests.support.examples import in_ci
from tests.support.parts import Offsets, encode_spans, place_cut, token_spans, trained_tokens

if TYPE_CHECKING:
    from tests.support.parts import Span


@st.composite
def tilings(draw: st.DrawFn) -> list[Span]:
    """Offsets as tokenizers give them: rising, some of no characters, some sharing theirs, with gaps."""
    offsets: list[Span] = []
    at = 0
    for kind, length in draw(st.lists(st.tuples(st.sampled_from("tttegs"), st.integers(1, 3)), max_size=20)):
        if kind == "g":
            at += length  # characters that a normalizer removed
        elif kind == "e":
            offsets.append((at, at))
        elif kind == "s":
            offsets += [(at, at + 1)] * length
            at += 1
        else:
            offsets.append((at, at + length))
            at += length
    return offsets


@st.composite
def span_lists(draw: st.DrawFn, most: int = 40) -> list[Span]:
    borders = sorted(draw(st.lists(st.integers(0, most), max_size=12)))
    return list(zip(borders[::2], borders[1::2], strict=False))


def covered(spans: list[Span], length: int) -> list[bool]:
    return [any(start <= place < stop for start, stop in spans) for place in range(length)]


def is_in(token: Span, block: Span) -> bool:
    start, stop = token
    if start == stop:
        return block[0] <= start < block[1]

    return all(block[0] <= place < block[1] for place in range(start, stop))


@in_ci(max_examples=50)
@given(offsets=tilings(), blocks=span_lists())
def test_a_token_is_trained_if_all_its_characters_are_in_one_block(offsets, blocks):
    spans = token_spans(Offsets.of(offsets), blocks)

    assert covered(spans, len(offsets)) == [any(is_in(token, block) for block in blocks) for token in offsets]
    assert all(start < stop for start, stop in spans)
    assert all(one[1] < other[0] for one, other in zip(spans, spans[1:], strict=False))


def begins(token: Span, block: Span, text: str) -> bool:
    """Whether the token holds the block's first character, white space in front of it, and nothing else."""
    return token[0] < block[0] < token[1] <= block[1] and text[token[0] : block[0]].isspace()


@in_ci(max_examples=50)
@example(offsets=[(0, 1), (1, 2), (2, 5), (5, 6), (6, 9)], blocks=[(3, 7)], text="a" * 64)
@given(offsets=tilings(), blocks=span_lists(), text=st.text("ab ", min_size=64, max_size=64))
def test_tokens_of_a_block_are_trained_or_named(offsets, blocks, text):
    spans, straddling = trained_tokens(Offsets.of(offsets), blocks, text)

    trained = [any(is_in(token, block) or begins(token, block, text) for block in blocks) for token in offsets]
    touched = [any(max(token[0], block[0]) < min(token[1], block[1]) for block in blocks) for token in offsets]
    assert covered(spans, len(offsets)) == trained
    assert straddling == [place for place in range(len(offsets)) if touched[place] and not trained[place]]


def test_spans_are_written_as_json_and_blocks_without_tokens_have_none():
    assert encode_spans([(5, 20), (21, 22)]) == b"[[5,20],[21,22]]"
    assert encode_spans([]) == b"[]"
    assert token_spans(Offsets.of([]), [(0, 0), (3, 9)]) == []


SINGLE = Offsets.of([(place, place + 1) for place in range(12)])
SHARED = Offsets.of([(0, 1), (1, 2), (1, 2), (1, 2), (2, 3), (3, 4)])


@pytest.mark.parametrize(
    ("offsets", "context", "num_tokens", "cut", "removed"),
    [
        (SINGLE, (2, 8), 3, "truncate_context_left", (2, 5)), (SINGLE, (2, 8), 3, "truncate_context_right", (5, 8)),
        (SINGLE, (2, 8), 3, "truncate_context_middle", (4, 7)), (SHARED, (0, 6), 2, "truncate_context_left", (0, 4)),
        (SHARED, (0, 6), 3, "truncate_context_right", (1, 6)), (SHARED, (0, 6), 2, "truncate_context_middle", (1, 4)),
    ],
)  # fmt: skip
def test_a_context_is_cut_where_it_should_be_and_no_character_in_two(offsets, context, num_tokens, cut, removed):
    assert place_cut(offsets, context, num_tokens, cut) == removed
