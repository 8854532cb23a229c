"""The text that ``inspect`` shows of a sample is the text of its tokens, and nothing in it can pass for a sign."""

from __future__ import annotations

import json
import re
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from asyncdata import ChatTokenizeFn, DataLoader, PreferenceTokenizeFn
from asyncdata.cli.commands.mask_text import lines_of, plain_text, styled_text
from asyncdata.cli.inspection.chat_turns import Turn, Turns
from asyncdata.cli.inspection.loss_mask import MaskedText
from asyncdata.tokenization.token_text import Piece, TokenTexts
from tests.unit.tokenization.trained import assistant, user, variant

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GRIN = "\U0001f600"  # four bytes

# The turns of chats

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [SYSTEM, user("Is it far?"), assistant("No."), user("Sure?"), assistant("Yes.")]
SHOWN = [(message["role"], f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n") for message in CHAT]
IMAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Is it far?"}]}
WITH_TOOLS = """\
{% if tools %}{{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}
{% endfor %}"""
LATE_THOUGHTS = """\
{% for m in messages %}{{ m['role'] }}: {% if loop.last %}({{ m.get('thinking') }}) {% endif %}
{%- generation %}{{ m['content'] }}{% endgeneration %}
{% endfor %}"""
WITH_CALLS = """\
{%- for m in messages %}{{ '[' + m.role + ']' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{% for name in call.function.arguments.keys() %}{{ name }}{% endfor %}
{%- endfor %}{% endfor %}"""
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CHATS: dict[str, tuple[dict[str, Any], str, tuple[str, ...], list[list[tuple[str, str]]]]] = {
    "every message is a turn": ({"messages": CHAT}, "", (), [SHOWN]),
    "media that are left out are in none": (
        {"messages": [SYSTEM, IMAGE, *CHAT[2:]], "images": ["a.png"], "image": {"a": 1}},
        "",
        ("--set", "media=leave_out", "--metadata-key", "image"),
        [SHOWN],
    ),
    "tools are part of the first": (
        {"messages": [user("Hi"), assistant("Ho")], "tools": json.dumps([{"name": "f"}])},
        WITH_TOOLS,
        (),
        [[("user", '[{"name": "f"}]\nuser: Hi\n'), ("assistant", "assistant: Ho\n")]],
    ),
    "messages whose border cannot be told are one": (  # as with templates that drop all but the last thinking
        {"messages": [user("a"), assistant("b", thinking="t"), user("c"), assistant("d")]},
        LATE_THOUGHTS,
        (),
        [[("user+assistant+user+assistant", "user: aassistant: buser: cassistant: (None) d")]],
    ),
    "a chat as text with arguments as text has those of the chat": (
        {"messages": json.dumps([user("a"), assistant("", tool_calls=[CALL]), user("b"), assistant("c")])},
        WITH_CALLS,
        (),
        [[("user", "[user]a"), ("assistant", "[assistant]at"), ("user", "[user]b"), ("assistant", "[assistant]c")]],
    ),
    "a pair has those of its prompt and of each answer": (
        {"prompt": [user("Hi")], "chosen": [assistant("Ho")], "rejected": [assistant("No")]},
        "",
        ("--kind", "preference"),
        [
            [("user", "<|im_start|>user\nHi<|im_end|>\n"), ("assistant", f"<|im_start|>assistant\n{text}<|im_end|>\n")]
            for text in ("Ho", "No")
        ],
    ),
    "a pair of texts has none": (
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."},
        "",
        ("--kind", "preference"),
        [[("", "The sky is blue.<|im_end|>")], [("", "The sky is a fish.<|im_end|>")]],
    ),
}


@pytest.fixture
def turns(
    jsonl_file: Callable[..., Path], run_json: Callable[..., list[Any]], small_tokenizer: Path, tmp_path: Path
) -> Callable[..., list[list[tuple[str, str]]]]:
    """A function that gives the turns of each text of a row, role and text, as ``inspect`` has them."""

    def of(row: dict[str, Any], template: str = "", *words: object) -> list[list[tuple[str, str]]]:
        (tmp_path / "template").write_text(template)
        options = [*words, *(["--chat-template", tmp_path / "template"] if template else [])]
        found, _ = run_json("inspect", jsonl_file([row]), "--tokenizer", small_tokenizer, *options)
        return [turns_of(text) for text in found["texts"]]

    return of


def turns_of(shown: dict[str, Any]) -> list[tuple[str, str]]:
    text = "".join(piece["text"] for piece in shown["pieces"])
    starts = [(turn["start"], turn["role"]) for turn in shown["turns"]] or [(0, "")]
    stops = [*(start for start, _ in starts[1:]), len(text)]
    return [(role, text[start:stop]) for (start, role), stop in zip(starts, stops, strict=True)]


@pytest.mark.parametrize(("row", "template", "options", "wanted"), CHATS.values(), ids=CHATS)
def test_the_turns_of_a_text_are_those_of_its_chat(turns, row, template, options, wanted):
    assert turns(row, template, *options) == wanted


@pytest.mark.parametrize("max_length", [4, 9, 15, 22, 30])
def test_a_text_without_its_beginning_has_the_turns_that_are_left(turns, max_length):
    (found,) = turns({"messages": CHAT}, "", "--max-length", max_length, "--set", "overlong=truncate_left")

    text = "".join(part for _, part in found)
    assert "".join(part for _, part in SHOWN).endswith(text)
    assert [role for role, _ in found] == [role for role, _ in SHOWN[-len(found) :]]
    assert found[1:] == SHOWN[len(SHOWN) - len(found) + 1 :]


def test_a_text_without_its_end_has_the_turns_before_it(turns):
    (found,) = turns({"messages": CHAT}, "", "--max-length", 30, "--set", "overlong=truncate_right")

    assert [role for role, _ in found] == ["system", "user", "assistant"]
    assert found[:2] == SHOWN[:2]


def test_another_text_than_that_of_the_chat_and_a_tokenizer_without_a_template_have_no_turns(small_tokenizer, tmp_path):
    bare = variant(small_tokenizer, tmp_path / "no_template", config={"chat_template": None})
    pair = {"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."}

    assert Turns(ChatTokenizeFn(small_tokenizer), ["messages"])(json.dumps({"messages": CHAT}).encode(), "other") == []
    assert Turns(PreferenceTokenizeFn(bare), ["prompt", "chosen"])(json.dumps(pair).encode(), "The sky is blue.") == []


@pytest.mark.thorough
def test_what_is_shown_as_trained_is_what_a_loader_trains(test_data: Path, run_json: Any) -> None:
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
            assert labels is not None
            assert by_token == (labels != -100).tolist()
            assert (text["num_tokens"], text["num_trained"]) == (len(labels), sum(by_token))


# Tokens as texts


def byte_level() -> Tokenizer:
    """A token for each byte, and three that hold parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: number for number, char in enumerate(alphabet)}
    vocab |= {"Ġa": 256, "ðŁ": 257, "ĺĢ": 258}  # " a", and the two halves of the grin
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("ð", "Ł"), ("ĺ", "Ģ")]))
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
    return tokenizer


def word_pieces() -> Tokenizer:
    vocab = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "now": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), with_byte_fallback()


def pieces_of(tokenizer: Tokenizer, ids: list[int], is_trained: list[bool] | None = None) -> list[Piece]:
    """They cover the tokens without a gap, and none is both trained and context."""
    wanted = is_trained or [False] * len(ids)
    pieces = TokenTexts(tokenizer)(ids, wanted)
    assert [piece.is_trained for piece in pieces for _ in range(piece.start, piece.stop)] == wanted
    assert all(one.stop == other.start for one, other in pairwise(pieces))
    return pieces


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), data=st.data())
def test_the_texts_of_byte_level_tokens_are_the_text_whatever_is_trained(text: str, data: Any) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    is_trained = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))

    assert text_of(pieces_of(BYTE_LEVEL, ids)) == text
    assert text_of(pieces_of(BYTE_LEVEL, ids, is_trained)).encode("utf-8", "surrogateescape").decode() == text


@pytest.mark.thorough
@given(text=st.text(st.sampled_from(f"ab .é{GRIN}字"), max_size=20).map(lambda text: f"a{text}"))
def test_the_texts_of_tokens_with_byte_fallback_are_the_text(text: str) -> None:
    ids = BYTE_FALLBACK.encode(text).ids

    assert text_of(pieces_of(BYTE_FALLBACK, ids)) == text == BYTE_FALLBACK.decode(ids)


@given(
    text=st.text(st.sampled_from(f"xé字{GRIN}"), min_size=1, max_size=6), cut=st.integers(0, 24), end=st.integers(0, 24)
)
def test_a_cut_leaves_bytes_and_no_character_that_is_not_there(text: str, cut: int, end: int) -> None:
    alphabet = {char: BYTE_LEVEL.token_to_id(char) for char in pre_tokenizers.ByteLevel.alphabet()}
    one_a_byte = [alphabet[char] for char in BYTE_LEVEL.pre_tokenizer.pre_tokenize_str(text)[0][0]]
    last = len(one_a_byte) - end

    shown = text_of(pieces_of(BYTE_LEVEL, one_a_byte[cut:last] if last > 0 else []))

    assert shown.encode("utf-8", "surrogateescape") == (text.encode()[cut:last] if last > 0 else b"")
    assert "\ufffd" not in shown


class Forgetful(dict[int, str]):
    """Keeps nothing."""

    def __setitem__(self, key: int, value: str) -> None:
        return


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


@pytest.mark.parametrize(
    ("ids", "is_trained", "wanted"),
    [
        (BYTE_LEVEL.encode(f"x{GRIN}y").ids, [], [("x", ""), (GRIN, ""), ("y", "")]),
        (BYTE_LEVEL.encode(GRIN).ids, [False, True], [("\udcf0\udc9f", ""), ("\udc98\udc80", "")]),
        (
            [*BYTE_LEVEL.encode(GRIN).ids[:1], *BYTE_LEVEL.encode("<|end|><|a b|><think>").ids],
            [],
            [("\udcf0\udc9f", ""), ("<|end|>", "<|end|>"), ("<|a b|>", "<|a b|>"), ("<think>", "")],
        ),
        ([99_999], [], [("99999", "99999")]),
    ],
    ids=[
        "a character that is split over tokens is one piece",
        "of a character that is trained in part the bytes are shown",
        "a special token has its name and ends a character",
        "an id that is not known is its number",
    ],
)
def test_tokens_are_shown_as_pieces(ids, is_trained, wanted):
    assert [(piece.text, piece.name) for piece in pieces_of(BYTE_LEVEL, ids, is_trained)] == wanted


def test_word_pieces_are_joined_as_the_tokenizer_joins_them():
    tokenizer = word_pieces()

    pieces = pieces_of(tokenizer, tokenizer.encode("playing now. play [SEP]").ids)

    assert [piece.text for piece in pieces] == ["play", "ing", " now", ".", " play", "[SEP]"]


def test_text_that_looks_like_a_special_token_is_text():
    tokenizer = byte_level()
    tokenizer.encode_special_tokens = True

    pieces = pieces_of(tokenizer, tokenizer.encode("<|end|>").ids)

    assert (text_of(pieces), {piece.name for piece in pieces}) == ("<|end|>", {""})


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", ["qwen2-bpe-151k", "gpt2-bpe-50k"])
def test_the_texts_of_real_chats_are_the_texts(test_data: Path, tokenizer: str) -> None:
    loaded = Tokenizer.from_file(str(test_data / "tokenizers" / tokenizer / "tokenizer.json"))
    for line in (test_data / "chat_sft" / "chat_sft.jsonl").read_text(encoding="utf-8").splitlines()[:60]:
        assert text_of(pieces_of(loaded, loaded.encode(line).ids)) == line


# Lines of a terminal

SPECIAL = "<|end|>"
ITEM = re.compile(r"⟨U\+(?P<code>[0-9A-F]{4,6})⟩|⟨0x(?P<byte>[0-9A-F]{2})⟩|⟨(?P<special>[^⟩]*)⟩|(?P<char>.)")
CHARS = st.one_of(
    st.characters(),
    st.sampled_from("\n\t\r\x1b ⟦⟧⟨⟩↵⇥│\\"),
    st.integers(0x80, 0xFF).map(lambda byte: chr(0xDC00 + byte)),
)


def masked(*texts: tuple[str, bool] | tuple[str, bool, str], turns: tuple[Turn, ...] = ()) -> MaskedText:
    """One token for each text; a third value is the name of a special one."""
    pieces = [
        Piece(number, number + 1, text, rest[0] if rest else "", is_trained)
        for number, (text, is_trained, *rest) in enumerate(texts)
    ]
    return MaskedText("", pieces, list(turns), True)


def plain(*texts: tuple[str, bool] | tuple[str, bool, str], turns: tuple[Turn, ...] = (), context: int = 0) -> str:
    return plain_text(lines_of(masked(*texts, turns=turns), context))


def read_back(shown: str) -> list[tuple[str, bool, bool]]:
    """The characters and special tokens that are shown, each with whether it is trained and whether it is special."""
    found = []
    for line in shown.split("\n"):
        is_trained = False
        for item in ITEM.finditer(line.partition("│ ")[2]):
            char = item["char"]
            if char in {"⟦", "⟧"}:
                is_trained = char == "⟦"
            elif item["code"]:
                found.append((chr(int(item["code"], 16)), is_trained, False))
            elif item["byte"]:
                found.append((chr(0xDC00 + int(item["byte"], 16)), is_trained, False))
            elif item["special"] is not None:
                found.append((item["special"], is_trained, True))
            else:
                found.append(({"↵": "\n", "⇥": "\t"}.get(char, char), is_trained, False))
    return found


TOKENS = st.one_of(
    st.tuples(st.text(CHARS, max_size=6), st.booleans()), st.tuples(st.just(SPECIAL), st.booleans(), st.just(SPECIAL))
)


@given(texts=st.lists(TOKENS, max_size=8))
def test_what_is_shown_without_colour_can_be_read_back_and_controls_no_terminal(texts):
    shown = plain(*texts)

    assert all(char.isprintable() for char in shown if char != "\n")
    assert all(line.startswith("│ ") for line in shown.split("\n") if shown)
    num_alike = max((len(list(group)) for key, group in groupby(texts) if len(key) == 3), default=0)
    if num_alike <= 3:  # more of them are counted
        wanted: list[tuple[str, bool, bool]] = []
        for text, is_trained, *special in texts:
            wanted += [(text, is_trained, True)] if special else [(char, is_trained, False) for char in text]
        assert read_back(shown) == wanted


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (plain(("a", False), ("b\nc", True), (SPECIAL, True, SPECIAL), ("\n", False)), "│ a⟦b↵⟧\n│ ⟦c⟨<|end|>⟩⟧↵"),
        (
            plain(("a\n", False), ("bc", True), ("d\ne", False), turns=(Turn(0, "u"), Turn(2, "as"), Turn(4, "tool"))),
            "u    │ a↵\nas   │ ⟦bc⟧\ntool │ d↵\n     │ e",
        ),
        (plain(("abc", False), ("d", True), turns=(Turn(0, "u"), Turn(2, "as"))), "u  │ abc\nas │ ⟦d⟧"),
        (
            plain(("ab", False), ("c", False), turns=(Turn(0, "user\n\x1b[2J│"), Turn(2, "x⟦"))),
            "userU+000AU+001B[2J│ │ ab\nxU+27E6              │ c",
        ),
        (
            plain(*[(str(number % 10), False) for number in range(50)], *[("x", True)] * 50, context=5),
            f"│ 012⟨… 45 tokens …⟩89⟦{'x' * 50}⟧",
        ),
        (plain(*[(str(number), False) for number in range(5)], context=5), "│ 01234"),
        (plain(("a", True), *[("<pad>", False, "<pad>")] * 1200), "│ ⟦a⟧⟨<pad> ×1,200⟩"),
        (plain(("x", False, "⟩\n")), "│ ⟨U+27E9U+000A⟩"),
        (plain(("\x1b\udce2\u202e", False)), "│ ⟨U+001B⟩⟨0xE2⟩⟨U+202E⟩"),
        (plain(), ""),
    ],
    ids=[
        "trained text stands in brackets on every line",
        "every turn begins a line with its role",
        "a turn that begins within a token begins with the next one",
        "a role is text of the row too",
        "long context is left out in its middle, and what is trained never is",
        "context that is short enough is whole",
        "padding is counted",
        "a special token with brackets in its name is shown by their numbers",
        "a character that cannot be shown is shown by its number",
        "a text without tokens has no lines",
    ],
)
def test_text_is_shown_in_lines(shown, wanted):
    assert shown == wanted


def test_colours_tell_what_is_trained_and_brackets_are_not_needed():
    lines = lines_of(masked(("a", False), ("b", True), (SPECIAL, True, SPECIAL), ("\n", False)))

    colours = [("│ ", "cyan"), ("a", "dim"), ("b", "bold green"), (SPECIAL, "bold magenta"), ("↵", "dim yellow")]
    assert styled_text(lines) == colours
    assert [style for _, style in styled_text(lines[:1], is_masked=False)][1] == ""
