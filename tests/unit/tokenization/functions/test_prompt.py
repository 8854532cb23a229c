"""Prompts: what becomes of a row's prompt, label, metadata and tools; keys with a dot; chats by a renderer."""

import importlib.metadata
import json
import shutil
from typing import Any

import pytest
from tokenizers import Tokenizer

from asyncdata import ChatTokenizeFn, PromptTokenizeFn, RendererTokenizeFn, SoftPacking
from asyncdata.errors import BadRowError, ConfigError, WorkerError
from asyncdata.tokenization.functions.chat import made_by_renderers
from asyncdata.tokenization.functions.prompt import PromptRowFn
from tests.support.function_kinds import chat_prompt
from tests.support.worker_fns import STOP as END
from tests.unit.tokenization import drops, faults, run, token_ids, values
from tests.unit.tokenization.trained import assistant, delivered, outcome, user, variant

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
    assert (values(chunk, "prompt"), values(chunk, "label")) == (texts, [1.5, {"x": None}, *[0] * 7])
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
        {"input": "a", "tools": [TOOL]}, {"input": "a", "tools": json.dumps([TOOL]), "metadata": {"k": 1}},
        {"input": "a", "tools": [], "metadata": {}}, {"input": "a", "tools": None, "metadata": {"k": 1}},
        {"input": "a", "tools": [TOOL], "metadata": {"tools": "old"}},
        b'{"input": "a", "tools": [{"x": 1e999}], "metadata": { }}', {"input": "a"},
    ]  # fmt: skip
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

    assert (prompts(), prompts(chat_template="default")) == (["plain a", "tools 0", "tools 1"], ["plain a"] * 3)
    assert prompts(chat_template="{{ messages[0].role }}") == ["user"] * 3
    made = prompts(chat_template=variables, chat_template_kwargs=kwargs)
    assert made == ["{'b': [1], 'a': None}<|im_end|>PFalse"] * 3


def test_special_tokens_are_added_to_plain_text_only_if_asked_for(small_tokenizer, tmp_path):
    folder = variant(small_tokenizer, tmp_path / "t", around="<|endoftext|> $A")
    made = [PromptTokenizeFn(folder), PromptTokenizeFn(folder, add_special_tokens=True), chat_prompt(folder)]

    first = [token_ids(run(fn.open(), [{"input": "a"}]))[0][0] for fn in made]

    assert ([id == 0 for id in first], first[2]) == ([False, True, False], 1)


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
    assert (values(chunk, "extra"), token_ids(chunk)) == ([*short, ROW], [[]] * len(values(chunk, "extra")))
    assert (list(drops(chunk)), faults(chunk)) == (["max_length"], [(12, "AD111"), (13, "AD110")])


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


SUM = {"prompt": "What is 2 + 3?"}
LABEL: dict[str, Any] = {"prompt_key": "prompt", "label_key": "reward_model.ground_truth"}
ONE_TURN = [user("q"), assistant("a")]


@pytest.mark.parametrize(("value", "num_workers"), [(5, 0), (None, 0), (["5"], 0), ({"a": 1.5}, 1), ("ä", 0)])
def test_a_label_in_an_object_has_any_value_and_each_row_has_its_own(tmp_path, small_tokenizer, value, num_workers):
    rows = [
        f'{{"prompt": "a", "reward_model": {{"style": "rule", "ground_truth": {json.dumps(each)}}}}}'
        for each in (value, 0)
    ]
    found = delivered(tmp_path, PromptTokenizeFn(small_tokenizer, **LABEL), *rows, num_workers=num_workers)
    beside = delivered(tmp_path, PromptTokenizeFn(small_tokenizer, **LABEL), *rows, "{", bad_rows="skip")

    assert [sample.label for sample in found] == [sample.label for sample in beside] == [value, 0]


