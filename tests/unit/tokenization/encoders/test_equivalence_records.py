"""Proofs that a backend is exact: how they are made, kept, chosen and revoked."""

from __future__ import annotations

import json
import os
import stat
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pytest
from tokenizers import Tokenizer, models

from asyncdata import ConfigError
from asyncdata.tokenization.encoders import equivalence_records
from asyncdata.tokenization.encoders.character_sets import CharacterFinder
from asyncdata.tokenization.encoders.equivalence_records import (
    Proof,
    choose,
    find,
    keep,
    make,
    make_first,
    missing,
    proof_path,
    revoke,
    subject_of,
)
from asyncdata.tokenization.encoders.equivalence_sweep import CONTEXTS, sweep
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from tests.support.backends import Fake, install

if TYPE_CHECKING:
    from asyncdata.tokenization.encoders.equivalence_records import Subject


@pytest.fixture
def files(small_tokenizer) -> TokenizerFiles:
    return TokenizerFiles(str(small_tokenizer))


@pytest.fixture
def right(files) -> Fake:
    return Fake(files.load(), lambda _: False)


@pytest.fixture
def wrong(files) -> Fake:
    return Fake(files.load(), lambda text: "<|im_end|>" in text)


@pytest.fixture
def subject(monkeypatch, files, right) -> Subject:
    install(monkeypatch, {"gigatoken": lambda: right})
    found = subject_of(files, "gigatoken")
    assert found is not None
    return found


