"""Chats by a renderer: the ids are its own, in every worker, for training as for a rollout."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from typing import Any

import pytest
from tokenizers import Tokenizer

from asyncdata import DataLoader, RendererTokenizeFn, SoftPacking
from asyncdata.errors import BadRowError, ConfigError, WorkerError
from asyncdata.tokenization.functions.chat import made_by_renderers
from tests.support.renderers import END
from tests.unit.tokenization.trained import delivered

OURS = "tests.support.renderers:characters"
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "B"},
]
ROW = {"messages": CHAT, "tools": [{"name": "sum"}], "metadata": {"n": 1}, "answer": "B"}
HI, A, ASKED, B = [2, 72, 105, END], [65, END], [2, 63, END], [66, END]


@pytest.mark.parametrize(
    ("more", "trained"),
    [
        ({}, A),
        ({"turn_flags": []}, [*A, *B]),
        ({"turn_flags": [], "train_on": "last_assistant"}, B),
        ({"turn_flags": [], "arguments": {"offset": 1}}, [66, END, 67, END]),
    ],
)
def test_what_the_renderer_generates_is_trained_as_far_as_the_row_is(tmp_path, small_tokenizer, more, trained):
    row = ROW | {"messages": [*CHAT[:3], CHAT[3] | {"loss": False}]}
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
    (prompt,) = delivered(tmp_path, fn, ROW | {"messages": CHAT[:3]})
    (whole,) = delivered(tmp_path, RendererTokenizeFn(small_tokenizer, build=OURS), ROW)

    assert [*prompt.tokens.tolist(), *B] == whole.tokens.tolist()
    assert (prompt.prompt, prompt.label, prompt.labels) == (CHAT[:3], "B", None)
    assert prompt.metadata == {"n": 1, "tools": ROW["tools"]}
    with pytest.raises(ConfigError, match="AD416"):
        delivered(tmp_path, fn, ROW, packing=SoftPacking(max_length=8))


def test_an_end_that_only_a_next_message_would_give_is_added_and_trained(tmp_path, small_tokenizer):
    fn = RendererTokenizeFn(small_tokenizer, build=OURS, arguments={"ends": False})
    (sample,) = delivered(tmp_path, fn, ROW)

    assert sample.labels.tolist()[-2:] == B


def test_rows_are_dropped_or_bad_as_those_of_templates(tmp_path, small_tokenizer):
    def statistics(fn: RendererTokenizeFn, *rows: dict[str, Any]) -> dict[str, int]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, ROW]))
        with DataLoader(str(path), tokenize_fn=fn, num_workers=0, epochs=1, batch_size=1, bad_rows="skip") as loader:
            assert len(list(loader)) == 1
            return dict(loader.statistics().dropped_total)

    fn = RendererTokenizeFn(small_tokenizer, build=OURS, max_length=20)
    long = {"messages": [CHAT[0], {"role": "assistant", "content": "long" * 9}]}
    bad = {"messages": [{"role": "robot", "content": "no such role"}, CHAT[1]]}
    assert statistics(fn, {"messages": CHAT[:1]}, long, bad, {"messages": [{"from": "user"}]}) == {
        "no_trained_tokens": 1,
        "max_length": 1,
        "bad row AD421": 1,
        "bad row AD112": 1,
    }
    prompts = RendererTokenizeFn(small_tokenizer, build=OURS, train_on="none")
    assert statistics(prompts, {"messages": []}) == {"empty_prompt": 1}


def test_a_renderer_without_a_mask_is_named_with_what_renders_templates(tmp_path, small_tokenizer):
    fn = RendererTokenizeFn(small_tokenizer, build="tests.support.renderers:maskless")
    with pytest.raises(BadRowError, match=r"AD425 .* sampled_mask has 0 values, .*ChatTokenizeFn renders templates"):
        delivered(tmp_path, fn, ROW)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"build": "tests.support.renderers:nothing"}, "AD420 cannot import"),
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
    monkeypatch.setattr("tests.support.renderers.Characters.version", 2, raising=False)
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
        assert sample.tokens.tolist() == theirs.token_ids
        assert sample.labels.tolist() == labels


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
            delivered(tmp_path, fn, ROW)
