"""Nothing of a row is passed over in silence: keys that speak are read or refused, the rest is named once a source."""

import json
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from asyncdata import ChatTokenizeFn, Mix, Part, PreferenceTokenizeFn, PromptTokenizeFn, RendererTokenizeFn, RowFn
from asyncdata.cli.main import main
from asyncdata.errors import BadRowError
from asyncdata.workers.inline import InlineExecutor
from tests.support.function_kinds import KINDS, chat_prompt, fixed_length
from tests.support.loaders import deliver
from tests.support.pages import read_page
from tests.unit.tokenization.trained import delivered, outcome

ASKS, SAYS = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
CHAT: dict[str, Any] = {"messages": [ASKS, SAYS]}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "tide", "arguments": {}}}
THINKS = {**SAYS, "content": "<think>\nHm.\n</think>\n\nBecause."}
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% else %}"
    "{% generation %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>{% endgeneration %}"
    "{% endif %}\n{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
WRITES = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.reasoning_content or '' }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n"
    "{% endfor %}"
)


UNREAD, NOT_WRITTEN = "rows.unread_keys", "chat.not_written"


SPEAKS: dict[str, Any] = {
    "system": "Be terse.", "system_prompt": "Be terse.", "functions": [TOOL],
    "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chats": (ChatTokenizeFn, CHAT),
    "prompts": (chat_prompt, {"input": [ASKS]}),
    "a text as a prompt": (chat_prompt, {"input": "Why?"}),
    "a renderer": (partial(RendererTokenizeFn, build="tests.support.worker_fns:characters"), CHAT),
}


