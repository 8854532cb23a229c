"""Chats whose blocks neither prefixes nor a mark tell of, in templates of the shape that recent models have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import ChatTokenizeFn, DataLoader, PromptTokenizeFn
from tests.unit.tokenization import faults, notes, run
from tests.unit.tokenization.trained import assistant, trained, user, variant

if TYPE_CHECKING:
    from collections.abc import Callable

END, OVER = "<|im_end|>", "<|endoftext|>"

# Every turn has a place for thoughts, that of earlier turns is empty; the prompt opens one.
KEEPS_A_PLACE = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role != 'assistant' %}{{ m.content }}
{%- elif m.thinking and loop.index0 > ns.last %}{{ '<think>\\n' + m.thinking + '\\n</think>\\n' + m.content }}
{%- else %}{{ '<think></think>' + m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
# Thoughts are written after the last question only; the prompt has an empty place for them.
CLOSES_THE_PLACE = KEEPS_A_PLACE.replace("'<think></think>' + m.content", "m.content").replace(
    "'<|im_start|>assistant\\n<think>\\n'", "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n'"
)
# Another token ends the last turn than ends those before; thoughts before a call are dropped once there is an answer.
CHANNELS = """\
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>user:' + m.content + '<|im_end|>' }}
{%- elif m.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call before it') }}{% endif %}
{{- '<|im_start|>tool:' + m.content + '<|im_end|>' }}
{%- elif m.tool_calls %}
{%- set ns = namespace(answer=false) %}
{%- for later in messages[loop.index:] %}
{%- if later.role == 'assistant' and not later.tool_calls %}{% set ns.answer = true %}{% endif %}{% endfor %}
{%- if m.thinking and not ns.answer %}{{ '<|im_start|>assistant=thought:' + m.thinking + '<|im_end|>' }}{% endif %}
{{- '<|im_start|>assistant=call:' + m.tool_calls[0].function.name + '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{ '<|im_start|>assistant=thought:' + m.thinking + '<|im_end|>' }}{% endif %}
{{- '<|im_start|>assistant=final:' + m.content + '<|endoftext|>' }}
{%- else %}{{ '<|im_start|>assistant=final:' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""
# The next header is all that ends a turn; thoughts are written after the last question only.
WITHOUT_STOP = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{{- '<think>' + (m.thinking if m.thinking and loop.index0 > ns.last else '') + '</think>' }}{% endif %}
{{- m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# A content is a list of parts.
PARTS = """\
{%- for m in messages %}{{ m.role + ':' }}{% for part in m.content %}{{ ' ' + part.text }}{% endfor %}
{%- if m.content[0].type == 'text' %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
# A token ends each turn, and one more the chat.
ENDS_THE_CHAT = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}LAST{% endif %}"""
TRAINS_WHAT_ENDS_THE_CHAT = ENDS_THE_CHAT.replace(
    "LAST",
    "{% elif messages[-1].role == 'assistant' %}{% generation %}<|endoftext|>{% endgeneration %}"
    "{% else %}<|endoftext|>",
)
LEAVES_OUT_WHAT_ENDS_THE_CHAT = ENDS_THE_CHAT.replace("LAST", "{% else %}<|endoftext|>")
LEAVES_OUT_THE_STOP = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|call|>' }}{% endgeneration %}{{ '<|endoftext|>' }}
{%- else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"""
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky", "how": [1]}}}
# As templates that write each argument by itself.
WRITES_ARGUMENTS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{%- for name, value in ARGUMENTS %}{{ name ~ '=' ~ value ~ ';' }}{% endfor %}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def name(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With one more special token, and another end of a sequence than ends a turn."""
    tokens = json.loads((small_tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    more = [{**tokens[0], "id": 5000 + number, "content": text} for number, text in enumerate(["<|call|>"])]
    target = tmp_path_factory.mktemp("by_turn") / "tokenizer"
    return variant(small_tokenizer, target, added_tokens=[*tokens, *more], config={"eos_token": OVER})


def said(name: str, template: str, chat: list[dict[str, Any]], **settings: Any) -> list[str]:
    return trained(ChatTokenizeFn(name, chat_template=template, **settings), {"messages": chat})


# One end of a message for itself


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("template", "past", "last"),
    [
        (KEEPS_A_PLACE, "<think></think>", "so\n</think>\nf"),
        (CLOSES_THE_PLACE, "", "<think>\nso\n</think>\nf"),
        (WITHOUT_STOP, "<think></think>", "<think>so</think>f"),
    ],
    ids=["keeps a place", "closes the place", "without stop"],
)
def test_a_turn_that_parts_from_its_prompt_is_trained_from_there(
    name: str, template: str, past: str, last: str
) -> None:
    chat = [
        *(user("a"), assistant("b", thinking="hm")),
        *(user("c"), assistant("d")),
        *(user("e"), assistant("f", thinking="so")),
    ]
    end = "" if template is WITHOUT_STOP else END

    assert said(name, template, chat[:4]) == [f"{past}b{end}", f"{past}d{end}"]
    assert said(name, template, chat) == [f"{past}b{end}", f"{past}d{end}", f"{last}{end}"]
    assert said(name, template, [*chat, user("g")]) == [f"{past}b{end}", f"{past}d{end}", f"{past}f{end}"]


def test_a_token_that_only_past_turns_end_with_is_not_trained_and_the_stop_token_is(name: str) -> None:
    chat = [user("a"), assistant("b", thinking="hm"), user("c"), assistant("d", thinking="so")]

    assert said(name, CHANNELS, chat) == ["=final:b", f"=thought:so{END}<|im_start|>assistant=final:d{OVER}"]


@pytest.mark.thorough
def test_a_call_whose_thoughts_are_dropped_is_trained_as_it_stands(name: str) -> None:
    call = assistant("", thinking="hm", tool_calls=[CALL])
    chat = [user("a"), call, {"role": "tool", "content": "t"}]

    assert said(name, CHANNELS, chat) == [f"=thought:hm{END}<|im_start|>assistant=call:look<|call|>"]
    assert said(name, CHANNELS, [*chat, assistant("b")]) == ["=call:look<|call|>", f"=final:b{OVER}"]


def test_parts_of_a_content_are_asked_for_as_parts(name: str) -> None:
    def parts(*texts: str) -> Any:
        return [{"type": "text", "text": text} for text in texts]

    chat = [user(parts("a", "b")), assistant(parts("c", "d")), user(parts("e")), assistant(parts("f"))]

    assert said(name, PARTS, chat) == [f" c d{END}", f" f{END}"]


def test_the_error_of_unlocated_blocks_names_the_templates_of_trl(name: str) -> None:
    backwards = KEEPS_A_PLACE.replace("for m in messages %}{{", "for m in messages | reverse %}{{")
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]

    chunk = run(ChatTokenizeFn(name, chat_template=backwards).open(), [{"messages": chat}])

    assert faults(chunk) == [(0, "AD414")]
    assert "TRL has such training templates for many models (get_training_chat_template)" in chunk.errors[0].reason


# The template's own blocks


@pytest.mark.thorough
@pytest.mark.parametrize("train_on", ["assistant", "last_assistant"])
def test_the_token_that_ends_the_chat_may_be_a_separate_block(name: str, train_on: Any) -> None:
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]

    texts = said(name, TRAINS_WHAT_ENDS_THE_CHAT, chat, train_on=train_on)

    assert texts == [f"b{END}\n", f"d{END}\n{OVER}"][-len(texts) :]
    assert len(texts) == (2 if train_on == "assistant" else 1)


def test_the_token_that_ends_the_chat_need_not_be_trained_if_each_block_has_a_stop_token(name: str) -> None:
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]

    assert said(name, LEAVES_OUT_WHAT_ENDS_THE_CHAT, chat) == [f"b{END}\n", f"d{END}\n"]


def test_a_stop_token_after_each_block_is_refused_also_where_the_block_ends_with_another_token(name: str) -> None:
    fn = ChatTokenizeFn(name, chat_template=LEAVES_OUT_THE_STOP)

    chunk = run(fn.open(), [{"messages": [user("a"), assistant("b")]}])

    assert faults(chunk) == [(0, "AD414")]
    assert "writes the stop token '<|endoftext|>' after {% endgeneration %}" in chunk.errors[0].reason


# No stop token


@pytest.mark.thorough
def test_a_template_without_a_stop_token_is_warned_of_once_and_its_rows_are_counted(
    name: str, jsonl_file: Callable[..., Path]
) -> None:
    rows = [{"messages": [user("a"), assistant(f"b{number}")]} for number in range(100)]

    def warnings(template: str) -> tuple[list[Any], dict[str, int]]:
        fn = ChatTokenizeFn(name, chat_template=template)
        with (
            capture_logs() as logs,
            DataLoader(str(jsonl_file(rows)), tokenize_fn=fn, num_workers=0, epochs=1) as loader,
        ):
            loader.get_next_batch(100)
            noted = loader.statistics().noted_total
        return [each for each in logs if each["event"] == "chat.no_stop_token"], noted

    (warning,), noted = warnings(WITHOUT_STOP)

    assert (warning["log_level"], noted) == ("warning", {"no_stop_token": 100})
    assert "pass chat_template= with the stop token inside {% generation %}" in warning["reason"]
    assert warnings(KEEPS_A_PLACE) == ([], {})


# Arguments that are JSON text


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", ["call.function.arguments.items()", "call.function.arguments | items"])
def test_arguments_as_text_are_read_where_the_template_wants_the_object(name: str, arguments: str) -> None:
    as_text = {**CALL, "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}
    template = WRITES_ARGUMENTS.replace("ARGUMENTS", arguments)

    for call in (CALL, as_text):
        for _ in range(3):  # a shape is proven when it comes again
            chat = [user("a"), assistant(None, tool_calls=[call]), {"role": "tool", "content": "x"}, assistant("b")]
            assert said(name, template, chat) == [f"at=sky;how=[1];{END}", f"b{END}"]


def test_arguments_as_text_are_not_gone_through_by_their_characters(name: str) -> None:
    template = WRITES_ARGUMENTS.replace("name, value in ARGUMENTS", "name in call.function.arguments").replace(
        "name ~ '=' ~ value", "name"
    )
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}

    assert said(name, template, [user("a"), assistant("", tool_calls=[call])]) == [f"at;{END}"]


def test_arguments_as_text_stay_text_where_the_template_takes_them(name: str) -> None:
    template = WRITES_ARGUMENTS.replace(
        "{%- for name, value in ARGUMENTS %}{{ name ~ '=' ~ value ~ ';' }}{% endfor %}",
        "{{ call.function.arguments if call.function.arguments is string else 'no text' }}",
    )
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at":  "sky"}'}}

    assert said(name, template, [user("a"), assistant("", tool_calls=[call])]) == [f'{{"at":  "sky"}}{END}']


def test_arguments_that_are_no_object_are_refused_as_the_template_does(name: str) -> None:
    fn = ChatTokenizeFn(name, chat_template=WRITES_ARGUMENTS.replace("ARGUMENTS", "call.function.arguments.items()"))
    calls = [{"type": "function", "function": {"name": "look", "arguments": text}} for text in ("[1]", "{", "\ud800")]

    chunk = run(fn.open(), [{"messages": [user("a"), assistant("", tool_calls=[call])]} for call in calls])

    assert faults(chunk) == [(0, "AD412"), (1, "AD412"), (2, "AD412")]
    assert "has no attribute 'items'" in chunk.errors[0].reason


# Messages that are JSON text


def test_messages_that_are_json_text_are_the_chat(name: str) -> None:
    chat = [user("a"), assistant("b")]

    for text in (json.dumps(chat), f"\n {json.dumps(chat, indent=1)}"):
        assert trained(ChatTokenizeFn(name), {"messages": text}) == [f"b{END}"]


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        (str([user("a")]), "AD101", "'messages' is a string, and its text is not JSON: invalid JSON at column 3"),
        ('[{"role": "user", "cont', "AD101", "its text is not JSON"),
        ('{"role": "user", "content": "a"}', "AD111", "must be a string or a list of messages, got an object"),
        ('[{"content": "a"}]', "AD112", "'messages'[0] has no 'role'"),
    ],
)
def test_messages_whose_text_is_no_chat_are_named_and_not_taken_for_a_users_turn(
    name: str, text: str, code: str, reason: str
) -> None:
    chunk = run(ChatTokenizeFn(name).open(), [{"messages": text}])

    assert faults(chunk) == [(0, code)]
    assert reason in chunk.errors[0].reason


def test_a_prompt_that_is_json_text_is_as_it_was(name: str) -> None:
    fn = PromptTokenizeFn(name, prompt_key="p", apply_chat_template=True)

    chunk = run(fn.open(), [{"p": json.dumps([user("a")])}])

    assert faults(chunk) == []
    assert '[{"role": "user"' in chunk.value("prompt", 0)


# The templates of TRL, where its tree is at hand


OF_TRL = ["phi3_training", "phi3_5_training", "nemotron_3_nano", "glm4moe", "qwen3_5_nothink"]


@pytest.mark.parametrize("template", OF_TRL)
def test_templates_of_trl_train_each_message_of_plain_chats(name: str, template: str) -> None:
    folder = os.environ.get("ASYNCDATA_TRL")
    if not folder:
        pytest.skip("ASYNCDATA_TRL names no tree of TRL")

    source = (Path(folder) / "trl" / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    chat = [user("a"), assistant("bcd", reasoning_content="hm"), user("e"), assistant("fgh", reasoning_content="so")]

    chunk = run(ChatTokenizeFn(name, chat_template=source).open(), [{"messages": chat}])

    assert faults(chunk) == []
    first, second = said(name, source, chat)
    assert "bcd" in first
    assert "fgh" in second
    assert notes(chunk) == ({"no_stop_token": [0]} if template == "glm4moe" else {})
