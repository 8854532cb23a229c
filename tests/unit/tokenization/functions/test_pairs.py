"""Texts, pairs and samples of one length: what is trained and what is cut, and no pair without its question."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncdata import FixedLengthTokenizeFn, PreferenceTokenizeFn, TextTokenizeFn
from asyncdata.delivery.chunk import Chunk
from asyncdata.errors import BadRowError
from tests.support.peers.rollouts import recipe
from tests.unit.tokenization import drops, faults, notes, run, token_ids, values
from tests.unit.tokenization.trained import assistant, delivered, mask_of, tokenizer_of, trained_texts, user, variant

TEXT = "All of this is trained, caf\u00e9 \U0001f600 too."


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, [], ["<|im_end|>"]), ({"eos": False}, [], []), ({"eos": "<|endoftext|>"}, [], ["<|endoftext|>"]),
        ({"bos": "<|im_start|>"}, ["<|im_start|>"], ["<|im_end|>"]), ({"bos": True}, ["<|im_start|>"], ["<|im_end|>"]),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_around_a_text_are_as_asked_and_trained(small_tokenizer, tmp_path, settings, before, after):
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
ANSWERED: dict[str, Any] = {key: [assistant(text)] for key, text in BARE.items()}
WHOLE_CHATS = {key: [user(ASKS), *chat] for key, chat in ANSWERED.items()}
WHOLE = {key: f"\n\nHuman: {ASKS}\n\nAssistant: {text}" for key, text in BARE.items()}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        key: ({key: ASKS}, f"without '{key}'.*set prompt_key to")
        for key in ("question", "instruction", "query", "input", "system", "Prompt")
    },
    "two keys": ({"system": "Be terse.", "question": ASKS}, "without 'system', 'question'"),
    "a null prompt": ({"prompt": None}, "without 'prompt'"),
    "a system prompt beside the prompt": ({"prompt": ASKS, "system": "Be terse."}, "without 'system'"),
    "a system prompt beside whole chats": ({**WHOLE_CHATS, "system": "Be terse."}, "without 'system'"),
}


@pytest.mark.parametrize("answers", [BARE, ANSWERED], ids=["texts", "chats"])
@pytest.mark.parametrize(("more", "reason"), REFUSED.values(), ids=REFUSED)
def test_two_answers_are_not_trained_without_their_question(tmp_path, small_tokenizer, answers, more, reason):
    row = {**answers, **more}
    if more.get("prompt") and answers is ANSWERED:
        row["prompt"] = [user(ASKS)]

    with pytest.raises(BadRowError, match=f"AD110 .*{reason}"):
        delivered(tmp_path, PreferenceTokenizeFn(small_tokenizer), {**answers}, row)


RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole texts": ({}, WHOLE),
    "whole texts beside what is said to be none": ({"prompt_key": None}, {**WHOLE, "question": ASKS, "prompt": None}),
    "a key that is empty": ({}, {**BARE, "input": "", "system": None}),
    "a key that is to be ignored": ({"ignore_keys": ("system", "question")}, {**BARE, "question": ASKS}),
    "a system prompt that is": ({"ignore_keys": ("system",)}, {**WHOLE_CHATS, "system": "Be terse."}),
    "the question's own key": ({"prompt_key": "question"}, {**BARE, "question": ASKS}),
    "a system prompt within": ({}, {**ANSWERED, "system": "Be terse.", "prompt": [SYSTEM, user(ASKS)]}),
    "whole chats": ({}, {"question": ASKS, **WHOLE_CHATS}),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "row"), RIGHT.values(), ids=RIGHT)
def test_pairs_that_have_their_question_are_read(tmp_path, small_tokenizer, settings, row):
    assert len(delivered(tmp_path, PreferenceTokenizeFn(small_tokenizer, **settings), row)) == 1


def test_a_prompt_that_both_answers_begin_with_names_the_setting(tmp_path, small_tokenizer):
    """As UltraFeedback and the preferences of Tulu 3 have it: the prompt is text, and both answers are whole chats."""
    row = {"prompt": ASKS, **WHOLE_CHATS}

    with pytest.raises(BadRowError, match="set prompt_key=None"):
        delivered(tmp_path, PreferenceTokenizeFn(small_tokenizer), row)

    (found,) = delivered(tmp_path, PreferenceTokenizeFn(small_tokenizer, prompt_key=None), row)
    (same,) = delivered(tmp_path, PreferenceTokenizeFn(small_tokenizer), WHOLE_CHATS)
    assert (found.tokens.tolist(), found.extra) == (same.tokens.tolist(), same.extra)
    with pytest.raises(BadRowError, match=r"AD111 .*all text, or all messages\n"):
        delivered(tmp_path, PreferenceTokenizeFn(small_tokenizer), {"prompt": ASKS, **ANSWERED})


CONTEXT = " ".join(f"Mary went to the garden {number} times. \U0001f600" for number in range(30))
ROW = {"input": CONTEXT, "question": "Where is Mary? ", "target": "garden"}
SUFFIX = "\nQuestion: Where is Mary? \nAnswer:"
CUTS = ["truncate_context_left", "truncate_context_right", "truncate_context_middle"]
TOKENIZERS = ["qwen2-bpe-151k", "gpt2-bpe-50k"]
SOME = [9, pytest.param(1, marks=pytest.mark.slow)]
"""Rows of BABILong: in CI one of so many."""


def babilong(name: str, max_length: int = 1000, **settings: Any) -> FixedLengthTokenizeFn:
    return FixedLengthTokenizeFn.babilong(name, max_length, **settings)


def made(name: str, *rows: Any, max_length: int = 1000, **settings: Any) -> Chunk:
    return run(babilong(name, max_length, **settings).open(), rows or [ROW])


def texts(fn: FixedLengthTokenizeFn, chunk: Chunk) -> list[str]:
    """Each sample's text without its padding."""
    extras = values(chunk, "extra")
    kept = [ids[: len(ids) - extra["num_padding"]] for ids, extra in zip(token_ids(chunk), extras, strict=True)]
    return [tokenizer_of(fn).decode(ids, skip_special_tokens=False) for ids in kept]


