"""What a function returns for a row, read as a sample: one reading for plain functions and for XTuner's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import BadRowError, DataLoader, PackedCollator, SoftPacking
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.tokenization.user_results import read_result, read_xtuner_result
from tests.unit.tokenization import faults, run, token_ids, values

READERS = [read_result, read_xtuner_result]


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens, and labels that are the token or -100."""
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=12))
    return tokens, [token if draw(st.booleans()) else -100 for token in tokens]


def labels_of(tokens: list[int], spans: list[list[int]]) -> list[int]:
    labels = [-100] * len(tokens)
    for start, stop in spans:
        labels[start:stop] = tokens[start:stop]
    return labels


@pytest.mark.thorough
@pytest.mark.parametrize("read", READERS)
@given(sample=samples(), as_array=st.booleans(), name=st.sampled_from(["input_ids", "tokens"]))
def test_labels_are_kept_exactly(read: Any, sample: Any, as_array: bool, name: str) -> None:
    tokens, labels = (np.array(each, np.int64) if as_array else each for each in sample)

    chunk = run(FunctionTokenizer(lambda row: {name: tokens, "labels": labels}, read), [{}])

    assert token_ids(chunk) == [sample[0]]
    assert labels_of(sample[0], values(chunk, "spans")[0]) == sample[1]
    assert values(chunk, "extra") == [None]


def test_a_sample_of_a_plain_function_has_labels(jsonl_file: Any) -> None:
    def answer_only(row: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": [5, 6, 7], "labels": [-100, 6, 7], "kind": "x"}

    with DataLoader(str(jsonl_file([{"a": 1}])), tokenize_fn=answer_only, num_workers=0) as loader:
        (sample,) = loader.get_next_batch(1)

    assert sample.labels is not None
    assert (sample.tokens.tolist(), sample.labels.tolist()) == ([5, 6, 7], [-100, 6, 7])
    assert sample.extra == {"kind": "x"}


def test_without_labels_a_plain_functions_sample_has_none_and_of_xtuners_all_is_trained() -> None:
    plain, xtuner = (run(FunctionTokenizer(lambda row: {"input_ids": [5, 6]}, read), [{}]) for read in READERS)
    unlabelled = run(FunctionTokenizer(lambda row: {"input_ids": [5, 6], "labels": None}), [{}])

    assert values(plain, "spans") == values(unlabelled, "spans") == [None]
    assert values(xtuner, "spans") == [[[0, 2]]]


def test_input_ids_go_before_tokens() -> None:
    chunk = run(FunctionTokenizer(lambda row: {"input_ids": [1], "tokens": ["a"]}), [{}])

    assert (token_ids(chunk), values(chunk, "extra")) == ([[1]], [{"tokens": ["a"]}])


@pytest.mark.thorough
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([5, 6], "2 labels for 3 tokens"),
        ([-100, 6, 9], "labels[2] is 9, and the token 7; a label must be the token itself where it is trained"),
        ([1, 0, 0], "labels[0] is 1, and the token 5"),
        ([6, 7, -100], "the labels are shifted: each is the next token; return them unshifted, collators shift them"),
        ([-100, 7, -100], "the labels are shifted"),
        ("abc", "str; need a list of labels"),
        (5, "int; need a list of labels"),
        ([[5], [6], [7]], "labels[0] is [5], and the token 5"),
    ],
)
def test_labels_that_are_none_make_a_bad_row_that_says_how_they_should_be(read: Any, labels: Any, reason: str) -> None:
    chunk = run(FunctionTokenizer(lambda row: {"input_ids": [5, 6, 7], "labels": labels}, read), [{}])

    assert faults(chunk) == [(0, "AD425")]
    assert reason in chunk.errors[0].reason


def test_a_label_of_one_token_is_not_taken_for_a_shifted_one() -> None:
    chunk = run(FunctionTokenizer(lambda row: {"input_ids": [5], "labels": [4]}), [{}])

    assert "labels[0] is 4, and the token 5" in chunk.errors[0].reason


HUGE = "word " * 100_000


