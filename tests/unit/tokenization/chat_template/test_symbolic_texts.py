"""Questions about texts of which parts are unknown: each has the answer of every chat, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.tokenization.chat_template.compiled.symbolic_texts import UnknownTexts
from asyncdata.tokenization.chat_template.compiled.symbolic_values import Trace, UnprovenError, symbols_in
from asyncdata.tokenization.chat_template.rendered_texts import Texts
from tests.support.examples import in_ci

if TYPE_CHECKING:
    from collections.abc import Callable

A, B = "\U00100000", "\U00100001"
SPECIAL = ["<e>", "<e>x", " <f>"]

texts = st.lists(st.sampled_from([A, B, "x", "<e>", "<", "e>", " ", " <f>"]), max_size=5).map("".join)
fillings = st.fixed_dictionaries(
    {symbol: st.lists(st.sampled_from(["x", "<e>", "<", "e>", " ", ">"]), max_size=3).map("".join) for symbol in (A, B)}
)
QUESTIONS: dict[str, Callable[[Texts, str, str], Any]] = {
    "same": lambda all_texts, one, other: all_texts.same(one, other),
    "starts_with": lambda all_texts, one, other: all_texts.starts_with(one, other),
    "ends_with": lambda all_texts, one, _: all_texts.ends_with(one, SPECIAL),
    "without_trailing_space": lambda all_texts, one, _: all_texts.without_trailing_space(one),
    "constant": lambda all_texts, one, _: all_texts.constant(one),
    "num_shared": lambda all_texts, one, other: one[: all_texts.num_shared(one, other)],
    "stop_at": lambda all_texts, one, _: [found.group() for found in [all_texts.stop_at(one, 0)] if found],
}


def filled(text: str, filling: dict[str, str]) -> str:
    return "".join(filling.get(piece, piece) for piece in symbols_in(text))


def chat_of(filling: dict[str, str]) -> list[dict[str, str]]:
    return [{"content": filling[symbol]} for symbol in (A, B)]


def trace_of(filling: dict[str, str]) -> Trace:
    """That of a chat of two messages, which these are."""
    trace = Trace()
    for number, message in enumerate(chat_of(filling)):
        trace.load(number, "content", message["content"])
    return trace


def attempt(question: Callable[..., Any], trace: Trace, *args: Any) -> Any:
    try:
        return question(UnknownTexts(SPECIAL, trace), *args)
    except UnprovenError:
        return UnprovenError


@pytest.mark.thorough
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@in_ci(max_examples=50)
@given(one=texts, other=texts, filling=fillings, others=st.lists(fillings, max_size=5))
def test_an_answer_is_that_of_every_chat_for_which_the_trace_holds(question, one, other, filling, others):
    trace = trace_of(filling)
    answer = attempt(question, trace, one, other)
    program = trace.program(None)

    for each in (filling, *others):
        if program.values(chat_of(each), None) is not None:
            known = question(Texts(SPECIAL), filled(one, each), filled(other, each))
            assert (filled(answer, each) if isinstance(answer, str) else answer) in (known, UnprovenError)


ANSWERS: list[tuple[str, str, str, Any]] = [
    ("same", f"a{A}", f"a{A}", True),
    ("same", f"a{A}", f"a{B}", UnprovenError),
    ("starts_with", f"a{A}bc", f"a{A}b", True),
    ("starts_with", f"a{A}bc", f"a{A}x", False),
    ("starts_with", f"a{A}", f"a{A}x", False),
    ("starts_with", f"a{A}", f"a{A}{B}", UnprovenError),
    ("starts_with", f"a{A}", "ab", False),
    ("starts_with", f"a{A}", "axb", False),
    ("starts_with", f"a{A}", "ax", UnprovenError),
    ("starts_with", "ab", f"a{A}", False),
    ("starts_with", "axb", f"a{A}", UnprovenError),
    ("starts_with", f"{A}", f"{B}", UnprovenError),
    ("ends_with", f"{A}<e>", "", True),
    ("ends_with", f"{A}<e> ", "", False),
    ("ends_with", f"{A}e>", "", False),
    ("ends_with", f"<{A}e>", "", False),
    ("without_trailing_space", f"{A}a \n", "", f"{A}a"),
    ("without_trailing_space", f"{A} \n", "", A),
    ("without_trailing_space", f"{B} \n", "", UnprovenError),
    ("constant", "abc", "", "abc"),
    ("constant", f"a{A}", "", UnprovenError),
    ("num_shared", f"{A}ab", f"{A}ac", f"{A}a"),
    ("num_shared", f"{A}a", f"{A}a{B}", f"{A}a"),
    ("num_shared", f"{A}a{B}", f"{A}ac", UnprovenError),
    ("stop_at", " <e>", "", [" <e>"]),
    ("stop_at", f" <e>.{A}", "", [" <e>"]),
    ("stop_at", f" <e>{A}", "", UnprovenError),
    ("stop_at", f" {A}", "", UnprovenError),
    ("stop_at", f".{A}", "", []),
]


def test_a_question_with_one_answer_for_all_chats_is_answered():
    found = [attempt(QUESTIONS[name], trace_of({A: "x", B: " "}), one, other) for name, one, other, _ in ANSWERS]

    assert found == [answer for *_, answer in ANSWERS]


def test_marks_are_those_of_a_chat_that_has_none():
    texts = UnknownTexts(SPECIAL, Trace())

    assert texts.marks == ()
    assert texts.unused_marks(f"a{A}") == texts.marks == Texts(SPECIAL).unused_marks("abc") == ("\ufdd0", "\ufdd1")
    with pytest.raises(UnprovenError):
        texts.unused_marks("a\ufdd1")
