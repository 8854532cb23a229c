"""What may be passed as ``tokenize_fn``, and what a worker process can make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ChatTokenizeFn, ConfigError, DataLoader, SnapshotMismatchError, TextTokenizeFn, XTunerTokenizeFn
from asyncdata.tokenization.base import describe
from asyncdata.tokenization.resolve import resolved
from tests.support.tokenize_fns import row_id
from tests.support.xtuner_fns import Characters, Returns, ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHARACTERS = "tests.support.xtuner_fns:Characters"


def tokens(path: str, fn: Any, num_workers: int = 0) -> list[int]:
    with DataLoader(path, tokenize_fn=fn, num_workers=num_workers) as loader:
        (sample,) = loader.get_next_batch(1)
        assert sample.labels is not None
        assert sample.labels.tolist() == [-100, *sample.tokens.tolist()[1:]]
        return sample.tokens.tolist()


@pytest.fixture
def path(jsonl_file: Callable[..., Path]) -> str:
    return str(jsonl_file([{"text": "abcdef"}]))


def test_an_object_for_xtuner_runs_as_it_is_in_this_process(path: str) -> None:
    assert tokens(path, Characters(2)) == [97, 98]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        pytest.param("tests.support.xtuner_fns:ready", 3, id="the variable of a module"),
        pytest.param(CHARACTERS, 6, id="the path of a class"),
        pytest.param(Characters, 6, id="a class"),
        pytest.param(XTunerTokenizeFn(CHARACTERS, {"max_length": 4}), 4, id="a description"),
    ],
)
def test_one_that_has_an_import_path_runs_in_a_worker(path: str, fn: Any, wanted: int) -> None:
    assert len(tokens(path, fn, num_workers=1)) == wanted


def test_one_that_has_none_is_refused_for_a_worker_with_the_ways_out(path: str) -> None:
    with pytest.raises(ConfigError, match="AD420 a worker process cannot be sent a Characters; ") as refused:
        DataLoader(path, tokenize_fn=Characters(2), num_workers=1)

    for way_out in ("XTunerTokenizeFn('package.module:name'", "tokenize_fn='package.module:name'", "num_workers=0"):
        assert way_out in str(refused.value)


def test_a_class_that_needs_arguments_is_refused_with_the_way_out() -> None:
    for fn in (Returns, "tests.support.xtuner_fns:Returns"):
        with pytest.raises(ConfigError, match=r"AD420 .* missing a required argument: 'result'; pass tokenize_fn="):
            resolved(fn)


def test_its_fingerprint_is_its_hash(path: str) -> None:
    named = resolved(Characters(2)), resolved(Characters(2, name="other"))

    assert named[0].fingerprints() == XTunerTokenizeFn(Characters(5)).fingerprints()  # type: ignore[union-attr]
    assert named[0].fingerprints() != named[1].fingerprints()  # type: ignore[union-attr]


def test_a_snapshot_of_an_object_with_another_hash_is_refused(path: str) -> None:
    with DataLoader(path, tokenize_fn=Characters(2), num_workers=0) as loader:
        loader.get_next_batch(1)
        state = loader.state_dict()

    with (
        DataLoader(path, tokenize_fn=Characters(2, name="other"), num_workers=0) as loader,
        pytest.raises(SnapshotMismatchError, match="tokenize_fn"),
    ):
        loader.load_state_dict(state)


def test_it_runs_in_its_runtime_state(path: str) -> None:
    fn = Characters(2)
    fn.set_state("cache")

    assert tokens(path, fn) == [97, 98]


def test_functions_and_descriptions_are_returned_unchanged(small_tokenizer: Path) -> None:
    assert resolved(row_id) is row_id
    assert resolved("tests.support.tokenize_fns:row_id") is row_id
    fn = TextTokenizeFn(str(small_tokenizer))
    assert resolved(fn) == fn


def test_an_object_by_its_path_is_described_by_it() -> None:
    fn: Any = resolved("tests.support.xtuner_fns:ready")

    assert fn == XTunerTokenizeFn("tests.support.xtuner_fns:ready")
    assert describe(fn).settings == {"build": "tests.support.xtuner_fns:ready", "arguments": {}}
    assert XTunerTokenizeFn(ready).build is ready


@pytest.mark.parametrize("fn", [ChatTokenizeFn, "asyncdata:ChatTokenizeFn"])
def test_a_class_of_descriptions_in_place_of_its_instance_is_refused(fn: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokenize_fn is the class ChatTokenizeFn; pass an instance: ChatTokenizeFn"):
        resolved(fn)
