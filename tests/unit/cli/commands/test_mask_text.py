"""What the terminal shows of a loss mask can be read back: nothing in a text can pass for what is said about it."""

from __future__ import annotations

import re
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.cli.commands.mask_text import lines_of, plain_text, styled_text
from asyncdata.cli.inspection.chat_turns import Turn
from asyncdata.cli.inspection.loss_mask import MaskedText
from asyncdata.tokenization.token_text import Piece

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


@pytest.mark.thorough
@given(
    texts=st.lists(
        st.one_of(
            st.tuples(st.text(CHARS, max_size=6), st.booleans()),
            st.tuples(st.just(SPECIAL), st.booleans(), st.just(SPECIAL)),
        ),
        max_size=8,
    )
)
def test_what_is_shown_without_colour_can_be_read_back(texts):
    wanted = []
    for (text, is_trained, *special), group in groupby(texts):
        for _ in group:
            wanted += [(text, is_trained, True)] if special else [(char, is_trained, False) for char in text]

    num_alike = max((len(list(group)) for key, group in groupby(texts) if len(key) == 3), default=0)
    if num_alike <= 3:
        assert read_back(plain(*texts)) == wanted


@pytest.mark.thorough
@given(texts=st.lists(st.tuples(st.text(CHARS, max_size=6), st.booleans()), max_size=8))
def test_no_text_can_control_the_terminal_or_hide_a_line(texts):
    shown = plain(*texts)

    assert all(char.isprintable() for char in shown if char != "\n")
    assert all(line.startswith("│ ") for line in shown.split("\n") if shown)


def test_trained_text_stands_in_brackets_on_every_line():
    assert plain(("a", False), ("b\nc", True), (SPECIAL, True, SPECIAL), ("\n", False)) == ("│ a⟦b↵⟧\n│ ⟦c⟨<|end|>⟩⟧↵")


def test_every_turn_begins_a_line_with_its_role():
    turns = (Turn(0, "user"), Turn(2, "assistant"), Turn(4, "tool"))

    shown = plain(("a\n", False), ("bc", True), ("d\ne", False), turns=turns)

    assert shown == "user      │ a↵\nassistant │ ⟦bc⟧\ntool      │ d↵\n          │ e"


def test_a_turn_that_begins_within_a_token_begins_with_the_next_one():
    turns = (Turn(0, "user"), Turn(2, "assistant"))

    assert plain(("abc", False), ("d", True), turns=turns) == "user      │ abc\nassistant │ ⟦d⟧"


def test_a_role_is_text_of_the_row_too():
    turns = (Turn(0, "user\n\x1b[2J│"), Turn(2, "x⟦"))

    assert plain(("ab", False), ("c", False), turns=turns) == "userU+000AU+001B[2J│ │ ab\nxU+27E6              │ c"


def test_long_context_is_left_out_in_its_middle_and_what_is_trained_never_is():
    texts = [(str(number % 10), False) for number in range(50)] + [("x", True)] * 50

    shown = plain(*texts, context=5)

    assert shown == f"│ 012⟨… 45 tokens …⟩89⟦{'x' * 50}⟧"
    assert plain(*texts[:5], context=5) == "│ 01234"


def test_padding_is_counted():
    assert plain(("a", True), *[("<pad>", False, "<pad>")] * 1200) == "│ ⟦a⟧⟨<pad> ×1,200⟩"


def test_a_special_token_with_brackets_in_its_name_is_shown_by_their_numbers():
    assert plain(("x", False, "⟩\n")) == "│ ⟨U+27E9U+000A⟩"


def test_a_text_without_tokens_has_no_lines():
    assert plain() == ""


def test_colours_tell_what_is_trained_and_brackets_are_not_needed():
    lines = lines_of(masked(("a", False), ("b", True), (SPECIAL, True, SPECIAL), ("\n", False)))

    assert styled_text(lines) == [
        ("│ ", "cyan"),
        ("a", "dim"),
        ("b", "bold green"),
        (SPECIAL, "bold magenta"),
        ("↵", "dim yellow"),
    ]
    assert [style for _, style in styled_text(lines[:1], is_masked=False)][1] == ""


@pytest.mark.parametrize(("char", "sign"), [("\x1b", "⟨U+001B⟩"), ("\udce2", "⟨0xE2⟩"), ("\u202e", "⟨U+202E⟩")])
def test_a_character_that_cannot_be_shown_is_shown_by_its_number(char, sign):
    assert plain((char, False)) == f"│ {sign}"
