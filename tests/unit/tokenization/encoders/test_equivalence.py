"""Proofs that a backend is exact: how they are made by a sweep, kept, chosen and revoked."""

from __future__ import annotations

import json
import os
import stat
import unicodedata
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, processors

from asyncdata import ConfigError
from asyncdata.tokenization.encoders import equivalence_records as records
from asyncdata.tokenization.encoders import equivalence_sweep as sweeps
from asyncdata.tokenization.encoders.character_sets import (
    NUM_CODE_POINTS,
    CharacterFinder,
    complement,
    ranges_of,
    unknown_characters,
)
from asyncdata.tokenization.encoders.equivalence_records import Proof
from asyncdata.tokenization.encoders.equivalence_sweep import CONTEXTS, ForkedParts, OffsetCheck, random_texts, sweep
from asyncdata.tokenization.encoders.hf_encoder import separator_of
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from tests.support.backends import FEW, Fake, install
from tests.unit.tokenization.trained import variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncdata.tokenization.encoders.equivalence_records import Subject


def fake(files: TokenizerFiles, *wrong: str) -> Fake:
    """A backend that is wrong on texts with one of these."""
    return Fake(files.load(), lambda text: any(each in text for each in wrong))


def one_subject(files: TokenizerFiles, backend: str = "gigatoken") -> Subject:
    found = records.subject_of(files, backend)
    assert found is not None
    return found


@pytest.fixture
def right(files) -> Fake:
    return fake(files)


@pytest.fixture
def wrong(files) -> Fake:
    return fake(files, "<|im_end|>")


@pytest.fixture
def subject(monkeypatch, files, right) -> Subject:
    install(monkeypatch, {"gigatoken": lambda: right})
    return one_subject(files)


def test_a_proof_that_was_kept_is_found_and_only_its_owner_may_read_it(subject):
    proof = Proof(subject=subject, exceptions=[(5, 7), (9, 10)], around=([1], []), num_texts=3, seconds=1.5)
    assert records.find(subject) is None

    records.keep(proof)

    assert records.find(subject) == proof
    assert proof.num_exceptions == 3
    assert stat.S_IMODE(os.stat(records.proof_path(subject)).st_mode) == 0o600


OTHERS = {"tokenizer": "f" * 32, "backend_version": "9", "tokenizers_version": "9", "sweep_version": -1}
OTHERS |= {"unicode_version": "1.0", "processor": "other", "backend": "fastokens"}


@pytest.mark.parametrize("name", OTHERS)
def test_a_proof_of_another_subject_is_not_used(subject, name):
    other = msgspec.structs.replace(subject, **{name: OTHERS[name]})
    records.keep(Proof(subject=subject))

    assert records.find(other) is None

    os.replace(records.proof_path(subject), records.proof_path(other))  # also under its name
    assert records.find(other) is None


@pytest.mark.thorough
def test_a_proof_is_made_once_and_one_that_is_damaged_anywhere_is_made_again(files, subject, right):
    proof = records.make(files, subject)
    num_texts = right.num_texts
    assert num_texts == proof.num_texts > 0
    assert records.make(files, subject) == proof == records.choose(files, "gigatoken") == records.choose(files, "auto")
    assert right.num_texts == num_texts

    path = Path(records.proof_path(subject))
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        for damaged in (data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :], data[:position]):
            path.write_bytes(damaged)
            assert records.find(subject) is None, position
    again = records.make(files, subject)

    assert (again.exceptions, records.find(subject)) == (proof.exceptions, again)


def test_auto_takes_the_first_whole_proof_then_a_partial_one_and_tokenizers_where_there_is_none(
    monkeypatch, files, right
):
    install(monkeypatch, {"gigatoken": lambda: right, "fastokens": lambda: right})
    first, second = one_subject(files), one_subject(files, "fastokens")
    assert (records.choose(files, "auto"), records.missing(files)) == (None, ["gigatoken", "fastokens"])

    records.keep(Proof(subject=first, refusal="it is wrong"))
    assert (records.choose(files, "auto"), records.missing(files)) == (None, ["fastokens"])
    records.keep(Proof(subject=first, is_partial=True))
    assert records.choose(files, "auto") == records.find(first)
    records.keep(Proof(subject=second))
    assert (records.choose(files, "auto"), records.missing(files)) == (records.find(second), [])
    records.keep(Proof(subject=first))
    assert records.choose(files, "auto") == records.find(first)
    assert records.choose(files, "hf") is None