def raises_chained(row: dict[str, Any]) -> None:
    try:
        raise ValueError(HUGE)
    except ValueError as error:
        raise KeyError(HUGE) from error


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            lambda row: HUGE,
            "AD425 .* a text of 500,000 characters; a text is the reason to drop the row, .* ids",
        ),
        (lambda row: {HUGE: 1}, "AD425 .* a dict without 'input_ids': it has"),
        (lambda row: {"input_ids": [1], "labels": [HUGE]}, r"AD425 .* labels\[0\] is word .* -100 elsewhere"),
        (raises_chained, r"AD421 .* raised KeyError\('word word [^\n]* characters left out\)"),
    ],
    ids=["text", "key", "label", "errors"],
)
def test_an_error_about_a_huge_value_is_short(tmp_path: Any, function: Any, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n')
    with (
        DataLoader(path, tokenize_fn=function, num_workers=0) as loader,
        pytest.raises(BadRowError, match=text) as caught,
    ):
        loader.get_next_batch(1)

    assert len(str(caught.value)) < 11_000
    assert len(caught.value.reason) < 2_100


MASKS = ["loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "response_mask", "loss_weights"]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("mask", [[0, 1, 1], np.array([0, 1, 1]), [False, True, True], [0.0, 1.0, 1.0]], ids=repr)
def test_a_mask_by_a_usual_name_makes_the_labels(read: Any, name: str, mask: Any) -> None:
    chunk = run(FunctionTokenizer(lambda row: {"input_ids": [5, 6, 7], name: mask, "kind": "x"}, read), [{}])

    assert (values(chunk, "spans"), values(chunk, "extra")) == ([[[1, 3]]], [{"kind": "x"}])


@pytest.mark.parametrize("read", READERS)
def test_masks_and_labels_that_agree_are_one(read: Any) -> None:
    result = {"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "loss_mask": [0, 1, 0], "completion_mask": [0, 1, 0]}
    nothing = {"input_ids": [5, 6], "loss_mask": [0, 0], "assistant_masks": None}

    chunk = run(FunctionTokenizer(lambda row: nothing if row else result, read), [{}, {"is": "nothing"}])

    assert (values(chunk, "spans"), values(chunk, "extra")) == ([[[1, 2]], []], [None, None])


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"loss_mask": [0, 1]}, "loss_mask has 2 values for 3 tokens; it needs one for each token, also of the prompt"),
        ({"loss_mask": []}, "loss_mask has 0 values for 3 tokens"),
        ({"loss_mask": [0, 1, 2]}, "loss_mask has 2, and must be 0 or 1 for each token"),
        ({"loss_mask": [[0, 1, 1]]}, "loss_mask has [0, 1, 1], and must be 0 or 1 for each token"),
        ({"loss_weights": [0, 0.5, 1]}, "loss_weights has 0.5, and must be 0 or 1 for each token; weights are not"),
        ({"assistant_masks": "abc"}, "str; need a list of assistant_masks"),
        ({"loss_mask": [0, 1, 1], "completion_mask": [0, 0, 1]}, "loss_mask and completion_mask differ at token 1"),
        ({"labels": [-100, 6, 7], "loss_mask": [1, 1, 1]}, "labels and loss_mask differ at token 0"),
    ],
)
def test_a_mask_that_cannot_be_labels_makes_a_bad_row_by_its_name(read: Any, fields: Any, reason: str) -> None:
    chunk = run(FunctionTokenizer(lambda row: {"input_ids": [5, 6, 7], **fields}, read), [{}])

    assert faults(chunk) == [(0, "AD425")]
    assert reason in chunk.errors[0].reason


def test_a_mask_of_a_loader_is_what_its_samples_train(jsonl_file: Any) -> None:
    def masked(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}

    knobs: dict[str, Any] = {"packing": SoftPacking(max_length=4), "collate_fn": PackedCollator(), "batch_size": 1}
    with DataLoader(str(jsonl_file([{"a": 1}])), tokenize_fn=masked, num_workers=0, epochs=1, **knobs) as loader:
        (batch,) = loader

    assert batch["labels"].tolist() == [[-100, -100, 7]]


def test_a_column_that_no_sample_has_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="no column 'loss_mask'; there are prompt, .*spans"):
        ColumnWriter().keep(0, [5, 6], loss_mask=b"[0,1]")
