"""FixedLengthTokenizeFn: samples of one length, of which the context is cut and the answer is trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from asyncdata import FixedLengthTokenizeFn
from asyncdata.delivery.chunk import Chunk
from tests.support.peers.babilong import recipe
from tests.unit.tokenization import drops, faults, notes, run, token_ids, values
from tests.unit.tokenization.trained import mask_of, tokenizer_of, trained_texts, variant

END = "<|im_end|>"
CONTEXT = " ".join(f"Mary went to the garden {number} times. \U0001f600" for number in range(30))
ROW = {"input": CONTEXT, "question": "Where is Mary? ", "target": "garden"}
SUFFIX = "\nQuestion: Where is Mary? \nAnswer:"
CUTS = ["truncate_context_left", "truncate_context_right", "truncate_context_middle"]
TOKENIZERS = ["qwen2-bpe-151k", "gpt2-bpe-50k"]
SOME = [9, pytest.param(1, marks=pytest.mark.slow)]
"""Rows of BABILong: in CI one of so many."""


@pytest.fixture
def around(small_tokenizer, tmp_path):
    """Its special tokens are put around every text."""
    both = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    return variant(small_tokenizer, tmp_path / "around", post_processor=json.loads(both.__getstate__()))


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


def test_a_tokenizer_without_padding_is_padded_with_its_end_and_one_without_an_end_can_be_given_one(
    small_tokenizer, tmp_path
):
    no_pad = variant(small_tokenizer, tmp_path / "no_pad", config={"pad_token": None})
    no_end = variant(small_tokenizer, tmp_path / "no_end", config={"eos_token": None})

    (ids,) = token_ids(made(no_pad))
    ended = made(no_end, add_eos=END)

    assert (ids[-1], trained_texts(ended, tokenizer_of(babilong(no_end)))) == (2, [[f" garden{END}"]])


def test_special_tokens_in_front_are_kept_and_none_come_between_prompt_and_answer(around):
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
def test_below_the_prompts_length_every_sample_of_babilong_has_its_question(
    test_data, tokenizer, cut, file, max_length, every
):
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