def test_a_backend_that_is_named_and_cannot_be_used_is_an_error_that_says_why_and_the_way_out(
    monkeypatch, files, wrong
):
    def cannot_load() -> Fake:
        raise ValueError("unsupported pre-tokenizer")

    for backends, reason in (
        ({"gigatoken": lambda: wrong}, r"AD434 .*'gigatoken' is not exact .* differ on '<\|im_end\|>'.*'hf'"),
        ({"gigatoken": cannot_load, "fastokens": cannot_load}, "cannot load it: ValueError: unsupported pre-tokenizer"),
        ({}, "AD435 .*pip install fastokens"),
    ):
        install(monkeypatch, backends)
        with pytest.raises(ConfigError, match=reason):
            records.choose(files, "gigatoken" if len(backends) == 1 else "fastokens")
    assert records.choose(files, "auto") is None


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (models.Unigram([("a", -1.0)]), "its model is Unigram"),
        (models.WordPiece({"a": 0}), "its model is WordPiece"),
        (models.BPE({"a": 0, "b": 1}, [], dropout=0.1), "BPE dropout"),
    ],
    ids=["Unigram", "WordPiece", "dropout"],
)
def test_models_that_no_other_library_knows_are_not_even_tried(monkeypatch, tmp_path, right, model, says):
    loads = install(monkeypatch, {"gigatoken": lambda: right})
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))

    with pytest.raises(ConfigError, match=says):
        records.choose(TokenizerFiles(str(tmp_path)), "gigatoken")
    assert loads == {"gigatoken": 0}