@pytest.mark.parametrize(("key", "value"), SPEAKS.items(), ids=SPEAKS)
@pytest.mark.parametrize(("make", "row"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_key_that_speaks_is_refused_by_name_with_the_way_out(tmp_path, small_tokenizer, make, row, key, value):
    if (make, key) == (ChatTokenizeFn, "chat_template_kwargs"):
        pytest.skip("it is read")
    with pytest.raises(BadRowError, match="AD133") as caught:
        outcome(tmp_path, make(small_tokenizer), row, {**row, key: value})

    assert f"'{key}'" in str(caught.value) and f"ignore_keys=('{key}',)" in str(caught.value)
    assert f"{tmp_path / 'rows.jsonl'}:2" in str(caught.value)
    found = outcome(tmp_path, make(small_tokenizer, ignore_keys=(key,)), row, {**row, key: value})
    assert (len(found.samples), found.of(UNREAD), found.statistics.unread_keys) == (2, [], {})


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tools beside functions": ({"tool_key": "functions"}, {**CHAT, "functions": [TOOL], "tools": [TOOL]}, "tools"),
    "functions as text": ({}, {**CHAT, "functions": json.dumps([TOOL])}, "functions"),
    "trained turns": ({}, {**CHAT, "metadata": {"train_turns": [1]}}, "metadata.train_turns"),
    "trained turns of other metadata": ({"metadata_key": None}, {**CHAT, "metadata": {"train_turns": [1]}},
        "metadata.train_turns"),
    "a row that msgspec cannot read": ({}, {**CHAT, "x": float("nan"), "system": "Be terse."}, "system"),
    "a question's functions": ({}, {"question": "Why?", "answer": "So.", "functions": [TOOL]}, "functions"),
    "a key that speaks beside a label in an object": ({"label_key": "of.label"},
        {**CHAT, "of": {"label": 1}, "functions": [TOOL]}, "functions"),
    **{
        f"{key} of a turn of ShareGPT": (
            {}, {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So.", key: value}]},
            key,
        )
        for key, value in {
            "reasoning_content": "Hm.", "thinking": "Hm.", "tool_calls": [CALL], "tool_call_id": "1",
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(("settings", "row", "key"), OTHERS.values(), ids=OTHERS)
def test_so_are_those_of_turns_and_of_other_places(tmp_path, small_tokenizer, settings, row, key):
    with pytest.raises(BadRowError, match="AD133") as caught:
        outcome(tmp_path, ChatTokenizeFn(small_tokenizer, **settings), row)

    assert f"'{key}'" in str(caught.value)
    ignoring = ChatTokenizeFn(small_tokenizer, **settings, ignore_keys=(key,))
    assert len(outcome(tmp_path, ignoring, row).samples) == 1


RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "empty values": ({},
        {"system": "", "system_prompt": " ", "tools": [], "functions": [], "images": None, "chat_template_kwargs": {}}),
    "nulls that Arrow pads": ({},
        {"chat_template_kwargs": {"enable_thinking": None}, "functions": None, "tools": None}),
    "other shapes": ({},
        {"system": 3, "system_prompt": {"id": 1}, "functions": ["tide"], "chat_template_kwargs": "none"}),
    "metadata": ({}, {"id": 1, "source": "web", "metadata": {"train_turns": None, "lang": "en"}}),
    "a chat with a system prompt of its own": ({},
        {"system": "x", "messages": [{"role": "system", "content": "Be terse."}, ASKS, SAYS]}),
    "the same as text": ({},
        {"system": "x", "messages": json.dumps([{"role": "system", "content": "Be terse."}, ASKS, SAYS])}),
    "tools that are not to be read": ({"tool_key": None}, {"tools": [TOOL]}),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "more"), RIGHT.values(), ids=RIGHT)
def test_right_rows_are_never_refused(tmp_path, small_tokenizer, settings, more):
    row = {**CHAT, **more}
    messages = json.loads(row["messages"]) if isinstance(row["messages"], str) else row["messages"]

    first, second = delivered(tmp_path, ChatTokenizeFn(small_tokenizer, **settings), {"messages": messages}, row)

    assert first.tokens.tolist() == second.tokens.tolist()


def test_keys_that_settings_name_are_read(tmp_path, small_tokenizer):
    named = {"messages_key": "chat", "tool_key": "functions", "metadata_key": "info"}
    asks = {"dialect": "question_answer", "dialect_keys": {"question": "ask", "system": "system_prompt"}}
    for settings, row in (
        (named, {"chat": [ASKS, SAYS], "functions": [TOOL], "info": {"a": 1}}),
        (asks, {"ask": "Why?", "answer": "So.", "system_prompt": "Be terse."}),
    ):
        found = outcome(tmp_path, ChatTokenizeFn(small_tokenizer, **settings), row)
        assert (found.of(UNREAD), found.statistics.unread_keys) == ([], {})
    fn, row = PromptTokenizeFn(small_tokenizer, prompt_key="text", label_key="solution"), {"text": "a", "solution": "b"}
    assert outcome(tmp_path, fn, {**row, "system": "x"}).statistics.unread_keys == {"system": 1}


def test_a_refused_row_is_a_bad_row_with_its_reason_counted(tmp_path, small_tokenizer):
    rows = [CHAT, {**CHAT, "system": "Be terse.", "other": 1}]

    found = outcome(tmp_path, ChatTokenizeFn(small_tokenizer), *rows, bad_rows="skip")

    assert (len(found.samples), found.statistics.dropped_total) == (1, {"bad row AD133": 1})
    assert found.statistics.unread_keys == {}, "a bad row is told of anyway"


def test_the_rest_is_named_once_with_an_example_and_its_place(tmp_path, small_tokenizer):
    address = "https://store/a?X-Amz-Signature=0123456789abcdef"
    rows = [{**CHAT, "id": number, "source": "x" * 500, "url": address, "empty": None} for number in range(40)]

    found = outcome(tmp_path, ChatTokenizeFn(small_tokenizer), *rows)

    (event,) = found.of(UNREAD)
    assert (event["keys"], event["value"]) == (["id", "source", "url"], "id: 0")
    assert f"{tmp_path / 'rows.jsonl'}:1" in event["example"]
    assert found.statistics.unread_keys == {"id": 8, "source": 8, "url": 8}
    assert found.statistics.to_dict()["asyncdata_unread_source_keys"] == 8
    for key, least in (("source", "xxx"), ("url", "https://store")):
        (event,) = outcome(tmp_path, ChatTokenizeFn(small_tokenizer), {**CHAT, key: rows[0][key]}).of(UNREAD)
        assert least in event["value"] and len(event["value"]) < 120 and "0123456789abcdef" not in event["value"]
    (event,) = outcome(tmp_path, ChatTokenizeFn(small_tokenizer), *rows, bad_rows={"excerpts": False}).of(UNREAD)
    assert event["keys"] == ["id", "source", "url"] and not event["value"]


def test_at_most_twenty_keys_are_named(tmp_path, small_tokenizer):
    rows = [{**CHAT, **{f"key {number} {at}\ud800": 1 for at in range(15)}} for number in range(5)]

    found = outcome(tmp_path, ChatTokenizeFn(small_tokenizer), *rows)

    assert len(found.of(UNREAD)) == 1 and len(found.of(UNREAD)[0]["keys"]) == len(found.statistics.unread_keys) == 20


@pytest.mark.parametrize("shuffle", [False, True, "full"])
@pytest.mark.parametrize("with_samples", [False, True], ids=["", "scans answer with samples"])
def test_the_first_row_of_each_file_is_looked_at(jsonl_file, small_tokenizer, shuffle, with_samples):
    files = [jsonl_file([{**CHAT, name: number} for number in range(60)], f"{name}.jsonl") for name in "abc"]

    with patch.object(InlineExecutor, "answers_with_samples", new=with_samples):
        found = deliver(files, ChatTokenizeFn(small_tokenizer), shuffle=shuffle)

    assert (set(found.statistics.unread_keys), len(found.of(UNREAD))) == ({"a", "b", "c"}, 1)


def test_each_part_of_a_mixture_says_its_own(jsonl_file, small_tokenizer):
    files = {name: str(jsonl_file([{**CHAT, name: 1}] * 3, f"{name}.jsonl")) for name in ("one", "two")}
    parts = {name: Part(file, when_done="leave") for name, file in files.items()}

    found = deliver(Mix(parts), ChatTokenizeFn(small_tokenizer))

    assert sorted((event["source"], *event["keys"]) for event in found.of(UNREAD)) == [("one", "one"), ("two", "two")]
    assert set(found.statistics.unread_keys) == {"one one", "two two"}


def kept(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [1, 2], "labels": [1, 2]}


COUNTED: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "text": (KINDS["text"].make, {"text": "Why not?"}, True),
    "questions": (fixed_length, {"q": "Why?", "a": "So."}, True),
    "whole rows": (lambda _: RowFn(), {"text": "Why?"}, False),
    "a function of a user": (lambda _: kept, {"text": "Why?"}, False),
}


@pytest.mark.parametrize(("make", "row", "is_counted"), COUNTED.values(), ids=COUNTED)
def test_texts_are_counted_only_and_whole_rows_lose_nothing(tmp_path, small_tokenizer, make, row, is_counted):
    found = outcome(tmp_path, make(small_tokenizer), {**row, "system": "Be terse.", "id": 1})

    assert (found.of(UNREAD), found.statistics.unread_keys) == ([], {"system": 1, "id": 1} if is_counted else {})
    assert len(found.samples) == 1


LOST: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "tools": (PLAIN, {**CHAT, "tools": [TOOL]}, ["tools"]),
    "tools that are written": (WRITES, {**CHAT, "tools": [TOOL]}, []),
    "a call beside a text": (PLAIN, {"messages": [ASKS, {**SAYS, "tool_calls": [CALL]}]}, ["tool_calls"]),
    "a call that is written": (WRITES, {"messages": [ASKS, {**SAYS, "tool_calls": [CALL]}]}, []),
    "reasoning": (PLAIN, {"messages": [ASKS, {**SAYS, "reasoning_content": "Hm."}]}, ["reasoning_content"]),
    "thinking by another name": (PLAIN, {"messages": [ASKS, {**SAYS, "thinking": "Hm."}]}, ["reasoning_content"]),
    "reasoning that is written": (WRITES, {"messages": [ASKS, {**SAYS, "reasoning_content": "Hm."}]}, []),
    "thinking of earlier turns": (FORGETS, {"messages": [ASKS, THINKS, ASKS, SAYS]}, ["earlier_thinking"]),
    "thinking of the last turn": (FORGETS, {"messages": [ASKS, SAYS, ASKS, THINKS]}, []),
    "thinking that is kept": (PLAIN, {"messages": [ASKS, THINKS, ASKS, SAYS]}, []),
    "a system prompt": (NO_SYSTEM, {"messages": [{"role": "system", "content": "Be."}, ASKS, SAYS]}, ["system"]),
    "a system prompt that is written": (PLAIN, {"messages": [{"role": "system", "content": "Be."}, ASKS, SAYS]}, []),
}


@pytest.mark.parametrize(("template", "row", "lost"), LOST.values(), ids=LOST)
def test_what_a_template_does_not_write_is_said_once_and_counted(tmp_path, small_tokenizer, template, row, lost):
    found = outcome(tmp_path, ChatTokenizeFn(small_tokenizer, chat_template=template), row, CHAT, row)

    said = [(event["what"], event["num_found"], event["num_rows"]) for event in found.of(NOT_WRITTEN)]
    assert said == [(what, 2, 3) for what in lost]
    assert found.statistics.noted_total == {f"{what}_not_written": 2 for what in lost}
    if lost:
        key = lost[0].removeprefix("earlier_")
        fn = ChatTokenizeFn(small_tokenizer, chat_template=template, ignore_keys=(key,))
        assert not outcome(tmp_path, fn, row).statistics.noted_total


def test_so_it_is_of_prompts_and_pairs(tmp_path, small_tokenizer):
    prompts = PromptTokenizeFn(small_tokenizer, apply_chat_template=True, chat_template=PLAIN)
    pair = {"prompt": [ASKS], "chosen": [SAYS], "rejected": [{**SAYS, "content": "So.", "reasoning_content": "Hm."}]}

    assert outcome(tmp_path, prompts, {"input": [ASKS], "tools": [TOOL]}).statistics.noted_total == {
        "tools_not_written": 1
    }
    found = outcome(tmp_path, PreferenceTokenizeFn(small_tokenizer, chat_template=PLAIN), pair)
    assert found.statistics.noted_total == {"reasoning_content_not_written": 1}


def test_inspect_and_the_report_say_the_same(tmp_path, jsonl_file, small_tokenizer, capsys):
    path = str(jsonl_file([{**CHAT, "source": "web", "tools": [TOOL]}] * 3))
    fn = ChatTokenizeFn(small_tokenizer, chat_template=PLAIN)
    deliver(path, fn, telemetry={"folder": str(tmp_path / "run")})

    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 0
    tables = read_page((tmp_path / "page.html").read_bytes()).tables
    assert tables["unread-table"][1:] == [["source", "3"]]
    assert tables["noted-table"][1:] == [["tools_not_written", "3"]]
    capsys.readouterr()
    words = ["inspect", path, "--tokenizer", str(small_tokenizer), "--kind", "chat", "--num", "2", "--no-shuffle"]
    assert main([*words]) == 0
    assert f'2 source, such as {path}:1: "web"' in capsys.readouterr().out
    assert main([*words, "--json", "--set", f"chat_template={PLAIN}"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["not_written"] == {"tools": 2}
    assert record["unread_keys"] == {"source": {"num_rows": 2, "row": f"{path}:1", "value": '"web"'}}
