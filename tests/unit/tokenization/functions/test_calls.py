"""Calls of tools are given to a template in the form that it writes right, and so is a turn without content."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncdata import ChatTokenizeFn, PreferenceTokenizeFn, PromptTokenizeFn, RendererTokenizeFn
from asyncdata.integrations.slime.rows import SlimeTokenizeFn
from tests.support.chats import END
from tests.unit.tokenization import run, token_ids, values
from tests.unit.tokenization.trained import assistant, tokenizer_of, trained, user


def template(writes: str, content: str = "(m.content or '')", calls: str = "(m.tool_calls or [])") -> str:
    """A template that writes the content of a turn, and ``writes`` of each call, whose arguments are ``ARGS``."""
    text = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + CONTENT }}{% for call in CALLS %}{{ WRITES }}"
    text += "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
    text = text.replace("CONTENT", content).replace("CALLS", calls).replace("WRITES", writes)
    return text.replace("ARGS", "call.function.arguments")


ARGUMENTS = {"at": "sky", "how": [1]}
TEXT = '{"at": "sky", "how": [1]}'
ENCODES = template("ARGS | tojson")
OF_OBJECTS = {
    "encodes": (ENCODES, TEXT),
    "encodes the function": (template("call.function | tojson"), f'{{"name": "look", "arguments": {TEXT}}}'),
    "takes apart": (template("ARGS.items() | join"), "('at', 'sky')('how', [1])"),
    "writes the keys": (template("ARGS | join('+')"), "at+how"),
    "writes only an object": (template("ARGS | tojson if ARGS is mapping"), TEXT),
    "passes text on": (template("ARGS if ARGS is string else ARGS | length ~ ARGS.items() | join"), None),
}
OF_TEXT = {
    "joins": (template("'' + ARGS"), TEXT),
    "writes": (template("ARGS"), TEXT),
    "writes only text": (template("ARGS if ARGS is string else '?'"), TEXT),
}
OF_BOTH = {"takes both": (template("ARGS if ARGS is string else ARGS | tojson"), TEXT)}
FORMS = {**OF_OBJECTS, **OF_TEXT, **OF_BOTH}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}


def chat(*calls: Any, **content: Any) -> list[dict[str, Any]]:
    turn = {"role": "assistant", **content, "tool_calls": list(calls)}
    return [user("a"), turn, {"role": "tool", "content": "t", "name": "look"}, assistant("b")]


@pytest.mark.parametrize("given", [ARGUMENTS, TEXT, json.dumps(ARGUMENTS)], ids=["object", "text", "JSON"])
@pytest.mark.parametrize(("text", "written"), FORMS.values(), ids=FORMS)
def test_arguments_are_written_as_an_object_is_or_as_its_text(small_tokenizer, text, written, given):
    fn = ChatTokenizeFn(str(small_tokenizer), chat_template=text)
    written = written or "2('at', 'sky')('how', [1])"

    for _ in range(3):  # a shape is proven when it comes again
        assert trained(fn, {"messages": chat(call(given), call(given), content=None)}) == [written * 2 + END, f"b{END}"]


OF_PLAIN = template("call.arguments | tojson")


@pytest.mark.parametrize("given", [ARGUMENTS, TEXT], ids=["object", "text"])
@pytest.mark.parametrize("text", [OF_PLAIN, template("(call.function or call).arguments | tojson")])
def test_a_call_without_a_function_is_a_call(small_tokenizer, text, given):
    fn = ChatTokenizeFn(str(small_tokenizer), chat_template=text)

    assert trained(fn, {"messages": chat(call(given)["function"])}) == [TEXT + END, f"b{END}"]


NEEDS_NULL = template("ARGS | tojson", "('' if m.content is none else m.content + '')")
NEEDS_TEXT = template("ARGS | tojson", "(m.content + '')")
OF_NOTHING = {
    "has a place for it": ENCODES,
    "fails without the key": NEEDS_NULL,
    "writes calls only beside null": NEEDS_NULL.replace("m.tool_calls or", "m.tool_calls if m.content is none else"),
    "would write None": template("'' + ARGS", "m.content | string"),
    "would write null": template("ARGS", "(m.content if m.content is string else m.content | tojson)"),
    "would end a turn of its own": template("ARGS", "('.' if m.content == '' and m.tool_calls else m.content or '')"),
    "fails unless it is text": NEEDS_TEXT,
}


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "absent"])
@pytest.mark.parametrize("text", OF_NOTHING.values(), ids=OF_NOTHING)
def test_no_content_beside_calls_is_written_as_nothing(small_tokenizer, text, content):
    fn = ChatTokenizeFn(str(small_tokenizer), chat_template=text)

    for _ in range(3):
        assert trained(fn, {"messages": chat(call(TEXT), **content)}) == [TEXT + END, f"b{END}"]


@pytest.mark.parametrize("text", OF_NOTHING.values(), ids=OF_NOTHING)
def test_a_tool_may_return_null(small_tokenizer, text):
    fn, (asks, calls, _, answers) = ChatTokenizeFn(str(small_tokenizer), chat_template=text), chat(call(TEXT))

    for nothing in ({"content": None}, {"content": ""}, {}):
        chunk = run(fn.open(), [{"messages": [asks, calls, {"role": "tool", "name": "look", **nothing}, answers]}] * 3)
        written = [tokenizer_of(fn).decode(ids, skip_special_tokens=False) for ids in token_ids(chunk)]
        assert [text.count(f"<|im_start|>tool\n{END}\n") for text in written] == [1, 1, 1]


def test_every_function_writes_them_alike(small_tokenizer):
    name, asks = str(small_tokenizer), {"apply_chat_template": True}
    pair = {"chosen": [assistant("b")], "rejected": [assistant("c")]}
    calls = {"value": json.dumps({"name": "look", "arguments": TEXT}), "from": "function_call"}
    turns = [{"from": "human", "value": "a"}, calls]
    share_gpt = ChatTokenizeFn(name, dialect="sharegpt", chat_template=ENCODES)
    of_slime = SlimeTokenizeFn(name, pretokenize=True, apply_chat_template_kwargs={"chat_template": ENCODES}, **asks)
    of_pairs = [
        PreferenceTokenizeFn(name, chat_template=ENCODES, train_on=which) for which in ("assistant", "completion")
    ]

    for arguments in (ARGUMENTS, TEXT):
        prompt = chat(call(arguments), content=None)[:3]
        rows = [(share_gpt, {"conversations": turns}), *((fn, {"prompt": prompt, **pair}) for fn in of_pairs)]
        rows += [(fn, {"input": prompt}) for fn in (of_slime, PromptTokenizeFn(name, chat_template=ENCODES, **asks))]
        for fn, row in rows:
            (ids,) = token_ids(run(fn.open(), [row]))
            text = tokenizer_of(fn).decode(ids, skip_special_tokens=False)
            assert text.startswith(f"<|im_start|>user\na{END}\n<|im_start|>assistant\n{TEXT}{END}\n")


def test_a_template_that_transformers_renders_is_given_them_alike(small_tokenizer):
    pytest.importorskip("transformers", reason="it renders for tokenizers that are code")
    kwargs = {"chat_template": NEEDS_TEXT}
    fn = SlimeTokenizeFn(
        str(small_tokenizer), trust_remote_code=True, apply_chat_template=True, apply_chat_template_kwargs=kwargs
    )

    (prompt,) = values(run(fn.open(), [{"input": chat(call(TEXT), content=None)[:3]}]), "prompt")

    assert f"assistant\n{TEXT}{END}" in prompt


TOOLS_LATE = """\
{%- set asks = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}
{%- if m.role == 'user' %}{% if tools and m == asks[-1] %}{{ '[TOOLS]' ~ (tools | tojson) }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[CALLS]' ~ (m.tool_calls | tojson) ~ '<|im_end|>' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '<|im_end|>' }}
{%- else %}{{ '[RESULT]' + m.content + ',' + m.tool_call_id + '[/RESULT]' }}{% endif %}{% endfor %}"""
"""As Mistral's third: tools before the last question, no generation prompt, calls in place of a content."""


def test_calls_of_earlier_turns_are_trained_where_tools_are_written_before_the_last_question(small_tokenizer):
    fn, one = ChatTokenizeFn(str(small_tokenizer), chat_template=TOOLS_LATE), call(ARGUMENTS)
    result = {"role": "tool", "content": "t", "tool_call_id": "call00001"}
    turn = [user("a"), assistant("", tool_calls=[one]), result, assistant("b")]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    said = [f"[CALLS]{json.dumps([one])}{END}", f" b{END}"]

    for _ in range(3):
        assert trained(fn, {"messages": turn + turn, "tools": tools}) == said * 2
        assert trained(fn, {"messages": [*turn, user("c"), assistant("d")], "tools": tools}) == [*said, f" d{END}"]


BAD = {"empty": "", "code": "print(1)", "a list": "[1]", "cut": '{"at": ', "a surrogate": "\ud800"}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_arguments_that_are_no_object_make_a_bad_row_that_is_told_where(small_tokenizer, text):
    name, messages = str(small_tokenizer), chat(call(TEXT), call(text), content=None)
    functions = [ChatTokenizeFn(name, chat_template=each) for each, _ in FORMS.values()]
    functions += [PreferenceTokenizeFn(name, chat_template=ENCODES)]
    functions += [RendererTokenizeFn(name, build="tests.support.renderers:characters")]
    row = {"messages": messages, "prompt": messages[:3], "chosen": [assistant("b")], "rejected": [assistant("c")]}

    for fn in functions:
        (error,) = run(fn.open(), [row]).errors
        assert error.code == "AD111"
        assert error.reason.startswith(
            "messages[1], tool_calls[1] of 'look': its arguments are text that is no JSON obj"
        )
        assert "{} for a call without arguments" in error.reason


def test_what_a_template_does_not_write_may_be_anything(small_tokenizer):
    fn = ChatTokenizeFn(str(small_tokenizer), chat_template=template("call.function.name"))

    assert trained(fn, {"messages": chat(call("print(1)"), content="c")}) == [f"clook{END}", f"b{END}"]
