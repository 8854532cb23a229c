"""A key with a dot leads into an object of the row, as the labels of verl's rows lie: ``reward_model.ground_truth``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncdata import ChatTokenizeFn, PromptTokenizeFn
from asyncdata.errors import BadRowError
from tests.unit.tokenization.trained import delivered as samples

ASKED = {"prompt": "What is 2 + 3?"}
LABEL: dict[str, Any] = {"prompt_key": "prompt", "label_key": "reward_model.ground_truth"}
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_the_label_of_rows_of_verl_is_read(tmp_path, small_tokenizer, test_data):
    row = (test_data / "rows" / "nested_label.jsonl").read_text(encoding="utf-8").strip()
    fn = PromptTokenizeFn(small_tokenizer, apply_chat_template=True, metadata_key="extra_info", **LABEL)

    (sample,) = samples(tmp_path, fn, row)

    assert (sample.label, sample.metadata) == ("5", {"index": "r1"})


@pytest.mark.parametrize(("value", "num_workers"), [(5, 0), (None, 0), (["5"], 0), ({"a": 1.5}, 1), ("ä", 0)])
def test_a_label_in_an_object_has_any_value_and_each_row_has_its_own(tmp_path, small_tokenizer, value, num_workers):
    rows = [
        f'{{"prompt": "a", "reward_model": {{"style": "rule", "ground_truth": {json.dumps(each)}}}}}'
        for each in (value, 0)
    ]
    found = samples(tmp_path, PromptTokenizeFn(small_tokenizer, **LABEL), *rows, num_workers=num_workers)
    beside = samples(tmp_path, PromptTokenizeFn(small_tokenizer, **LABEL), *rows, "{", bad_rows="skip")

    assert [sample.label for sample in found] == [sample.label for sample in beside] == [value, 0]


def test_a_key_that_has_the_dot_itself_comes_first(tmp_path, small_tokenizer):
    inner = {"reward_model": {"ground_truth": "inner"}}
    rows = [
        {**ASKED, **inner, "reward_model.ground_truth": "literal"},
        {**ASKED, "reward_model.ground_truth": 0},
        {**ASKED, **inner, "reward_model.ground_truth": None},
        {**ASKED, "reward_model.ground_truth": None},
    ]

    for beside in ([], ["{"]):  # all rows in one call, and each by itself
        found = samples(tmp_path, PromptTokenizeFn(small_tokenizer, **LABEL), *rows, *beside, bad_rows="skip")
        assert [sample.label for sample in found] == ["literal", 0, "inner", None]


@pytest.mark.parametrize("outer", [{}, {"reward_model": "5"}, {"reward_model": None}, {"reward_model": {"style": 1}}])
def test_a_row_without_the_key_is_bad(tmp_path, small_tokenizer, outer):
    with pytest.raises(BadRowError, match="no key 'reward_model.ground_truth': the row has 'prompt'"):
        samples(tmp_path, PromptTokenizeFn(small_tokenizer, **LABEL), {**ASKED, **outer})


def test_the_error_says_in_which_object_a_key_lies(tmp_path, small_tokenizer):
    fn = PromptTokenizeFn(small_tokenizer, prompt_key="prompt", label_key="ground_truth")

    with pytest.raises(BadRowError, match="set label_key='reward_model.ground_truth'"):
        samples(tmp_path, fn, {**ASKED, "reward_model": {"ground_truth": "5"}})


def test_prompts_chats_metadata_and_tools_may_lie_in_objects_too(tmp_path, small_tokenizer):
    """Also where a row is read leniently, as NaN makes it."""
    row = {"in": {"prompt": "a", "chat": CHAT, "of": {"it": {"n": 1}}}, "label": float("nan")}
    prompts = PromptTokenizeFn(small_tokenizer, prompt_key="in.prompt", metadata_key="in.of.it")
    chats = ChatTokenizeFn(small_tokenizer, messages_key="in.chat", metadata_key="in.of")

    (prompt,), (chat,) = samples(tmp_path, prompts, row), samples(tmp_path, chats, row)

    assert (prompt.prompt, prompt.metadata) == ("a", {"n": 1})
    (same,) = samples(tmp_path, ChatTokenizeFn(small_tokenizer), {"messages": CHAT})
    assert (chat.tokens.tolist(), chat.labels.tolist()) == (same.tokens.tolist(), same.labels.tolist())
    assert chat.metadata == {"it": {"n": 1}}


def test_a_chat_may_have_a_label(tmp_path, small_tokenizer):
    """As the rows of KTO have: what the answer is worth, which no token says."""
    rows: list[dict[str, Any]] = [
        {"prompt": "What?", "completion": " That.", "label": False},
        {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True},
        {"prompt": "What?", "completion": " That."},
    ]
    fn = ChatTokenizeFn(small_tokenizer, label_key="label")

    found = samples(tmp_path, fn, *rows[:2])

    bare = samples(tmp_path, ChatTokenizeFn(small_tokenizer), *rows[:2])
    assert [sample.label for sample in found] == [False, True]
    assert [sample.label for sample in bare] == [None, None]
    assert [sample.labels.tolist() for sample in found] == [sample.labels.tolist() for sample in bare]
    with pytest.raises(BadRowError, match=r"rows.jsonl:2 .*no key 'label': the row has .*set label_key to"):
        samples(tmp_path, fn, rows[0], rows[2])
