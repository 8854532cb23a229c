"""Programs that are made of templates: what is proven, what is not, and when they are used. See tests/property."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from tests.support.chat_templates import EACH, LOOKS, SPECIAL, WELL_KNOWN
from tests.support.inner import change
from tests.support.parts import ADD, NOTHING_PROVEN, ChatSpans, ChatTemplate, Program, Shapes, Step
from tests.unit.tokenization.trained import assistant, talk, user

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
CALL = {"id": "1", "function": {"name": "look", "arguments": {"at": "x", "n": [1, None, True]}}}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def prove(text: str, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> Program:
    template = ChatTemplate(text, {**VARIABLES, **variables}, datetime.datetime(2026, 1, 31))
    return template.proven(messages, tools, lambda one: ([one.rendered(one.messages, one.tools)], ()))


def made(program: Program, messages: list[dict[str, Any]], tools: Any = None) -> list[str] | None:
    """The program's text; None for a chat for which it does not hold."""
    values = program.values(messages, tools)
    return None if values is None else program.texts(values)


def spans_of(text: str) -> ChatSpans:
    return ChatSpans(ChatTemplate(text, {**VARIABLES, "add_generation_prompt": False}), "it", SPECIAL, "</s>")


def rendered(text: str, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    return [ChatTemplate(text, VARIABLES).rendered(messages, tools)]


@pytest.mark.parametrize("name", ["chatml with tools", "thinks", "macro"])
def test_templates_of_well_known_kinds_are_proven_for_calls_of_tools(name):
    called = [*talk("a", ""), {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}]
    called[1] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    other = [{**called[0], "content": "Look."}, {**called[1], "tool_calls": [{**CALL, "id": "2"}]}, *called[2:]]
    other[1]["tool_calls"][0]["function"] = {"name": "see", "arguments": {"y": "é"}}
    program = prove(WELL_KNOWN[name], called, TOOLS)

    assert made(program, other, [{"x": 1}]) == rendered(WELL_KNOWN[name], other, [{"x": 1}])


@pytest.mark.parametrize("what", LOOKS, ids=range(len(LOOKS)))
def test_a_template_that_looks_into_a_text_or_may_not_say_the_same_twice_is_not_proven(what):
    text = EACH.replace("WHAT", what)
    rendered(text, talk("a", "b"))  # it is fine, only not proven

    assert prove(text, talk("a", "b")).parts is None


def test_a_chat_that_the_template_refuses_is_not_proven_and_says_nothing_of_others():
    text = "{% if messages[0].content == 'a' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    refused, fine = prove(text, talk("a")), prove(text, talk("b"))

    assert refused.parts is None
    assert refused.values(talk("b"), None) is None
    assert made(fine, talk("c")) == ["c"]
    assert made(fine, talk("a")) is None


def test_a_proof_that_takes_very_many_operations_is_given_up(monkeypatch):
    change(monkeypatch, most_operations=100)
    template = ChatTemplate("{% for a in messages %}{% for b in messages %}{{ a.content }}{% endfor %}{% endfor %}", {})
    short, long = ([{"role": "user", "content": text}] * number for text, number in (("a", 2), ("b", 20)))
    programs = [
        template.proven(chat, None, lambda each: ([each.rendered(each.messages)], ())) for chat in (short, long)
    ]

    assert [program.parts is not None for program in programs] == [True, False]
    assert [template.render(long) for _ in range(3)] == ["b" * 400] * 3


@pytest.mark.parametrize(
    ("calls", "holds"),
    [
        ([{"id": "", "function": {"name": "b", "arguments": {}}}], True), ([CALL, CALL], False), ([], False),
        ([{"name": "b"}], False), ([{**CALL, "function": {"name": "b"}}], False),
        ([{**CALL, "function": {"name": None, "arguments": {}}}], False), ([None], False),
    ],
)  # fmt: skip
def test_a_program_holds_for_as_many_calls_with_the_same_keys_and_types(calls, holds):
    program = prove(WELL_KNOWN["chatml with tools"], [assistant("a", tool_calls=[CALL])])

    assert (made(program, [assistant("a", tool_calls=calls)]) is not None) is holds


def test_a_message_that_begins_after_text_of_another_message_is_not_proven():
    text = "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>' }}"
    text += "{{ BEFORE if BEFORE.startswith('x') else 'yy' }}{{ m.content + '<|im_end|>' }}"
    text += "{{ '.' if loop.last }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    text += "{{ '<|im_start|>' if add_generation_prompt }}"
    spans = spans_of(text.replace("BEFORE", "messages[loop.index0 - 1].content"))

    assert spans.proven(talk("x", "b", "c"), None, [1]).parts is None


def test_the_date_that_a_template_is_told_is_a_constant():
    program = prove("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}", talk("a"))

    assert made(program, talk("b")) == ["31 Jan 2026b"]


# Texts with the characters that stand for texts and for the borders of blocks


NAMES = "{{ messages[0].role }}{{ messages[0].keys() | list }}{{ bos_token + messages[0].content }}"
LISTS = "{{ messages[0].parts == [messages[0].content] }}"
MARKED = "{{ (messages[0].content ~ 'x') | upper }}"
PROVEN: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], bool]] = {
    "nothing odd": (NAMES, talk("a"), {}, True),
    "a variable": (NAMES, talk("a"), {"bos_token": "\U00100000"}, False),
    "a role": (NAMES, [{"role": "\U00100000", "content": "a"}], {}, False),
    "a key": (NAMES, [user("a") | {"\U00100000": 1}], {}, False),
    "a list beside one with an unknown text in it": (LISTS, [user("a") | {"parts": ["a"]}], {}, False),
    "a text": (MARKED, talk("a"), {}, True),
    "a mark in a text, which would be hidden in it": (MARKED.replace("x", "\ufdd0"), talk("a"), {}, False),
    **{
        f"a role that looks like a text, {what}, {role!r}": (
            "{% for message in messages %}{{ " + what + " }}{% endfor %}",
            [{"role": role, "content": ""}, {"role": role, "content": role}], {}, False,
        )
        for what in ["message.role in messages[0].content", "message.content == message.role", "message"]
        for role in ["\U00100000", "a\U00100001"]
    },
}  # fmt: skip