def test_a_key_that_has_the_dot_itself_comes_first(tmp_path, small_tokenizer):
    inner = {"reward_model": {"ground_truth": "inner"}}
    rows = [
        {**SUM, **inner, "reward_model.ground_truth": "literal"}, {**SUM, "reward_model.ground_truth": 0},
        {**SUM, **inner, "reward_model.ground_truth": None}, {**SUM, "reward_model.ground_truth": None},
    ]  # fmt: skip

    for beside in ([], ["{"]):  # all rows in one call, and each by itself
        found = delivered(tmp_path, PromptTokenizeFn(small_tokenizer, **LABEL), *rows, *beside, bad_rows="skip")
        assert [sample.label for sample in found] == ["literal", 0, "inner", None]


@pytest.mark.parametrize("outer", [{}, {"reward_model": "5"}, {"reward_model": None}, {"reward_model": {"style": 1}}])
def test_a_row_without_the_key_is_bad(tmp_path, small_tokenizer, outer):
    with pytest.raises(BadRowError, match="no key 'reward_model.ground_truth': the row has 'prompt'"):
        delivered(tmp_path, PromptTokenizeFn(small_tokenizer, **LABEL), {**SUM, **outer})


def test_the_error_says_in_which_object_a_key_lies(tmp_path, small_tokenizer):
    fn = PromptTokenizeFn(small_tokenizer, prompt_key="prompt", label_key="ground_truth")

    with pytest.raises(BadRowError, match="set label_key='reward_model.ground_truth'"):
        delivered(tmp_path, fn, {**SUM, "reward_model": {"ground_truth": "5"}})


def test_prompts_chats_metadata_and_tools_may_lie_in_objects_too(tmp_path, small_tokenizer):
    """Also where a row is read leniently, as NaN makes it."""
    row = {"in": {"prompt": "a", "chat": ONE_TURN, "of": {"it": {"n": 1}}}, "label": float("nan")}
    prompts = PromptTokenizeFn(small_tokenizer, prompt_key="in.prompt", metadata_key="in.of.it")
    chats = ChatTokenizeFn(small_tokenizer, messages_key="in.chat", metadata_key="in.of")

    (prompt,), (chat,) = delivered(tmp_path, prompts, row), delivered(tmp_path, chats, row)

    assert (prompt.prompt, prompt.metadata) == ("a", {"n": 1})
    (same,) = delivered(tmp_path, ChatTokenizeFn(small_tokenizer), {"messages": ONE_TURN})
    assert (chat.tokens.tolist(), chat.labels.tolist()) == (same.tokens.tolist(), same.labels.tolist())
    assert chat.metadata == {"it": {"n": 1}}


def test_a_chat_may_have_a_label(tmp_path, small_tokenizer):
    """As the rows of KTO have: what the answer is worth, which no token says."""
    rows: list[dict[str, Any]] = [
        {"prompt": "What?", "completion": " That.", "label": False},
        {"prompt": ONE_TURN[:1], "completion": ONE_TURN[1:], "label": True},
        {"prompt": "What?", "completion": " That."},
    ]
    fn = ChatTokenizeFn(small_tokenizer, label_key="label")

    found = delivered(tmp_path, fn, *rows[:2])

    bare = delivered(tmp_path, ChatTokenizeFn(small_tokenizer), *rows[:2])
    assert [sample.label for sample in found] == [False, True]
    assert [sample.label for sample in bare] == [None, None]
    assert [sample.labels.tolist() for sample in found] == [sample.labels.tolist() for sample in bare]
    with pytest.raises(BadRowError, match=r"rows.jsonl:2 .*no key 'label': the row has .*set label_key to"):
        delivered(tmp_path, fn, rows[0], rows[2])


OURS = "tests.support.worker_fns:characters"
CHAT = [user("Hi"), assistant("A"), user("?"), assistant("B")]
RENDERED = {"messages": CHAT, "tools": [{"name": "sum"}], "metadata": {"n": 1}, "answer": "B"}
HI, A, ASKED, B = [2, 72, 105, END], [65, END], [2, 63, END], [66, END]