def rows_of_babilong(test_data: Path, file: str, every: int) -> list[Any]:
    return json.loads((test_data / "babilong" / file).read_text(encoding="utf-8"))[::every]


def test_a_sample_is_prompt_answer_end_and_padding_and_only_the_answer_is_trained(name):
    fn = babilong(name, pad_id=77)

    chunk = run(fn.open(), [ROW])

    (ids,), (extra,) = token_ids(chunk), values(chunk, "extra")
    assert (len(ids), texts(fn, chunk)) == (1000, [f"{CONTEXT}{SUFFIX} garden{END}"])
    assert trained_texts(chunk, tokenizer_of(fn)) == [[f" garden{END}"]]
    assert ids[1000 - extra["num_padding"] :] == [77] * extra["num_padding"] != []
    assert values(chunk, "label") == ["garden"]


def test_padding_may_be_the_end_and_an_end_may_be_given(small_tokenizer, tmp_path):
    no_pad = variant(small_tokenizer, tmp_path / "no_pad", config={"pad_token": None})
    no_end = variant(small_tokenizer, tmp_path / "no_end", config={"eos_token": None})

    (ids,) = token_ids(made(no_pad))
    ended = made(no_end, add_eos=END)

    assert (ids[-1], trained_texts(ended, tokenizer_of(babilong(no_end)))) == (2, [[f" garden{END}"]])


def test_special_tokens_in_front_are_kept_and_none_come_between_prompt_and_answer(small_tokenizer, tmp_path):
    around = variant(small_tokenizer, tmp_path / "around", around="<|im_start|> $A <|im_end|>")
    cut = {"max_length": 60, "overlong": "truncate_context_left"}
    with_them, without = made(around, **cut), made(around, **cut, add_special_tokens=False)

    assert token_ids(with_them)[0][0] == 1
    assert token_ids(with_them)[0].count(2) == token_ids(without)[0].count(2) == 1
    assert token_ids(without)[0][0] != 1


def test_any_keys_of_a_row_can_be_laid_out(name):
    fn = FixedLengthTokenizeFn(name, max_length=40, prompt="{{{a}}} {b} or {b}?", answer=" {c}, {a}")

    chunk = run(fn.open(), [{"a": "one", "b": "two", "c": "three"}])

    assert texts(fn, chunk) == [f"{{one}} two or two? three, one{END}"]
    assert trained_texts(chunk, tokenizer_of(fn)) == [[f" three, one{END}"]]


@pytest.mark.thorough
@pytest.mark.parametrize("cut", CUTS)
def test_the_question_and_the_answer_are_never_cut(name, cut):
    fn = babilong(name, overlong=cut)
    tail = f"{SUFFIX} garden{END}"
    shortest = len(tokenizer_of(fn).encode(tail).ids)

    for length in range(shortest, 200):
        chunk = run(babilong(name, length, overlong=cut).open(), [ROW])
        if chunk.num_samples == 0:
            assert (drops(chunk), length < shortest + 10) == ({"context_too_short": [0]}, True)
            continue
        (text,), (extra,) = texts(fn, chunk), values(chunk, "extra")
        assert len(token_ids(chunk)[0]) == length
        assert text.endswith(tail)
        assert trained_texts(chunk, tokenizer_of(fn)) == [[f" garden{END}"]]
        assert extra["num_padding"] < 4  # where a character of several tokens would have been cut
        assert "\ufffd" not in text


def test_a_context_is_cut_where_it_is_asked_for(name):
    kept = {}
    for cut in CUTS:
        fn = babilong(name, 100, overlong=cut)
        chunk = run(fn.open(), [ROW])
        assert notes(chunk) == {"truncated": [0]}
        (text,) = texts(fn, chunk)
        kept[cut] = text.removesuffix(f"{SUFFIX} garden{END}")

    assert CONTEXT.endswith(kept["truncate_context_left"])
    assert CONTEXT.startswith(kept["truncate_context_right"])
    middle = kept["truncate_context_middle"]
    half = len(middle) // 2 - 5
    assert CONTEXT.startswith(middle[:half])
    assert CONTEXT.endswith(middle[-half:])


