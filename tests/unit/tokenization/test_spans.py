"""Spans against the plainest thing that does the same: one truth value for every character and every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from asyncdata.core.types import SampleRange
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.functions.fixed_length_layout import place_cut
from asyncdata.tokenization.spans import (
    NOT_TRAINED,
    Offsets,
    clip,
    common_prefix,
    common_suffix,
    encode_spans,
    join,
    token_spans,
    trained_runs,
    trained_tokens,
)
from tests.unit.tokenization import read_back

if TYPE_CHECKING:
    from asyncdata.tokenization.spans import Span

CUTS = st.sampled_from(["truncate_context_left", "truncate_context_right", "truncate_context_middle"])


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


@given(offsets=tilings(), blocks=span_lists())
def test_a_token_is_trained_if_all_its_characters_are_in_one_block(offsets, blocks):
    spans = token_spans(Offsets.of(offsets), blocks)

    assert covered(spans, len(offsets)) == [any(is_in(token, block) for block in blocks) for token in offsets]
    assert all(start < stop for start, stop in spans)
    assert all(one[1] < other[0] for one, other in zip(spans, spans[1:], strict=False))


def begins(token: Span, block: Span, text: str) -> bool:
    """Whether the token holds the block's first character, white space in front of it, and nothing else."""
    return token[0] < block[0] < token[1] <= block[1] and text[token[0] : block[0]].isspace()


@example(offsets=[(0, 1), (1, 2), (2, 5), (5, 6), (6, 9)], blocks=[(3, 7)], text="a" * 64)
@given(offsets=tilings(), blocks=span_lists(), text=st.text("ab ", min_size=64, max_size=64))
def test_tokens_of_a_block_are_trained_or_named(offsets, blocks, text):
    spans, straddling = trained_tokens(Offsets.of(offsets), blocks, text)

    trained = [any(is_in(token, block) or begins(token, block, text) for block in blocks) for token in offsets]
    touched = [any(max(token[0], block[0]) < min(token[1], block[1]) for block in blocks) for token in offsets]
    assert covered(spans, len(offsets)) == trained
    assert straddling == [place for place in range(len(offsets)) if touched[place] and not trained[place]]


@given(spans=span_lists())
def test_joined_spans_cover_the_same_and_do_not_touch(spans):
    joined = join(spans)

    assert covered(joined, 41) == covered(spans, 41)
    assert all(one[1] < other[0] for one, other in zip(joined, joined[1:], strict=False))


@given(spans=span_lists(), window=st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted))
def test_a_clipped_mask_is_the_slice_of_the_mask(spans, window):
    start, stop = window

    assert covered(clip(spans, start, stop), stop - start) == covered(spans, 41)[start:stop]


@given(flags=st.lists(st.booleans(), max_size=30))
def test_labels_are_read_back_from_the_column_that_was_written(flags):
    tokens = list(range(100, 100 + len(flags)))
    labels = [token if flag else NOT_TRAINED for token, flag in zip(tokens, flags, strict=True)]
    out = ColumnWriter()
    out.keep(0, tokens, spans=encode_spans(trained_runs(labels)))

    (sample,) = SampleRange(read_back(out.finish(1, 0.0), 1), 0, 1, 0, 0, 1).samples()

    assert sample.labels is not None
    assert sample.labels.tolist() == labels


@given(start=st.text("ab", max_size=8), middles=st.tuples(*[st.text("abc", max_size=4)] * 2), end=st.text("ab"))
def test_what_two_texts_share_is_found_as_by_looking_at_each_character(start, middles, end):
    one, other = (start + middle + end for middle in middles)
    alike = [a == b for a, b in zip(one, other, strict=False)]
    alike_from_the_end = [a == b for a, b in zip(reversed(one), reversed(other), strict=False)]

    assert common_prefix(one, other) == ([*alike, False].index(False))
    assert common_suffix(one, other) == ([*alike_from_the_end, False].index(False))


@given(data=st.data(), offsets=tilings(), cut=CUTS)
def test_a_cut_takes_enough_out_of_the_context_alone_and_no_character_in_two(data, offsets, cut):
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(offsets))] * 2)))
    num_tokens = data.draw(st.integers(0, last - first))
    if num_tokens == 0:
        return

    start, stop = place_cut(Offsets.of(offsets), (first, last), num_tokens, cut)

    assert first <= start <= stop <= last
    assert stop - start >= num_tokens
    kept = {place for token in offsets[first:start] + offsets[stop:last] for place in range(*token)}
    assert kept.isdisjoint({place for token in offsets[start:stop] for place in range(*token)})


def test_spans_are_written_as_json_and_blocks_without_tokens_have_none():
    assert encode_spans([(5, 20), (21, 22)]) == b"[[5,20],[21,22]]"
    assert encode_spans([]) == b"[]"
    assert token_spans(Offsets.of([]), [(0, 0), (3, 9)]) == []


SINGLE = Offsets.of([(place, place + 1) for place in range(12)])
SHARED = Offsets.of([(0, 1), (1, 2), (1, 2), (1, 2), (2, 3), (3, 4)])


@pytest.mark.parametrize(
    ("offsets", "context", "num_tokens", "cut", "removed"),
    [
        (SINGLE, (2, 8), 3, "truncate_context_left", (2, 5)),
        (SINGLE, (2, 8), 3, "truncate_context_right", (5, 8)),
        (SINGLE, (2, 8), 3, "truncate_context_middle", (4, 7)),
        (SHARED, (0, 6), 2, "truncate_context_left", (0, 4)),
        (SHARED, (0, 6), 3, "truncate_context_right", (1, 6)),
        (SHARED, (0, 6), 2, "truncate_context_middle", (1, 4)),
    ],
)
def test_a_context_is_cut_where_it_should_be_and_no_character_in_two(offsets, context, num_tokens, cut, removed):
    assert place_cut(offsets, context, num_tokens, cut) == removed
