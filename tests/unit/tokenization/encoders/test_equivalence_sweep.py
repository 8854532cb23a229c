from __future__ import annotations

import unicodedata
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from asyncdata.tokenization.encoders.character_sets import complement, ranges_of
from asyncdata.tokenization.encoders.equivalence_sweep import random_texts, sweep
from asyncdata.tokenization.encoders.hf_encoder import HfEncoder, separator_of
from tests.support.backends import FEW, Fake

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.thorough

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.fixture(params=["grouped", "apart"])
def tried(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Any:
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


def test_a_backend_that_is_right_is_proven_for_every_character_that_was_tried(tried: Any) -> None:
    found = tried(lambda _: False)

    assert (found.refusal, excluded(found), found.num_differences) == ("", set(), 0)
    assert found.exceptions == complement(ranges_of(FEW))


def test_a_character_that_is_wrong_alone_is_left_out_and_no_other(tried: Any) -> None:
    found = tried(lambda text: "\u0416" in text)

    assert (found.refusal, excluded(found)) == ("", {0x416})
    assert found.num_differences > 0


@pytest.mark.parametrize("context", ["1{}2", "a{}A", "{}'s", "\n{}\n", "e{}\u0301", "{}{}{}{}", "  {}  "])
def test_a_character_that_is_wrong_in_one_context_is_left_out(tried: Any, context: str) -> None:
    found = tried(lambda text: context.replace("{}", "\u00e5") in text)

    assert (found.refusal, excluded(found)) == ("", {0xE5})


def test_a_character_that_the_backend_raises_for_is_left_out(tried: Any) -> None:
    found = tried(lambda text: "\u00df" in text, raises=True)

    assert (found.refusal, excluded(found)) == ("", {0xDF})


def test_a_sequence_that_is_normalized_otherwise_loses_its_mark(tried: Any) -> None:
    found = tried(lambda text: "C\u0327" in text or "c\u0327" in text)  # the mark itself is not of the sweep

    assert (found.refusal, excluded(found)) == ("", set())

    found = tried(lambda text: "y\u0301" in text)

    assert (found.refusal, excluded(found)) == ("", {0x301})


@pytest.mark.parametrize("token", SPECIAL)
def test_special_tokens_that_are_not_found_refuse_the_backend_and_the_text_is_named(tried: Any, token: str) -> None:
    found = tried(lambda text: f"a{token}b" in text)

    assert found.refusal == f"its ids differ on 'a{token}b'"


@pytest.mark.parametrize("text", ["", " " * 100, "x" + "a" * 600 + "y", "\r\n" * 17])
def test_an_empty_text_and_long_runs_that_are_wrong_refuse_the_backend(tried: Any, text: str) -> None:
    found = tried(lambda tried_text: tried_text == text, raises=True)

    assert found.refusal.startswith("its ids differ on '")


def test_two_characters_that_are_wrong_only_together_are_not_both_proven(tried: Any) -> None:
    found = tried(lambda text: "\u00e5" in text and "\u00f8" in text)

    assert found.refusal or excluded(found) & {0xE5, 0xF8}


def test_a_difference_that_no_character_explains_refuses_the_backend(tried: Any) -> None:
    found = tried(lambda text: len(text) > 30 and text.count("e") % 7 == 3 and "<|" not in text and "x" not in text)

    assert "which no single character explains" in found.refusal


def test_a_wrong_character_in_a_long_text_or_an_emoji_does_not_refuse_the_backend(tried: Any) -> None:
    found = tried(lambda text: "\u4e2d" in text or "\U0001f600" in text)

    assert (found.refusal, excluded(found)) == ("", {0x4E2D, 0x1F600})


@given(wrong=st.sets(st.sampled_from(FEW).filter(lambda point: point >= 0x80), max_size=3))
@settings(max_examples=10)
def test_whatever_characters_are_wrong_none_of_them_is_proven(tokenizer: Tokenizer, wrong: set[int]) -> None:
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


def test_the_random_texts_are_the_same_each_time_and_others_for_another_seed() -> None:
    texts = partial(random_texts, FEW, SPECIAL, 50)

    assert list(texts(seed=1)) == list(texts(seed=1)) != list(texts(seed=2))
    joined = "".join(texts(seed=1))
    assert all(token in "".join(random_texts(FEW, SPECIAL, 500, seed=3)) for token in SPECIAL)
    assert any(unicodedata.combining(char) for char in joined)
