"""A pair whose question stands under a key that is not read is refused: it would be trained without it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncdata import PreferenceTokenizeFn
from asyncdata.errors import BadRowError
from tests.unit.tokenization.trained import delivered as samples

BARE = {"chosen": "The Black Sea.", "rejected": "The Red Sea."}
ASKS = "Which sea lies north of Turkey?"
SYSTEM = {"role": "system", "content": "Be terse."}
CHATS: dict[str, Any] = {key: [{"role": "assistant", "content": text}] for key, text in BARE.items()}
WHOLE = {key: f"\n\nHuman: {ASKS}\n\nAssistant: {text}" for key, text in BARE.items()}


@pytest.mark.parametrize("name", ["pairs_question", "pairs_instruction"])
def test_pairs_of_others_name_the_key_of_their_question(tmp_path, small_tokenizer, test_data, name):
    lines = (test_data / "rows" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()

    with pytest.raises(BadRowError, match="AD110") as caught:
        samples(tmp_path, PreferenceTokenizeFn(small_tokenizer), *map(json.loads, lines))

    assert f"'{name.removeprefix('pairs_')}'" in str(caught.value)
    assert "set prompt_key" in str(caught.value)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        key: ({key: ASKS}, f"without '{key}'")
        for key in ("question", "instruction", "query", "input", "system", "Prompt")
    },
    "two keys": ({"system": "Be terse.", "question": ASKS}, "without 'system', 'question'"),
    "a null prompt": ({"prompt": None}, "without 'prompt'"),
    "a system prompt beside the prompt": ({"prompt": ASKS, "system": "Be terse."}, "without 'system'"),
}


@pytest.mark.parametrize("answers", [BARE, CHATS], ids=["texts", "chats"])
@pytest.mark.parametrize(("more", "reason"), REFUSED.values(), ids=REFUSED)
def test_two_answers_are_not_trained_without_their_question(tmp_path, small_tokenizer, answers, more, reason):
    row = {**more, **answers}
    if more.get("prompt") and answers is CHATS:
        row["prompt"] = [{"role": "user", "content": ASKS}]

    with pytest.raises(BadRowError, match="AD110") as caught:
        samples(tmp_path, PreferenceTokenizeFn(small_tokenizer), {**answers}, row)

    assert reason in str(caught.value)


RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole texts": ({}, WHOLE),
    "whole texts beside what is said to be none": ({"prompt_key": None}, {**WHOLE, "question": ASKS, "prompt": None}),
    "a key that is empty": ({}, {**BARE, "input": "", "system": None}),
    "the question's own key": ({"prompt_key": "question"}, {**BARE, "question": ASKS}),
    "a system prompt within": (
        {}, {**CHATS, "system": "Be terse.", "prompt": [SYSTEM, {"role": "user", "content": ASKS}]},
    ),
    "whole chats": (
        {}, {"question": ASKS, **{key: [{"role": "user", "content": ASKS}, *chat] for key, chat in CHATS.items()}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "row"), RIGHT.values(), ids=RIGHT)
def test_pairs_that_have_their_question_are_read(tmp_path, small_tokenizer, settings, row):
    assert len(samples(tmp_path, PreferenceTokenizeFn(small_tokenizer, **settings), row)) == 1


def test_a_prompt_that_both_answers_begin_with_names_the_setting(tmp_path, small_tokenizer):
    """As UltraFeedback and the preferences of Tulu 3 have it: the prompt is text, and both answers are whole chats."""
    row: dict[str, Any] = {key: [{"role": "user", "content": ASKS}, *chat] for key, chat in CHATS.items()}

    with pytest.raises(BadRowError, match="set prompt_key=None"):
        samples(tmp_path, PreferenceTokenizeFn(small_tokenizer), {"prompt": ASKS, **row})

    (found,) = samples(tmp_path, PreferenceTokenizeFn(small_tokenizer, prompt_key=None), {"prompt": ASKS, **row})
    (same,) = samples(tmp_path, PreferenceTokenizeFn(small_tokenizer), row)
    assert (found.tokens.tolist(), found.extra) == (same.tokens.tolist(), same.extra)
    with pytest.raises(BadRowError, match=r"AD111 .*all text, or all messages\n"):
        samples(tmp_path, PreferenceTokenizeFn(small_tokenizer), {"prompt": ASKS, **CHATS})
