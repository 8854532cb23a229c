"""PromptTokenizeFn and PromptRowFn: what becomes of a row's prompt, label, metadata and tools."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from asyncdata import PromptTokenizeFn
from asyncdata.tokenization.functions.prompt import PromptRowFn
from tests.support.function_kinds import chat_prompt
from tests.unit.tokenization import drops, faults, run, token_ids, values
from tests.unit.tokenization.trained import user, variant

TOOL = {"type": "function", "function": {"name": "look"}}
TOOLS_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}|{{ tools | tojson }}"


@pytest.fixture
def tokenizer(name):
    return Tokenizer.from_file(f"{name}/tokenizer.json")


def test_a_row_becomes_tokens_prompt_label_and_metadata(name, tokenizer):
    rows = [
        b'{"input": "caf\\u00e9 ol\xc3\xa9", "label": 1.50, "metadata": {"a":  [1, 2.0]}, "other": 1}',
        {"input": "two", "label": {"x": None}, "metadata": {}},
        *({"input": "two", "label": 0, "metadata": empty} for empty in (None, False, 0, "", [], "text")),
        {"input": "two", "label": 0},
    ]

    chunk = run(PromptTokenizeFn(name, label_key="label").open(), rows)

    texts = ["café olé", *["two"] * 8]
    assert token_ids(chunk) == [tokenizer.encode(text).ids for text in texts]
    assert values(chunk, "prompt") == texts
    assert values(chunk, "label") == [1.5, {"x": None}, *[0] * 7]
    assert values(chunk, "metadata") == [{"a": [1, 2.0]}, {}, *[None] * 5, "text", None]
    assert (faults(chunk), drops(chunk)) == ([], {})


def test_keys_can_be_renamed_shared_and_left_out(name):
    row = {"q": "why", "tools": "no JSON", "metadata": 5, "m": {"a": 1}}
    shared = PromptTokenizeFn(name, prompt_key="q", label_key="q", metadata_key="m", tool_key=None)
    none = PromptTokenizeFn(name, prompt_key="q", metadata_key=None, tool_key=None)

    chunk, bare = run(shared.open(), [row]), run(none.open(), [row])

    assert [values(chunk, column) for column in ("prompt", "label", "metadata")] == [["why"], ["why"], [{"a": 1}]]
    assert values(bare, "label") == values(bare, "metadata") == [None]


def test_a_string_is_one_user_turn_of_a_chat_also_if_it_is_json(name, tokenizer):
    text = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    chat = json.dumps([user("why")])

    chunk = run(chat_prompt(name).open(), [{"input": "why"}, {"input": [user("why")]}, {"input": chat}])

    assert (values(chunk, "prompt"), faults(chunk)) == ([text, text, text.replace("why", chat)], [])
    assert token_ids(chunk)[:2] == [tokenizer.encode(text, add_special_tokens=False).ids] * 2
    assert token_ids(chunk)[0][0] == 1  # the special token, not its letters


def test_an_empty_prompt_is_dropped(name):
    rows = [{"input": ""}, {"input": "a"}, {"input": []}]

    plain = run(PromptTokenizeFn(name, add_special_tokens=True).open(), rows[:2])
    chat = run(chat_prompt(name).open(), rows)
    blank = run(chat_prompt(name, chat_template="{{ '' }}").open(), rows)

    assert (drops(plain), values(plain, "prompt")) == ({"empty_prompt": [0]}, ["a"])
    assert (drops(chat), chat.num_samples) == ({"empty_prompt": [2]}, 2)
    assert drops(blank) == {"empty_prompt": [0, 1, 2]}


def test_tools_go_to_the_template_and_into_the_metadata(name):
    rows: list[Any] = [
        {"input": "a", "tools": [TOOL]},
        {"input": "a", "tools": json.dumps([TOOL]), "metadata": {"k": 1}},
        {"input": "a", "tools": [], "metadata": {}},
        {"input": "a", "tools": None, "metadata": {"k": 1}},
        {"input": "a", "tools": [TOOL], "metadata": {"tools": "old"}},
        b'{"input": "a", "tools": [{"x": 1e999}], "metadata": { }}',
        {"input": "a"},
    ]
    metadata = [
        {"tools": [TOOL]}, {"k": 1, "tools": [TOOL]}, {"tools": []}, {"k": 1}, {"tools": [TOOL]},
        {"tools": [{"x": float("inf")}]}, None,
    ]  # fmt: skip
    tools = ["[{...}]", "[{...}]", "[]", "null", "[{...}]", '[{"x": Infinity}]', "null"]

    chat = run(chat_prompt(name, chat_template=TOOLS_TEMPLATE).open(), rows)
    plain = run(PromptTokenizeFn(name).open(), rows)

    assert values(chat, "metadata") == values(plain, "metadata") == metadata
    assert values(chat, "prompt") == ["a|" + text.replace("{...}", json.dumps(TOOL)) for text in tools]
    assert values(plain, "prompt") == ["a"] * 7


def test_the_template_for_tools_serves_rows_with_tools_and_every_chat_has_the_variables(small_tokenizer, tmp_path):
    folder = shutil.copytree(small_tokenizer, tmp_path / "t")
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text("plain {{ messages[0].content }}")
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | length }}")
    rows = [{"input": "a"}, {"input": "a", "tools": []}, {"input": "a", "tools": [TOOL]}]
    variables = "{{ thinking }}{{ eos_token }}{{ pad_token }}{{ add_generation_prompt }}"
    kwargs = {"thinking": {"b": [1], "a": None}, "pad_token": "P", "add_generation_prompt": False}

    def prompts(**settings: Any) -> list[Any]:
        return values(run(chat_prompt(str(folder), **settings).open(), rows), "prompt")

    assert prompts() == ["plain a", "tools 0", "tools 1"]
    assert prompts(chat_template="default") == ["plain a"] * 3
    assert prompts(chat_template="{{ messages[0].role }}") == ["user"] * 3
    made = prompts(chat_template=variables, chat_template_kwargs=kwargs)
    assert made == ["{'b': [1], 'a': None}<|im_end|>PFalse"] * 3


def test_special_tokens_are_added_to_plain_text_only_if_asked_for(small_tokenizer, tmp_path):
    around = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    folder = variant(small_tokenizer, tmp_path / "t", post_processor=json.loads(around.__getstate__()))
    made = [PromptTokenizeFn(folder), PromptTokenizeFn(folder, add_special_tokens=True), chat_prompt(folder)]

    first = [token_ids(run(fn.open(), [{"input": "a"}]))[0][0] for fn in made]

    assert [id == 0 for id in first] == [False, True, False]
    assert first[2] == 1


# PromptRowFn: the row as it is, unless its prompt is too long


SHOUTS = "{% for m in messages %}{{ m.content }}{% endfor %}!"
ROW = {"prompt": [user("one")], "data_source": "sums", "metadata": "not looked at"}


def test_a_row_for_a_framework_is_kept_as_it_is_and_without_tokens_if_its_prompt_is_not_too_long(name):
    settings = {"prompt_key": "prompt", "apply_chat_template": True, "chat_template": SHOUTS}
    rows = [{**ROW, "prompt": [user("a " * number)]} for number in range(1, 12)]
    prompts = run(PromptTokenizeFn(name, metadata_key=None, **settings).open(), rows)
    limit = sorted(map(len, token_ids(prompts)))[5]
    marked = b"\xef\xbb\xbf" + json.dumps(ROW).encode()

    chunk = run(PromptRowFn(name, max_length=limit, **settings).open(), [*rows, marked, {"prompt": 3}, {"other": []}])

    short = [row for row, ids in zip(rows, token_ids(prompts), strict=True) if len(ids) <= limit]
    assert 0 < len(short) < len(rows)
    assert values(chunk, "extra") == [*short, ROW]
    assert token_ids(chunk) == [[]] * len(values(chunk, "extra"))
    assert list(drops(chunk)) == ["max_length"]
    assert faults(chunk) == [(12, "AD111"), (13, "AD110")]


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", ["qwen2-bpe-151k", "gpt2-bpe-50k", "gpt2-bpe-50k-generation"])
@pytest.mark.parametrize("file", ["gsm8k/test.slime", "gsm8k/test.chat", "chat_sft/chat_sft"])
@pytest.mark.parametrize("marks", [False, True], ids=["its template", "generation blocks"])
def test_text_and_ids_of_every_row_are_those_of_transformers(test_data, tokenizer, file, marks):
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    folder = test_data / "tokenizers" / tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=10**9)
    marked = test_data / "tokenizers" / "qwen2-bpe-151k" / "chat_template_generation.jinja"
    settings: dict[str, Any] = {"chat_template": marked.read_text(encoding="utf-8") if marks else None}
    raws = (test_data / f"{file}.jsonl").read_bytes().splitlines()
    rows = [json.loads(raw) for raw in raws]
    key = "messages" if "sft" in file else "input"
    texts = [
        theirs.apply_chat_template(
            [user(row[key])] if "slime" in file else row[key],
            tools=row.get("tools"), tokenize=False, add_generation_prompt=True, **settings,
        )
        for row in rows
    ]  # fmt: skip
    made = [(texts, {"apply_chat_template": True, **settings})]
    made += [([row[key] for row in rows], {})] if "slime" in file else []

    for expected, more in made:
        chunk = run(PromptTokenizeFn(str(folder), prompt_key=key, **more).open(), raws)

        assert (chunk.num_samples, chunk.errors, chunk.drops) == (len(rows), [], [])
        assert values(chunk, "prompt") == expected
        assert token_ids(chunk) == theirs(expected, add_special_tokens=False)["input_ids"]
