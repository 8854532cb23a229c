"""The texts of a sample's tokens, end to end, are its text, and nothing is shown that is not there."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from asyncdata.tokenization.token_text import Piece, TokenTexts, without_texts

if TYPE_CHECKING:
    from pathlib import Path

GRIN = "\U0001f600"  # four bytes


def byte_level() -> Tokenizer:
    """A token for each byte, and two that hold parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate(alphabet)}
    vocab |= {"Ġa": 256, "ðŁ": 257, "ĺĢ": 258}  # " a", and the two halves of the grin
    merges = [("Ġ", "a"), ("ð", "Ł"), ("ĺ", "Ģ")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|a b|>")])
    tokenizer.add_tokens([AddedToken("<think>")])
    return tokenizer


def with_byte_fallback() -> Tokenizer:
    """As SentencePiece vocabularies are: words with a mark for the space, and bytes for what is not in them."""
    words = ["<unk>", "<s>", "▁", "▁a", "a", "b", "▁b", "."]
    vocab = {word: number for number, word in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def word_pieces() -> Tokenizer:
    vocab = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "now": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), with_byte_fallback()


class Forgetful(dict[int, str]):
    """Keeps nothing."""

    def __setitem__(self, key: int, value: str) -> None:
        return


def pieces_of(tokenizer: Tokenizer, ids: list[int], is_trained: list[bool] | None = None) -> list[Piece]:
    pieces = TokenTexts(tokenizer)(ids, is_trained or [False] * len(ids))
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])][: len(pieces)]
    assert (pieces[-1].stop if pieces else 0) == len(ids)
    return pieces


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.thorough
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_the_texts_of_byte_level_tokens_are_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids

    pieces = pieces_of(BYTE_LEVEL, ids)

    assert text_of(pieces) == text
    assert ("\ufffd" in text_of(pieces)) == ("\ufffd" in text)


@given(
    ids=st.lists(st.sampled_from([64, 65, *range(250, 262)]), max_size=20),
    before=st.lists(st.integers(0, 261), max_size=20),
    trained_from=st.integers(0, 20),
)
def test_tokens_that_were_seen_before_have_the_same_texts(ids: list[int], before: list[int], trained_from: int) -> None:
    texts, forgetful = TokenTexts(BYTE_LEVEL), TokenTexts(BYTE_LEVEL)
    forgetful._whole = Forgetful()  # noqa: SLF001 - without it, there is no other way
    is_trained = [at >= trained_from for at in range(len(ids))]

    texts(before, [False] * len(before))

    assert texts(ids, is_trained) == forgetful(ids, is_trained)


@pytest.mark.thorough
@given(
    text=st.text(st.sampled_from(f"ab .é{GRIN}字"), max_size=20).map(lambda text: f"a{text}"),
)
def test_the_texts_of_tokens_with_byte_fallback_are_the_text(text: str) -> None:
    ids = BYTE_FALLBACK.encode(text).ids

    assert text_of(pieces_of(BYTE_FALLBACK, ids)) == text == BYTE_FALLBACK.decode(ids)


def test_word_pieces_are_joined_as_the_tokenizer_joins_them() -> None:
    tokenizer = word_pieces()
    ids = tokenizer.encode("playing now. play [SEP]").ids

    pieces = pieces_of(tokenizer, ids)

    assert text_of(pieces[:-1]) == tokenizer.decode(ids[:-1]) == "playing now. play"
    assert [piece.text for piece in pieces] == ["play", "ing", " now", ".", " play", "[SEP]"]


def test_a_character_that_is_split_over_tokens_is_one_piece() -> None:
    ids = BYTE_LEVEL.encode(f"x{GRIN}y").ids

    assert [(piece.start, piece.stop, piece.text) for piece in pieces_of(BYTE_LEVEL, ids)] == [
        (0, 1, "x"),
        (1, 3, GRIN),
        (3, 4, "y"),
    ]


