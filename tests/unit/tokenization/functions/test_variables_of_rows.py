"""A row's ``chat_template_kwargs`` are variables of the template for its chat, as they are for TRL."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ChatTokenizeFn, PreferenceTokenizeFn
from asyncdata.errors import BadRowError
from tests.unit.tokenization.trained import delivered

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = """\
{{- '<|im_start|>system\\n' + ('Think.' if enable_thinking else 'Answer.') + (custom_instructions or '') }}
{%- if tools %}{{ tools | tojson }}{% endif %}{{ '<|im_end|>' }}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ANSWERS = {key: [{"role": "assistant", "content": f"It is {key}."}] for key in ("chosen", "rejected")}
ASKED = [{"role": "user", "content": "What is it?"}]
CHAT = {"messages": ASKED + ANSWERS["chosen"]}
PAIR = {"prompt": ASKED, **ANSWERS}
VARIABLES: list[Any] = [
    {"enable_thinking": True}, {"enable_thinking": False},
    {"enable_thinking": True, "custom_instructions": "Be a pirate.", "python_tools": None},
    {"custom_instructions": 'Say "ä".'}, {}, None,
]  # fmt: skip
KINDS = pytest.mark.parametrize(("make", "row"), [(ChatTokenizeFn, CHAT), (PreferenceTokenizeFn, PAIR)])


def samples(folder: Path, fn: Any, *rows: dict[str, Any]) -> list[tuple[Any, ...]]:
    found = delivered(folder, fn, *rows)
    return [(sample.tokens.tolist(), sample.labels.tolist(), sample.extra) for sample in found]


@KINDS
def test_a_row_with_variables_has_the_tokens_of_these_settings(tmp_path, small_tokenizer, make, row):
    """Whatever rows stand beside it, also when the shape of its chat is known already; with tools as without."""
    rows = [{**row, "chat_template_kwargs": variables} for variables in VARIABLES for _ in range(3)]
    rows += [{**row, "tools": [{"name": "look"}], "chat_template_kwargs": VARIABLES[0]}]

    found = samples(tmp_path, make(small_tokenizer, chat_template=TEMPLATE), *rows)

    expected = []
    for variables in VARIABLES:
        fn = make(small_tokenizer, chat_template=TEMPLATE, chat_template_kwargs=variables or {})
        expected += samples(tmp_path, fn, row, row, row)
    fn = make(small_tokenizer, chat_template=TEMPLATE, chat_template_kwargs=VARIABLES[0])
    assert found == expected + samples(tmp_path, fn, {**row, "tools": [{"name": "look"}]})
    assert len({str(tokens) for tokens, *_ in found}) == 5


@KINDS
def test_variables_may_be_json_text_and_another_value_says_nothing(tmp_path, small_tokenizer, make, row):
    fn, variables = make(small_tokenizer, chat_template=TEMPLATE), {"enable_thinking": True}
    as_text, *others = [{**row, "chat_template_kwargs": each} for each in (json.dumps(variables), "a", [1], 7)]

    found = samples(tmp_path, fn, as_text, *others)

    assert found == samples(tmp_path, fn, {**row, "chat_template_kwargs": variables}, row, row, row)


@KINDS
def test_what_a_row_says_comes_before_the_setting(tmp_path, small_tokenizer, make, row):
    fn = make(small_tokenizer, chat_template=TEMPLATE, chat_template_kwargs={"enable_thinking": True})
    says_no = {**row, "chat_template_kwargs": {"enable_thinking": False}}

    thinks, does_not = samples(tmp_path, fn, row, says_no)

    assert thinks != does_not
    assert [does_not] == samples(tmp_path, make(small_tokenizer, chat_template=TEMPLATE), row)


@KINDS
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"messages": []}, "'chat_template_kwargs' has messages, which is no variable"),
        ('{"add_generation_prompt": true}', "has add_generation_prompt, which is no variable"),
    ],
)
def test_a_name_that_is_no_variable_is_a_bad_row(tmp_path, small_tokenizer, make, row, variables, reason):
    fn = make(small_tokenizer, chat_template=TEMPLATE)

    with pytest.raises(BadRowError, match="AD111") as caught:
        samples(tmp_path, fn, row, {**row, "chat_template_kwargs": variables})

    assert reason in str(caught.value)
    assert caught.value.line == 2


def test_a_text_that_no_template_renders_needs_none(tmp_path, small_tokenizer):
    row = {"prompt": "a", "completion": " b"}

    (found,) = samples(tmp_path, ChatTokenizeFn(small_tokenizer), {**row, "chat_template_kwargs": {"a": 1}})

    assert [found] == samples(tmp_path, ChatTokenizeFn(small_tokenizer), row)
