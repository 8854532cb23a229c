"""Where tokens lie: by their lengths from the ids of a fast backend, and by ``tokenizers`` where that is not known."""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from asyncdata import ChatTokenizeFn, ConfigError, FixedLengthTokenizeFn
from asyncdata.tokenization.encoders import equivalence_records
from asyncdata.tokenization.encoders.equivalence_records import choose, find, keep, subject_of
from asyncdata.tokenization.encoders.hf_encoder import HfEncoder
from asyncdata.tokenization.encoders.span_encoder import FastSpanEncoder, HfSpanEncoder, open_span_encoder
from asyncdata.tokenization.encoders.token_lengths import LengthsById, OffsetCheck, TokenLengths, lengths_of
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from asyncdata.tokenization.wrong_ids import WrongIdsError
from tests.support.backends import Fake, install
from tests.support.examples import in_ci
from tests.support.found_out import audit_often
from tests.support.function_kinds import CHAT, KINDS
from tests.unit.tokenization import outcomes, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from asyncdata.tokenization.encoders.span_encoder import Located

POINTS = [10, *range(0x20, 0x7F), 0xE9, 0x414, 0x416, 0x4E2D, 0x301, 0x1F600]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

a_text = st.lists(
    st.sampled_from([*SPECIAL, "the ", " word", "\n", "  ", "e\u0301", "\u00e9", "\u0958", "\u212b", "\u4e2d\u6587"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def normalizing(small_tokenizer, tmp_path_factory) -> TokenizerFiles:
    """The small tokenizer, which normalizes to NFC as Qwen's does."""
    return changed(small_tokenizer, tmp_path_factory.mktemp("nfc"), normalizer=normalizers.NFC())


def changed(folder: Path, to: Path, **parts: Any) -> TokenizerFiles:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, value in parts.items():
        setattr(tokenizer, name, value)
    tokenizer.save(str(to / "tokenizer.json"))
    return TokenizerFiles(str(to))


def plain(found: Sequence[Located | Exception]) -> list[Any]:
    return [repr(each) if isinstance(each, Exception) else (list(each.ids), *map(list, each.offsets)) for each in found]


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """A folder for each time that ``tokenizers`` is loaded."""
    found: list[str] = []
    load = TokenizerFiles.load
    monkeypatch.setattr(TokenizerFiles, "load", lambda self: found.append(self.folder) or load(self))
    return found


@pytest.fixture
def proven(monkeypatch) -> Callable[[TokenizerFiles], TokenizerFiles]:
    """Makes a backend that gives the right ids, and proves it."""

    def prove(files: TokenizerFiles) -> TokenizerFiles:
        backend = Fake(files.load(), lambda text: "\u0416" in text)
        install(monkeypatch, {"gigatoken": lambda: backend}, points=POINTS)
        choose(files, "gigatoken")
        return files

    return prove


# The offsets that follow from the ids.


@pytest.mark.parametrize("form", ["", "NFC"])
@in_ci(max_examples=40)
@given(texts=st.lists(a_text, max_size=5))
def test_offsets_from_ids_are_those_of_tokenizers_for_every_text_in_its_normal_form(
    small_tokenizer, normalizing, form, texts
):
    files = normalizing if form else TokenizerFiles(str(small_tokenizer))
    tokenizer = files.load()
    lengths = TokenLengths(lengths_of(files, tokenizer), files.normal_form or "")

    found = lengths(texts, HfEncoder(tokenizer)(texts))

    expected = HfSpanEncoder(tokenizer).encode(texts)
    assert files.normal_form == form
    for text, offsets, wanted in zip(texts, found, expected, strict=True):
        is_normal = not form or unicodedata.is_normalized("NFC", text)
        assert (offsets is not None) == is_normal, text
        assert offsets is None or list(map(list, offsets)) == list(map(list, wanted.offsets)), text


@pytest.mark.parametrize("form", ["", "NFC"])
@in_ci(max_examples=40)
@given(texts=st.lists(a_text | st.text(st.characters(max_codepoint=127), max_size=9), max_size=5))
def test_with_lengths_tokenizers_tells_the_same(small_tokenizer, normalizing, form, texts):
    files = normalizing if form else TokenizerFiles(str(small_tokenizer))
    lengths = LengthsById.of(files, files.load())

    found = HfSpanEncoder(files.load(), lengths).encode(texts)

    assert lengths is not None
    assert plain(found) == plain(HfSpanEncoder(files.load()).encode(texts))


def test_only_texts_that_are_not_ascii_are_asked_for_offsets(small_tokenizer, monkeypatch):
    encoder = open_span_encoder(TokenizerFiles(str(small_tokenizer)), "hf")
    assert isinstance(encoder, HfSpanEncoder)
    real, asked = vars(encoder)["_encode_all"], list[str]()
    monkeypatch.setattr(encoder, "_encode_all", lambda texts: asked.extend(texts) or real(texts))

    encoder.encode(["plain", "caf\u00e9", "", "<|im_start|>user"])

    assert asked == ["caf\u00e9"]


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}], ids=str)
def test_a_token_that_takes_white_space_at_its_sides_has_the_offsets_of_its_own_characters(
    small_tokenizer, tmp_path, flags
):
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<sep>", **flags), AddedToken("<x>", special=True)])
    shutil.copytree(small_tokenizer, tmp_path, dirs_exist_ok=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["a <sep> b", "\u00e9 <sep> b <sep>", "<sep> \u00e9", "<sep>", "a  <sep><x>", "a<x>b"]

    found = open_span_encoder(TokenizerFiles(str(tmp_path)), "hf").encode(texts)

    for text, located in zip(texts, found, strict=True):
        spans = [span for id, span in zip(located.ids, zip(*located.offsets, strict=True), strict=True) if id == 2000]
        assert spans == [match.span() for match in re.finditer("<sep>", text)]


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "_")])},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
    ],
    ids=["changes case", "replaces", "adds a space", "removes spaces", "no bytes"],
)
def test_a_tokenizer_that_changes_the_text_has_no_lengths(small_tokenizer, tmp_path, parts):
    files = changed(small_tokenizer, tmp_path / "changed", **parts)

    assert lengths_of(files, files.load()) == b""
    assert LengthsById.of(files, files.load()) is None


