"""What a row says of itself: turns that are not trained, and variables of its template."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tokenizers import Tokenizer

from asyncdata import ChatTokenizeFn, PreferenceTokenizeFn, PromptTokenizeFn, RendererTokenizeFn
from asyncdata.errors import BadRowError
from asyncdata.workers.inline import InlineExecutor
from tests.support.loaders import Outcome
from tests.support.tokenizers import END, GENERATION
from tests.unit.tokenization.trained import delivered, outcome

FLAGS = ("loss", "train", "training", "trainable", "weight")
NO, YES = f"Surely.{END}", f"No, 7 times 13.{END}"


def chat(*flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Two questions and their answers, each with the flags of its place."""
    turns = [("user", "Is 91 prime?"), ("assistant", "Surely."), ("user", "Sure?"), ("assistant", "No, 7 times 13.")]
    more = [*flags, *[{}] * (len(turns) - len(flags))]
    return [{"role": role, "content": text, **one} for (role, text), one in zip(turns, more, strict=True)]


def answers(first: dict[str, Any], second: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"messages": chat({}, first, {}, second or {})}


def as_share_gpt(row: dict[str, Any]) -> dict[str, Any]:
    """The row in the form of ShareGPT, with a system prompt beside it."""
    turns = [{"from": turn.pop("role"), "value": turn.pop("content"), **turn} for turn in map(dict, row["messages"])]
    return {"conversations": turns, "system": "Be exact."}


def flagged(found: Outcome) -> tuple[dict[str, int], int]:
    """The notes that were counted, and how often it was said that turns are left out."""
    return found.statistics.noted_total, len(found.of("chat.turn_left_out"))


def trained(sample: Any, name: Any) -> str:
    labels = [label for label in sample.labels.tolist() if label != -100]
    return Tokenizer.from_file(f"{name}/tokenizer.json").decode(labels, skip_special_tokens=False)


@pytest.fixture
def rows(test_data) -> list[dict[str, Any]]:
    """One for each trainer's own flag."""
    lines = (test_data / "rows" / "turn_flags.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "messages": ({}, dict), "messages as text": ({}, lambda row: {"messages": json.dumps(row["messages"])}),
    "generation blocks": ({"chat_template": GENERATION}, dict), "ShareGPT": ({}, as_share_gpt),
    "ShareGPT by name": ({"dialect": "sharegpt"}, as_share_gpt),
    "prompt and completion": ({}, lambda row: {"prompt": row["messages"][:1], "completion": row["messages"][1:]}),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "form"), FORMS.values(), ids=FORMS)
def test_rows_of_other_trainers_leave_out_the_turns_that_they_say(tmp_path, small_tokenizer, rows, settings, form):
    fn = ChatTokenizeFn(small_tokenizer, **settings)

    found = outcome(tmp_path, fn, *map(form, rows))

    assert [trained(sample, small_tokenizer) for sample in found.samples] == [YES] * len(rows)
    assert flagged(found) == ({"turn_left_out": len(rows)}, 1)
    assert "turn_flags=()" in found.of("chat.turn_left_out")[0]["reason"]


def test_a_renderer_leaves_them_out_too(tmp_path, small_tokenizer, rows):
    fn = RendererTokenizeFn(small_tokenizer, build="tests.support.worker_fns:characters")

    found = outcome(tmp_path, fn, *rows)

    for sample in found.samples:
        labels = [label for label in sample.labels.tolist() if label != -100]
        assert "".join(map(chr, labels[:-1])) == "No, 7 times 13."
    assert flagged(found) == ({"turn_left_out": len(rows)}, 1)


def test_the_rest_of_a_chat_that_is_trained_whole_stays_trained(tmp_path, small_tokenizer, rows):
    fn = ChatTokenizeFn(small_tokenizer, train_on="all")
    (whole,) = delivered(tmp_path, fn, {"messages": chat()})

    found = outcome(tmp_path, fn, *rows)

    for sample in found.samples:
        assert sample.tokens.tolist() == whole.tokens.tolist()
        assert trained(sample, small_tokenizer) == trained(whole, small_tokenizer).replace(NO, "")
    assert flagged(found)[0] == {"turn_left_out": len(rows)}


