from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import ConfigError, DataLoader, SnapshotMismatchError, TokenizeFn, XTunerTokenizeFn
from asyncdata.tokenization.base import describe, open_spec
from tests.support.faults import until
from tests.support.xtuner_fns import Characters, Returns, counting
from tests.unit.tokenization import drops, faults, run, token_ids, values

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHARACTERS = "tests.support.xtuner_fns:Characters"


def test_a_function_written_for_xtuner_runs_unchanged() -> None:
    fn = XTunerTokenizeFn(CHARACTERS, {"max_length": 4})

    chunk = run(open_spec(describe(fn.resolve())), [{"text": "abc"}, {"text": "abcdef"}])

    assert isinstance(fn, TokenizeFn)
    assert token_ids(chunk) == [[97, 98, 99], [97, 98, 99, 100]]
    assert values(chunk, "spans") == [[[1, 3]], [[1, 4]]]
    assert values(chunk, "extra") == [{"char_start": 0}] * 2


@pytest.mark.parametrize(
    "build", [CHARACTERS, Characters, "tests.support.xtuner_fns:ready", "tests.support.xtuner_fns:counting", counting]
)
def test_it_is_made_by_a_path_a_class_or_a_function_and_runs_in_its_runtime_state(build: Any) -> None:
    chunk = run(open_spec(describe(XTunerTokenizeFn(build))), [{"text": "abc"}])

    assert token_ids(chunk) == [[97, 98, 99]]


def test_an_object_runs_in_this_process_and_cannot_be_sent_to_another(jsonl_file: Callable[..., Path]) -> None:
    path = str(jsonl_file([{"text": "abc"}]))
    fn = XTunerTokenizeFn(Characters(2))

    with DataLoader(path, tokenize_fn=fn, num_workers=0) as loader:
        (sample,) = loader.get_next_batch(1)

    assert sample.labels is not None
    assert (sample.tokens.tolist(), sample.labels.tolist()) == ([97, 98], [-100, 98])
    with pytest.raises(ConfigError, match=r"AD420 a worker process cannot be sent a Characters; name what makes it"):
        DataLoader(path, tokenize_fn=fn, num_workers=1)


def test_arrays_are_read_as_lists_are() -> None:
    result = {"input_ids": np.array([5, 6]), "labels": np.array([-100, 6])}

    chunk = run(XTunerTokenizeFn(Returns(result)).open(), [{}])

    assert (token_ids(chunk), values(chunk, "spans")) == ([[5, 6]], [[[1, 2]]])


def test_a_row_that_xtuner_filters_is_dropped_and_counted() -> None:
    result = {"input_ids": [], "labels": [], "num_tokens": 0}

    chunk = run(XTunerTokenizeFn(Returns, {"result": result}).open(), [{}])

    assert (chunk.num_samples, drops(chunk)) == (0, {"num_tokens_0": [0]})


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "need a dict with 'input_ids'"),
        ({"num_tokens": 3}, "a dict without 'input_ids': it has ['num_tokens']"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 labels for 2 tokens"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "labels[1] is 3, and the token 2; a label must be the token"),
        ({"input_ids": ["a"]}, "integer"),
        ({"input_ids": [2**31]}, "int"),
        ({"input_ids": [-1]}, "token id -1 is negative"),
    ],
)
def test_a_result_that_is_not_a_sample_is_a_bad_row(result: Any, reason: str) -> None:
    chunk = run(XTunerTokenizeFn(Returns, {"result": result}).open(), [{}])

    assert faults(chunk) == [(0, "AD425")]
    assert reason in chunk.errors[0].reason


def test_a_row_that_it_raises_on_is_bad_and_named() -> None:
    chunk = run(XTunerTokenizeFn(CHARACTERS).open(), [{"text": "a"}, {"txt": "a"}])

    assert (chunk.num_samples, faults(chunk)) == (1, [(1, "AD421")])
    assert "KeyError" in chunk.errors[0].reason


def test_its_fingerprint_is_its_hash_with_the_arguments_that_the_hash_forgets() -> None:
    made = [
        XTunerTokenizeFn(CHARACTERS, arguments)
        for arguments in ({}, {"max_length": 4}, {"max_length": 5}, {"name": "other"})
    ]
    forgetful = [XTunerTokenizeFn(Characters(length)) for length in (4, 5)]

    assert len({fn.fingerprints()["tokenize_fn"] for fn in made}) == 4
    assert made[1].fingerprints() == XTunerTokenizeFn(Characters, {"max_length": 4}).fingerprints()
    assert forgetful[0].fingerprints() == forgetful[1].fingerprints()


def test_canaries_detect_changes_that_the_hash_of_an_object_does_not_show(jsonl_file: Callable[..., Path]) -> None:
    path = str(jsonl_file([{"text": "abcdef"}] * 8))
    with DataLoader(path, tokenize_fn=XTunerTokenizeFn(Characters(4)), num_workers=0) as loader:
        loader.get_next_batch(2)
        until(lambda: loader.state_dict()["canaries"])
        state = loader.state_dict()

    with (
        DataLoader(path, tokenize_fn=XTunerTokenizeFn(Characters(5)), num_workers=0) as loader,
        pytest.raises(SnapshotMismatchError, match="AD603"),
    ):
        loader.load_state_dict(state)
        loader.get_next_batch(1)


@pytest.mark.parametrize(
    ("build", "arguments", "reason"),
    [
        ("tests.support.xtuner_fns:missing", {}, "AD420 cannot import"),
        (dict, {}, "AD420 'builtins:dict' makes a dict, which lacks __call__ or hash"),
        (lambda: None, {}, "AD420 .* has no import path"),
        (CHARACTERS, {"name": {1}}, "arguments must be JSON values"),
    ],
)
def test_what_cannot_work_is_refused_before_any_worker(build: Any, arguments: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        XTunerTokenizeFn(build, arguments).resolve()