@pytest.mark.parametrize(
    ("more", "trained"),
    [
        ({}, A), ({"turn_flags": []}, [*A, *B]), ({"turn_flags": [], "train_on": "last_assistant"}, B),
        ({"turn_flags": [], "arguments": {"offset": 1}}, [66, END, 67, END]),
    ],
)  # fmt: skip
def test_what_the_renderer_generates_is_trained_as_far_as_the_row_is(tmp_path, small_tokenizer, more, trained):
    row = RENDERED | {"messages": [*CHAT[:3], CHAT[3] | {"loss": False}]}
    fn = RendererTokenizeFn(small_tokenizer, build=OURS, **more)
    (sample,) = delivered(tmp_path, fn, row, num_workers=int("arguments" in more))
    labels = sample.labels.tolist()
    assert [label for label in labels if label != -100] == trained
    assert all(label in (token, -100) for token, label in zip(sample.tokens.tolist(), labels, strict=True))
    assert sample.metadata == {"n": 1}
    if not more:
        assert sample.tokens.tolist() == [103, *HI, 3, *A, *ASKED, 3, *B]


def test_a_prompt_is_what_the_training_of_its_rollout_begins_with(tmp_path, small_tokenizer):
    fn = RendererTokenizeFn(small_tokenizer, build=OURS, label_key="answer", train_on="none")
    (prompt,) = delivered(tmp_path, fn, RENDERED | {"messages": CHAT[:3]})
    (whole,) = delivered(tmp_path, RendererTokenizeFn(small_tokenizer, build=OURS), RENDERED)

    assert [*prompt.tokens.tolist(), *B] == whole.tokens.tolist()
    assert (prompt.prompt, prompt.label, prompt.labels) == (CHAT[:3], "B", None)
    assert prompt.metadata == {"n": 1, "tools": RENDERED["tools"]}
    with pytest.raises(ConfigError, match="AD416"):
        delivered(tmp_path, fn, RENDERED, packing=SoftPacking(max_length=8), batch_size=1)


def test_an_end_that_only_a_next_message_would_give_is_added_and_trained(tmp_path, small_tokenizer):
    fn = RendererTokenizeFn(small_tokenizer, build=OURS, arguments={"ends": False})
    (sample,) = delivered(tmp_path, fn, RENDERED)

    assert sample.labels.tolist()[-2:] == B


def test_rows_are_dropped_or_bad_as_those_of_templates(tmp_path, small_tokenizer):
    def dropped(fn: RendererTokenizeFn, *rows: dict[str, Any]) -> dict[str, int]:
        found = outcome(tmp_path, fn, *rows, RENDERED, bad_rows="skip")
        assert len(found.samples) == 1
        return found.statistics.dropped_total

    fn = RendererTokenizeFn(small_tokenizer, build=OURS, max_length=20)
    long = {"messages": [CHAT[0], assistant("long" * 9)]}
    bad = {"messages": [{"role": "robot", "content": "no such role"}, CHAT[1]]}
    assert dropped(fn, {"messages": CHAT[:1]}, long, bad, {"messages": [{"from": "user"}]}) == {
        "no_trained_tokens": 1, "max_length": 1, "bad row AD421": 1, "bad row AD112": 1,
    }  # fmt: skip
    prompts = RendererTokenizeFn(small_tokenizer, build=OURS, train_on="none")
    assert dropped(prompts, {"messages": []}) == {"empty_prompt": 1}


def test_a_renderer_without_a_mask_is_named_with_what_renders_templates(tmp_path, small_tokenizer):
    fn = RendererTokenizeFn(small_tokenizer, build="tests.support.worker_fns:maskless")
    with pytest.raises(BadRowError, match=r"AD425 .* sampled_mask has 0 values, .*ChatTokenizeFn renders templates"):
        delivered(tmp_path, fn, RENDERED)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"build": "tests.support.worker_fns:nothing"}, "AD420 cannot import"),
        ({"build": OURS, "tokenizer_backend": "gigatoken"}, "the renderer tokenizes"),
        ({"build": OURS, "arguments": {"one": {1}}}, "arguments must be JSON values"),
    ],
)
def test_what_cannot_be_is_refused_before_a_worker_starts(small_tokenizer, settings, words):
    with pytest.raises(ConfigError, match=words):
        RendererTokenizeFn(small_tokenizer, **settings).resolve()


