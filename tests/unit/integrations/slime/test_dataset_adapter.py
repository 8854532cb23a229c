"""The interface of slime's streaming datasets, on our loader, and the answers to its known troubles."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from asyncdata.errors import ConfigError, PrefetchTimeoutError, SnapshotMismatchError
from asyncdata.integrations.hf_adapter import AsyncDatasetAdapter, HFDatasetAdapterBase
from tests.support.inner import change
from tests.support.slime_source import GatedRows, SlimeSample, args_for, numbers, source_of

COUNTS = {"epoch_id", "consumed_count", "global_consumed_count"}


def adapter_of(path, **given):
    args = args_for(path, **{"use_hf_datasets": True, "rollout_shuffle": True, **given})
    return contextlib.closing(AsyncDatasetAdapter(args))


def rows(samples):
    return [sample.metadata["row"] for sample in samples]


def place(adapter):
    return adapter.epoch_id, adapter.consumed_count, adapter.global_consumed_count


def test_the_interface_is_the_one_of_slimes_design():
    methods = {"get_next_batch", "shuffle", "get_checkpoint_state", "load_checkpoint_state"}
    assert HFDatasetAdapterBase.__abstractmethods__ == methods
    assert issubclass(AsyncDatasetAdapter, HFDatasetAdapterBase)
    assert not {"__len__", "__getitem__"} & set(dir(AsyncDatasetAdapter))


def test_prompts_come_one_after_the_other_over_all_epochs(prompts):
    with adapter_of(prompts) as adapter:
        found = [rows(adapter.get_next_batch(number)) for number in (4, 6, 15)]
        assert sorted(found[0] + found[1]) == list(range(10)) == sorted(found[2][:10])
        assert found[0] + found[1] != found[2][:10]
        assert place(adapter) == (2, 5, 25)
        assert adapter.get_next_batch(0) == []
        with pytest.raises(ConfigError, match="AD440"):
            adapter.get_next_batch(-1)


def test_samples_are_slimes_own_one_for_each_prompt_whatever_the_groups_size(prompts):
    def sample(n):
        metadata = {"row": n, "tags": ["a", "b"]}
        return SlimeSample(group_index=n, index=n, prompt=f"prompt {n}", label=str(n), metadata=metadata)

    with adapter_of(prompts, rollout_shuffle=False, n_samples_per_prompt=8) as adapter:
        assert adapter.get_next_batch(2) == [sample(0), sample(1)]


def test_an_epoch_may_be_gone_to_and_the_present_one_stays(prompts):
    with adapter_of(prompts) as adapter:
        both = [rows(adapter.get_next_batch(10)) for _ in range(2)]
        adapter.shuffle(0)
        assert rows(adapter.get_next_batch(4)) == both[0][:4]
        adapter.shuffle(0)
        assert rows(adapter.get_next_batch(6)) == both[0][4:]
        adapter.shuffle(1)
        assert place(adapter) == (1, 0, 30)
        assert rows(adapter.get_next_batch(3)) == both[1][:3]
        assert place(adapter) == (1, 3, 33)


@pytest.mark.parametrize("order", ["stream", "legacy"])
@pytest.mark.parametrize("counts_alone", [False, True], ids=["state", "counts"])
@pytest.mark.parametrize("taken", [3, *(pytest.param(number, marks=pytest.mark.thorough) for number in (0, 10, 24))])
def test_it_continues_from_its_state_or_from_the_counts_alone_also_over_renamed_rows(
    prompts, order, taken, counts_alone
):
    with adapter_of(prompts, asyncdata_order=order) as adapter:
        adapter.get_next_batch(taken)
        state = json.loads(json.dumps(adapter.get_checkpoint_state()))
        assert set(state) == {*COUNTS, "loader"}
        expected = rows(adapter.get_next_batch(17))
    if counts_alone:
        state = {key: state[key] for key in COUNTS}
    renamed = prompts.rename(prompts.with_name("renamed.jsonl"))
    with adapter_of(renamed, asyncdata_order=order, asyncdata_same_rows=True) as adapter:
        adapter.get_next_batch(5)
        adapter.load_checkpoint_state(state)
        assert place(adapter) == (state["epoch_id"], state["consumed_count"], taken)

        assert rows(adapter.get_next_batch(17)) == expected


@pytest.mark.parametrize("order", ["stream", "legacy"])
def test_a_state_that_cannot_be_of_this_dataset_is_an_error_and_not_the_next_epoch(prompts, order):
    state = {"epoch_id": 1, "consumed_count": 11, "global_consumed_count": 21}
    with adapter_of(prompts, asyncdata_order=order) as adapter, pytest.raises(SnapshotMismatchError, match="AD603"):
        adapter.load_checkpoint_state(state)


def test_a_slow_row_is_an_error_and_not_a_short_batch(prompts, monkeypatch):
    gate = GatedRows()
    change(monkeypatch, tokenize_function_of_slime=lambda args, options: gate)
    with adapter_of(prompts, asyncdata_timeout_s=0.05, rollout_shuffle=False) as adapter:
        with pytest.raises(PrefetchTimeoutError, match="AD510"):
            adapter.get_next_batch(3)

        assert place(adapter) == (0, 0, 0)
        gate.opened.set()
        found: list[Any] = []
        while not found:
            with contextlib.suppress(PrefetchTimeoutError):
                found = adapter.get_next_batch(3)
        assert [sample.label for sample in found] == [0, 1, 2]


def test_the_data_source_takes_any_dataset_of_this_interface(prompts, given):
    given |= {"asyncdata_dataset": "asyncdata.integrations.hf_adapter.AsyncDatasetAdapter", "rollout_shuffle": True}
    with source_of(prompts, **given) as source:
        source.set_train_parallel_config({"dp_size": 2})
        assert isinstance(source.dataset, AsyncDatasetAdapter)
        with pytest.raises(TypeError):
            len(source)

        source.add_samples(source.get_samples(13)[:1])
        assert (source.epoch_id, source.sample_offset, source.sample_index) == (1, 3, 26)
        source.save(0)
        expected = source.get_samples(9)
    with source_of(prompts, **given) as source:
        source.load(0)
        found = source.get_samples(9)

        assert numbers(found) == numbers(expected)
        assert [group[1].prompt for group in found] == [group[1].prompt for group in expected]
        source.dataset = source.dataset
        assert source.get_samples(1)


def test_the_media_of_rows_become_multimodal_inputs(jsonl_file):
    path = jsonl_file([{"input": "see <image>", "image": ["a.png"], "metadata": {"row": 0}}])
    given = {"multimodal_keys": {"image": "image"}, "asyncdata_processor": "tests.support.slime_source.process_media"}
    with adapter_of(path, label_key=None, **given) as adapter:
        assert adapter.get_next_batch(1)[0].multimodal_inputs == {"images": ["picture a.png"]}
