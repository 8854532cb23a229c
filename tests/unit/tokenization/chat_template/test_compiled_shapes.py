"""Chats of one shape share a program, which is proven when the shape comes again, and given up where that fails."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdata.tokenization.chat_template.compiled.cache import Shapes
from asyncdata.tokenization.chat_template.compiled.program import ADD, NOTHING_PROVEN, Program, Step
from asyncdata.tokenization.chat_template.template import ChatTemplate

Message = dict[str, Any]


def user(text: str, **more: Any) -> Message:
    return {"role": "user", "content": text, **more}


class Prover:
    """Says that a text is the first content in brackets, for contents of the same length; notes what it is asked."""

    def __init__(self, *, proves: bool = True) -> None:
        self.asked: list[tuple[list[Message], Any, Any]] = []
        self.proves = proves

    def __call__(self, messages: list[Message], tools: Any, more: Any) -> Program:
        self.asked.append((messages, tools, more))
        steps = [Step(0, len, len(messages[0]["content"]))]
        return Program([(0, "content")], steps, [("[", 0, "]")] if self.proves else None)


@pytest.fixture
def prover() -> Prover:
    return Prover()


def test_a_shape_is_proven_when_it_comes_for_the_second_time(prover):
    shapes = Shapes(prover)

    assert [shapes.texts([user(text)], None) for text in "abc"] == [None, ["[b]"], ["[c]"]]
    assert prover.asked == [([user("b")], None, None)]


def test_roles_keys_and_types_distinguish_shapes(prover):
    shapes = Shapes(prover)
    for _ in range(2):
        shapes.texts([user("a")], None)
    others: list[tuple[Any, Any, Any]] = [
        ([user("a"), user("b")], None, None),
        ([{"role": "system", "content": "a"}], None, None),
        ([user("a", name="x")], None, None),
        ([{"content": "a", "role": "user"}], None, None),
        ([{"role": "user", "content": ["a"]}], None, None),
        ([{"role": "user", "content": None}], None, None),
        ([user("a")], [], None),
        ([user("a")], None, (1,)),
        *(([user("a", loss=value)], None, None) for value in (1, True, 1.0)),
    ]

    assert [shapes.texts(*other) for other in others] == [None] * len(others)
    assert len(prover.asked) == 1


def test_chats_that_give_other_answers_have_a_program_of_their_own_up_to_eight(prover):
    shapes = Shapes(prover)
    shapes.texts([user("")], None)

    found = [shapes.texts([user("a" * length)], None) for length in range(10)]

    assert found == [[f"[{'a' * length}]"] for length in range(8)] + [None, None]
    assert shapes.texts([user("bbb")], None) == ["[bbb]"]
    assert len(prover.asked) == 8


def test_a_shape_whose_chats_keep_giving_other_answers_is_given_up_unless_its_programs_serve_as_often(prover):
    lonely, served = Shapes(prover), Shapes(prover)
    for length in range(200):
        lonely.texts([user("a" * length)], None)
        served.texts([user("a" * length)], None)
        served.texts([user("b")], None)

    assert lonely.texts([user("bbb")], None) is None
    assert served.texts([user("bbb")], None) == ["[bbb]"]


def test_as_many_shapes_are_kept_as_came_lately(prover):
    shapes = Shapes(prover)
    often = [user("a", often=1)]
    for number in range(2000):
        shapes.texts([user("a", **{str(number): 1})], None)
        shapes.texts(often, None)

    assert len(prover.asked) == 1
    assert shapes.num_kept <= 256
    assert shapes.texts([user("a", **{"1999": 1})], None) == ["[a]"]
    assert shapes.texts([user("a", **{"0": 1})], None) is None


@pytest.mark.parametrize(("is_first_proven", "num_asked"), [(False, 32), (True, 101)])
def test_where_nothing_can_be_proven_it_is_not_tried_for_ever_unless_one_was(is_first_proven, num_asked):
    prover = Prover(proves=is_first_proven)
    shapes = Shapes(prover)
    for _ in range(2 * is_first_proven):
        shapes.texts([user("a")], None)
    prover.proves = False

    for number in range(100):
        for _ in range(3):
            assert shapes.texts([user("a", **{str(number): 1})], None) is None

    assert len(prover.asked) == num_asked


@pytest.mark.parametrize(
    "messages",
    [[user("a")] * 129, [{"role": ["user"], "content": "a"}], [{"role": 1, "content": "a"}], [{"content": "a"}]],
    ids=["too many", "list", "number", "none"],
)
def test_chats_that_are_too_long_or_have_odd_roles_are_rendered(prover, messages):
    shapes = Shapes(prover)

    assert [shapes.texts(messages, None) for _ in range(3)] == [None, None, None]
    assert prover.asked == []


# Programs


def test_a_program_asks_makes_and_fills_in():
    steps = [Step(0, bool, True), Step(0, str.strip, ADD), Step((2, "-", 1), str.upper, ADD)]
    program = Program([(1, "content"), (None, "tools")], steps, [("<", 2, ">"), (), (3, "!")])
    chat = [user("x"), user(" a ")]

    values = program.values(chat, "t")

    assert values == [" a ", "t", "a", "A-T"]
    assert program.texts(values) == ["<a>", "", "A-T!"]
    assert program.values([user("x"), user("")], "t") is None


def test_a_chat_with_an_absent_string_in_a_value_is_rendered():
    program = Program([(0, "content"), (0, "thinking")], [], [("x", 0), ("b",)], absent=("x", "y"))

    assert program.texts(["z", ["x"]]) == ["xz", "b"]
    assert program.texts(["cy", "z"]) is None
    assert program.texts(["z", "x"]) is None


def test_a_value_that_is_too_deep_to_be_made_into_text_is_rendered():
    deep: Any = "a"
    for _ in range(100_000):
        deep = [deep]
    program = Program([(0, "content")], [Step(0, repr, ADD)], [(1,)])

    assert program.values([{"role": "user", "content": deep}], None) is None
    while isinstance(deep, list):  # or Python would take it apart recursively
        deep = deep.pop()


def test_a_program_that_comes_to_another_text_than_the_template_is_not_used():
    program = Program([(0, "content")], [], [("a", 0)])

    assert program.checked([user("b")], None, lambda: ["ab"]) is program
    assert program.checked([user("b")], None, lambda: ["ac"]).parts is None
    assert NOTHING_PROVEN.checked([user("b")], None, lambda: ["ac"]) is NOTHING_PROVEN


# What it is for


def test_a_template_is_not_run_for_a_shape_that_is_known(monkeypatch):
    template = ChatTemplate("<{{ messages[0].content }}>", {})
    for text in "ab":
        assert template.render([user(text)]) == f"<{text}>"
    monkeypatch.setattr(template, "rendered", None)

    assert template.render([user("c")]) == "<c>"


def test_a_template_of_which_nothing_is_proven_is_run():
    template = ChatTemplate("{{ messages[0].content[0] }}{% block x %}{% endblock %}", {})

    assert [template.render([user(text)]) for text in ("ab", "bc", "cd", "de")] == ["a", "b", "c", "d"]
