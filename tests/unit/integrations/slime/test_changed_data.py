"""A checkpoint of slime's data source meets other data: left-out rows are reported, unchanged ones continue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import SnapshotMismatchError
from asyncdata.integrations.hf_adapter import AsyncDatasetAdapter
from asyncdata.integrations.slime import torch_checkpoint
from asyncdata.integrations.slime.sample import SlimeSample
from tests.support.slime_source import args_for, labels, no_rollout, numbers, source_of, write_prompts

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")

ORDERS: list[dict[str, Any]] = [
    {"asyncdata_order": order, "rollout_shuffle": shuffled}
    for order in ("legacy", "stream")
    for shuffled in (True, False)
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", 100)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    return {"save": str(tmp_path / "run"), "load": str(tmp_path / "run"), "n_samples_per_prompt": 2}


def warnings_of(events: list[Any]) -> list[Any]:
    return [event for event in events if event["event"] == "snapshot.rows_left_out"]


@pytest.mark.thorough
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_allowed_other_data_warns_with_the_number_of_rows_left_out(prompts, given, tmp_path, order):
    given |= order
    with source_of(prompts, **given) as source:
        source.get_samples(10)
        source.save(0)
    other = write_prompts(tmp_path / "other.jsonl", 120)
    with capture_logs() as events, source_of(other, **given, asyncdata_allow_changed=["data"]) as source:
        source.load(0)
        assert (source.epoch_id, source.sample_offset, source.sample_group_index) == (1, 0, 10)

    (event,) = warnings_of(events)
    assert (event["num_delivered"], event["num_left_out"], event["changed"]) == (10, 90, ["data"])
    assert (event["log_level"], event["epoch"]) == ("warning", 0)


@pytest.mark.thorough
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_renamed_file_of_the_same_rows_continues_at_its_place(prompts, given, tmp_path, order):
    given |= order
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(10)[:1])
        source.save(0)
        expected = source.get_samples(130)
    renamed = prompts.rename(tmp_path / "renamed.jsonl")

    with source_of(renamed, **given) as source, pytest.raises(SnapshotMismatchError, match="same_rows"):
        source.load(0)
    with capture_logs() as events, source_of(renamed, **given, asyncdata_same_rows=True) as source:
        source.load(0)
        assert (source.epoch_id, source.sample_offset) == (0, 10)
        found = source.get_samples(130)
        assert (labels(found), numbers(found)) == (labels(expected), numbers(expected))
        source.save(1)
        source.load(1)
    assert warnings_of(events) == []


def test_other_rows_that_are_said_to_be_the_same_are_refused(prompts, given, tmp_path):
    with source_of(prompts, **given) as source:
        source.get_samples(10)
        source.save(0)
    other = write_prompts(tmp_path / "other.jsonl", 101)
    allowed = {"asyncdata_same_rows": True, "asyncdata_allow_changed": ["data"]}
    with source_of(other, **given, **allowed) as source:
        with pytest.raises(SnapshotMismatchError, match=r"AD603 same_rows=True.*(?s:.*)other\.jsonl"):
            source.load(0)

        assert source.sample_offset == 0


@pytest.mark.thorough
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_at_an_epochs_end_nothing_is_left_out(prompts, given, tmp_path, order):
    given |= order
    with source_of(prompts, **given) as source:
        source.get_samples(100)
        source.save(0)
    other = write_prompts(tmp_path / "other.jsonl", 120)
    with capture_logs() as events, source_of(other, **given, asyncdata_allow_changed=["data"]) as source:
        source.load(0)
        assert (source.epoch_id, source.sample_offset) == (1, 0)
        source.get_samples(1)
        assert (source.epoch_id, source.sample_offset) == (1, 1)
    assert warnings_of(events) == []


class InMemory:
    """A dataset as slime's own, in memory."""

    def __init__(self, num_rows: int) -> None:
        self.samples = [SlimeSample(label=str(number)) for number in range(num_rows)]

    def __len__(self) -> int:
        return len(self.samples)


@pytest.mark.parametrize(("taken", "expected"), [(10, [(10, 90)]), (100, []), (0, [])])
def test_a_dataset_in_memory_that_has_another_length_warns_as_well(given, taken, expected):
    given |= {"asyncdata_dataset": "tests.support.slime_source.dataset_of_args"}
    with source_of("unused", dataset=InMemory(100), **given) as source:
        source.get_samples(taken)
        source.save(0)
    with (
        capture_logs() as events,
        source_of("unused", dataset=InMemory(50), asyncdata_allow_changed="data", **given) as source,
    ):
        source.load(0)
        assert (source.epoch_id, source.sample_offset) == ((1, 0) if taken else (0, 0))
    assert [(event["num_delivered"], event["num_left_out"]) for event in warnings_of(events)] == expected


def test_slimes_own_checkpoint_in_another_order_warns_without_a_number(prompts, given, tmp_path):
    torch = pytest.importorskip("torch")
    assert torch_checkpoint.is_available()
    folder = tmp_path / "run" / "rollout"
    folder.mkdir(parents=True)
    state = {"sample_offset": 10, "epoch_id": 0, "sample_group_index": 10, "sample_index": 20, "metadata": {}}
    torch.save(state, folder / "global_dataset_state_dict_5.pt")
    allowed = {"asyncdata_order": "stream", "asyncdata_allow_changed": ["order"]}
    with capture_logs() as events, source_of(prompts, **given, **allowed) as source:
        source.load(5)
    (event,) = warnings_of(events)

    assert (event["changed"], event["num_delivered"], event["num_left_out"]) == (["order"], 10, None)


def test_the_dataset_adapter_takes_the_same_rows_under_another_name(prompts, tmp_path):
    dataset = AsyncDatasetAdapter(args_for(prompts))
    dataset.get_next_batch(10)
    state = dataset.get_checkpoint_state()
    expected = [sample.label for sample in dataset.get_next_batch(5)]
    dataset.close()
    renamed = prompts.rename(tmp_path / "renamed.jsonl")

    dataset = AsyncDatasetAdapter(args_for(renamed, asyncdata_same_rows=True))
    dataset.load_checkpoint_state(state)
    assert [sample.label for sample in dataset.get_next_batch(5)] == expected
    dataset.close()