@pytest.mark.parametrize(("text", "messages", "variables", "is_proven"), PROVEN.values(), ids=PROVEN)
def test_what_could_be_taken_for_a_text_is_not_proven(text, messages, variables, is_proven):
    program = prove(text, messages, **variables)

    assert (program.parts is not None) is is_proven
    assert made(program, messages) in (None, rendered(text, messages))


class Prover:
    """Says that a text is the first content in brackets, for contents of the same length; notes what it is asked."""

    def __init__(self, *, proves: bool = True) -> None:
        self.asked: list[tuple[list[dict[str, Any]], Any, Any]] = []
        self.proves = proves

    def __call__(self, messages: list[dict[str, Any]], tools: Any, more: Any) -> Program:
        self.asked.append((messages, tools, more))
        steps = [Step(0, len, len(messages[0]["content"]))]
        return Program([(0, "content")], steps, [("[", 0, "]")] if self.proves else None)


@pytest.fixture
def prover() -> Prover:
    return Prover()


def test_a_shape_is_proven_when_it_comes_for_the_second_time_and_is_of_roles_keys_and_types(prover):
    shapes = Shapes(prover)

    assert [shapes.texts([user(text)], None) for text in "abc"] == [None, ["[b]"], ["[c]"]]
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
    assert prover.asked == [([user("b")], None, None)]


def test_as_many_shapes_are_kept_as_came_lately(prover):
    shapes = Shapes(prover)
    often = [user("a", often=1)]
    for number in range(2000):
        shapes.texts([user("a", **{str(number): 1})], None)
        shapes.texts(often, None)

    assert len(prover.asked) == 1
    assert shapes.texts([user("a", **{"1999": 1})], None) == ["[a]"]
    assert shapes.texts([user("a", **{"0": 1})], None) is None


@pytest.mark.parametrize(
    "messages",
    [[user("a")] * 129, [{"role": ["user"], "content": "a"}], [{"role": 1, "content": "a"}], [{"content": "a"}]],
    ids=["too many", "list", "number", "none"],
)
def test_chats_that_are_too_long_or_have_odd_roles_are_rendered(prover, messages):
    shapes = Shapes(prover)

    assert [shapes.texts(messages, None) for _ in range(3)] == [None, None, None]
    assert prover.asked == []


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


def test_a_template_is_not_run_for_a_shape_that_is_known_and_is_run_where_nothing_is_proven(monkeypatch):
    proven = ChatTemplate("<{{ messages[0].content }}>", {})
    unproven = ChatTemplate("{{ messages[0].content[0] }}{% block x %}{% endblock %}", {})

    assert [proven.render([user(text)]) for text in "ab"] == ["<a>", "<b>"]
    monkeypatch.setattr(proven, "rendered", None)
    assert proven.render([user("c")]) == "<c>"
    assert [unproven.render([user(text)]) for text in ("ab", "bc", "cd", "de")] == ["a", "b", "c", "d"]
