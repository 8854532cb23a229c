"""Turns whose content is not text: what a template would lose of them makes a bad row."""

from __future__ import annotations

from typing import Any

import pytest

from asyncdata import ChatTokenizeFn, PromptTokenizeFn
from tests.support.chats import CHAT
from tests.unit.tokenization import faults, run
from tests.unit.tokenization.functions.test_chat import WITH_CALLS
from tests.unit.tokenization.test_media import PARTS, WRITES_ALL
from tests.unit.tokenization.trained import assistant, trained, user

LENIENT = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content or '' }}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Writes nothing where a turn has no content, and the reasoning if there is any."""

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}


def codes(fn: Any, *chats: Any) -> list[tuple[int, str]]:
    key = "messages" if isinstance(fn, ChatTokenizeFn) else "input"
    return faults(run(fn.open(), [{key: chat} for chat in chats]))


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "text": "Yes."},
        {"role": "assistant"},
        assistant(None),
        assistant(None, text="Yes."),
        {"role": "assistant", "content": [], "tool_calls": []},
    ],
)
def test_a_turn_of_the_assistant_without_content_makes_a_bad_row(name: str, turn: Any) -> None:
    chat = [user("Why?"), turn]

    for fn in (
        ChatTokenizeFn(name, chat_template=LENIENT),
        PromptTokenizeFn(name, apply_chat_template=True, chat_template=LENIENT),
    ):
        assert codes(fn, *[chat] * 40) == [(number, "AD132") for number in range(40)]


def test_the_error_of_a_turn_without_content_names_the_turn_and_what_it_has(name: str) -> None:
    row = {"messages": [user("Why?"), {"role": "assistant", "text": "Yes."}]}

    (error,) = run(ChatTokenizeFn(name, chat_template=LENIENT).open(), [row]).errors

    assert error.reason == "'messages'[1] has no 'content', and the template writes nothing of its 'text'"


def test_a_turn_of_the_user_without_content_makes_a_bad_row_and_of_a_tool_does_not(name: str) -> None:
    fn = ChatTokenizeFn(name, chat_template=LENIENT)
    tool = [user("Why?"), assistant("a"), {"role": "tool", "name": "look", "content": None}, assistant("b")]

    assert codes(fn, [{"role": "user", "text": "Why?"}, assistant("Yes.")], tool) == [(0, "AD132")]


def test_a_turn_without_content_is_trained_if_the_template_writes_something_else_of_it(name: str) -> None:
    calls = [user("Why?"), assistant(None, tool_calls=[CALL])]
    thinks = [user("Why?"), {"role": "assistant", "reasoning_content": "Hm."}]

    assert trained(ChatTokenizeFn(name, chat_template=WITH_CALLS), {"messages": calls}) == [
        "<call>look</call><|im_end|>"
    ]
    assert trained(ChatTokenizeFn(name, chat_template=LENIENT), {"messages": thinks}) == [
        "<think>Hm.</think><|im_end|>"
    ]


def test_tool_calls_that_the_template_does_not_write_do_not_replace_content(name: str) -> None:
    calls = [user("Why?"), assistant(None, tool_calls=[CALL])]

    assert codes(ChatTokenizeFn(name, chat_template=LENIENT), calls) == [(0, "AD132")]


def test_an_empty_answer_is_an_answer(name: str) -> None:
    assert trained(ChatTokenizeFn(name, chat_template=LENIENT), {"messages": [user("Why?"), assistant("")]}) == [
        "<|im_end|>"
    ]


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (WRITES_ALL, {"type": "text", "text": "words"}),
        (PARTS, {"type": "refusal", "refusal": "No."}),
        (PARTS, {"type": "text", "content": "words"}),
        (PARTS, {"type": "text", "text": "words", "image": None}),
        (PARTS, {"more": 1}),
    ],
)
def test_a_content_part_that_the_template_does_not_write_as_text_makes_a_bad_row(
    name: str, template: str, part: Any
) -> None:
    chats = [CHAT, *[[user([part]), assistant("a")]] * 4]
    prompt = PromptTokenizeFn(name, apply_chat_template=True, chat_template=template)

    assert codes(ChatTokenizeFn(name, chat_template=template), *chats) == [(number, "AD131") for number in range(1, 5)]
    assert codes(prompt, *chats) == [(number, "AD131") for number in range(1, 5)]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "words"},
        {"text": "words"},
        {"type": "output_text", "text": "words"},
        {"type": "thinking", "thinking": "words"},
        {"type": "text", "text": "words", "cache_control": {"type": "ephemeral"}},
    ],
)
def test_a_content_part_that_the_template_writes_is_read(name: str, part: Any) -> None:
    fn = ChatTokenizeFn(name, chat_template=PARTS)

    assert trained(fn, {"messages": [user("Why?"), assistant([part])]}) == ["words<|im_end|>"]


def test_what_a_tool_returns_may_have_any_form(name: str) -> None:
    template = WRITES_ALL.replace("~ m.content ~", "~ (m.content if m.content is string else m.content | tojson) ~")
    results = [[{"name": "look", "value": 1}], [1, 2], {"more": None}]
    chats = [[user("a"), assistant("b"), {"role": "tool", "content": each}, assistant("c")] for each in results]

    assert codes(ChatTokenizeFn(name, chat_template=template), *chats) == []


@pytest.mark.parametrize("chat", ["hello", "", "[1, 2]", {"role": "user", "content": "a"}, ["hello"], None, 7])
def test_messages_that_are_no_list_of_turns_make_a_bad_row(name: str, chat: Any) -> None:
    assert codes(ChatTokenizeFn(name), chat) == [(0, "AD111")]
