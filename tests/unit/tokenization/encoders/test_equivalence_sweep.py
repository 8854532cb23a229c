"""What a sweep finds out about a backend; the sets of characters that it tells of, and its processes."""

from __future__ import annotations

import os
import unicodedata
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from asyncdata.tokenization.encoders.character_sets import (
    NUM_CODE_POINTS,
    CharacterFinder,
    complement,
    ranges_of,
    unknown_characters,
)
from asyncdata.tokenization.encoders.equivalence_sweep import random_texts, sweep
from asyncdata.tokenization.encoders.forked_parts import ForkedParts
from asyncdata.tokenization.encoders.hf_encoder import HfEncoder, separator_of
from tests.support.backends import FEW, Fake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.fixture(params=["grouped", "apart"])
def tried(tokenizer, request) -> Any:
    """A short sweep over a backend that is wrong on some texts, with the contexts in one text or each in its own."""
    separator = separator_of(tokenizer) if request.param == "grouped" else None

    def run(wrong: Any, *, raises: bool = False, num_random_texts: int = 200) -> Any:
        fake = Fake(tokenizer, wrong, raises=raises)
        return sweep(
            HfEncoder(tokenizer),
            fake,
            SPECIAL,
            separator=separator,
            code_points=FEW,
            num_random_texts=num_random_texts,
            longest_text=600,
        )

    return run


def excluded(findings: Any) -> set[int]:
    return {point for point in FEW if any(start <= point < stop for start, stop in findings.exceptions)}


@pytest.mark.thorough
def test_a_backend_that_is_right_is_proven_for_every_character_that_was_tried(tried):
    found = tried(lambda _: False)

    assert (found.refusal, excluded(found), found.num_differences) == ("", set(), 0)
    assert found.exceptions == complement(ranges_of(FEW))


def holds(*texts: str) -> Callable[[str], bool]:
    return lambda tried: any(text in tried for text in texts)


WRONG: dict[str, tuple[Callable[[str], bool], set[int]]] = {
    "alone": (holds("\u0416"), {0x416}),
    "between digits": (holds("1\u00e52"), {0xE5}),
    "between letters": (holds("a\u00e5A"), {0xE5}),
    "before an apostrophe": (holds("\u00e5's"), {0xE5}),
    "on a line": (holds("\n\u00e5\n"), {0xE5}),
    "before a mark": (holds("e\u00e5\u0301"), {0xE5}),
    "four times": (holds("\u00e5" * 4), {0xE5}),
    "between spaces": (holds("  \u00e5  "), {0xE5}),
    "in a sequence of a mark that is not of the sweep": (holds("C\u0327", "c\u0327"), set()),
    "in a sequence that is normalized otherwise": (holds("y\u0301"), {0x301}),
    "in a long text, and an emoji": (holds("\u4e2d", "\U0001f600"), {0x4E2D, 0x1F600}),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("wrong", "points"), WRONG.values(), ids=WRONG)
def test_a_character_that_is_wrong_is_left_out_and_no_other(tried, wrong, points):
    found = tried(wrong)

    assert (found.refusal, excluded(found)) == ("", points)


@pytest.mark.thorough
def test_a_character_that_the_backend_raises_for_is_left_out(tried):
    found = tried(lambda text: "\u00df" in text, raises=True)

    assert (found.refusal, excluded(found)) == ("", {0xDF})
    assert found.num_differences > 0


@pytest.mark.thorough
@pytest.mark.parametrize("token", SPECIAL)
def test_special_tokens_that_are_not_found_refuse_the_backend_and_the_text_is_named(tried, token):
    found = tried(lambda text: f"a{token}b" in text)

    assert found.refusal == f"its ids differ on 'a{token}b'"


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["", " " * 100, "x" + "a" * 600 + "y", "\r\n" * 17])
def test_an_empty_text_and_long_runs_that_are_wrong_refuse_the_backend(tried, text):
    found = tried(lambda tried_text: tried_text == text, raises=True)

    assert found.refusal.startswith("its ids differ on '")


@pytest.mark.thorough
def test_two_characters_that_are_wrong_only_together_are_not_both_proven(tried):
    found = tried(lambda text: "\u00e5" in text and "\u00f8" in text)

    assert found.refusal or excluded(found) & {0xE5, 0xF8}


