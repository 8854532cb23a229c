"""Texts and pairs: which text, and which of a pair, is trained, never without its question."""

import json
from typing import Any

import pytest

from asyncdata import PreferenceTokenizeFn, TextTokenizeFn
from asyncdata.errors import BadRowError
from tests.unit.tokenization import drops, faults, run, token_ids, values
from tests.unit.tokenization.trained import assistant, tokenizer_of, user, variant
from tests.unit.tokenization.trained import delivered as samples

TEXT = "All of this is trained, caf\u00e9 \U0001f600 too."


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, [], ["<|im_end|>"]), ({"eos": False}, [], []), ({"eos": "<|endoftext|>"}, [], ["<|endoftext|>"]),
        ({"bos": "<|im_start|>"}, ["<|im_start|>"], ["<|im_end|>"]), ({"bos": True}, ["<|im_start|>"], ["<|im_end|>"]),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_put_around_a_text_as_asked_and_all_but_the_first_are_trained(
    small_tokenizer, tmp_path, settings, before, after
):
    folder = variant(small_tokenizer, tmp_path / "bos", config={"bos_token": "<|im_start|>"})
    tokenizer = tokenizer_of(TextTokenizeFn(folder))

    chunk = run(TextTokenizeFn(folder, **settings).open(), [{"text": TEXT}])

    front, back = ([tokenizer.token_to_id(token) for token in tokens] for tokens in (before, after))
    ids = [*front, *tokenizer.encode(TEXT).ids, *back]
    assert (token_ids(chunk), values(chunk, "spans")) == ([ids], [[[1, len(ids)]]])


def test_rows_without_trained_tokens_are_dropped_with_a_reason(small_tokenizer):
    fn = TextTokenizeFn(str(small_tokenizer), eos=False)

    chunk = run(fn.open(), [{"text": ""}, {"text": "a"}, {"text": "a b"}])

    assert (chunk.num_samples, drops(chunk)) == (1, {"empty_text": [0], "no_trained_tokens": [1]})


END = "<|im_end|>"
OBJECTS = f"<|im_start|>user\nno{END}\n<|im_start|>assistant\n"


