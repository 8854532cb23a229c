"""Ids by a proven backend or by ``tokenizers``, where their tokens lie, and the audit of both."""

import contextlib
import re
import shutil
import subprocess
import sys
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from asyncdata import BadRows, ChatTokenizeFn, DataLoader, FixedLengthTokenizeFn, PromptTokenizeFn, RowShuffle
from asyncdata.errors import ConfigError
from asyncdata.tokenization.encoders import fast_backends, text_encoder
from asyncdata.tokenization.encoders.equivalence_records import find, keep
from asyncdata.tokenization.encoders.text_encoder import choose
from tests.support import parts
from tests.support.examples import in_ci
from tests.support.function_kinds import CAFE as CHAT
from tests.support.function_kinds import KINDS
from tests.support.tokenizers import RARE, Fake, FoundOut, audit_often, install
from tests.unit.tokenization import outcomes, run


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer) -> Tokenizer:
    return Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))


def ids_of(flat: parts.FlatIds) -> list[list[int]]:
    return [array("i", ids).tolist() for ids in flat.of_each()]


def expected(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


class Watched(Fake):
    """Keeps the texts that it was given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.texts: list[str] = []

    def __call__(self, texts: list[str]) -> parts.FlatIds:
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


def test_texts_that_are_not_proven_go_to_tokenizers_and_keep_their_place(watched, tokenizer, files, monkeypatch):
    loads, load = [], parts.real("load_a_tokenizer")
    parts.change(monkeypatch, load_a_tokenizer=lambda self: loads.append(1) or load(self))
    encoder = parts.open_encoder(files)
    assert ids_of(encoder(["one", "two"]).flat) == expected(tokenizer, ["one", "two"])
    assert loads == [], "it is not loaded until a text needs it"
    watched.texts.clear()
    texts = ["plain", "caf\u00e9", "\u0416", "", "a \u0416 b", "\u4e2d", "\u0414!", "\ud800"]

    for _ in range(2):
        found, errors = encoder(texts)
        assert ids_of(found) == [*expected(tokenizer, texts[:-1]), []]
        assert list(errors) == [7], "neither can encode it"

    assert (watched.texts, loads) == (["plain", "caf\u00e9", "", "\u0414!"] * 2, [1])


def test_hf_uses_no_backend_and_one_that_raises_leaves_the_texts_to_tokenizers(watched, tokenizer, files, monkeypatch):
    encoder = parts.open_encoder(files)
    monkeypatch.setattr(Watched, "__call__", Mock(side_effect=RuntimeError("no memory")))

    for each in (encoder, parts.open_encoder(files, "hf")):
        assert ids_of(each(["one", "two"]).flat) == expected(tokenizer, ["one", "two"])
    assert Watched.__call__.call_count == 1  # type: ignore[attr-defined]


@pytest.fixture
def found_out(monkeypatch, tokenizer, files) -> Callable[[str], None]:
    """A backend that is proven, and becomes wrong on one rare text."""
    audit_often(monkeypatch)

    def make(rare: str) -> None:
        is_proven = []
        backend = Fake(tokenizer, lambda text: bool(is_proven) and text == rare)
        install(monkeypatch, {"gigatoken": lambda: backend}, points=range(0x20, 0x7F))
        choose(files, "gigatoken")
        is_proven.append(True)

    return make


def test_the_audit_finds_a_text_that_the_sweep_did_not_and_revokes_the_proof(found_out, files):
    found_out("a rare text")
    encoder = parts.open_encoder(files)
    for _ in range(20):
        encoder(["common", "text"])

    with pytest.raises(parts.WrongIdsError, match=r"AD436 .*'gigatoken' 1\.0 gives other ids than .*'hf'") as caught:
        for _ in range(20):
            encoder(["a rare text", "a rare text"])
    assert (caught.value.excerpt, caught.value.is_here) == ("a rare text", True)
    with pytest.raises(parts.WrongIdsError, match="AD436") as again:
        encoder(["another"])
    assert not again.value.is_here

    refusal = proof_of(files).refusal
    assert "a text of 11 characters" in refusal
    assert "a rare text" not in refusal
    assert choose(files, "auto") is None


def proof_of(files: parts.TokenizerFiles) -> Any:
    """The proof that is kept, which may be revoked."""
    return find(parts.subject_of(files, "gigatoken")) or pytest.fail("there is none")


def is_found_out(encoder: text_encoder.Encoder) -> bool:
    try:
        for _ in range(20):
            encoder(["a rare text"] * 2)
    except parts.WrongIdsError:
        return True
    return False


@pytest.mark.thorough
def test_it_begins_in_a_pause_or_when_much_has_been_done(found_out, files, monkeypatch):
    """Before that, no request waits for ``tokenizers`` to be loaded."""
    found_out("a rare text")
    has_worked = parts.open_encoder(files)
    parts.change(monkeypatch, work_before_an_audit_s=1e9)
    busy, paused = parts.open_encoder(files), parts.open_encoder(files)
    assert not is_found_out(busy)
    assert not is_found_out(paused)
    assert fast_backends.has_idle_work()

    del busy
    fast_backends.do_idle_work()
    assert not fast_backends.has_idle_work()
    assert is_found_out(paused)
    assert is_found_out(has_worked)


def test_an_error_in_idle_work_is_reported_by_the_next_batch(found_out, files, monkeypatch):
    parts.change(monkeypatch, work_before_an_audit_s=1e9)
    found_out("a rare text")
    encoder = parts.open_encoder(files)
    assert not is_found_out(encoder)
    parts.change(monkeypatch, load_a_tokenizer=lambda _: Path("/nowhere").read_text())

    fast_backends.do_idle_work()

    with pytest.raises(FileNotFoundError):
        is_found_out(encoder)


in_both_orders = pytest.mark.parametrize(
    "order", [False, RowShuffle(method="none", only_kept=True)], ids=["blocks", "rows"]
)


@pytest.mark.thorough
@in_both_orders
@pytest.mark.parametrize(("excerpts", "bad", "policy"), [(True, 0, "raise"), (True, 2, "skip"), (False, 2, "skip")])
def test_wrong_ids_in_an_audit_have_a_place_and_an_excerpt_only_if_allowed(
    found_out, small_tokenizer, jsonl_file, order, excerpts, bad, policy
):
    found_out("a rare text")
    common = [{"input": f"common {number}"} for number in range(5)]
    broken = [{"put": "no prompt"}] * bad
    path = jsonl_file([*common[:2], *broken, *common[2:], *[{"input": "a rare text"}] * 40])
    lines = path.read_bytes().splitlines(keepends=True)
    knobs = {"shuffle": order, "num_workers": 0, "bad_rows": BadRows(policy=policy, excerpts=excerpts)}

    with DataLoader(path, tokenize_fn=PromptTokenizeFn(str(small_tokenizer)), **knobs) as loader:
        with pytest.raises(ConfigError, match="AD436") as caught:
            while True:
                loader.get_next_batch(5)

    message = str(caught.value)
    found = re.match(rf"AD436 {re.escape(str(path))}:(\d+) \(byte (\d+)\): tokenizer_backend", message)
    assert found is not None
    line, start = map(int, found.groups())
    assert b"a rare text" in lines[line - 1]
    assert (start, "a rare text" in message) == (sum(map(len, lines[: line - 1])), excerpts)


@pytest.mark.thorough
@in_both_orders
def test_wrong_ids_in_a_workers_audit_end_the_run_and_name_the_row(found_out, small_tokenizer, jsonl_file, order):
    found_out("nothing: here all is well")
    path = jsonl_file([*[{"input": f"common {number}"} for number in range(30)], *[{"input": RARE}] * 40])

    with DataLoader(path, tokenize_fn=FoundOut(str(small_tokenizer)), shuffle=order, num_workers=2) as loader:
        match = rf"AD436 {re.escape(str(path))}:(3[1-9]|[4-7]\d) \(byte \d+\): .*{RARE}"
        with pytest.raises(ConfigError, match=match):
            while True:
                loader.get_next_batch(5)


AUDITOR = """
import sys
sys.path[:] = sys.argv[1:]
from asyncdata.tokenization.encoders import text_encoder
text_encoder.FIRST_AUDIT_TOKENS = 1
print(text_encoder._Audit().is_due(5), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def auditor() -> Iterator[str]:
    """Another process, and whether it audits."""
    command = [sys.executable, "-c", AUDITOR, *sys.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


@pytest.mark.thorough
def test_one_process_of_a_run_audits_and_another_when_it_is_gone():
    with auditor() as first, auditor() as second:
        assert (first, second) == ("True", "False")
    with auditor() as third:
        assert third == "True"


def test_a_backend_is_loaded_again_when_its_caches_have_grown(tokenizer, monkeypatch):
    load = Mock(side_effect=lambda: parts.HfEncoder(tokenizer))
    parts.change(monkeypatch, most_growth_of_an_encoder=50)
    parts.change(monkeypatch, look_at_growth_every=0)
    encoder = parts.BoundedEncoder(load)
    texts = ["one two", "three"]

    def loads_after(num_bytes: int) -> int:
        parts.change(monkeypatch, private_bytes=lambda: num_bytes)
        assert ids_of(encoder(texts)) == expected(tokenizer, texts)
        return load.call_count

    assert [loads_after(size) for size in (100, 150, 151, 151, 200, 202, 120)] == [1, 1, 1, 2, 2, 2, 3]
    encoder.allow(1000)
    assert loads_after(1120) == 3


POINTS = [10, *range(0x20, 0x7F), 0xE9, 0x414, 0x416, 0x4E2D, 0x301, 0x1F600]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

a_text = st.lists(
    st.sampled_from([*SPECIAL, "the ", " word", "\n", "  ", "e\u0301", "\u00e9", "\u0958", "\u212b", "\u4e2d\u6587"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def normalizing(small_tokenizer, tmp_path_factory) -> parts.TokenizerFiles:
    """The small tokenizer, which normalizes to NFC as Qwen's does."""
    return changed(small_tokenizer, tmp_path_factory.mktemp("nfc"), normalizer=normalizers.NFC())


def changed(folder: Path, to: Path, **settings: Any) -> parts.TokenizerFiles:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    tokenizer.save(str(to / "tokenizer.json"))
    return parts.TokenizerFiles(str(to))


def plain(found: Sequence[parts.Located | Exception]) -> list[Any]:
    return [repr(each) if isinstance(each, Exception) else (list(each.ids), *map(list, each.offsets)) for each in found]


@pytest.fixture
def proven(monkeypatch) -> Callable[[parts.TokenizerFiles], parts.TokenizerFiles]:
    """Makes a backend that gives the right ids, and proves it."""

    def prove(files: parts.TokenizerFiles) -> parts.TokenizerFiles:
        backend = Fake(files.load(), lambda text: "\u0416" in text)
        install(monkeypatch, {"gigatoken": lambda: backend}, points=POINTS)
        choose(files, "gigatoken")
        return files

    return prove


@pytest.mark.parametrize("form", ["", "NFC"])
@in_ci(max_examples=40)
@given(texts=st.lists(a_text | st.text(st.characters(max_codepoint=127), max_size=9), max_size=5))
def test_offsets_from_ids_are_those_of_tokenizers_for_normal_texts(small_tokenizer, normalizing, form, texts):
    files = normalizing if form else parts.TokenizerFiles(str(small_tokenizer))
    tokenizer = files.load()
    lengths = parts.TokenLengths(parts.lengths_of(files, tokenizer), files.normal_form or "")

    found = lengths(texts, parts.HfEncoder(tokenizer)(texts))

    expected = parts.HfEncoder(tokenizer, offsets=True).located(texts)
    assert files.normal_form == form
    for text, offsets, wanted in zip(texts, found, expected, strict=True):
        is_normal = not form or unicodedata.is_normalized("NFC", text)
        assert (offsets is not None) == is_normal, text
        assert offsets is None or list(map(list, offsets)) == list(map(list, wanted.offsets)), text
    by_id = parts.LengthsById.of(files, files.load())
    assert by_id is not None
    assert plain(parts.HfEncoder(files.load(), offsets=True, lengths=by_id).located(texts)) == plain(expected)


STRIPPING = [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}]


@pytest.mark.parametrize("flags", STRIPPING, ids=str)
def test_a_token_that_takes_white_space_has_no_length_and_the_offsets_of_its_own_characters(files, tmp_path, flags):
    tokenizer = files.load()
    tokenizer.add_special_tokens([AddedToken("<sep>", **flags), AddedToken("<x>", special=True)])
    shutil.copytree(files.folder, tmp_path, dirs_exist_ok=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = parts.TokenizerFiles(str(tmp_path))
    lengths = parts.TokenLengths(parts.lengths_of(files, tokenizer), "")
    texts = ["a <sep> b", "\u00e9 <sep> b <sep>", "<sep> \u00e9", "<sep>", "a  <sep><x>", "a<sep>b", "a<x>b", "a b"]

    found = parts.open_encoder(files, "hf", offsets=True).encode(texts)

    for text, located in zip(texts, found, strict=True):
        spans = [span for id, span in zip(located.ids, zip(*located.offsets, strict=True), strict=True) if id == 2000]
        assert spans == [match.span() for match in re.finditer("<sep>", text)]
    by_length = lengths(texts, parts.HfEncoder(tokenizer)(texts))
    assert [offsets is None for offsets in by_length] == [True] * 6 + [False] * 2


def splitting(*steps: Any) -> dict[str, Any]:
    return {"pre_tokenizer": pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])}


@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [
        (splitting(pre_tokenizers.Split("x", "isolated"), pre_tokenizers.Digits(individual_digits=True)), 2 * 2000),
        ({"normalizer": normalizers.Lowercase()}, 0),
        ({"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "_")])}, 0),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, 0),
        (splitting(pre_tokenizers.WhitespaceSplit()), 0),
        ({"pre_tokenizer": pre_tokenizers.Whitespace()}, 0),
    ],
    ids=["only splits", "changes case", "replaces", "adds a space", "removes spaces", "no bytes"],
)
def test_a_tokenizer_that_changes_the_text_has_no_lengths(small_tokenizer, tmp_path, settings, num_bytes):
    files = changed(small_tokenizer, tmp_path / "changed", **settings)

    assert len(parts.lengths_of(files, files.load())) == num_bytes
    assert (parts.LengthsById.of(files, files.load()) is None) is (num_bytes == 0)


def lying(lengths: bytes, tokenizer: Tokenizer) -> bytes:
    """As if "he" had one byte and "a" two, which only shows where both are in a text."""
    found = array("H", lengths)
    for token, length in (("he", 1), ("a", 2)):
        found[tokenizer.token_to_id(token)] = length
    return found.tobytes()


def test_the_check_names_the_first_text_whose_offsets_are_others(files):
    tokenizer = files.load()
    check = parts.OffsetCheck(tokenizer, parts.TokenLengths(lying(parts.lengths_of(files, tokenizer), tokenizer), ""))

    assert (check(["one"]), check.difference) == (parts.HfEncoder(tokenizer)(["one"]), "")

    check(["one", "hea"])
    assert check.difference.endswith(" 'hea'")


def test_a_proven_backend_tells_the_same_and_tokenizers_is_loaded_late(proven, normalizing, monkeypatch):
    files = proven(normalizing)
    plain_texts = ["", "one word", "<|im_start|>user\ncaf\u00e9<|im_end|>", "\u4e2d\u6587"[:1]]
    others = ["cafe\u0301", "\u0416", "a \u0958 b", "\ud800", "\u6587"]
    loads, load = [], parts.real("load_a_tokenizer")
    parts.change(monkeypatch, load_a_tokenizer=lambda self: loads.append(self.folder) or load(self))

    encoder = parts.open_encoder(files, offsets=True)
    found = encoder.encode(plain_texts)
    assert loads == []
    mixed = encoder.encode([*others, *plain_texts])

    assert len(loads) == 1
    trusted = parts.open_encoder(files, "hf", offsets=True)
    assert plain(found) == plain(trusted.encode(plain_texts))
    assert plain(mixed) == plain(trusted.encode([*others, *plain_texts]))
    assert isinstance(mixed[3], Exception)
    assert encoder.around() == trusted.around()
    assert encoder.ids_of("<|im_end|>", "eos") == trusted.ids_of("<|im_end|>", "eos")
    with pytest.raises(ConfigError, match="eos='two words' is 5 tokens"):
        encoder.ids_of("two words", "eos")


babilong = partial(FixedLengthTokenizeFn.babilong, max_length=100)
QUESTION = {"input": "Mary went to the garden. " * 20, "question": "Where is Mary?", "target": "garden"}
ODD = [{"role": role, "content": "cafe\u0301 \u0416, \u4e2d\u6587 \U0001f600?"} for role in ("user", "assistant")]
SAMPLES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    **{name: (kind.make, kind.row, {}) for name, kind in KINDS.items()},
    "odd chat": (ChatTokenizeFn, {"messages": [*CHAT, *ODD]}, {}),
    "padded": (babilong, QUESTION, {"max_length": 400}),
    "cut in the middle": (babilong, QUESTION, {"max_length": 120, "overlong": "truncate_context_middle"}),
    "the old recipe": (babilong, QUESTION, {"legacy_recipe": True}),
}


@pytest.mark.parametrize(("make", "row", "settings"), SAMPLES.values(), ids=SAMPLES)
def test_the_samples_are_the_same_by_every_backend(proven, normalizing, make, row, settings):
    folder = proven(normalizing).folder

    made = [
        outcomes(run(make(folder, tokenizer_backend=name, **settings).open(), [row]))
        for name in ("hf", "auto", "gigatoken")
    ]

    assert made == [made[0]] * 3
    assert isinstance(made[0][0][0], list), "it is a sample"


def test_a_backend_without_proven_offsets_is_refused_by_name(proven, small_tokenizer, tmp_path, monkeypatch):
    files = proven(changed(small_tokenizer, tmp_path / "lower", normalizer=normalizers.Lowercase()))
    folder = files.folder

    parts.change(monkeypatch, load_a_backend=Mock(side_effect=AssertionError))
    parts.open_encoder(files, offsets=True)
    assert choose(files, "auto") is not None, "its ids are proven"
    message = r"AD434 tokenizer_backend='gigatoken' does not tell where the tokens of a text lie.*not the bytes of"
    with pytest.raises(ConfigError, match=message):
        ChatTokenizeFn(folder, tokenizer_backend="gigatoken").open()


def test_wrong_offsets_in_an_audit_revoke_the_proof(proven, files, monkeypatch):
    proven(files)
    audit_often(monkeypatch)
    proof = proof_of(files)
    keep(msgspec.structs.replace(proof, token_lengths=lying(proof.token_lengths, files.load())))
    encoder = parts.open_encoder(files, offsets=True)

    with pytest.raises(parts.WrongIdsError, match=r"AD436 .*'gigatoken' 1\.0 gives other offsets than tokenizers"):
        for _ in range(20):
            encoder.encode(["hea", "hea"])

    assert choose(files, "auto") is None
    with pytest.raises(parts.WrongIdsError, match="AD436"):
        encoder.encode(["another"])