def test_a_proof_that_was_kept_is_found_and_only_its_owner_may_read_it(subject):
    proof = Proof(subject=subject, exceptions=[(5, 7), (9, 10)], around=([1], []), num_texts=3, seconds=1.5)
    assert find(subject) is None

    keep(proof)

    assert find(subject) == proof
    assert proof.num_exceptions == 3
    assert stat.S_IMODE(os.stat(proof_path(subject)).st_mode) == 0o600


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "f" * 32},
        {"backend_version": "9"},
        {"tokenizers_version": "9"},
        {"sweep_version": -1},
        {"unicode_version": "1.0"},
        {"processor": "other"},
        {"backend": "fastokens"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_proof_of_another_subject_is_not_used(subject, change):
    other = msgspec.structs.replace(subject, **change)
    keep(Proof(subject=subject))

    assert find(other) is None

    os.replace(proof_path(subject), proof_path(other))  # also under its name
    assert find(other) is None


@pytest.mark.thorough
def test_a_proof_that_is_damaged_anywhere_is_not_used_and_made_again(files, subject):
    proof = make(files, subject)
    path = proof_path(subject)
    with open(path, "rb") as file:
        data = file.read()
    for position in range(0, len(data), 7):
        with open(path, "wb") as file:
            file.write(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert find(subject) is None, position

        with open(path, "wb") as file:
            file.write(data[:position])
        assert find(subject) is None, position

    again = make(files, subject)

    assert (again.exceptions, find(subject)) == (proof.exceptions, again)


@pytest.mark.thorough
def test_a_proof_is_made_once(files, subject, right):
    proof = make(files, subject)
    num_texts = right.num_texts
    assert num_texts == proof.num_texts > 0

    assert make(files, subject) == proof == choose(files, "gigatoken") == choose(files, "auto")
    assert right.num_texts == num_texts


@pytest.mark.thorough
def test_auto_takes_the_first_that_is_proven_and_tokenizers_where_none_is(monkeypatch, files, right, wrong):
    install(monkeypatch, {"gigatoken": lambda: wrong, "fastokens": lambda: right})
    assert choose(files, "auto") is None
    assert missing(files) == ["gigatoken", "fastokens"]

    for name in ("gigatoken", "fastokens"):
        subject = subject_of(files, name)
        assert subject is not None
        make(files, subject)
        assert (missing(files) == ["fastokens"]) is (name == "gigatoken")

    proof = choose(files, "auto")
    assert proof is not None
    assert (proof.subject.backend, missing(files)) == ("fastokens", [])
    assert choose(files, "hf") is None


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
            choose(files, "gigatoken" if len(backends) == 1 else "fastokens")
    assert choose(files, "auto") is None


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
        choose(TokenizerFiles(str(tmp_path)), "gigatoken")
    assert loads == {"gigatoken": 0}


@pytest.mark.thorough
def test_a_revoked_backend_is_not_chosen_again(files, subject):
    make(files, subject)

    revoke(subject, "an audit found it out")

    assert choose(files, "auto") is None
    assert missing(files) == []  # it would be proven again by the same sweep
    with pytest.raises(ConfigError, match="an audit found it out"):
        choose(files, "gigatoken")


@pytest.mark.thorough
def test_without_a_cache_folder_a_proof_holds_for_the_process(monkeypatch, files, subject, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    proof = choose(files, "gigatoken")

    assert proof is not None
    assert not proof.refusal


@pytest.mark.thorough
def test_the_ids_around_a_text_are_part_of_the_proof(monkeypatch, small_tokenizer, tmp_path):
    values = json.loads((small_tokenizer / "tokenizer.json").read_text())
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    files = TokenizerFiles(str(tmp_path))
    tokenizer = files.load()
    install(monkeypatch, {"gigatoken": lambda: Fake(tokenizer, lambda _: False)})

    proof = choose(files, "gigatoken")

    assert proof is not None
    assert proof.around == ([1], [])
    assert equivalence_records.find(proof.subject) == proof


# In two parts, beside a run


POINTS = [*range(0x20, 0x7F), 0xE9, 0x301, *range(0x4E00, 0x4E40)]


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep few characters, most of which are common."""
    monkeypatch.setattr(equivalence_records, "known_points", lambda: POINTS)
    monkeypatch.setattr(equivalence_records, "common_points", lambda: POINTS[:-0x40])
    monkeypatch.setattr(equivalence_records, "NUM_COMMON_TEXTS", 100)
    short = partial(sweep, code_points=POINTS, num_random_texts=100, longest_text=500)
    monkeypatch.setattr(equivalence_records, "sweep", short)


@pytest.fixture
def few(subject, monkeypatch) -> None:
    shorten(monkeypatch)


def test_common_characters_are_proven_first_and_others_never_reach_the_backend_before_they_are(files, subject, few):
    first = make_first(files, subject)

    assert first.is_partial
    assert not first.refusal
    assert (choose(files, "auto"), make_first(files, subject)) == (first, first)
    assert CharacterFinder(first.exceptions)(["plain", "caf\u00e9", "\u4e2d", "x\u4e01"]) == [2, 3]
    assert missing(files) == ["gigatoken"]

    whole = make(files, subject)
    assert not whole.is_partial
    assert CharacterFinder(whole.exceptions)(["plain", "caf\u00e9", "\u4e2d", "x\u4e01"]) == []
    assert (choose(files, "auto"), make_first(files, subject), missing(files)) == (whole, whole, [])


def test_a_backend_that_is_wrong_on_common_characters_is_refused_at_once(monkeypatch, files, wrong):
    install(monkeypatch, {"gigatoken": lambda: wrong})
    shorten(monkeypatch)
    subject = subject_of(files, "gigatoken")
    assert subject is not None

    first = make_first(files, subject)

    assert (bool(first.refusal), first.is_partial, missing(files)) == (True, False, [])
    assert make(files, subject) == first


def test_a_backend_that_is_named_needs_the_whole_proof(files, subject, few):
    make_first(files, subject)

    proof = choose(files, "gigatoken")

    assert proof is not None
    assert not proof.is_partial


def test_what_an_audit_revokes_while_the_rest_is_proven_stays_revoked(files, subject, few):
    make_first(files, subject)
    revoke_at = iter([True])

    def audit(_part: str, _share: float) -> None:
        if next(revoke_at, False):
            revoke(subject, "an audit found other ids")

    assert make(files, subject, audit).refusal == "an audit found other ids"
    assert choose(files, "auto") is None


# The process that proves has one thread; that of pytest-xdist has more, of which Python 3.12 and later warn.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_several_processes_find_what_one_finds(monkeypatch, files, is_wrong):
    fake = Fake(files.load(), lambda text: is_wrong and "\u4e05" in text)
    install(monkeypatch, {"gigatoken": lambda: fake})
    shorten(monkeypatch)
    subject = subject_of(files, "gigatoken")
    assert subject is not None

    alone = make(files, subject)
    os.unlink(proof_path(subject))
    shared = make(files, subject, num_processes=3)

    expected = msgspec.structs.replace(alone, seconds=0, num_texts=0, num_differences=0)
    assert msgspec.structs.replace(shared, seconds=0, num_texts=0, num_differences=0) == expected
    assert bool(CharacterFinder(shared.exceptions)(["\u4e05"])) is is_wrong
    # Each process also tries the contexts themselves, and a difference in them would be found more than once.
    assert shared.num_texts - alone.num_texts == 2 * len(CONTEXTS)


def test_auto_prefers_a_whole_proof_of_any_backend_to_a_partial_one(monkeypatch, files, right):
    install(monkeypatch, {"gigatoken": lambda: right, "fastokens": lambda: right})
    first, second = (subject_of(files, name) for name in ("gigatoken", "fastokens"))
    assert first is not None
    assert second is not None

    keep(Proof(subject=first, is_partial=True))
    assert choose(files, "auto") == find(first)
    keep(Proof(subject=second))
    assert (choose(files, "auto"), missing(files)) == (find(second), [])
    keep(Proof(subject=first))
    assert choose(files, "auto") == find(first)
