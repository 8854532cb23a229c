"""The text that ``inspect`` shows of a sample is the text of its tokens, and nothing in it can pass for a sign."""

from __future__ import annotations

import json
import re
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from asyncdata import ChatTokenizeFn, DataLoader, PreferenceTokenizeFn
from tests.support.parts import MaskedText, Piece, TokenTexts, Turn, Turns, lines_of, plain_text
from tests.unit.tokenization.trained import assistant, user, variant

GRIN = "\U0001f600"  # four bytes

# Turns: ``tests/transcripts/turns.md`` has the rest


def test_another_text_than_that_of_the_chat_and_a_tokenizer_without_a_template_have_no_turns(small_tokenizer, tmp_path):
    bare = variant(small_tokenizer, tmp_path / "no_template", config={"chat_template": None})
    chat = {"messages": [user("Is it far?"), assistant("No.")]}
    pair = {"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."}
    assert Turns(ChatTokenizeFn(small_tokenizer), ["messages"])(json.dumps(chat).encode(), "other") == []
    assert Turns(PreferenceTokenizeFn(bare), ["prompt", "chosen"])(json.dumps(pair).encode(), "The sky is blue.") == []


@pytest.mark.thorough
def test_what_is_shown_as_trained_is_what_a_loader_trains(test_data, run_json):
    data, tokenizer = test_data / "chat_sft" / "chat_sft.jsonl", test_data / "tokenizers" / "gpt2-bpe-50k"
    fn = ChatTokenizeFn(str(tokenizer), max_length=900, overlong="truncate_left")
    with DataLoader(str(data), tokenize_fn=fn, seed=3, num_workers=0) as loader:
        samples = {str(sample.position): sample for sample in loader.get_next_batch(40, timeout_s=240)}
    words = (data, "--seed", 3, "--tokenizer", tokenizer, "--max-length", 900, "--set", "overlong=truncate_left")

    *rows, _ = run_json("inspect", *words, "--num", 40)

    assert {row["dropped"] for row in rows} <= {None, "no_trained_tokens"}
    for row in rows:
        for text in row["texts"]:
            by_token = [piece["is_trained"] for piece in text["pieces"] for _ in range(piece["start"], piece["stop"])]
            labels = samples[row["position"]].labels
            assert by_token == (labels != -100).tolist()
            assert (text["num_tokens"], text["num_trained"]) == (len(labels), sum(by_token))


def byte_level():
    """A token for each byte, and three that hold parts of characters."""
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"Ġa": 256, "ðŁ": 257, "ĺĢ": 258}  # " a", and the two halves of the grin
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("ð", "Ł"), ("ĺ", "Ģ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|a b|>")])
    tokenizer.add_tokens([AddedToken("<think>")])
    return tokenizer


def with_byte_fallback():
    """As SentencePiece vocabularies are: words with a mark for the space, and bytes for what is not in them."""
    words = ["<unk>", "<s>", "▁", "▁a", "a", "b", "▁b", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def word_pieces():
    vocab = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "now": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


BYTE_LEVEL = byte_level()
BYTES = {char: BYTE_LEVEL.token_to_id(char) for char in pre_tokenizers.ByteLevel.alphabet()}


def ids_of(text):
    return BYTE_LEVEL.encode(text).ids


def pieces_of(ids, is_trained=None, tokenizer=BYTE_LEVEL):
    """They cover the tokens without a gap, and none is both trained and context."""
    wanted = is_trained or [False] * len(ids)
    pieces = TokenTexts(tokenizer)(ids, wanted)
    assert [piece.is_trained for piece in pieces for _ in range(piece.start, piece.stop)] == wanted
    assert all(one.stop == other.start for one, other in pairwise(pieces))
    return pieces


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), data=st.data())
def test_the_texts_of_byte_level_tokens_are_the_text_whatever_is_trained(text, data):
    ids = ids_of(text)
    is_trained = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    assert text_of(pieces_of(ids)) == text
    assert text_of(pieces_of(ids, is_trained)).encode("utf-8", "surrogateescape").decode() == text


@given(
    text=st.text(st.sampled_from(f"xé字{GRIN}"), min_size=1, max_size=6), cut=st.integers(0, 24), end=st.integers(0, 24)
)
def test_a_cut_leaves_bytes_and_no_character_that_is_not_there(text, cut, end):
    one_a_byte = [BYTES[char] for char in BYTE_LEVEL.pre_tokenizer.pre_tokenize_str(text)[0][0]]
    last = max(0, len(one_a_byte) - end)
    shown = text_of(pieces_of(one_a_byte[cut:last]))
    assert shown.encode("utf-8", "surrogateescape") == text.encode()[cut:last]
    assert "\ufffd" not in shown


HALVES = [("\udcf0\udc9f", ""), ("\udc98\udc80", "")]
NAMED = [HALVES[0], *((name, name) for name in ("<|end|>", "<|a b|>")), ("<think>", "")]
PIECES = {
    "a character that is split over tokens is one piece": (ids_of(f"x{GRIN}y"), [], [("x", ""), (GRIN, ""), ("y", "")]),
    "of a character that is trained in part the bytes are shown": (ids_of(GRIN), [False, True], HALVES),
    "a special token has its name and ends a character": (
        [ids_of(GRIN)[0], *ids_of("<|end|><|a b|><think>")], [], NAMED
    ),
    "an id that is not known is its number": ([99_999], [], [("99999", "99999")]),
}  # fmt: skip


