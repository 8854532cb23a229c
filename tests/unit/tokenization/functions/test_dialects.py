"""Chats in the forms of other trainers have the tokens of the same chat as messages; so have calls, in any form."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncdata import ChatTokenizeFn, PreferenceTokenizeFn, PromptTokenizeFn, RendererTokenizeFn
from asyncdata.errors import ConfigError
from asyncdata.integrations.slime.rows import SlimeTokenizeFn
from tests.support.tokenizers import END
from tests.unit.tokenization import run, token_ids, values
from tests.unit.tokenization.functions.test_chat import WITH_CALLS
from tests.unit.tokenization.trained import assistant, mask_of, talk, tokenizer_of, trained, user, variant

SYSTEM = {"role": "system", "content": "Be short."}
ASKS, SAYS, MORE, LAST = talk("What is 1 + 1?", "2", "And\n3?", "It is 3.")
LOOKS = {"name": "look", "arguments": {"at": "sky"}}
CALL = assistant("", tool_calls=[{"type": "function", "function": LOOKS}])
FOUND = {"role": "tool", "content": "blue"}


def read(fn: ChatTokenizeFn, row: dict[str, Any]) -> Any:
    return run(fn.open(), [row])


def fault(fn: ChatTokenizeFn, row: dict[str, Any]) -> tuple[str, str]:
    (error,) = read(fn, row).errors
    return error.code, error.reason


def turn(said: str, value: str, **more: Any) -> dict[str, Any]:
    return {"from": said, "value": value, **more}


ASKED, SAID = turn("human", "What is 1 + 1?"), turn("gpt", "2")
ONE_TURN = {"conversations": [ASKED, SAID]}
SAME: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "sharegpt": ("sharegpt", {"conversations": [ASKED, SAID, turn("user", "And\n3?"), turn("assistant", "It is 3.")]},
        [ASKS, SAYS, MORE, LAST]),
    "sharegpt with a system text": ("sharegpt",
        {"system": "Be short.", "conversations": [ASKED, turn("chatgpt", "2")]}, [SYSTEM, ASKS, SAYS]),
    "sharegpt with a system turn": ("sharegpt",
        {"system": "", "conversations": [turn("system", "Be short."), ASKED, SAID]}, [SYSTEM, ASKS, SAYS]),
    "sharegpt with calls": ("sharegpt",
        {"conversations": [ASKED, turn("function_call", json.dumps(LOOKS)), turn("observation", "blue"), SAID]},
        [ASKS, CALL, FOUND, SAYS]),
    "alpaca": ("alpaca", {"instruction": "What is 1 + 1?", "input": "", "output": "2"}, [ASKS, SAYS]),
    "alpaca with input": ("alpaca", {"instruction": "And", "input": "3?", "output": "It is 3."}, [MORE, LAST]),
    "alpaca with all": ("alpaca",
        {"instruction": "And\n3?", "output": "It is 3.", "system": "Be short.", "history": [["What is 1 + 1?", "2"]]},
        [SYSTEM, ASKS, SAYS, MORE, LAST]),
    "completion": ("prompt_completion", {"prompt": [ASKS], "completion": [SAYS]}, [ASKS, SAYS]),
    "completion of a chat that is not trained": ("prompt_completion",
        {"prompt": [ASKS, SAYS, MORE], "completion": [LAST]}, [ASKS, {**SAYS, "loss": False}, MORE, LAST]),
    "response": ("prompt_response", {"prompt": "What is 1 + 1?", "response": "2"}, [ASKS, SAYS]),
    "query with all": ("query_response",
        {"query": "And\n3?", "response": "It is 3.", "system": "Be short.", "history": [["What is 1 + 1?", "2"]]},
        [SYSTEM, ASKS, SAYS, MORE, LAST]),
    "answer": ("question_answer", {"question": "What is 1 + 1?", "answer": "2"}, [ASKS, SAYS]),
    "messages": ("messages", {"messages": [ASKS, SAYS]}, [ASKS, SAYS]),
    "sharegpt with a system prompt": ("sharegpt", {"system_prompt": "Be short.", **ONE_TURN}, [SYSTEM, ASKS, SAYS]),
    "sharegpt with its system prompt twice": ("sharegpt",
        {"system_prompt": "Be short.", "conversations": [turn("system", "Be short.", weight=0), ASKED, SAID]},
        [SYSTEM, ASKS, SAYS]),
    "alpaca with the same system text twice": ("alpaca",
        {"instruction": "What is 1 + 1?", "output": "2", "system": "Be short.", "system_prompt": "Be short."},
        [SYSTEM, ASKS, SAYS]),
    "dolly": ("instruction_response", {"instruction": "And", "context": "3?", "response": "It is 3."}, [MORE, LAST]),
    "dolly without context": ("instruction_response", {"instruction": "What is 1 + 1?", "context": "", "response": "2"},
        [ASKS, SAYS]),
    "open orca": ("question_response", {"system_prompt": "Be short.", "question": "What is 1 + 1?", "response": "2"},
        [SYSTEM, ASKS, SAYS]),
    "query and answer": ("query_answer", {"query": "What is 1 + 1?", "answer": "2"}, [ASKS, SAYS]),
    "calls as text": ("xlam", {"query": "What is 1 + 1?", "answers": json.dumps([LOOKS])}, [ASKS, CALL]),
    "calls as a list": ("xlam", {"system": "Be short.", "query": "What is 1 + 1?", "answers": [LOOKS]},
        [SYSTEM, ASKS, CALL]),
}  # fmt: skip


@pytest.mark.parametrize("dialect, row, messages", SAME.values(), ids=SAME)
def test_a_row_has_the_tokens_and_labels_of_its_messages(name, dialect, row, messages):
    expected = read(ChatTokenizeFn(name, chat_template=WITH_CALLS), {"messages": messages})

    found = read(ChatTokenizeFn(name, chat_template=WITH_CALLS, dialect=dialect), row)

    assert token_ids(found) == token_ids(expected) != []
    assert mask_of(found) == mask_of(expected)
    assert sum(mask_of(found))


BAD = {
    "an unknown role": ("sharegpt", {"conversations": [turn("robot", "a")]}, "AD112", "from 'robot', which is no role"),
    "a message": ("sharegpt", {"conversations": [ASKS]}, "AD112", "it has 'role', 'content'"),
    "no list": ("sharegpt", {"conversations": "a"}, "AD111", "a list of turns"),
    "no text": ("sharegpt", {"conversations": [turn("gpt", None)]}, "AD111", "'value' must be a string"),
    "no call": ("sharegpt", {"conversations": [turn("function_call", "[1]")]}, "AD111", "a call must be JSON"),
    "no JSON": ("sharegpt", {"conversations": [turn("function_call", "look(")]}, "AD101", "invalid JSON"),
    "a number": ("alpaca", {"instruction": 1, "output": "b"}, "AD111", "must be a string"),
    "no pairs": ("alpaca", {"instruction": "a", "output": "b", "history": [["c"]]}, "AD111", "a list of pairs"),
    "text and messages": ("prompt_completion", {"prompt": "a", "completion": []}, "AD111", "or both texts"),
    "another form": ("alpaca", {"conversations": []}, "AD110", "dialect='sharegpt'"),
    "messages": ("alpaca", {"messages": []}, "AD110", "dialect='messages'"),
    "messages as turns": ("sharegpt", {"conversations": [ASKS]}, "AD112", "set messages_key"),
    "no form": ("alpaca", {"instruction": "a"}, "AD110", "no key 'output'"),
    "no answers": ("xlam", {"query": "a", "answers": "[]"}, "AD111", "'answers': a call must be JSON"),
    "no form at all": ("messages", {"Question": "a", "Response": "b"}, "AD110",
        "no key 'messages': the row has 'Question', 'Response'; name their form by dialect=, and your names of its"),
    "another key of the chat": ("messages", {"conversation": [ASKS]}, "AD110", "set messages_key='conversation'?"),
}  # fmt: skip


@pytest.mark.parametrize("dialect, row, code, reason", BAD.values(), ids=BAD)
def test_a_row_that_is_not_of_the_form_is_bad(name, dialect, row, code, reason):
    found, why = fault(ChatTokenizeFn(name, chat_template=WITH_CALLS, dialect=dialect), row)

    assert found == code
    assert reason in why


def test_without_a_loader_the_error_names_the_dialect_that_is_seen(name):
    fn = ChatTokenizeFn(name, chat_template=WITH_CALLS)

    for dialect, row, _ in SAME.values():
        if dialect != "messages":
            code, reason = fault(fn, row)
            assert (code, f"dialect='{dialect}'" in reason) == ("AD110", True)
    code, reason = fault(fn, {"messages": [turn("human", "a")]})
    assert (code, "dialect='sharegpt'" in reason) == ("AD112", True)


def test_the_rows_own_names_of_keys_are_read(name):
    settings = {"chat_template": WITH_CALLS, "dialect": "question_answer"}
    fn = ChatTokenizeFn(name, dialect_keys={"question": "ask", "system": "before"}, **settings)

    found = read(fn, {"ask": "What is 1 + 1?", "answer": "2", "before": "Be short."})

    same = {"question": "What is 1 + 1?", "answer": "2", "system": "Be short."}
    assert token_ids(found) == token_ids(read(ChatTokenizeFn(name, **settings), same))
    assert fault(fn, {"question": "What is 1 + 1?"})[1].startswith("no key 'ask'")


def test_texts_are_trained_without_a_template_and_end_with_the_end_token(name, tmp_path):
    """Also by a tokenizer that has no template; and a row of messages is rendered beside them."""
    fn = ChatTokenizeFn(name, chat_template=WITH_CALLS, dialect="prompt_completion")
    texts = {"prompt": "One, two,", "completion": " three."}
    ids = tokenizer_of(fn).encode

    found = read(fn, texts)

    (tokens,) = token_ids(found)
    assert tokens == ids("One, two, three." + END, add_special_tokens=False).ids
    assert mask_of(found) == [False] * len(ids("One, two,").ids) + [True] * len(ids(" three." + END).ids)
    assert token_ids(read(fn, {**texts, "completion": " three." + END})) == [tokens]
    bare = variant(Path(name), tmp_path / "bare", config={"chat_template": None})
    without = ChatTokenizeFn(bare, dialect="prompt_completion")
    assert token_ids(read(without, texts)) == [tokens]
    assert fault(without, {"prompt": [ASKS], "completion": [SAYS]})[0] == "AD411"
    all_of_it = ChatTokenizeFn(name, chat_template=WITH_CALLS, dialect="prompt_completion", train_on="all")
    assert mask_of(read(all_of_it, texts)) == [False] + [True] * (len(tokens) - 1)


def test_texts_have_what_the_tokenizer_puts_around_them(name, tmp_path):
    begins = variant(Path(name), tmp_path / "begins", around=f"{END} $A")
    texts = {"prompt": "One, two,", "completion": " three."}

    (tokens,) = token_ids(read(ChatTokenizeFn(begins, dialect="prompt_completion"), texts))

    assert tokens == [2, *token_ids(read(ChatTokenizeFn(name, dialect="prompt_completion"), texts))[0]]


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_a_call_with_empty_content_that_the_template_does_not_write_is_an_error(name, key):
    without_calls = "{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}"
    says = {"role": "assistant", "content": "", key: CALL["tool_calls"]}
    chat = [ASKS, says, FOUND, SAYS]

    code, reason = fault(ChatTokenizeFn(name, chat_template=without_calls), {"messages": chat})

    assert code == "AD132"
    assert f"'messages'[1] has empty 'content', and the template writes nothing of its '{key}'" in reason
    assert read(ChatTokenizeFn(name, chat_template=without_calls), {"messages": [ASKS, SAYS]}).errors == []
    turns = [turn("human", "a"), turn("function_call", '{"name": "look"}'), turn("gpt", "b")]
    as_turns = ChatTokenizeFn(name, chat_template=without_calls, dialect="sharegpt")
    assert fault(as_turns, {"conversations": turns})[0] == "AD132"


def test_what_a_dialect_does_not_go_with_is_refused(name):
    with pytest.raises(ConfigError, match="leave messages_key out"):
        ChatTokenizeFn(name, dialect="alpaca", messages_key="chat")
    with pytest.raises(ConfigError, match="did you mean 'alpaca'"):
        ChatTokenizeFn(name, dialect="alpacca")
    with pytest.raises(ConfigError, match="did you mean 'question'"):
        ChatTokenizeFn(name, dialect="question_answer", dialect_keys={"questions": "q"})
    for dialect in (None, "messages"):
        with pytest.raises(ConfigError, match="or set messages_key"):
            ChatTokenizeFn(name, dialect=dialect, dialect_keys={"messages": "chat"})


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
    "filters the items": (template("ARGS | items | join"), "('at', 'sky')('how', [1])"),
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


BAD_ARGUMENTS = {"empty": "", "code": "print(1)", "a list": "[1]", "cut": '{"at": ', "a surrogate": "\ud800"}


@pytest.mark.parametrize("text", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_arguments_that_are_no_object_make_a_bad_row_that_is_told_where(small_tokenizer, text):
    name, messages = str(small_tokenizer), chat(call(TEXT), call(text), content=None)
    functions = [ChatTokenizeFn(name, chat_template=each) for each, _ in FORMS.values()]
    functions += [PreferenceTokenizeFn(name, chat_template=ENCODES)]
    functions += [RendererTokenizeFn(name, build="tests.support.worker_fns:characters")]
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
