"""Ids by a proven backend, by ``tokenizers`` where it is not, and the audit of both."""

from __future__ import annotations

import re
import subprocess
import sys
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models

from asyncdata import BadRows, ConfigError, DataLoader, PromptTokenizeFn, RowShuffle
from asyncdata.tokenization.encoders import idle_work, text_encoder
from asyncdata.tokenization.encoders.equivalence_records import choose, find, subject_of
from asyncdata.tokenization.encoders.fast_backends import BoundedEncoder, FlatIds
from asyncdata.tokenization.encoders.hf_encoder import HfEncoder, encode_here, ids_around, separator_of
from asyncdata.tokenization.encoders.text_encoder import open_encoder
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from asyncdata.tokenization.wrong_ids import WrongIdsError
from tests.support.backends import Fake, install
from tests.support.found_out import RARE, FoundOut, audit_often
from tests.unit.tokenization import faults, run, token_ids

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer) -> Tokenizer:
    return Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))


@pytest.fixture
def files(small_tokenizer) -> TokenizerFiles:
    return TokenizerFiles(str(small_tokenizer))


def ids_of(flat: FlatIds) -> list[list[int]]:
    return [array("i", ids).tolist() for ids in flat.of_each()]


def expected(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


class Watched(Fake):
    """Keeps the texts that it was given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.texts: list[str] = []

    def __call__(self, texts: list[str]) -> FlatIds:
        self.texts += texts
        return super().__call__(texts)


@pytest.fixture
def watched(monkeypatch, tokenizer, files) -> Watched:
    """A proven backend that is wrong on Ж."""
    backend = Watched(tokenizer, lambda text: "\u0416" in text)
    install(monkeypatch, {"gigatoken": lambda: backend}, points=[*range(0x20, 0x7F), 0xE9, 0x414, 0x416])
    choose(files, "gigatoken")
    backend.texts.clear()
    return backend


def test_texts_with_a_character_that_is_not_proven_go_to_tokenizers_and_come_back_in_their_place(
    watched, tokenizer, files
):
    texts = ["plain", "caf\u00e9", "\u0416", "", "a \u0416 b", "\u4e2d", "\u0414!"]

    found, errors = open_encoder(files)(texts)

    assert (ids_of(found), errors) == (expected(tokenizer, texts), {})
    assert watched.texts == ["plain", "caf\u00e9", "", "\u0414!"]


def test_hf_uses_no_backend(watched, tokenizer, files):
    found, _ = open_encoder(files, "hf")(["one", "two"])

    assert (ids_of(found), watched.texts) == (expected(tokenizer, ["one", "two"]), [])


def test_tokenizers_is_not_loaded_until_a_text_needs_it(monkeypatch, watched, files):
    loads = []
    load = TokenizerFiles.load
    monkeypatch.setattr(TokenizerFiles, "load", lambda self: loads.append(1) or load(self))

    encoder = open_encoder(files)
    encoder(["one", "two"])
    assert loads == []

    encoder(["\u0416"])
    encoder(["\u0416"])
    assert loads == [1]


def test_a_text_that_neither_can_encode_is_named_and_the_others_are_there(monkeypatch, watched, tokenizer, files):
    found, errors = open_encoder(files)(["one", "\ud800", "two"])

    assert ids_of(found) == [*expected(tokenizer, ["one"]), [], *expected(tokenizer, ["two"])]
    assert list(errors) == [1]


def test_a_backend_that_raises_leaves_the_texts_to_tokenizers(watched, tokenizer, files, monkeypatch):
    def fail(_texts: list[str]) -> FlatIds:
        raise RuntimeError("no memory")

    encoder = open_encoder(files)
    monkeypatch.setattr(Watched, "__call__", lambda self, texts: fail(texts))

    assert ids_of(encoder(["one", "two"]).flat) == expected(tokenizer, ["one", "two"])


def test_prompts_are_the_same_by_every_backend(watched, small_tokenizer):
    rows: list[Any] = [{"input": text} for text in ("one", "\u0416 two", "", "caf\u00e9", "x" * 50)]
    rows.append(b'{"input": "half \\ud800"}')
    of = {
        backend: run(PromptTokenizeFn(str(small_tokenizer), tokenizer_backend=backend, max_length=40).open(), rows)
        for backend in ("hf", "auto", "gigatoken")
    }

    assert token_ids(of["hf"]) == token_ids(of["auto"]) == token_ids(of["gigatoken"])
    assert faults(of["hf"]) == faults(of["auto"]) == [(5, "AD107")]
    assert "one" in watched.texts


# The audit.


@pytest.fixture
def often(monkeypatch) -> None:
    audit_often(monkeypatch)


@pytest.fixture
def found_out(monkeypatch, tokenizer, files, often) -> Callable[[str], None]:
    """A backend that is proven, and becomes wrong on one rare text."""

    def make(rare: str) -> None:
        is_proven = []
        backend = Fake(tokenizer, lambda text: bool(is_proven) and text == rare)
        install(monkeypatch, {"gigatoken": lambda: backend}, points=range(0x20, 0x7F))
        choose(files, "gigatoken")
        is_proven.append(True)

    return make


def test_the_audit_finds_a_text_that_the_sweep_did_not_and_revokes_the_proof(found_out, files):
    found_out("a rare text")
    encoder = open_encoder(files)
    for _ in range(20):
        encoder(["common", "text"])

    with pytest.raises(WrongIdsError, match=r"AD436 .*'gigatoken' 1\.0 gives other ids than .*'hf'") as caught:
        for _ in range(20):
            encoder(["a rare text", "a rare text"])
    assert (caught.value.excerpt, caught.value.is_here) == ("a rare text", True)
    with pytest.raises(WrongIdsError, match="AD436") as again:
        encoder(["another"])
    assert not again.value.is_here

    subject = subject_of(files, "gigatoken")
    assert subject is not None
    refusal = (find(subject) or pytest.fail("revoked, not removed")).refusal
    assert "a text of 11 characters" in refusal
    assert "a rare text" not in refusal
    assert choose(files, "auto") is None


def is_found_out(encoder: text_encoder.TextEncoder) -> bool:
    try:
        for _ in range(20):
            encoder(["a rare text"] * 2)
    except WrongIdsError:
        return True
    return False


@pytest.mark.thorough
def test_it_begins_in_a_pause_or_when_much_has_been_done(found_out, files, monkeypatch):
    """Before that, no request waits for ``tokenizers`` to be loaded."""
    found_out("a rare text")
    has_worked = open_encoder(files)
    monkeypatch.setattr(text_encoder, "WORK_BEFORE_AUDIT_S", 1e9)
    busy, paused = open_encoder(files), open_encoder(files)
    assert not is_found_out(busy)
    assert not is_found_out(paused)
    assert idle_work.is_awaited()

    del busy
    idle_work.pause()
    assert not idle_work.is_awaited()
    assert is_found_out(paused)
    assert is_found_out(has_worked)


def test_an_error_in_idle_work_is_reported_by_the_next_batch(found_out, files, monkeypatch):
    monkeypatch.setattr(text_encoder, "WORK_BEFORE_AUDIT_S", 1e9)
    found_out("a rare text")
    encoder = open_encoder(files)
    assert not is_found_out(encoder)
    monkeypatch.setattr(encoder, "_load", lambda: Path("/nowhere").read_text())

    idle_work.pause()

    with pytest.raises(FileNotFoundError):
        is_found_out(encoder)


@pytest.mark.thorough
@pytest.mark.parametrize("order", [False, RowShuffle(method="none", only_kept=True)], ids=["blocks", "rows"])
@pytest.mark.parametrize(("excerpts", "bad", "policy"), [(True, 0, "raise"), (True, 2, "skip"), (False, 2, "skip")])
def test_wrong_ids_in_an_audit_have_a_place_and_an_excerpt_only_if_allowed(
    found_out, small_tokenizer, jsonl_file, order, excerpts, bad, policy
):
    found_out("a rare text")
    common = [{"input": f"common {number}"} for number in range(5)]
    broken = [{"put": "no prompt"}] * bad
    path = jsonl_file([*common[:2], *broken, *common[2:], *[{"input": "a rare text"}] * 40])
    lines = path.read_bytes().splitlines(keepends=True)

    with (
        DataLoader(
            path,
            tokenize_fn=PromptTokenizeFn(str(small_tokenizer)),
            shuffle=order,
            num_workers=0,
            bad_rows=BadRows(policy=policy, excerpts=excerpts),
        ) as loader,
        pytest.raises(ConfigError, match="AD436") as caught,
    ):
        while True:
            loader.get_next_batch(5)

    message = str(caught.value)
    found = re.match(rf"AD436 {re.escape(str(path))}:(\d+) \(byte (\d+)\): tokenizer_backend", message)
    assert found is not None
    line, start = map(int, found.groups())
    assert b"a rare text" in lines[line - 1]
    assert start == sum(map(len, lines[: line - 1]))
    assert ("a rare text" in message) == excerpts


@pytest.mark.thorough
@pytest.mark.parametrize("order", [False, RowShuffle(method="none", only_kept=True)], ids=str)
def test_wrong_ids_in_a_workers_audit_end_the_run_and_name_the_row(found_out, small_tokenizer, jsonl_file, order):
    found_out("nothing: here all is well")
    path = jsonl_file([*[{"input": f"common {number}"} for number in range(30)], *[{"input": RARE}] * 40])

    with (
        DataLoader(path, tokenize_fn=FoundOut(str(small_tokenizer)), shuffle=order, num_workers=2) as loader,
        pytest.raises(ConfigError, match=rf"AD436 {re.escape(str(path))}:(3[1-9]|[4-7]\d) \(byte \d+\): .*{RARE}"),
    ):
        while True:
            loader.get_next_batch(5)


def test_one_text_in_so_many_is_audited_by_its_length():
    audit = text_encoder._Audit(first=100, every=10)  # noqa: SLF001 - the arithmetic of it
    due = []
    for step in range(1000):
        if audit.is_due(10):
            due.append(step)
            audit.is_done(20 if len(due) == 1 else 5)

    assert due[:4] == [9, 29, 34, 39]
    assert audit.num_audits == len(due)


AUDITOR = """
import sys
sys.path[:] = sys.argv[1:]
from asyncdata.tokenization.encoders.text_encoder import _Audit
print(_Audit(first=1, every=10).is_due(5), flush=True)
sys.stdin.read()
"""


@pytest.mark.thorough
def test_one_process_of_a_run_audits_and_another_when_it_is_gone():
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", AUDITOR, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with start() as first:
        assert says(first) == "True"
        with start() as second:
            assert says(second) == "False"
            second.communicate()
        first.communicate()
    with start() as third:
        assert says(third) == "True"
        third.communicate()


# Its parts.


def test_a_backend_is_loaded_again_when_its_caches_have_grown(tokenizer):
    used = [100]
    encoder = BoundedEncoder(lambda: HfEncoder(tokenizer), 50, lambda: used[0], look_every=0)
    texts = ["one two", "three"]

    def loads_after(num_bytes: int) -> int:
        used[0] = num_bytes
        assert ids_of(encoder(texts)) == expected(tokenizer, texts)
        return encoder.num_loads

    assert [loads_after(size) for size in (100, 150, 151, 151, 200, 202, 120)] == [1, 1, 1, 2, 2, 2, 3]
    encoder.allow(1000)
    assert loads_after(1120) == 3


def test_a_text_that_tokenizers_refuses_is_found_among_many(tokenizer):
    flat, errors = HfEncoder(tokenizer).each(["one", "\udfff", "two"])

    assert ids_of(flat) == [*expected(tokenizer, ["one"]), [], *expected(tokenizer, ["two"])]
    assert list(errors) == [1]


def test_no_ids_around_a_text_and_no_separator_are_said(tokenizer):
    assert ids_around(tokenizer) == ([], [])
    assert separator_of(tokenizer) == "<|endoftext|>"
    assert separator_of(Tokenizer(models.BPE())) is None


@pytest.mark.thorough
@pytest.mark.parametrize("with_offsets", [False, True])
@pytest.mark.parametrize("value", [None, "true", "FALSE", "0", ""])
@pytest.mark.parametrize("adds", [False, True])
def test_the_ids_are_the_same_one_by_one_and_at_once(small_tokenizer, monkeypatch, value, with_offsets, adds):
    texts = ["one two", "", "three", "<|im_end|> four"]
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    if value is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    at_once = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=adds)]

    found = encode_here(tokenizer, with_offsets=with_offsets)(texts, add_special_tokens=adds)

    assert [encoding.ids for encoding in found] == at_once