def both(fn: PreferenceTokenizeFn, row: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The whole text of the chosen and the rejected one, cut at the borders of what is trained."""
    chunk = run(fn.open(), [row])
    assert chunk.errors == []
    ((ids,), (spans,), (extra,)) = token_ids(chunk), values(chunk, "spans"), values(chunk, "extra")
    return cut(fn, ids, spans), cut(fn, extra["rejected_input_ids"], extra["rejected_spans"])


def cut(fn: PreferenceTokenizeFn, ids: list[int], spans: list[list[int]]) -> list[str]:
    borders = [0, *(border for span in spans for border in span), len(ids)]
    pieces = zip(borders, borders[1:], strict=False)
    return [tokenizer_of(fn).decode(ids[start:stop], skip_special_tokens=False) for start, stop in pieces]


SKY = {"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."}
GREY = {"chosen": "The sky is grey today", "rejected": "The sky is green"}
LETTERS = {"prompt": "a", "chosen": " b c d e", "rejected": " e d c"}
PROMPT = [user("a"), assistant("said before"), user("c")]
CHATS = {"chosen": [assistant("good")], "rejected": [assistant("bad"), user("no"), assistant("worse")]}
TOOLS = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
ALL = {"train_on": "completion"}
TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], list[str]]] = {
    "answers and their end": ({}, SKY, ["The sky is", f" blue.{END}", ""], ["The sky is", f" a fish.{END}", ""]),
    "answers alone": ({"eos": False}, SKY, ["The sky is", " blue.", ""], ["The sky is", " a fish.", ""]),
    "behind the words that are the same": ({}, GREY, ["The sky is", f" grey today{END}", ""],
        ["The sky is", f" green{END}", ""]),
    "so too where there is said to be no prompt": ({"prompt_key": None}, {**GREY, "prompt": None, "question": "What?"},
        ["The sky is", f" grey today{END}", ""], ["The sky is", f" green{END}", ""]),
    "the completion of a text": (ALL, SKY, ["The sky is", f" blue.{END}", ""], ["The sky is", f" a fish.{END}", ""]),
    "a completion with its own end": (ALL, {"prompt": "So", "chosen": f" it ends{END}", "rejected": " it is"},
        ["So", f" it ends{END}", ""], ["So", f" it is{END}", ""]),
    "a completion behind the tokens that are the same": (ALL, {"chosen": "It is grey", "rejected": "It is green"},
        ["It is gre", f"y{END}", ""], ["It is gre", f"en{END}", ""]),
    "a completion that is cut": ({**ALL, "max_length": 3, "overlong": "truncate_right"}, LETTERS, ["a", " b c", ""],
        ["a", " e d", ""]),
    "answers that are cut": ({"eos": False, "max_length": 3, "overlong": "truncate_right"}, LETTERS, ["a", " b c", ""],
        ["a", " e d", ""]),
    "chats with tools": ({"chat_template": TOOLS},
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")], "tools": [{"x": 1}]},
        [f'[{{"x": 1}}]a{END}', f"b{END}", ""], [f'[{{"x": 1}}]a{END}', f"c{END}", ""]),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "row", "chosen", "rejected"), TRAINED.values(), ids=TRAINED)
def test_exactly_this_is_trained(name, settings, row, chosen, rejected):
    assert both(PreferenceTokenizeFn(name, **settings), row) == (chosen, rejected)


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(
    ("train_on", "good", "bad"),
    [
        ("assistant", [f"good{END}", "\n"], [f"bad{END}", f"\n{OBJECTS}", f"worse{END}", "\n"]),
        ("completion", [f"good{END}\n", ""], [f"bad{END}\n{OBJECTS}worse{END}\n", ""]),
    ],
)
def test_chats_are_trained_on_what_comes_after_the_prompt(name, explicit, train_on, good, bad):
    """As DPOTrainer of TRL trains a completion: also the line break after the stop token, and the user's turns."""
    row: dict[str, Any] = {"prompt": PROMPT, **CHATS}
    if not explicit:
        row = {key: PROMPT + chat for key, chat in CHATS.items()}

    found = both(PreferenceTokenizeFn(name, train_on=train_on), row)

    assert (found[0][0].count("said before"), found[0][1:], found[1][1:]) == (1, good, bad)


def test_pairs_that_cannot_be_learned_from_are_dropped_by_their_reason(name):
    rows = [
        {"prompt": "a", "chosen": " b", "rejected": " b"},
        {"chosen": [user("a"), assistant("b")], "rejected": [user("a")]},
        {"prompt": [user("a")], "chosen": [user("b")], "rejected": [assistant("c")]},
        {"prompt": "a", "chosen": " b c d e f g h i", "rejected": " b"},
        {"prompt": "a", "chosen": " b", "rejected": " b c d e f g h i"},
        {"prompt": "a", "chosen": " b", "rejected": " c", "metadata": {"n": 1}},
    ]
    without_end = [{"prompt": "a", "chosen": one, "rejected": other} for one, other in ((" b", ""), ("", " b"))]

    chunk = run(PreferenceTokenizeFn(name, max_length=6).open(), rows)

    assert drops(chunk) == {"no_preference": [0], "no_trained_tokens": [1, 2], "max_length": [3, 4]}
    assert values(chunk, "metadata") == [{"n": 1}]
    assert drops(run(PreferenceTokenizeFn(name, eos=False).open(), without_end)) == {"no_trained_tokens": [0, 1]}


def test_a_tokenizer_without_a_template_will_do_for_texts_alone(small_tokenizer, tmp_path):
    folder = variant(small_tokenizer, tmp_path / "plain", config={"chat_template": None})

    chunk = run(PreferenceTokenizeFn(folder).resolve().open(), [LETTERS, {"prompt": PROMPT, **CHATS}])

    assert (chunk.num_samples, faults(chunk)) == (1, [(1, "AD411")])


BARE = {"chosen": "The Black Sea.", "rejected": "The Red Sea."}
ASKS = "Which sea lies north of Turkey?"
SYSTEM = {"role": "system", "content": "Be terse."}
ANSWERED: dict[str, Any] = {key: [{"role": "assistant", "content": text}] for key, text in BARE.items()}
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


@pytest.mark.parametrize("answers", [BARE, ANSWERED], ids=["texts", "chats"])
@pytest.mark.parametrize(("more", "reason"), REFUSED.values(), ids=REFUSED)
def test_two_answers_are_not_trained_without_their_question(tmp_path, small_tokenizer, answers, more, reason):
    row = {**more, **answers}
    if more.get("prompt") and answers is ANSWERED:
        row["prompt"] = [{"role": "user", "content": ASKS}]

    with pytest.raises(BadRowError, match="AD110") as caught:
        samples(tmp_path, PreferenceTokenizeFn(small_tokenizer), {**answers}, row)

    assert reason in str(caught.value)


RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole texts": ({}, WHOLE),
    "whole texts beside what is said to be none": ({"prompt_key": None}, {**WHOLE, "question": ASKS, "prompt": None}),
    "a key that is empty": ({}, {**BARE, "input": "", "system": None}),
    "the question's own key": ({"prompt_key": "question"}, {**BARE, "question": ASKS}),
    "a system prompt within": ({},
        {**ANSWERED, "system": "Be terse.", "prompt": [SYSTEM, {"role": "user", "content": ASKS}]}),
    "whole chats": ({},
        {"question": ASKS, **{key: [{"role": "user", "content": ASKS}, *chat] for key, chat in ANSWERED.items()}}),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "row"), RIGHT.values(), ids=RIGHT)
def test_pairs_that_have_their_question_are_read(tmp_path, small_tokenizer, settings, row):
    assert len(samples(tmp_path, PreferenceTokenizeFn(small_tokenizer, **settings), row)) == 1


def test_a_prompt_that_both_answers_begin_with_names_the_setting(tmp_path, small_tokenizer):
    """As UltraFeedback and the preferences of Tulu 3 have it: the prompt is text, and both answers are whole chats."""
    row: dict[str, Any] = {key: [{"role": "user", "content": ASKS}, *chat] for key, chat in ANSWERED.items()}

    with pytest.raises(BadRowError, match="set prompt_key=None"):
        samples(tmp_path, PreferenceTokenizeFn(small_tokenizer), {"prompt": ASKS, **row})

    (found,) = samples(tmp_path, PreferenceTokenizeFn(small_tokenizer, prompt_key=None), {"prompt": ASKS, **row})
    (same,) = samples(tmp_path, PreferenceTokenizeFn(small_tokenizer), row)
    assert (found.tokens.tolist(), found.extra) == (same.tokens.tolist(), same.extra)
    with pytest.raises(BadRowError, match=r"AD111 .*all text, or all messages\n"):
        samples(tmp_path, PreferenceTokenizeFn(small_tokenizer), {"prompt": ASKS, **ANSWERED})
