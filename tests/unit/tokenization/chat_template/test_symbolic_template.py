"""What is proven of templates, and what is not. That what is proven holds is shown in tests/property."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ChatTokenizeFn
from asyncdata.tokenization.chat_template.assistant_spans import ChatSpans
from asyncdata.tokenization.chat_template.compiled import symbolic_values
from asyncdata.tokenization.chat_template.template import ChatTemplate
from asyncdata.tokenization.functions.chat_settings import assistants
from tests.support.chat_templates import EACH, SPECIAL, WELL_KNOWN, plain

if TYPE_CHECKING:
    from asyncdata.tokenization.chat_template.compiled.program import Program

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
CALL = {"id": "1", "function": {"name": "look", "arguments": {"at": "x", "n": [1, None, True]}}}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def chat(*said: str) -> list[dict[str, Any]]:
    """A chat of the user and the assistant by turns."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]


def prove(text: str, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> Program:
    template = ChatTemplate(text, {**VARIABLES, **variables}, datetime.datetime(2026, 1, 31))
    return template.proven(messages, tools, lambda one: ([one.rendered(one.messages, one.tools)], ()))


def made(program: Program, messages: list[dict[str, Any]], tools: Any = None) -> list[str] | None:
    """The program's text; None for a chat for which it does not hold."""
    values = program.values(messages, tools)
    return None if values is None else program.texts(values)


@pytest.mark.thorough
@pytest.mark.parametrize("text", WELL_KNOWN.values(), ids=WELL_KNOWN)
def test_templates_of_well_known_kinds_are_proven_for_chats_of_several_turns(text):
    program = prove(text, chat("a", "b", "c", "d", "e"))
    other = chat(" Why?\n", "Because.", "And then?", "é", "")

    assert made(program, other) == [ChatTemplate(text, VARIABLES).rendered(other)]


@pytest.mark.parametrize("name", ["chatml with tools", "thinks", "macro"])
def test_templates_of_well_known_kinds_are_proven_for_calls_of_tools(name):
    called = [*chat("a", ""), {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}]
    called[1] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    other = [{**called[0], "content": "Look."}, {**called[1], "tool_calls": [{**CALL, "id": "2"}]}, *called[2:]]
    other[1]["tool_calls"][0]["function"] = {"name": "see", "arguments": {"y": "é"}}
    program = prove(WELL_KNOWN[name], called, TOOLS)

    assert made(program, other, [{"x": 1}]) == [ChatTemplate(WELL_KNOWN[name], VARIABLES).rendered(other, [{"x": 1}])]


@pytest.mark.thorough
@pytest.mark.parametrize("text", [*WELL_KNOWN.values(), plain(WELL_KNOWN["macro"])], ids=[*WELL_KNOWN, "plain"])
def test_where_the_assistant_speaks_is_proven_for_templates_of_well_known_kinds(text):
    spans = ChatSpans(ChatTemplate(text, {**VARIABLES, "add_generation_prompt": False}), "it", SPECIAL, "</s>")
    program = spans.proven(chat("a", "b", "c", "d"), None, [1, 3])
    other = chat(" Why?\n", "Because.", "<|im_end|>\n<|im_start|>assistant\nAnd?", "é")
    whole, blocks = spans.asked(other, None, [1, 3])

    parts = made(program, other)

    assert parts is not None
    assert "".join(parts) == whole
    assert parts[1::2] == [whole[start:stop] for start, stop in blocks]


LOOKS = [
    "{{ m.content[0] }}",
    "{{ m.content | first }}",
    "{{ m.content | list }}",
    "{{ m.content | reverse }}",
    "{{ m.content | int }}",
    "{{ m.content | e }}",
    "{{ m.content | wordcount }}",
    "{{ m.content | random }}",
    "{{ 'abc' | random }}",
    "{{ m.content == messages[-1].content }}",
    "{{ m.content < 'b' }}",
    "{{ m.content in 'abc' }}",
    "{{ m.content in messages[-1].content }}",
    "{{ m.content.startswith(messages[-1].content) }}",
    "{{ m.content * 2 }}",
    "{{ '%s' % m.content }}",
    "{{ '{}'.format(m.content) }}",
    "{{ 'a'.join([m.content]) }}",
    "{{ [m.content] }}",
    "{{ {m.content: 1} | length }}",
    "{{ {'a': 1}[m.content] is defined }}",
    "{{ messages[m.content] is defined }}",
    "{{ m }}",
    "{{ m | tojson }}",
    "{{ m.content.upper }}",
    "{{ m.content.upper.func }}",
    "{{ m.content is upper }}",
    "{{ m.content is sameas m.content }}",
    "{{ '_shown' is filter }}",
    "{% for char in m.content %}{{ char }}{% endfor %}",
    "{% filter upper %}{{ m.content }}{% endfilter %}",
    "{% block x scoped %}{{ m.content }}{% endblock %}",
    "{{ ('<' | safe) + m.content }}",
    "{{ ['b', m.content] | sort | join }}",
    "{{ lipsum(1) | length > 0 }}",
    "{{ joiner('-')() }}",
    "{{ range(m.content | length) | list }}",
    "{{ '\\U00100000' }}",
    "\U00100000{{ m.content }}",
    "{{ namespace }}",
]


@pytest.mark.parametrize("number", range(len(LOOKS)))
def test_a_template_that_looks_into_a_text_or_may_not_say_the_same_twice_is_not_proven(number):
    text = EACH.replace("WHAT", LOOKS[number])
    ChatTemplate(text, VARIABLES).rendered(chat("a", "b"))  # it is fine, only not proven

    assert prove(text, chat("a", "b")).parts is None


def test_a_chat_that_the_template_refuses_is_not_proven_and_says_nothing_of_others():
    text = "{% if messages[0].content == 'a' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    refused, fine = prove(text, chat("a")), prove(text, chat("b"))

    assert refused.parts is None
    assert refused.values(chat("b"), None) is None
    assert made(fine, chat("c")) == ["c"]
    assert made(fine, chat("a")) is None


def test_a_proof_that_takes_very_many_operations_is_given_up(monkeypatch):
    monkeypatch.setattr(symbolic_values, "_MAX_OPERATIONS", 100)
    template = ChatTemplate("{% for a in messages %}{% for b in messages %}{{ a.content }}{% endfor %}{% endfor %}", {})
    short, long = ([{"role": "user", "content": text}] * number for text, number in (("a", 2), ("b", 20)))
    programs = [
        template.proven(chat, None, lambda each: ([each.rendered(each.messages)], ())) for chat in (short, long)
    ]

    assert [program.parts is not None for program in programs] == [True, False]
    assert [template.render(long) for _ in range(3)] == ["b" * 400] * 3


def test_chats_with_different_answers_get_different_programs():
    silent, thinking = chat("a", "b", "c"), chat("a", "<think>\nhm\n</think>\n\nb", "c")
    programs = [prove(WELL_KNOWN["thinks"], each) for each in (silent, thinking)]

    assert [program.values(silent, None) is not None for program in programs] == [True, False]
    assert [program.values(thinking, None) is not None for program in programs] == [False, True]
    assert made(programs[1], chat("x", "<think>y</think>z", "!")) == made(programs[0], chat("x", "z", "!"))


def test_a_program_holds_for_as_many_calls_with_the_same_keys_and_types():
    def called(*calls: Any) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": "a", "tool_calls": list(calls)}]

    program = prove(WELL_KNOWN["chatml with tools"], called(CALL))

    assert made(program, called({"id": "", "function": {"name": "b", "arguments": {}}})) is not None
    assert made(program, called(CALL, CALL)) is None
    assert made(program, called()) is None
    assert made(program, called({"name": "b"})) is None
    assert made(program, called({**CALL, "function": {"name": "b"}})) is None
    assert made(program, called({**CALL, "function": {"name": None, "arguments": {}}})) is None
    assert made(program, called(None)) is None


def test_a_message_that_begins_after_text_of_another_message_is_not_proven():
    before = "messages[loop.index0 - 1].content"
    text = "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>' }}"
    text += "{{ BEFORE if BEFORE.startswith('x') else 'yy' }}{{ m.content + '<|im_end|>' }}"
    text += "{{ '.' if loop.last }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    text += "{{ '<|im_start|>' if add_generation_prompt }}"
    spans = ChatSpans(ChatTemplate(text.replace("BEFORE", before), {}), "it", SPECIAL, "</s>")

    assert spans.proven(chat("x", "b", "c"), None, [1]).parts is None


def test_one_turn_of_the_user_is_its_content_between_constants_and_nothing_is_asked():
    for name in ("chatml", "chatml with tools", "headers", "instructs", "gathers", "macro"):
        program = prove(WELL_KNOWN[name], chat("a"))

        assert program.parts is not None
        assert len(program.parts[0]) <= 3
        assert len(program.steps) == (name == "headers")  # which trims


def test_the_date_that_a_template_is_told_is_a_constant():
    program = prove("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}", chat("a"))

    assert made(program, chat("b")) == ["31 Jan 2026b"]


@pytest.mark.parametrize("messages", [chat("\U00100000"), chat("\U00100001", "\ufdd0")], ids=["symbols", "marks"])
def test_texts_may_have_the_characters_that_stand_for_them(messages):
    program = prove(WELL_KNOWN["chatml"], messages)

    assert made(program, messages) == [ChatTemplate(WELL_KNOWN["chatml"], VARIABLES).rendered(messages)]


def test_roles_keys_and_variables_that_have_such_characters_are_rendered():
    text = "{{ messages[0].role }}{{ messages[0].keys() | list }}{{ bos_token + messages[0].content }}"

    assert prove(text, chat("a")).parts is not None
    assert prove(text, chat("a"), bos_token="\U00100000").parts is None
    assert prove(text, [{"role": "\U00100000", "content": "a"}]).parts is None
    assert prove(text, [{"role": "user", "content": "a", "\U00100000": 1}]).parts is None


@pytest.mark.parametrize("what", ["message.role in messages[0].content", "message.content == message.role", "message"])
def test_a_role_that_looks_like_a_text_is_never_taken_for_one(what):
    text = "{% for message in messages %}{{ " + what + " }}{% endfor %}"
    for role in ("\U00100000", "a\U00100001"):
        messages = [{"role": role, "content": ""}, {"role": role, "content": role}]
        program = prove(text, messages)

        assert made(program, messages) in (None, [ChatTemplate(text, VARIABLES).rendered(messages)])
        assert program.parts is None


def test_a_list_beside_one_with_an_unknown_text_in_it_is_not_compared():
    text = "{{ messages[0].parts == [messages[0].content] }}"
    messages = [{"role": "user", "content": "a", "parts": ["a"]}]

    assert ChatTemplate(text, VARIABLES).rendered(messages) == "True"
    assert prove(text, messages).parts is None


def test_a_chat_with_a_mark_in_it_is_asked_for_itself():
    spans = ChatSpans(ChatTemplate(WELL_KNOWN["macro"], VARIABLES), "it", SPECIAL, "</s>")
    program = spans.proven(chat("a", "b"), None, [1])

    assert made(program, chat("a", "c")) is not None
    assert made(program, chat("a", "\ufdd0")) is None
    assert made(program, chat("\ufdd1", "b")) is None


def test_nothing_is_made_of_a_text_with_a_mark_which_would_be_hidden_in_it():
    text = "{{ (messages[0].content ~ '\ufdd0') | upper }}"

    assert prove(text.replace("\ufdd0", "x"), chat("a")).parts is not None
    assert prove(text, chat("a")).parts is None


def test_a_chat_with_a_mark_in_text_that_only_a_shorter_chat_shows_is_rendered():
    template = ChatTemplate(WELL_KNOWN["thinks"], {**VARIABLES, "add_generation_prompt": False})
    spans = ChatSpans(template, "it", SPECIAL, "</s>")
    messages = chat("a", "b", "c", "d")
    messages[1]["reasoning_content"] = "hm"
    marked = [messages[0], {**messages[1], "reasoning_content": "\ufdd0"}, *messages[2:]]
    program = spans.proven(messages, None, [1, 3])

    assert made(program, messages) is not None
    assert made(program, marked) is None


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen2-bpe-151k", "gpt2-bpe-50k", "gpt2-bpe-50k-generation"])
def test_programs_of_real_chats_give_the_rendered_text(test_data, name, monkeypatch):
    fn = ChatTokenizeFn(str(test_data / "tokenizers" / name))
    spans = fn.chat_spans(fn.files(), SPECIAL)
    lines = (test_data / "chat_sft" / "chat_sft.jsonl").read_bytes().splitlines()[::3]
    rows = [(row["messages"], row.get("tools")) for row in map(json.loads, lines)]
    chats = [(spans[schemas is not None], messages, schemas, assistants(messages)) for messages, schemas in rows]
    asked = [of.asked(*one) for of, *one in chats]
    assert [of(*one) for of, *one in chats] == asked

    assert [of(*one) for of, *one in chats] == asked
    monkeypatch.setattr(ChatSpans, "asked", None)
    assert [of(*one) for of, *one in chats] == asked