@pytest.mark.thorough
@given(
    text=st.text(st.sampled_from(f"xé字{GRIN}"), min_size=1, max_size=6), cut=st.integers(0, 24), end=st.integers(0, 24)
)
def test_a_cut_leaves_bytes_and_no_character_that_is_not_there(text: str, cut: int, end: int) -> None:
    alphabet = {char: BYTE_LEVEL.token_to_id(char) for char in pre_tokenizers.ByteLevel.alphabet()}
    data = text.encode()[cut : len(text.encode()) - end]
    ids = [alphabet[char] for char in (BYTE_LEVEL.pre_tokenizer.pre_tokenize_str(text) or [("", ())])[0][0]]
    ids = ids[cut : len(ids) - end]

    shown = text_of(pieces_of(BYTE_LEVEL, ids))

    assert shown.encode("utf-8", "surrogateescape") == data
    assert "\ufffd" not in shown


def test_a_character_of_which_only_a_part_is_trained_is_shown_by_its_bytes() -> None:
    ids = BYTE_LEVEL.encode(GRIN).ids

    pieces = pieces_of(BYTE_LEVEL, ids, [False, True])

    assert [(piece.text, piece.is_trained) for piece in pieces] == [("\udcf0\udc9f", False), ("\udc98\udc80", True)]


def test_a_special_token_has_its_name_and_ends_a_character_that_is_not_whole() -> None:
    half = BYTE_LEVEL.encode(GRIN).ids[:1]
    ids = [*half, *BYTE_LEVEL.encode("<|end|><|a b|><think>").ids]

    pieces = pieces_of(BYTE_LEVEL, ids)

    assert [(piece.text, piece.name) for piece in pieces] == [
        ("\udcf0\udc9f", ""),
        ("<|end|>", "<|end|>"),
        ("<|a b|>", "<|a b|>"),
        ("<think>", ""),
    ]


def test_text_that_looks_like_a_special_token_is_text() -> None:
    tokenizer = byte_level()
    tokenizer.encode_special_tokens = True
    pieces = pieces_of(tokenizer, tokenizer.encode("<|end|>").ids)

    assert text_of(pieces) == "<|end|>"
    assert {piece.name for piece in pieces} == {""}


def test_an_id_that_the_tokenizer_does_not_know_is_its_number() -> None:
    assert pieces_of(BYTE_LEVEL, [99_999]) == [Piece(0, 1, "99999", "99999", False)]


def test_tokens_without_a_tokenizer_are_numbers() -> None:
    assert without_texts([5, 6], [False, True]) == [Piece(0, 1, "5", "5", False), Piece(1, 2, "6", "6", True)]


@pytest.mark.thorough
@given(data=st.data())
def test_no_piece_is_both_trained_and_context(data: Any) -> None:
    ids = BYTE_LEVEL.encode(data.draw(st.text(st.sampled_from(f"ab {GRIN}"), max_size=12))).ids
    is_trained = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))

    pieces = pieces_of(BYTE_LEVEL, ids, is_trained)

    assert [piece.is_trained for piece in pieces for _ in range(piece.start, piece.stop)] == is_trained
    assert text_of(pieces).encode("utf-8", "surrogateescape").decode() == BYTE_LEVEL.decode(ids)
    assert all(one.stop == other.start for one, other in pairwise(pieces))


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", ["qwen2-bpe-151k", "gpt2-bpe-50k"])
def test_the_texts_of_real_chats_are_the_texts(test_data: Path, tokenizer: str) -> None:
    loaded = Tokenizer.from_file(str(test_data / "tokenizers" / tokenizer / "tokenizer.json"))
    for line in (test_data / "chat_sft" / "chat_sft.jsonl").read_text(encoding="utf-8").splitlines()[:60]:
        ids = loaded.encode(line).ids

        assert text_of(pieces_of(loaded, ids)) == line