def test_another_renderer_or_version_is_another_function(small_tokenizer, monkeypatch):
    def prints(**more: Any) -> dict[str, str]:
        return RendererTokenizeFn(small_tokenizer, build=OURS, **more).fingerprints()

    one = prints()
    assert prints() == one
    assert prints(arguments={"offset": 1})["tokenize_fn"] != one["tokenize_fn"]
    monkeypatch.setattr("tests.support.worker_fns.Characters.version", 2, raising=False)
    assert prints() == one | {"template": f"{OURS} version 2"}


def test_without_the_package_the_error_names_it(small_tokenizer, monkeypatch):
    def gone(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", gone)
    with pytest.raises(ConfigError, match="RendererTokenizeFn needs renderers .*pip install renderers"):
        RendererTokenizeFn(small_tokenizer).resolve()


SPECIAL = ("think", "/think", "tool_call", "/tool_call", "tool_response", "/tool_response")


@pytest.fixture(scope="module")
def qwen3(small_tokenizer, tmp_path_factory) -> tuple[Any, RendererTokenizeFn]:
    """A renderer of the package, and ours around its like."""
    renderers = pytest.importorskip("renderers", reason="the package renderers is not installed")
    base = pytest.importorskip("renderers.base")
    folder = tmp_path_factory.mktemp("qwen3")
    shutil.copytree(small_tokenizer, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(small_tokenizer / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<{name}>" for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    made = renderers.create_renderer(base.load_tokenizer(str(folder)), renderers.Qwen3RendererConfig())
    return made, RendererTokenizeFn(folder, arguments={"name": "qwen3"})


def test_the_tokens_and_the_mask_are_those_that_prime_rl_trains(tmp_path, qwen3):
    from renderers import build_training_sample

    made, fn = qwen3
    tools = [{"type": "function", "function": {"name": "sum", "description": "", "parameters": {"type": "object"}}}]
    rows = [{"messages": CHAT}, {"messages": CHAT, "tools": tools}]
    for sample, row in zip(delivered(tmp_path, fn, *rows), rows, strict=True):
        theirs = build_training_sample(made, row["messages"], tools=row.get("tools"), ensure_final_stop=True)
        labels = [token if one else -100 for token, one in zip(theirs.token_ids, theirs.loss_mask, strict=True)]
        assert (sample.tokens.tolist(), sample.labels.tolist()) == (theirs.token_ids, labels)


def test_a_rollout_of_two_turns_by_the_package_has_the_ids_that_are_trained(tmp_path, qwen3):
    """The model's tokens are taken as they were sampled, and the next turn is bridged, as in a rollout."""
    _, fn = qwen3
    arguments = {"name": "qwen3", "enable_thinking": False}
    made = made_by_renderers(fn.tokenizer, **arguments)
    prompts = RendererTokenizeFn(fn.tokenizer, arguments=arguments, train_on="none")
    (first,) = delivered(tmp_path, prompts, {"messages": CHAT[:1]})
    (whole,) = delivered(tmp_path, RendererTokenizeFn(fn.tokenizer, arguments=arguments), {"messages": CHAT})
    prompt, ids = first.tokens.tolist(), whole.tokens.tolist()
    assert ids[: len(prompt)] == prompt

    answer = ids[len(prompt) : ids.index(made.get_stop_token_ids()[0], len(prompt)) + 1]
    assert whole.labels.tolist()[len(prompt) :][: len(answer)] == answer
    bridged = made.bridge_to_next_turn(prompt, answer, CHAT[2:3]).token_ids
    assert len(bridged) > len(prompt) + len(answer)
    assert ids[: len(bridged)] == bridged


def test_a_configuration_that_the_package_does_not_have_is_an_error(tmp_path, qwen3):
    for arguments, words in (
        ({"name": "qwen3", "enable_thoughts": True}, r"with the tokenizer in .*qwen3\.enable_thoughts: Extra inputs"),
        ({"name": "glm-4.5"}, r"Special token '\[gMASK\]' not found"),
    ):
        fn = RendererTokenizeFn(qwen3[1].tokenizer, arguments=arguments)
        with pytest.raises(WorkerError, match=words):
            delivered(tmp_path, fn, RENDERED)