@pytest.mark.parametrize(
    ("flag", "value", "is_trained"),
    [
        *((flag, 0, 0) for flag in FLAGS),
        *((FLAGS[0], no, 0) for no in (False, 0.0)),
        *((FLAGS[4], yes, 1) for yes in (None, True, 1, 1.0)),
    ],
)
def test_each_flag_says_yes_or_no(tmp_path, small_tokenizer, flag, value, is_trained):
    (sample,) = delivered(tmp_path, ChatTokenizeFn(small_tokenizer), answers({flag: value}))

    assert trained(sample, small_tokenizer) == NO * is_trained + YES


def test_one_no_is_enough_and_a_turn_that_is_not_trained_anyway_may_say_so(tmp_path, small_tokenizer):
    said = {"loss": False}
    row = {"messages": chat(said, {"train": True, "weight": 0}, said)}

    found = outcome(tmp_path, ChatTokenizeFn(small_tokenizer), row)

    assert (trained(*found.samples, small_tokenizer), flagged(found)[0]) == (YES, {"turn_left_out": 1})


BAD = {
    "a measured loss": (answers({"loss": 2.31}), "'messages'[1]: 'loss' must be true, false, 1 or 0, got another num"),
    "a text": (answers({"weight": "0"}), "'weight' must be true, false, 1 or 0, got a string"),
    "a half": (answers({}, {"weight": 0.5}), "'messages'[3]: 'weight' must be"),
    "a list": (answers({"train": []}), "'train' must be true, false, 1 or 0, got an array"),
    "a user": ({"messages": chat({"loss": True})}, "'messages'[0]: 'loss' says that the turn is trained, but it"),
    "a tool": ({"messages": [*chat(), {"role": "tool", "content": "1", "weight": 1}]},
        "'messages'[4]: 'weight' says that"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [ChatTokenizeFn, RendererTokenizeFn])
@pytest.mark.parametrize(("row", "reason"), BAD.values(), ids=BAD)
def test_another_value_is_a_bad_row_that_names_the_setting(tmp_path, small_tokenizer, kind, row, reason):
    more = {"build": "tests.support.worker_fns:characters"} if kind is RendererTokenizeFn else {}

    with pytest.raises(BadRowError, match="AD111") as caught:
        delivered(tmp_path, kind(small_tokenizer, **more), {"messages": chat()}, row)

    assert reason in str(caught.value)
    (flag,) = (flag for flag in FLAGS if f"'{flag}'" in reason)
    assert f"turn_flags={tuple(other for other in FLAGS if other != flag)} ignores it" in str(caught.value)
    fn = kind(small_tokenizer, turn_flags=[other for other in FLAGS if other != flag], **more)
    assert len(delivered(tmp_path, fn, {"messages": chat()}, row)) == 2


def test_flags_are_ignored_where_a_setting_says_so(tmp_path, small_tokenizer, rows):
    every, one = (ChatTokenizeFn(small_tokenizer, turn_flags=flags) for flags in ((), ("train",)))

    found = outcome(tmp_path, every, *rows)

    assert [trained(sample, small_tokenizer) for sample in found.samples] == [NO + YES] * len(rows)
    assert flagged(found) == ({}, 0)
    assert [trained(sample, small_tokenizer) for sample in delivered(tmp_path, one, *rows)] == [
        YES if row["flag"] == "train" else NO + YES for row in rows
    ]


def test_a_last_answer_that_is_left_out_leaves_nothing_to_train(tmp_path, small_tokenizer):
    fn = ChatTokenizeFn(small_tokenizer, train_on="last_assistant")

    found = outcome(tmp_path, fn, answers({}, {"weight": 0}), answers({"weight": 0}, {"weight": 1}))

    assert (trained(*found.samples, small_tokenizer), flagged(found)[0]) == (YES, {})
    assert found.statistics.dropped_total == {"no_trained_tokens": 1}


def test_a_turn_of_the_user_cannot_be_left_out_of_a_chat_that_is_trained_whole(tmp_path, small_tokenizer):
    row = {"messages": chat({"loss": False})}

    with pytest.raises(BadRowError, match=r"AD111 .*'messages'\[0\] has a flag .* leaves out only the assistant's"):
        delivered(tmp_path, ChatTokenizeFn(small_tokenizer, train_on="all"), row)


ASKED, SAID, LEFT = chat()[:1], chat()[3:], chat({}, {"weight": 0})[1:2]
BEGUN = chat({}, {"loss": False})[:3]
LEFT_OUT = {
    "an answer": ({"prompt": ASKED, "chosen": LEFT, "rejected": SAID}, "'chosen'[0]"),
    "the other answer": ({"prompt": ASKED, "chosen": SAID, "rejected": LEFT}, "'rejected'[0]"),
    "after a common beginning": ({"chosen": [*BEGUN, *LEFT], "rejected": [*BEGUN, *SAID]}, "'chosen'[3]"),
}


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
@pytest.mark.parametrize(("row", "place"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_an_answer_of_a_pair_that_is_left_out_is_refused(tmp_path, small_tokenizer, train_on, row, place):
    with pytest.raises(BadRowError, match="AD111") as caught:
        delivered(tmp_path, PreferenceTokenizeFn(small_tokenizer, train_on=train_on), row)

    assert f"{place} has a flag that leaves it out, but answers are trained" in str(caught.value)
    assert "turn_flags=()" in str(caught.value)
    fn = PreferenceTokenizeFn(small_tokenizer, train_on=train_on, turn_flags=())
    assert len(delivered(tmp_path, fn, row)) == 1


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_the_prompt_of_a_pair_is_not_trained_and_may_say_so(tmp_path, small_tokenizer, train_on):
    fn = PreferenceTokenizeFn(small_tokenizer, train_on=train_on)
    prompt = chat({"loss": False}, {"weight": 0})[:3]
    answer, other = [chat()[3] | {"weight": 1}], chat()[1:2]

    explicit = {"prompt": prompt, "chosen": answer, "rejected": other}
    common = {"chosen": prompt + answer, "rejected": prompt + other}
    plain = {"prompt": chat()[:3], "chosen": chat()[3:], "rejected": other}

    first, *others = samples(tmp_path, fn, explicit, common, plain)
    assert others == [first, first]


def test_prompts_have_no_flags(tmp_path, small_tokenizer):
    messages = chat({"loss": True}, {"weight": "0"}, {"train": 7})[:3]
    functions = [
        PromptTokenizeFn(small_tokenizer, prompt_key="messages", apply_chat_template=True),
        RendererTokenizeFn(small_tokenizer, build="tests.support.worker_fns:characters", train_on="none"),
    ]

    for fn in functions:
        found, plain = delivered(tmp_path, fn, {"messages": messages}, {"messages": chat()[:3]})
        assert found.tokens.tolist() == plain.tokens.tolist()


@pytest.mark.parametrize("shuffle", [True, "full"])
@pytest.mark.parametrize("with_samples", [False, True], ids=["", "scans answer with samples"])
def test_every_turn_is_counted_not_every_row(tmp_path, small_tokenizer, shuffle, with_samples):
    says_no = {"weight": 0}
    row = {"messages": [*chat({}, says_no), *chat({}, says_no)]}

    with patch.object(InlineExecutor, "answers_with_samples", new=with_samples):
        found = outcome(tmp_path, ChatTokenizeFn(small_tokenizer), *[row, {"messages": chat()}] * 20, shuffle=shuffle)

    assert flagged(found) == ({"turn_left_out": 40}, 1)


TEMPLATE = """\
{{- '<|im_start|>system\\n' + ('Think.' if enable_thinking else 'Answer.') + (custom_instructions or '') }}
{%- if tools %}{{ tools | tojson }}{% endif %}{{ '<|im_end|>' }}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ANSWERS = {key: [{"role": "assistant", "content": f"It is {key}."}] for key in ("chosen", "rejected")}
QUESTION = [{"role": "user", "content": "What is it?"}]
CHAT = {"messages": QUESTION + ANSWERS["chosen"]}
PAIR = {"prompt": QUESTION, **ANSWERS}
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