@pytest.mark.thorough
def test_without_a_cache_folder_a_proof_holds_for_the_process(monkeypatch, files, subject, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    proof = records.choose(files, "gigatoken")

    assert proof is not None
    assert not proof.refusal


@pytest.mark.thorough
def test_the_ids_around_a_text_are_part_of_the_proof(monkeypatch, small_tokenizer, tmp_path, right):
    around = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    folder = variant(small_tokenizer, tmp_path / "around", post_processor=json.loads(around.__getstate__()))
    install(monkeypatch, {"gigatoken": lambda: right})

    proof = records.choose(TokenizerFiles(folder), "gigatoken")

    assert proof is not None
    assert proof.around == ([1], [])
    assert records.find(proof.subject) == proof


# In two parts, beside a run


POINTS = [*range(0x20, 0x7F), 0xE9, 0x301, *range(0x4E00, 0x4E40)]


# The process that proves has one thread; that of pytest-xdist has more, of which Python 3.12 and later warn.


@pytest.fixture
def few(monkeypatch) -> None:
    """Sweeps are of few characters, most of which are common."""
    monkeypatch.setattr(sweeps, "known_points", lambda: POINTS)
    monkeypatch.setattr(sweeps, "common_points", lambda: POINTS[:-0x40])
    monkeypatch.setattr(sweeps, "NUM_COMMON_TEXTS", 100)
    short = partial(sweep, code_points=POINTS, num_random_texts=100, longest_text=500)
    monkeypatch.setattr(sweeps, "sweep", short)


@pytest.mark.parametrize("name", ["auto", "gigatoken"])
def test_common_characters_are_proven_first_and_others_never_reach_the_backend_before_they_are(
    files, subject, few, name
):
    texts = ["plain", "caf\u00e9", "\u4e2d", "x\u4e01"]
    first = records.make_first(files, subject)

    assert (first.is_partial, first.refusal) == (True, "")
    assert (records.choose(files, "auto"), records.make_first(files, subject), records.missing(files)) == (
        first,
        first,
        ["gigatoken"],
    )
    assert CharacterFinder(first.exceptions)(texts) == [2, 3]

    # One that is named needs the whole proof, and makes it.
    whole = records.make(files, subject) if name == "auto" else records.choose(files, name)
    assert whole is not None
    assert not whole.is_partial
    assert CharacterFinder(whole.exceptions)(texts) == []
    assert (records.choose(files, "auto"), records.make_first(files, subject), records.missing(files)) == (
        whole,
        whole,
        [],
    )


def test_a_backend_that_is_wrong_on_common_characters_is_refused_at_once(monkeypatch, files, wrong, few):
    install(monkeypatch, {"gigatoken": lambda: wrong}, points=None)
    subject = one_subject(files)

    first = records.make_first(files, subject)

    assert (bool(first.refusal), first.is_partial, records.missing(files)) == (True, False, [])
    assert records.make(files, subject) == first


def test_what_an_audit_revokes_while_the_rest_is_proven_stays_revoked(files, subject, few):
    records.make_first(files, subject)
    revoke_at = iter([True])

    def audit(_part: str, _share: float) -> None:
        if next(revoke_at, False):
            records.revoke(subject, "an audit found other ids")

    assert records.make(files, subject, audit).refusal == "an audit found other ids"
    assert records.choose(files, "auto") is None
    assert records.missing(files) == []  # it would be proven again by the same sweep
    with pytest.raises(ConfigError, match="an audit found other ids"):
        records.choose(files, "gigatoken")


# The process that proves has one thread; that of pytest-xdist has more, of which Python 3.12 and later warn.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_several_processes_find_what_one_finds(monkeypatch, files, few, is_wrong):
    backend = fake(files, *["\u4e05"] * is_wrong)
    install(monkeypatch, {"gigatoken": lambda: backend}, points=None)
    subject = one_subject(files)

    alone = records.make(files, subject)
    os.unlink(records.proof_path(subject))
    shared = records.make(files, subject, num_processes=3)

    expected = msgspec.structs.replace(alone, seconds=0, num_texts=0, num_differences=0)
    assert msgspec.structs.replace(shared, seconds=0, num_texts=0, num_differences=0) == expected
    assert bool(CharacterFinder(shared.exceptions)(["\u4e05"])) is is_wrong
    # Each process also tries the contexts themselves, and a difference in them would be found more than once.
    assert shared.num_texts - alone.num_texts == 2 * len(CONTEXTS)


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def swept(tokenizer: Tokenizer, wrong: Callable[[str], bool], separator: str | None, *, raises: bool = False) -> Any:
    """A short sweep over a backend that is wrong on some texts."""
    few: dict[str, Any] = {"code_points": FEW, "num_random_texts": 200, "longest_text": 600}
    return sweep(
        OffsetCheck(tokenizer, None), Fake(tokenizer, wrong, raises=raises), SPECIAL, separator=separator, **few
    )


@pytest.fixture(params=["grouped", "apart"])
def tried(tokenizer, request) -> Any:
    """With the contexts in one text, or each in its own."""
    separator = separator_of(tokenizer) if request.param == "grouped" else None
    return partial(swept, tokenizer, separator=separator)


def excluded(findings: Any) -> set[int]:
    return {point for point in FEW if any(start <= point < stop for start, stop in findings.exceptions)}


def holds(*texts: str) -> Callable[[str], bool]:
    return lambda tried: any(text in tried for text in texts)


WRONG: dict[str, tuple[Callable[[str], bool], set[int]]] = {
    "nowhere": (holds(), set()),
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
    if not points:
        assert found.exceptions == complement(ranges_of(FEW))


@pytest.mark.thorough
def test_a_character_that_the_backend_raises_for_is_left_out(tried):
    found = tried(holds("\u00df"), raises=True)

    assert (found.refusal, excluded(found), found.num_differences > 0) == ("", {0xDF}, True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text", [*(f"a{token}b" for token in SPECIAL), "", " " * 100, "x" + "a" * 600 + "y", "\r\n" * 17]
)
def test_special_tokens_empty_texts_and_long_runs_that_are_wrong_refuse_the_backend_and_are_named(tried, text):
    found = tried(lambda tried_text: tried_text == text, raises=True)

    assert found.refusal.startswith(f"its ids differ on {ascii(text)[:40]}")


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
    found = swept(tokenizer, lambda text: any(ord(char) in wrong for char in text), separator_of(tokenizer))

    assert (found.refusal, excluded(found)) == ("", wrong)


@pytest.mark.thorough
def test_the_random_texts_are_the_same_each_time_and_others_for_another_seed():
    texts = partial(random_texts, FEW, SPECIAL, 50)

    assert list(texts(seed=1)) == list(texts(seed=1)) != list(texts(seed=2))
    joined = "".join(texts(seed=1))
    assert all(token in "".join(random_texts(FEW, SPECIAL, 500, seed=3)) for token in SPECIAL)
    assert any(unicodedata.combining(char) for char in joined)


# Sets of characters


code_points = st.sets(st.integers(0, 0x10FFFF), max_size=30)
NEAR = st.sampled_from(["a", "\n", "é", "ÿ", "Ā", "中", "\U0001f600", "\ud800", "\U0010ffff"])


def to_code_points(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {point for start, stop in ranges for point in range(start, stop)}


@pytest.mark.thorough
@given(code_points, st.lists(st.text(st.characters() | NEAR, max_size=8), max_size=6), st.lists(NEAR, max_size=3))
def test_ranges_and_their_complement_are_all_there_is_and_the_finder_finds_the_texts_that_hold_a_point(
    points, texts, near
):
    points |= set(map(ord, near))
    ranges = ranges_of(points)
    rest = complement(ranges)

    assert to_code_points(ranges) == points
    assert all(stop < following for (_, stop), (following, _) in pairwise(ranges))
    assert complement(rest) == ranges
    assert sum(stop - start for start, stop in rest) == NUM_CODE_POINTS - len(points)
    found = CharacterFinder(ranges)(texts)
    assert found == [number for number, text in enumerate(texts) if any(ord(char) in points for char in text)]


@pytest.mark.thorough
def test_exactly_the_characters_that_unicode_has_not_assigned_are_unknown():
    unknown = to_code_points([*unknown_characters()])

    assert {0xD800, 0xDFFF, 0x0378, 0xF0000, 0x10FFFF} <= unknown
    assert not {point for point in range(0x3000) if unicodedata.category(chr(point)) != "Cn"} & unknown
    assert 0x1F600 not in unknown


# Processes. The one that proves has one thread; that of pytest-xdist has more, of which Python 3.12 and later warn.


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_part_that_fails_is_an_error_and_no_missing_result():
    def work(number: int) -> bytes:
        return b"x" * (1 // (number - 2))

    with pytest.raises(ChildProcessError, match=r"exit statuses \[0, 1, 0\]"):
        ForkedParts(4, work).results()
