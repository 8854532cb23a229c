from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

import msgspec
import pytest
from tokenizers import Tokenizer, models

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.encoders import equivalence_records
from asyncdata.tokenization.encoders.equivalence_records import (
    Proof,
    choose,
    find,
    keep,
    make,
    missing,
    proof_path,
    revoke,
    subject_of,
)
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from tests.support.backends import Fake, install

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdata.tokenization.encoders.equivalence_records import Subject


@pytest.fixture
def files(small_tokenizer: Path) -> TokenizerFiles:
    return TokenizerFiles(str(small_tokenizer))


@pytest.fixture
def right(files: TokenizerFiles) -> Fake:
    return Fake(files.load(), lambda _: False)


@pytest.fixture
def wrong(files: TokenizerFiles) -> Fake:
    return Fake(files.load(), lambda text: "<|im_end|>" in text)


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch, files: TokenizerFiles, right: Fake) -> Subject:
    install(monkeypatch, {"gigatoken": lambda: right})
    found = subject_of(files, "gigatoken")
    assert found is not None
    return found


def test_a_proof_that_was_kept_is_found_and_only_its_owner_may_read_it(subject: Subject) -> None:
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
def test_a_proof_of_another_subject_is_not_used(subject: Subject, change: dict[str, str]) -> None:
    other = msgspec.structs.replace(subject, **change)
    keep(Proof(subject=subject))

    assert find(other) is None

    os.replace(proof_path(subject), proof_path(other))  # also under its name
    assert find(other) is None


@pytest.mark.thorough
def test_a_proof_that_is_damaged_anywhere_is_not_used_and_made_again(files: TokenizerFiles, subject: Subject) -> None:
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
def test_a_proof_is_made_once(files: TokenizerFiles, subject: Subject, right: Fake) -> None:
    proof = make(files, subject)
    num_texts = right.num_texts
    assert num_texts == proof.num_texts > 0

    assert make(files, subject) == proof == choose(files, "gigatoken") == choose(files, "auto")
    assert right.num_texts == num_texts


@pytest.mark.thorough
def test_auto_takes_the_first_that_is_proven_and_tokenizers_where_none_is(
    monkeypatch: pytest.MonkeyPatch, files: TokenizerFiles, right: Fake, wrong: Fake
) -> None:
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


def test_a_backend_that_is_named_and_wrong_is_an_error_that_says_where_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, files: TokenizerFiles, wrong: Fake
) -> None:
    install(monkeypatch, {"gigatoken": lambda: wrong})

    with pytest.raises(ConfigError, match=r"AD434 .*'gigatoken' is not exact .* differ on '<\|im_end\|>'.*'hf'"):
        choose(files, "gigatoken")


def test_a_backend_that_is_named_and_not_installed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, files: TokenizerFiles
) -> None:
    install(monkeypatch, {})

    with pytest.raises(ConfigError, match="AD435 .*pip install fastokens"):
        choose(files, "fastokens")
    assert choose(files, "auto") is None


def test_a_backend_that_cannot_load_the_tokenizer_is_refused_with_its_words(
    monkeypatch: pytest.MonkeyPatch, files: TokenizerFiles
) -> None:
    def load() -> Fake:
        raise ValueError("unsupported pre-tokenizer")

    install(monkeypatch, {"gigatoken": load})

    with pytest.raises(ConfigError, match="gigatoken cannot load it: ValueError: unsupported pre-tokenizer"):
        choose(files, "gigatoken")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (models.Unigram([("a", -1.0)]), "its model is Unigram"),
        (models.WordPiece({"a": 0}), "its model is WordPiece"),
        (models.BPE({"a": 0, "b": 1}, [], dropout=0.1), "BPE dropout"),
    ],
    ids=["Unigram", "WordPiece", "dropout"],
)
def test_models_that_no_other_library_knows_are_not_even_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: Fake, model: models.Model, says: str
) -> None:
    loads = install(monkeypatch, {"gigatoken": lambda: right})
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))

    with pytest.raises(ConfigError, match=says):
        choose(TokenizerFiles(str(tmp_path)), "gigatoken")
    assert loads == {"gigatoken": 0}


@pytest.mark.thorough
def test_a_revoked_backend_is_not_chosen_again(files: TokenizerFiles, subject: Subject) -> None:
    make(files, subject)

    revoke(subject, "an audit found it out")

    assert choose(files, "auto") is None
    assert missing(files) == []  # it would be proven again by the same sweep
    with pytest.raises(ConfigError, match="an audit found it out"):
        choose(files, "gigatoken")


@pytest.mark.thorough
def test_without_a_cache_folder_a_proof_holds_for_the_process(
    monkeypatch: pytest.MonkeyPatch, files: TokenizerFiles, subject: Subject, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    proof = choose(files, "gigatoken")

    assert proof is not None
    assert not proof.refusal


@pytest.mark.thorough
def test_the_ids_around_a_text_are_part_of_the_proof(
    monkeypatch: pytest.MonkeyPatch, small_tokenizer: Path, tmp_path: Path
) -> None:
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