@pytest.mark.thorough
def test_a_difference_that_no_character_explains_refuses_the_backend(tried):
    found = tried(lambda text: len(text) > 30 and text.count("e") % 7 == 3 and "<|" not in text and "x" not in text)

    assert "which no single character explains" in found.refusal


@pytest.mark.thorough
@given(wrong=st.sets(st.sampled_from(FEW).filter(lambda point: point >= 0x80), max_size=3))
@settings(max_examples=10)
def test_whatever_characters_are_wrong_none_of_them_is_proven(tokenizer, wrong):
    fake = Fake(tokenizer, lambda text: any(ord(char) in wrong for char in text))

    found = sweep(
        HfEncoder(tokenizer),
        fake,
        [],
        separator=separator_of(tokenizer),
        code_points=FEW,
        num_random_texts=20,
        longest_text=100,
    )

    assert excluded(found) == wrong
    assert found.refusal == ""


@pytest.mark.thorough
def test_the_random_texts_are_the_same_each_time_and_others_for_another_seed():
    texts = partial(random_texts, FEW, SPECIAL, 50)

    assert list(texts(seed=1)) == list(texts(seed=1)) != list(texts(seed=2))
    joined = "".join(texts(seed=1))
    assert all(token in "".join(random_texts(FEW, SPECIAL, 500, seed=3)) for token in SPECIAL)
    assert any(unicodedata.combining(char) for char in joined)


# Sets of characters


POINTS = st.sets(st.integers(0, 0x10FFFF), max_size=30)
NEAR = st.sampled_from(["a", "\n", "é", "ÿ", "Ā", "中", "\U0001f600", "\ud800", "\U0010ffff"])


def to_code_points(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {point for start, stop in ranges for point in range(start, stop)}


@pytest.mark.thorough
@given(POINTS)
def test_ranges_hold_the_very_points_and_do_not_touch(points):
    ranges = ranges_of(points)

    assert to_code_points(ranges) == points
    assert all(stop < following for (_, stop), (following, _) in zip(ranges, ranges[1:], strict=False))


@pytest.mark.thorough
@given(POINTS)
def test_a_set_and_its_complement_are_all_there_is(points):
    rest = complement(ranges_of(points))

    assert complement(rest) == ranges_of(points)
    assert sum(stop - start for start, stop in rest) == NUM_CODE_POINTS - len(points)


@pytest.mark.thorough
@given(POINTS, st.lists(st.text(st.characters() | NEAR, max_size=8), max_size=6), st.lists(NEAR, max_size=3))
def test_the_finder_finds_the_texts_that_hold_one_and_no_other(points, texts, near):
    points |= set(map(ord, near))

    found = CharacterFinder(ranges_of(points))(texts)

    assert found == [number for number, text in enumerate(texts) if any(ord(char) in points for char in text)]


@pytest.mark.thorough
def test_exactly_the_characters_that_unicode_has_not_assigned_are_unknown():
    unknown = to_code_points([*unknown_characters()])

    assert {0xD800, 0xDFFF, 0x0378, 0xF0000, 0x10FFFF} <= unknown
    assert not {point for point in range(0x3000) if unicodedata.category(chr(point)) != "Cn"} & unknown
    assert 0x1F600 not in unknown


# Processes. The one that proves has one thread; that of pytest-xdist has more, of which Python 3.12 and later warn.


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_every_part_but_the_first_is_made_in_a_process_of_its_own_with_the_same_scheduling():
    def work(number: int) -> bytes:
        return f"{number} {os.getppid()} {os.sched_getscheduler(0)}".encode() * 100_000

    found = ForkedParts(4, work).results()

    mine = f"{os.getpid()} {os.sched_getscheduler(0)}"
    assert sorted(found) == [f"{number} {mine}".encode() * 100_000 for number in (1, 2, 3)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_part_that_fails_is_an_error_and_no_missing_result():
    def work(number: int) -> bytes:
        return b"x" * (1 // (number - 2))

    with pytest.raises(ChildProcessError, match=r"exit statuses \[0, 1, 0\]"):
        ForkedParts(4, work).results()
