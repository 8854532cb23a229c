"""Proofs that a backend is exact: how they are made by a sweep, kept, chosen and revoked."""

import os
import stat
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from asyncdata.errors import ConfigError
from asyncdata.tokenization.encoders import equivalence_records as records
from asyncdata.tokenization.encoders.equivalence_sweep import make
from asyncdata.tokenization.encoders.text_encoder import choose
from tests.support import parts
from tests.support.tokenizers import FEW, Fake, install, shorten
from tests.unit.tokenization.trained import variant


def fake(files: parts.TokenizerFiles, *wrong: str) -> Fake:
    """A backend that is wrong on texts with one of these."""
    return Fake(files.load(), lambda text: any(each in text for each in wrong))


def one_subject(files: parts.TokenizerFiles, backend: str = "gigatoken") -> parts.Subject:
    found = records.subject_of(files, backend)
    assert found is not None
    return found


@pytest.fixture
def right(files) -> Fake:
    return fake(files)


@pytest.fixture
def subject(monkeypatch, files, right) -> parts.Subject:
    install(monkeypatch, {"gigatoken": lambda: right})
    return one_subject(files)


def test_a_proof_that_was_kept_is_found_and_only_its_owner_may_read_it(subject):
    proof = parts.Proof(subject=subject, proven=[(5, 7), (9, 10)], around=([1], []), num_texts=3, seconds=1.5)
    assert records.find(subject) is None

    records.keep(proof)

    assert (records.find(subject), stat.S_IMODE(os.stat(subject.path).st_mode)) == (proof, 0o600)


OTHERS = {"tokenizer": "f" * 32, "backend_version": "9", "tokenizers_version": "9", "sweep_version": -1}
OTHERS |= {"unicode_version": "1.0", "processor": "other", "backend": "fastokens"}


@pytest.mark.parametrize("name", OTHERS)
def test_a_proof_of_another_subject_is_not_used(subject, name):
    other = msgspec.structs.replace(subject, **{name: OTHERS[name]})
    records.keep(parts.Proof(subject=subject))

    assert records.find(other) is None

    os.replace(subject.path, other.path)  # also under its name
    assert records.find(other) is None


@pytest.mark.thorough
def test_a_proof_is_made_once_and_one_that_is_damaged_anywhere_is_made_again(files, subject, right):
    proof = make(files, subject)
    num_texts = right.num_texts
    assert num_texts == proof.num_texts > 0
    assert make(files, subject) == proof == choose(files, "gigatoken") == choose(files, "auto")
    assert right.num_texts == num_texts

    path = Path(subject.path)
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        for damaged in (data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :], data[:position]):
            path.write_bytes(damaged)
            assert records.find(subject) is None, position
    again = make(files, subject)

    assert (again.proven, records.find(subject)) == (proof.proven, again)


def test_auto_takes_the_first_backend_that_is_proven_and_tokenizers_where_there_is_none(monkeypatch, files, right):
    install(monkeypatch, {"gigatoken": lambda: right, "fastokens": lambda: right})
    names = ["gigatoken", "fastokens"]
    first, second = (one_subject(files, name) for name in names)

    def state(*, needs_offsets: bool = False) -> tuple[parts.Proof | None, list[parts.Subject]]:
        wanted = records.to_prove(files, names, needs_offsets=needs_offsets)
        return choose(files, "auto", needs_offsets=needs_offsets), wanted

    assert state() == (None, [first, second])
    records.keep(parts.Proof(subject=second))
    assert state() == (records.find(second), [second]), "the workers use it, so it grows"
    records.keep(parts.Proof(subject=first, refusal="it is wrong"))
    assert (state(), state(needs_offsets=True)) == ((records.find(second), [second]), (None, []))
    os.unlink(second.path)
    assert state() == (None, [second])
    records.keep(parts.Proof(subject=second))
    records.keep(parts.Proof(subject=first))
    assert state() == (records.find(first), [first])
    assert choose(files, "hf") is None


