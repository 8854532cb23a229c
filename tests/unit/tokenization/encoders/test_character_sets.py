from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.tokenization.encoders.character_sets import (
    NUM_CODE_POINTS,
    CharacterFinder,
    complement,
    ranges_of,
    unknown_characters,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.thorough

POINTS = st.sets(st.integers(0, 0x10FFFF), max_size=30)
NEAR = st.sampled_from(["a", "\n", "é", "ÿ", "Ā", "中", "\U0001f600", "\ud800", "\U0010ffff"])


def to_code_points(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {point for start, stop in ranges for point in range(start, stop)}


@given(POINTS)
def test_ranges_hold_the_very_points_and_do_not_touch(points):
    ranges = ranges_of(points)

    assert to_code_points(ranges) == points
    assert all(stop < following for (_, stop), (following, _) in zip(ranges, ranges[1:], strict=False))


@given(POINTS)
def test_a_set_and_its_complement_are_all_there_is(points):
    rest = complement(ranges_of(points))

    assert complement(rest) == ranges_of(points)
    assert sum(stop - start for start, stop in rest) == NUM_CODE_POINTS - len(points)


@given(POINTS, st.lists(st.text(st.characters() | NEAR, max_size=8), max_size=6), st.lists(NEAR, max_size=3))
def test_the_finder_finds_the_texts_that_hold_one_and_no_other(points, texts, near):
    points |= set(map(ord, near))

    found = CharacterFinder(ranges_of(points))(texts)

    assert found == [number for number, text in enumerate(texts) if any(ord(char) in points for char in text)]


def test_exactly_the_characters_that_unicode_has_not_assigned_are_unknown():
    unknown = to_code_points([*unknown_characters()])

    assert {0xD800, 0xDFFF, 0x0378, 0xF0000, 0x10FFFF} <= unknown
    assert not {point for point in range(0x3000) if unicodedata.category(chr(point)) != "Cn"} & unknown
    assert 0x1F600 not in unknown
