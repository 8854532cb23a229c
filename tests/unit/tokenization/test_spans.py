from __future__ import annotations

import pytest

from asyncdata.tokenization.functions.fixed_length_layout import Cut, place_cut
from asyncdata.tokenization.spans import Offsets, clip, encode_spans, join, token_spans, trained_runs, trained_tokens

HELLO = Offsets.of([(0, 2), (2, 5), (5, 6), (6, 9)])


def test_the_tokens_of_a_block_are_those_that_lie_in_it():
    assert token_spans(HELLO, [(2, 6)]) == [(1, 3)]
    assert token_spans(HELLO, [(0, 2), (5, 9)]) == [(0, 1), (2, 4)]


def test_a_token_that_straddles_a_border_belongs_to_no_block():
    assert token_spans(HELLO, [(3, 6)]) == [(2, 3)]
    assert token_spans(HELLO, [(2, 8)]) == [(1, 3)]
    assert token_spans(HELLO, [(3, 5)]) == []


def test_a_character_that_is_split_over_tokens_belongs_whole_to_its_block():
    offsets = Offsets.of([(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)])

    assert token_spans(offsets, [(1, 2)]) == [(1, 4)]
    assert token_spans(offsets, [(1, 3)]) == [(1, 5)]
    assert token_spans(offsets, [(0, 1)]) == [(0, 1)]


def test_a_token_of_no_characters_belongs_where_the_next_one_does():
    offsets = Offsets.of([(0, 2), (2, 2), (2, 4), (4, 4), (4, 6)])

    assert token_spans(offsets, [(2, 4)]) == [(1, 3)]
    assert token_spans(offsets, [(0, 2)]) == [(0, 1)]


def test_blocks_of_no_tokens_have_no_span_and_blocks_that_touch_have_one():
    assert token_spans(Offsets.of([]), [(0, 0), (3, 9)]) == []
    assert token_spans(HELLO, [(2, 2), (2, 5), (5, 6)]) == [(1, 3)]
    assert join([(0, 0), (1, 2), (2, 2), (2, 4), (5, 6)]) == [(1, 4), (5, 6)]


def test_spans_are_cut_to_a_window_and_counted_from_its_start():
    assert clip([(1, 3), (4, 8), (9, 10)], 2, 6) == [(0, 1), (2, 4)]
    assert clip([(1, 3)], 3, 9) == []


def test_spans_are_written_as_json():
    assert encode_spans([(5, 20), (21, 22)]) == b"[[5,20],[21,22]]"
    assert encode_spans([]) == b"[]"


def test_runs_of_labels_are_spans():
    assert trained_runs([-100, 7, 8, -100, -100, 9]) == [(1, 3), (5, 6)]
    assert trained_runs([]) == trained_runs([-100]) == []


@pytest.mark.parametrize(
    ("cut", "removed"),
    [("truncate_context_left", (2, 5)), ("truncate_context_right", (5, 8)), ("truncate_context_middle", (4, 7))],
)
def test_a_context_is_cut_where_it_should_be(cut: Cut, removed: tuple[int, int]):
    offsets = Offsets.of([(place, place + 1) for place in range(12)])

    assert place_cut(offsets, (2, 8), 3, cut) == removed


def test_no_character_is_cut_in_two():
    offsets = Offsets.of([(0, 1), (1, 2), (1, 2), (1, 2), (2, 3), (3, 4)])

    assert place_cut(offsets, (0, 6), 2, "truncate_context_left") == (0, 4)
    assert place_cut(offsets, (0, 6), 3, "truncate_context_right") == (1, 6)
    assert place_cut(offsets, (0, 6), 2, "truncate_context_middle") == (1, 4)


def test_a_token_of_white_space_and_the_first_character_of_a_block_is_trained_with_it():
    text = "[x]  yes."
    offsets = Offsets.of([(0, 1), (1, 3), (3, 4), (4, 8), (8, 9)])

    assert trained_tokens(offsets, [(5, 9)], text) == ([(3, 5)], [])
    assert token_spans(offsets, [(5, 9)]) == [(4, 5)]


def test_tokens_that_hold_more_than_a_part_of_a_block_are_not_trained_and_are_named():
    assert trained_tokens(Offsets.of([(0, 2), (2, 5), (5, 6), (6, 9)]), [(3, 7)], "ab[cd]efg") == ([(2, 3)], [1, 3])
    assert trained_tokens(Offsets.of([(0, 9)]), [(3, 7)], "a        ") == ([], [0])
    assert trained_tokens(Offsets.of([(0, 2), (2, 9)]), [(3, 7)], "a        ") == ([], [1]), "it ends after the block"


def test_a_token_that_two_blocks_share_is_named_once_or_trained_with_the_second():
    offsets = Offsets.of([(0, 2), (2, 4), (4, 6)])

    assert trained_tokens(offsets, [(0, 3), (3, 6)], "abcdef") == ([(0, 1), (2, 3)], [1])
    assert trained_tokens(offsets, [(0, 3), (3, 6)], "ab def") == ([(0, 3)], [])