def test_a_named_backend_that_cannot_be_used_is_an_error_with_the_way_out(monkeypatch, files):
    def cannot_load() -> Fake:
        raise ValueError("unsupported pre-tokenizer")

    for backends, reason in (
        (
            {"gigatoken": lambda: fake(files, "<|im_end|>")},
            r"AD434 .*'gigatoken' is not exact .* differ on '<\|im_end\|>'.*'hf'",
        ),
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
        choose(parts.TokenizerFiles(str(tmp_path)), "gigatoken")
    assert loads == {"gigatoken": 0}


@pytest.mark.thorough
def test_without_a_cache_folder_a_proof_holds_for_the_process(monkeypatch, files, subject, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    proof = choose(files, "gigatoken")

    assert proof is not None
    assert not proof.refusal


@pytest.mark.thorough
def test_the_ids_around_a_text_are_part_of_the_proof(monkeypatch, small_tokenizer, tmp_path, right):
    folder = variant(small_tokenizer, tmp_path / "around", around="<|im_start|> $A")
    install(monkeypatch, {"gigatoken": lambda: right})

    proof = choose(parts.TokenizerFiles(folder), "gigatoken")

    assert proof is not None
    assert (proof.around, records.find(proof.subject)) == (([1], []), proof)


TEXTS = ["plain", "caf\u00e9", "\u4e00", "x\u4e01", "\ud800"]


@pytest.fixture
def growing(files, subject) -> parts.GrowingProof:
    made = parts.GrowingProof(files, subject)
    made.grow(FEW)
    return made


def test_texts_reach_the_backend_once_their_characters_were_asked_for_and_proven(files, growing, subject):
    workers = [records.ProvenTexts(growing.proof, needs_offsets=False) for _ in range(2)]
    for _ in range(3):
        assert [not_proven(TEXTS) for not_proven in workers] == [[2, 3, 4]] * 2
    asked = records.asked_for(subject)
    assert records.is_asked(subject)
    with records.alone("growing"):
        assert not records.is_asked(subject), "another process proves them"
    assert sorted(asked) == sorted([0x4E00, 0x4E01, 0xD800] * 2)  # once by each worker

    growing.grow(asked[:3])
    records.answered(subject, 3)
    assert sorted(records.asked_for(subject)) == sorted(asked[3:])
    records.answered(subject, 3)

    assert [not_proven(TEXTS) for not_proven in workers] == [[4]] * 2
    later = records.ProvenTexts(choose(files, "auto"), needs_offsets=False)
    assert later(TEXTS) == [4]
    assert records.asked_for(subject) == [], "what is refused is not asked for again"
    assert not records.is_asked(subject)


def test_a_proof_that_ended_early_is_used_and_the_next_goes_on_from_there(monkeypatch, files):
    backend = fake(files, "\u4e05")
    install(monkeypatch, {"gigatoken": lambda: backend})
    parts.GrowingProof(files, one_subject(files))  # its process is killed before the rest of Latin text is tried
    num_texts = backend.num_texts

    proof = choose(files, "auto")
    assert proof is not None
    assert records.ProvenTexts(proof, needs_offsets=False)(["plain", "<|im_end|>", "caf\u00e9"]) == [2]
    later = parts.GrowingProof(files, one_subject(files))
    later.grow(FEW)
    assert records.ProvenTexts(later.proof, needs_offsets=False)(["plain", "caf\u00e9"]) == []
    assert backend.num_texts - num_texts < num_texts, "what was proven is not tried again"


def test_a_character_on_which_the_backend_is_wrong_is_refused_for_good(monkeypatch, files):
    backend = fake(files, "\u4e05")
    install(monkeypatch, {"gigatoken": lambda: backend})
    growing = parts.GrowingProof(files, one_subject(files))

    growing.grow([0x4E05, 0x4E06])

    not_proven = records.ProvenTexts(growing.proof, needs_offsets=False)
    assert not_proven(["\u4e05", "\u4e06", "a\u4e05"]) == [0, 2]
    num_texts = backend.num_texts
    growing.grow([0x4E05])
    assert growing.proof.refused == [(0x4E05, 0x4E06)]
    assert num_texts <= backend.num_texts < num_texts + 100


def test_what_two_proven_characters_compose_is_tried_before_both_reach_the_backend(monkeypatch, files):
    backend = fake(files, "y\u0301")  # normalized to one character, which no text has
    install(monkeypatch, {"gigatoken": lambda: backend}, points=range(0x20, 0x7F))
    growing = parts.GrowingProof(files, one_subject(files))

    growing.grow([0x301])

    assert (growing.proof.refusal, growing.proof.refused) == ("", [(0x301, 0x302)])


def test_what_is_found_wrong_later_or_revoked_by_an_audit_leaves_all_texts_to_tokenizers(files, growing, subject):
    not_proven = records.ProvenTexts(growing.proof, needs_offsets=False)
    assert not_proven(["plain"]) == []
    records.revoke(subject, "an audit found other ids")
    growing.grow([0x4E01])

    assert (growing.proof.refusal, not_proven(["plain", "\u4e01"])) == ("an audit found other ids", [0, 1])
    assert choose(files, "auto") is None
    assert records.to_prove(files, ["gigatoken"], needs_offsets=False) == []
    with pytest.raises(ConfigError, match="an audit found other ids"):
        choose(files, "gigatoken")


def test_offsets_that_turn_out_wrong_later_leave_texts_to_tokenizers_where_offsets_are_needed(files, growing):
    workers = {needed: records.ProvenTexts(growing.proof, needs_offsets=needed) for needed in (False, True)}
    growing._trusted.difference = "the offsets of tokens differ in 'x'"  # noqa: SLF001 - no tokenizer is so

    growing.grow([0x4E01])

    assert {needed: found(["plain", "\u4e01"]) for needed, found in workers.items()} == {False: [], True: [0, 1]}
    assert (growing.proof.token_lengths, growing.proof.no_offsets) == (b"", "the offsets of tokens differ in 'x'")


@pytest.mark.thorough
@given(
    st.lists(st.sets(st.sampled_from(FEW), max_size=12), max_size=6), st.sets(st.sampled_from(FEW[100:]), max_size=3)
)
@settings(max_examples=15)
def test_in_whatever_parts_it_grows_only_what_was_tried_is_proven_and_nothing_wrong(tokenizer, portions, wrong):
    grown = parts.Sweep(
        parts.OffsetCheck(tokenizer, None),
        Fake(tokenizer, lambda text: any(ord(char) in wrong for char in text)),
        SPECIAL,
    )
    for part in portions:
        grown.grow(part)

    tried = set().union(*portions)
    assert (grown.refusal, grown.proven, grown.refused & tried) == ("", tried - wrong, tried & wrong)


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.fixture(params=["grouped", "apart"])
def tried(tokenizer, request, monkeypatch) -> Callable[..., parts.Sweep]:
    """A short sweep over a backend that is wrong on some texts, with the contexts in one text, or each in its own."""
    separator = parts.separator_of(tokenizer) if request.param == "grouped" else None
    shorten(monkeypatch, FEW, longest_text=600)

    def swept(wrong: Callable[[str], bool], *, raises: bool = False) -> parts.Sweep:
        done = parts.Sweep(
            parts.OffsetCheck(tokenizer, None), Fake(tokenizer, wrong, raises=raises), SPECIAL, separator=separator
        )
        done.begin()
        if not done.refusal:
            done.grow(FEW)
        return done

    return swept


def excluded(done: parts.Sweep) -> set[int]:
    return set(FEW) - done.proven


def holds(*texts: str) -> Callable[[str], bool]:
    return lambda tried: any(text in tried for text in texts)


WRONG: dict[str, tuple[Callable[[str], bool], set[int]]] = {
    "nowhere": (holds(), set()), "alone": (holds("\u0416"), {0x416}), "between digits": (holds("1\u00e52"), {0xE5}),
    "between letters": (holds("a\u00e5A"), {0xE5}), "before an apostrophe": (holds("\u00e5's"), {0xE5}),
    "on a line": (holds("\n\u00e5\n"), {0xE5}), "before a mark": (holds("e\u00e5\u0301"), {0xE5}),
    "four times": (holds("\u00e5" * 4), {0xE5}), "between spaces": (holds("  \u00e5  "), {0xE5}),
    "in a sequence of a mark that is not of the sweep": (holds("C\u0327", "c\u0327"), set()),
    "in a sequence that is normalized otherwise": (holds("y\u0301"), {0x301}),
    "in a long text, and an emoji": (holds("\u4e2d", "\U0001f600"), {0x4E2D, 0x1F600}),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("wrong", "points"), WRONG.values(), ids=WRONG)
def test_a_character_that_is_wrong_is_left_out_and_no_other(tried, wrong, points):
    found = tried(wrong)

    assert (found.refusal, excluded(found), found.proven | points) == ("", points, set(FEW))


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


code_points = st.sets(st.integers(0, 0x10FFFF), max_size=30)
NEAR = st.sampled_from(["a", "\n", "é", "ÿ", "Ā", "中", "\U0001f600", "\ud800", "\U0010ffff"])


@pytest.mark.thorough
@given(code_points, st.lists(st.text(st.characters() | NEAR, max_size=8), max_size=6), st.lists(NEAR, max_size=3))
def test_ranges_have_each_code_point_once_and_the_finder_finds_the_texts_with_any_other(points, texts, near):
    points |= set(map(ord, near))
    for known in (points, points | set(range(0x80))):
        ranges = parts.ranges_of(known)
        assert (parts.points_of(ranges), parts.num_points(ranges)) == (known, len(known))
        assert all(stop < following for (_, stop), (following, _) in pairwise(ranges))
        finder, others = parts.CharacterFinder(ranges), [set(map(ord, text)) - known for text in texts]
        assert finder(texts) == [number for number, each in enumerate(others) if each]
        assert [finder.others_in(text) for text in texts] == others


def test_what_unicode_has_not_assigned_is_not_known():
    unknown = {0xD800, 0xDFFF, 0x0378, 0xF0000, 0x10FFFF}

    assert not any(map(parts.is_known, unknown))
    assert all(parts.is_known(point) for point in range(0x3000) if unicodedata.category(chr(point)) != "Cn")
    assert parts.is_known(0x1F600)