def test_a_row_that_would_lose_too_much_of_its_context_or_the_answer_in_it_is_dropped(name):
    short = {"max_length": 60, "overlong": "truncate_context_left", "min_context_tokens": 50}
    rows = [{**ROW, "input": f"{front} {'filler ' * 100} {back}"} for front, back in (("garden", ""), ("", "garden"))]

    assert drops(made(name, ROW, {**ROW, "question": "?" * 200}, **short)) == {"context_too_short": [0, 1]}
    (extra,) = values(made(name, **short | {"min_context_tokens": 1}), "extra")
    kept = 60 - extra["num_padding"] - len(tokenizer_of(babilong(name)).encode(f"{SUFFIX} garden{END}").ids)
    assert made(name, **short | {"min_context_tokens": kept}).num_samples == 1
    assert drops(made(name, **short | {"min_context_tokens": kept + 1})) == {"context_too_short": [0]}
    for cut, lost in (("truncate_context_left", [0]), ("truncate_context_right", [1]), ("truncate_context_middle", [])):
        found = drops(made(name, *rows, max_length=80, overlong=cut, keep_answer=True))
        assert found.get("answer_lost", []) == lost
        assert drops(made(name, *rows, max_length=80, overlong=cut)) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("file", "max_length"), [("qa1_4k.json", 512), ("qa1_32k.json", 31000)])
@pytest.mark.parametrize("every", SOME)
def test_every_cut_sample_of_babilong_has_its_question(test_data, tokenizer, cut, file, max_length, every):
    rows = rows_of_babilong(test_data, file, every)
    fn = babilong(str(test_data / "tokenizers" / tokenizer), max_length, overlong=cut)

    chunk = run(fn.open(), rows)

    assert (chunk.num_samples, faults(chunk)) == (len(rows), [])
    assert {len(ids) for ids in token_ids(chunk)} == {max_length}
    assert trained_texts(chunk, tokenizer_of(fn)) == [[f" {row['target']}{END}"] for row in rows]
    for row, text in zip(rows, texts(fn, chunk), strict=True):
        assert text.endswith(f"\nQuestion: {row['question']}\nAnswer: {row['target']}{END}")


# As the recipe had it. That it is kept on made-up rows is in its golden records.


def test_only_the_recipes_prompt_has_a_blank_line_after_the_context(name):
    assert babilong(name, legacy_recipe=True).prompt == "{input}\n\nQuestion: {question}\nAnswer:"
    assert babilong(name).prompt == "{input}\nQuestion: {question}\nAnswer:", "runs of ours go on"
    assert babilong(name, legacy_recipe=True, prompt="{input}: {question}").prompt == "{input}: {question}"


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(("file", "max_length"), [("qa1_4k.json", 2048), ("qa1_32k.json", 32768)])
@pytest.mark.parametrize("every", SOME)
def test_the_legacy_recipe_is_kept_on_babilong(test_data, tokenizer, file, max_length, every):
    transformers = pytest.importorskip("transformers", reason="the oracle is not installed")
    folder = str(test_data / "tokenizers" / tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rows = rows_of_babilong(test_data, file, every)
    fn = babilong(folder, max_length, legacy_recipe=True)

    chunk = run(fn.open(), rows)

    assert chunk.num_samples == len(rows)
    for number, row in enumerate(rows):
        ids, extra = token_ids(chunk)[number], values(chunk, "extra")[number]
        expected = recipe(theirs, row, max_length, 64)
        attended = [1] * (max_length - extra["num_padding"]) + [0] * extra["num_padding"]
        labels = [id if trained else -100 for id, trained in zip(ids, mask_of(chunk, number), strict=True)]
        assert {"input_ids": ids, "labels": labels, "attention_mask": attended} == expected
        is_lost = f"Question: {row['question'].strip()}" not in texts(fn, chunk)[number]
        assert extra["question_lost"] is is_lost


def test_the_legacy_recipe_notes_whether_the_cut_removed_the_question(name):
    facts = set()
    length = len(tokenizer_of(babilong(name)).encode(f"{CONTEXT}\n{SUFFIX}").ids)
    for reserve in range(1, 40, 3):
        fn = babilong(name, length, legacy_recipe=True, reserve=reserve)
        chunk = run(fn.open(), [ROW])
        (extra,), (text,) = values(chunk, "extra"), texts(fn, chunk)
        assert extra["question_lost"] is ("Question: Where is Mary?" not in text)
        assert notes(chunk) == ({"question_lost": [0]} if extra["question_lost"] else {}) | {"truncated": [0]}
        facts.add((extra["question_lost"], "Answer:" in text))

    assert facts == {(False, False), (True, False)}
