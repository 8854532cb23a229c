"""Whose turn each part of a chat's text is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ChatTokenizeFn, PreferenceTokenizeFn
from asyncdata.cli.inspection.chat_turns import Turn, Turns
from tests.unit.tokenization.trained import assistant, user, variant

if TYPE_CHECKING:
    from pathlib import Path

CHAT = [{"role": "system", "content": "Be brief."}, user("Is it far?"), assistant("No."), user("Sure?")]
TEXTS = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in CHAT]
TEXT = "".join(TEXTS)


def raw(**row: Any) -> bytes:
    return json.dumps(row).encode()


def shown(turns: list[Turn], text: str) -> list[tuple[str, str]]:
    """Each turn's role, with its text."""
    stops = [*(turn.start for turn in turns[1:]), len(text)]
    return [(turn.role, text[turn.start : stop]) for turn, stop in zip(turns, stops, strict=True)]


@pytest.fixture
def turns(small_tokenizer: Path) -> Turns:
    return Turns(ChatTokenizeFn(str(small_tokenizer)), ["messages"])


def test_every_message_is_a_turn(turns: Turns) -> None:
    found = turns(raw(messages=CHAT), TEXT)

    assert shown(found, TEXT) == [(message["role"], text) for message, text in zip(CHAT, TEXTS, strict=True)]


@pytest.mark.parametrize("start", [1, 20, len(TEXTS[0]), len(TEXTS[0]) + 1, len(TEXT) - 1])
def test_a_text_without_its_beginning_has_the_turns_that_are_left(turns: Turns, start: int) -> None:
    lone = "\udc98\udc80"
    wanted = shown(turns(raw(messages=CHAT), TEXT), TEXT)
    text = TEXT[start:]

    found = shown(turns(raw(messages=CHAT), lone + text), lone + text)

    assert "".join(part for _, part in found) == lone + text
    assert [role for role, _ in found] == [role for role, _ in wanted][-len(found) :]
    assert found[1:] == wanted[len(wanted) - len(found) + 1 :]


def test_a_text_without_its_end_has_the_turns_before_it(turns: Turns) -> None:
    text = TEXT[: len(TEXTS[0]) + 5]

    assert shown(turns(raw(messages=CHAT), text), text) == [("system", TEXTS[0]), ("user", text[len(TEXTS[0]) :])]


def test_another_text_has_no_turns(turns: Turns) -> None:
    assert turns(raw(messages=CHAT), "something else") == []


def test_a_string_that_is_no_chat_has_no_turns(turns: Turns) -> None:
    assert turns(raw(messages="Hi"), "Hi") == []


def test_a_chat_whose_media_are_left_out_has_the_turns_of_the_rest(small_tokenizer: Path) -> None:
    parts = [{"type": "image"}, {"type": "text", "text": CHAT[1]["content"]}]
    chat = [CHAT[0], {"role": "user", "content": parts}, *CHAT[2:]]
    fn = ChatTokenizeFn(str(small_tokenizer), media="leave_out", metadata_key="image")

    found = Turns(fn, ["messages"])(raw(messages=chat, images=["a.png"], image={"a": 1}), TEXT)

    assert shown(found, TEXT) == shown(Turns(fn, ["messages"])(raw(messages=CHAT), TEXT), TEXT)


def test_tools_are_part_of_the_first_turn(small_tokenizer: Path, tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}"
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    turns = Turns(ChatTokenizeFn(str(small_tokenizer), chat_template=template), ["messages"])
    tools = [{"name": "f"}]
    text = '[{"name": "f"}]\nuser: Hi\nassistant: Ho\n'
    row = raw(messages=[user("Hi"), assistant("Ho")], tools=json.dumps(tools))

    assert shown(turns(row, text), text) == [("user", '[{"name": "f"}]\nuser: Hi\n'), ("assistant", "assistant: Ho\n")]


def test_messages_whose_border_cannot_be_told_are_one_turn(small_tokenizer: Path) -> None:
    template = (  # as templates that drop the thinking of all but the last turn
        "{% for m in messages %}{{ m['role'] }}: "
        "{% if loop.last %}({{ m.get('thinking') }}) {% endif %}{{ m['content'] }}\n{% endfor %}"
    )
    turns = Turns(ChatTokenizeFn(str(small_tokenizer), chat_template=template), ["messages"])
    text = "user: a\nassistant: b\nuser: (None) c\n"

    found = turns(raw(messages=[user("a"), assistant("b", thinking="t"), user("c")]), text)

    assert found == [Turn(0, "user+assistant+user")]


def test_a_pair_has_the_turns_of_its_prompt_and_its_answer(small_tokenizer: Path) -> None:
    fn = PreferenceTokenizeFn(str(small_tokenizer))
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    row = raw(prompt=[user("Hi")], chosen=[assistant("Ho")], rejected=[assistant("No")])

    assert [turn.role for turn in Turns(fn, ["prompt", "chosen"])(row, text)] == ["user", "assistant"]
    assert Turns(fn, ["prompt", "rejected"])(row, text) == []


def test_a_pair_of_texts_has_none(small_tokenizer: Path, tmp_path: Path) -> None:
    row = raw(prompt="The sky is", chosen=" blue.", rejected=" a fish.")
    folder = variant(small_tokenizer, tmp_path / "no_template", config={"chat_template": None})

    for name in (str(small_tokenizer), folder):
        assert Turns(PreferenceTokenizeFn(name), ["prompt", "chosen"])(row, "The sky is blue.") == []


def test_a_chat_as_text_with_arguments_as_text_has_the_turns_of_the_chat(small_tokenizer: Path) -> None:
    template = """\
{%- for m in messages %}{{ '[' + m.role + ']' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{% for name in call.function.arguments.keys() %}{{ name }}{% endfor %}
{%- endfor %}{% endfor %}"""
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    chat = [user("a"), assistant("", tool_calls=[call]), user("b")]

    found = Turns(ChatTokenizeFn(str(small_tokenizer), chat_template=template), ["messages"])

    text = "[user]a[assistant]at[user]b"
    assert [part for _, part in shown(found(raw(messages=json.dumps(chat)), text), text)] == [
        "[user]a",
        "[assistant]at",
        "[user]b",
    ]