def test_steps_that_only_split_keep_the_lengths(small_tokenizer, tmp_path):
    steps = [
        pre_tokenizers.Split("x", "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    files = changed(small_tokenizer, tmp_path / "changed", pre_tokenizer=pre_tokenizers.Sequence(steps))

    assert len(lengths_of(files, files.load())) == 2 * 2000


def test_a_vocabulary_that_lacks_a_byte_has_no_lengths(small_tokenizer, tmp_path):
    shutil.copytree(small_tokenizer, tmp_path / "lacking")
    path = tmp_path / "lacking" / "tokenizer.json"
    content = json.loads(path.read_bytes())
    content["model"]["vocab"]["-rare-"] = content["model"]["vocab"].pop("\u0100")  # the byte 0
    path.write_text(json.dumps(content), encoding="utf-8")
    files = TokenizerFiles(str(path.parent))

    assert lengths_of(files, files.load()) == b""


def test_a_token_that_absorbs_white_space_has_no_length_and_texts_without_it_have_offsets(small_tokenizer):
    files = TokenizerFiles(str(small_tokenizer))
    tokenizer = files.load()
    tokenizer.add_tokens([AddedToken("<stripping>", rstrip=True)])
    lengths = TokenLengths(lengths_of(files, tokenizer), "")
    texts = ["a <stripping> b", "a <stripping>b", "a b"]

    found = lengths(texts, HfEncoder(tokenizer)(texts))

    assert [offsets is None for offsets in found] == [True, True, False]


def test_the_check_names_the_first_text_whose_offsets_are_others(small_tokenizer):
    files = TokenizerFiles(str(small_tokenizer))
    tokenizer = files.load()
    lengths = bytearray(lengths_of(files, tokenizer))
    one, other = (tokenizer.token_to_id(token) for token in ("he", "a"))
    lengths[2 * one : 2 * one + 2], lengths[2 * other : 2 * other + 2] = b"\x01\x00", b"\x02\x00"
    check = OffsetCheck(tokenizer, TokenLengths(bytes(lengths), ""))

    assert check(["one"]) == HfEncoder(tokenizer)(["one"])
    assert check.difference == ""

    check(["one", "hea"])
    assert check.difference.endswith(" 'hea'")


# The encoder of both.


def test_a_proven_backend_tells_the_same_as_tokenizers_which_is_not_loaded_for_plain_texts(proven, normalizing, loads):
    files = proven(normalizing)
    plain_texts = ["", "one word", "<|im_start|>user\ncaf\u00e9<|im_end|>", "\u4e2d\u6587"[:1]]
    others = ["cafe\u0301", "\u0416", "a \u0958 b", "\ud800", "\u6587"]
    loads.clear()

    encoder = open_span_encoder(files)
    assert isinstance(encoder, FastSpanEncoder)
    found = encoder.encode(plain_texts)
    assert loads == []
    mixed = encoder.encode([*others, *plain_texts])

    assert len(loads) == 1
    trusted = HfSpanEncoder(files.load())
    assert plain(found) == plain(trusted.encode(plain_texts))
    assert plain(mixed) == plain(trusted.encode([*others, *plain_texts]))
    assert isinstance(mixed[3], Exception)
    assert encoder.around() == trusted.around()
    assert encoder.ids_of("<|im_end|>", "eos") == trusted.ids_of("<|im_end|>", "eos")
    with pytest.raises(ConfigError, match="eos='two words' is 5 tokens"):
        encoder.ids_of("two words", "eos")


def babilong(*args: Any, **settings: Any) -> FixedLengthTokenizeFn:
    return FixedLengthTokenizeFn.babilong(*args, **{"max_length": 100, **settings})


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


def test_special_tokens_are_known_without_loading_the_tokenizer(small_tokenizer, test_folders):
    for folder in (small_tokenizer, *test_folders):
        files = TokenizerFiles(str(folder))
        decoder = files.load().get_added_tokens_decoder()
        assert files.special_texts() == [token.content for token in decoder.values() if token.special], folder


@pytest.fixture
def test_folders(request):
    """The real tokenizers, where there are test data."""
    try:
        data = request.getfixturevalue("test_data")
    except pytest.skip.Exception:
        return []
    return sorted(path.parent for path in data.glob("tokenizers/*/tokenizer.json"))


# Where the offsets are not proven.


def test_a_backend_without_proven_offsets_is_not_used_by_auto_and_refused_by_name(proven, small_tokenizer, tmp_path):
    files = proven(changed(small_tokenizer, tmp_path / "lower", normalizer=normalizers.Lowercase()))
    folder = files.folder

    assert isinstance(open_span_encoder(files), HfSpanEncoder)
    assert choose(files, "auto") is not None, "its ids are proven"
    message = r"AD434 tokenizer_backend='gigatoken' does not tell where the tokens of a text lie.*not the bytes of"
    with pytest.raises(ConfigError, match=message):
        ChatTokenizeFn(folder, tokenizer_backend="gigatoken").open()


def test_wrong_offsets_in_an_audit_revoke_the_proof(proven, small_tokenizer, monkeypatch):
    files = proven(TokenizerFiles(str(small_tokenizer)))
    audit_often(monkeypatch)
    subject = subject_of(files, "gigatoken")
    assert subject is not None
    proof = find(subject)
    assert proof is not None
    ids = {token: files.load().token_to_id(token) for token in ("he", "a")}
    lengths = bytearray(proof.token_lengths)
    lengths[2 * ids["he"] : 2 * ids["he"] + 2], lengths[2 * ids["a"] : 2 * ids["a"] + 2] = b"\x01\x00", b"\x02\x00"
    keep(msgspec.structs.replace(proof, token_lengths=bytes(lengths)))
    encoder = open_span_encoder(files)

    with pytest.raises(WrongIdsError, match=r"AD436 .*'gigatoken' 1\.0 gives other offsets than tokenizers"):
        for _ in range(20):
            encoder.encode(["hea", "hea"])

    assert equivalence_records.choose(files, "auto") is None
    with pytest.raises(WrongIdsError, match="AD436"):
        encoder.encode(["another"])