@pytest.mark.parametrize(("ids", "is_trained", "wanted"), PIECES.values(), ids=PIECES)
def test_tokens_are_shown_as_pieces(ids, is_trained, wanted):
    assert [(piece.text, piece.name) for piece in pieces_of(ids, is_trained)] == wanted


@pytest.mark.parametrize(
    ("tokenizer", "text", "wanted"),
    [
        (word_pieces(), "playing now. play [SEP]", ["play", "ing", " now", ".", " play", "[SEP]"]),
        (with_byte_fallback(), f"a b.é {GRIN}a", ["a", " b", ".", "é", " ", GRIN, "a"]),
    ],
)
def test_the_texts_of_other_tokens_are_joined_as_the_tokenizer_joins_them(tokenizer, text, wanted):
    assert [piece.text for piece in pieces_of(tokenizer.encode(text).ids, tokenizer=tokenizer)] == wanted


def test_text_that_looks_like_a_special_token_is_text():
    tokenizer = byte_level()
    tokenizer.encode_special_tokens = True
    pieces = pieces_of(tokenizer.encode("<|end|>").ids, tokenizer=tokenizer)
    assert (text_of(pieces), {piece.name for piece in pieces}) == ("<|end|>", {""})


SPECIAL = "<|end|>"
ITEM = re.compile(r"⟨U\+(?P<code>[0-9A-F]{4,6})⟩|⟨0x(?P<byte>[0-9A-F]{2})⟩|⟨(?P<special>[^⟩]*)⟩|(?P<char>.)")
CHARS = st.one_of(
    st.characters(),
    st.sampled_from("\n\t\r\x1b ⟦⟧⟨⟩↵⇥│\\"),
    st.integers(0x80, 0xFF).map(lambda byte: chr(0xDC00 + byte)),
)


def masked(texts, turns=()):
    """One token for each text; a third value is the name of a special one."""
    pieces = [
        Piece(number, number + 1, text, rest[0] if rest else "", is_trained)
        for number, (text, is_trained, *rest) in enumerate(texts)
    ]
    return MaskedText("", pieces, [Turn(*turn) for turn in turns], True)


def plain(texts, *, turns=(), context=0):
    return plain_text(lines_of(masked(texts, turns), context))


def read_back(shown):
    """The characters and special tokens that are shown, each with whether it is trained and whether it is special."""
    found = []
    for line in shown.split("\n"):
        is_trained = False
        for item in ITEM.finditer(line.partition("│ ")[2]):
            char = item["char"]
            if char in {"⟦", "⟧"}:
                is_trained = char == "⟦"
            elif item["special"] is not None:
                found.append((item["special"], is_trained, True))
            else:
                code = item["code"] and chr(int(item["code"], 16))
                byte = item["byte"] and chr(0xDC00 + int(item["byte"], 16))
                found.append((code or byte or {"↵": "\n", "⇥": "\t"}.get(char, char), is_trained, False))
    return found


TOKENS = st.one_of(
    st.tuples(st.text(CHARS, max_size=6), st.booleans()), st.tuples(st.just(SPECIAL), st.booleans(), st.just(SPECIAL))
)


@given(texts=st.lists(TOKENS, max_size=8))
def test_what_is_shown_without_colour_can_be_read_back_and_controls_no_terminal(texts):
    shown = plain(texts)
    assert all(char.isprintable() for char in shown if char != "\n")
    assert all(line.startswith("│ ") for line in shown.split("\n") if shown)
    num_alike = max((len(list(group)) for key, group in groupby(texts) if len(key) == 3), default=0)
    if num_alike <= 3:  # more of them are counted
        wanted = []
        for text, is_trained, *special in texts:
            wanted += [(text, is_trained, True)] if special else [(char, is_trained, False) for char in text]
        assert read_back(shown) == wanted


FIFTY = [(str(number % 10), False) for number in range(50)]
SHOWN = {
    "a turn that begins within a token begins with the next one": (
        plain([("abc", False), ("d", True)], turns=[(0, "u"), (2, "as")]), "u  │ abc\nas │ ⟦d⟧"
    ),
    "long context is left out in its middle, and what is trained never is": (
        plain([*FIFTY, *[("x", True)] * 50], context=5), f"│ 012⟨… 45 tokens …⟩89⟦{'x' * 50}⟧"
    ),
    "context that is short enough is whole": (plain(FIFTY[:5], context=5), "│ 01234"),
    "padding is counted": (plain([("a", True), *[("<pad>", False, "<pad>")] * 1200]), "│ ⟦a⟧⟨<pad> ×1,200⟩"),
    "a special token with brackets in its name is shown by their numbers": (
        plain([("x", False, "⟩\n")]), "│ ⟨U+27E9U+000A⟩"
    ),
    "a text without tokens has no lines": (plain([]), ""),
}  # fmt: skip


@pytest.mark.parametrize(("shown", "wanted"), SHOWN.values(), ids=SHOWN)
def test_text_is_shown_in_lines(shown, wanted):
    assert shown == wanted
