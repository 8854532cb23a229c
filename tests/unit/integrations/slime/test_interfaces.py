"""Tracked groups, the data buffer of miles that tells where each ends; and slime's streaming datasets on our loader."""

import contextlib
import dataclasses
import json
import sys
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncdata.errors import ConfigError, PrefetchTimeoutError, SnapshotError, SnapshotMismatchError
from asyncdata.integrations import slime
from asyncdata.integrations.hf_adapter import AsyncDatasetAdapter, HFDatasetAdapterBase
from asyncdata.integrations.slime import async_rollouts
from tests.support.parts import TrackingBuffer, change
from tests.support.peers.records import stand_ins
from tests.support.slime_source import GatedRows, InMemory, SlimeSample, args_for, numbers, source_of, source_over


def numbers_of(groups):
    return [group[0].group_index for group in groups]


def test_a_rollout_can_be_saved_from_its_last_group_until_a_later_one_is_saved(prompts, given):
    with source_of(prompts, **given) as source:
        source.load(6)
        source.track_groups()
        for group in source.get_samples(6):
            source.consume_group(group)
            source.end_rollout()
        with pytest.raises(SnapshotError, match="rollout 13 cannot be saved: the batch of rollout 13 is not complete"):
            source.save(13)
        source.save(11)
        for old in (7, 10):
            with pytest.raises(SnapshotError, match=f"AD601 rollout {old} cannot be saved any more"):
                source.save(old)


def test_the_driver_may_tell_the_rollout_and_without_a_number_the_last_one_is_saved(prompts, given):
    with source_of(prompts, **given) as source:
        source.track_groups()
        source.begin_rollout(4)
        trained, left = source.get_samples(2)
        source.consume_group(trained)
        source.end_rollout()
        source.begin_rollout(5)
        source.consume_group(left)
        left[0].response = "an answer"
        source.save(None)
        source.load(None)
        (again,) = source.buffer

    assert (again[0].group_index, again[0].response) == (1, ""), "as it was served"


def test_a_group_is_consumed_once_and_one_that_no_checkpoint_can_store_is_counted(prompts, given):
    with source_of(prompts, **given) as source:
        source.track_groups()
        source.track_groups()
        (group,) = source.get_samples(1)
        source.consume_group(group)
        source.drop_group(group, "stale")
        with pytest.raises(ConfigError, match="group 0 was not served, or was consumed"):
            source.consume_group(group)
        assert source.statistics()["asyncdata_dropped_groups_total"] == 0, "it is the trainer's"

    with source_of(prompts) as source:
        (group,) = source.get_samples(1)
        for call in (source.end_rollout, lambda: source.consume_group(group), lambda: source.drop_group(group, "a")):
            with pytest.raises(ConfigError, match="call track_groups"):
                call()

    dataset = InMemory(1)
    dataset.samples[0].metadata = {"lock": object()}
    with source_over(dataset) as source:
        source.track_groups()
        source.get_samples(1)
        assert source.statistics()["asyncdata_unpersistable_groups_total"] == 1


class Plain:
    """As little of a data buffer as ours needs: first in, first out."""

    def __init__(self, input):
        self.handle = input.unused_handler_fn
        self._buffer = []

    async def put(self, input):
        if input.verdict == "aborted":
            self.handle(input.prompt_group)
        elif input.verdict != "filtered":
            self._buffer.append(input)

    async def get(self, **context):
        while (entry := self._buffer.pop(0)).verdict == "stale":
            self.handle(entry.prompt_group)
        return entry

    def get_metrics(self):
        return {"queue": len(self._buffer)}


class Buffer(TrackingBuffer, Plain): ...


Input = dataclasses.make_dataclass("Input", ["args", "unused_handler_fn"], frozen=True)
"""As miles makes a data buffer with."""


@pytest.mark.parametrize("handler", ["drop", "retry"])
def test_the_data_buffer_tells_where_each_group_ends(prompts, given, handler):
    async def run(source):
        back = source.add_samples if handler == "retry" else lambda groups: None
        buffer = Buffer(Input(source.args, lambda group: back([group])))
        for group, verdict in zip(source.get_samples(4), ("aborted", "stale", "filtered", "kept"), strict=True):
            await buffer.put(SimpleNamespace(prompt_group=group, verdict=verdict))
        return await buffer.get(current_version=1), buffer.get_metrics()

    with source_of(prompts, **given) as source:
        kept, metrics = anyio.run(run, source)
        source.save(0)

        assert numbers_of([kept.prompt_group]) == [3]
        reasons = ("dynamic_filter",) if handler == "retry" else ("aborted", "dynamic_filter", "stale")
        prefix = "rollout/asyncdata/"
        expected = {"queue": 0, f"{prefix}tracked_groups": 0, f"{prefix}dropped_groups_total": len(reasons)}
        assert metrics == expected | {f"{prefix}dropped_groups_{reason}_total": 1 for reason in reasons}
        assert numbers_of(source.buffer) == ([0, 1] if handler == "retry" else [])


def test_a_data_buffer_needs_our_data_source_with_the_same_arguments_and_miles_layout(prompts):
    kind = type("Odd", (TrackingBuffer, type("Empty", (), {"__init__": lambda self, input: None})), {})
    message = r"pass --data-source-path asyncdata\.integrations\.slime\.AsyncDataSource"
    with source_of(prompts) as source:
        with pytest.raises(ConfigError, match=message):
            Buffer(Input(args_for(None), print))
        with pytest.raises(ConfigError, match="Odd cannot see which ones it drops"):
            kind(Input(source.args, print))


def test_the_data_buffer_is_miles_own_class_with_ours_before_it(monkeypatch):
    for module in (slime, async_rollouts):
        monkeypatch.setitem(vars(module), "AsyncDataBuffer", None)  # it is as it was in the end
        del module.AsyncDataBuffer
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "miles", None)
        with pytest.raises(ConfigError, match="AsyncDataBuffer needs miles"):
            slime.AsyncDataBuffer  # noqa: B018 - the access is what is tested
    name = "miles.rollout.fully_async_data_buffer"
    with stand_ins({"miles": {}, "miles.rollout": {}, name: {"DefaultDataBuffer": Plain}}):
        assert slime.AsyncDataBuffer.__mro__[1:3] == (TrackingBuffer, Plain)


def test_what_slimes_asynchronous_rollout_returns_is_trained_and_all_else_is_in_the_checkpoint(prompts, given):
    def theirs(args, rollout_id, data_buffer, evaluation):
        first, second, third = data_buffer.get_samples(3)
        data_buffer.add_samples([second])
        return [list(first)]  # as asyncio.gather makes it; the third is in its queue

    modules = {"slime": {"__path__": []}, "slime.rollout": {"__path__": []}}
    modules["slime.rollout.fully_async_rollout"] = {"generate_rollout_fully_async": theirs}
    with stand_ins(modules), source_of(prompts, **given) as source:
        assert numbers_of(slime.generate_fully_async(source.args, 7, source)) == [0]
        assert numbers_of(slime.generate_fully_async(source.args, 8, source)) == [1]
        source.save(7)
        source.load(7)
        assert numbers_of(source.buffer) == [1, 2, 4, 3], "what was out, and what was given back"
        with pytest.raises(ConfigError, match="that is a InMemory: pass --data-source-path"):
            slime.generate_fully_async(source.args, 9, InMemory(1))


COUNTS = {"epoch_id", "consumed_count", "global_consumed_count"}


def adapter_of(path, **given):
    args = args_for(path, **{"use_hf_datasets": True, "rollout_shuffle": True, **given})
    return contextlib.closing(AsyncDatasetAdapter(args))


def rows(samples):
    return [sample.metadata["row"] for sample in samples]


def place(adapter):
    return adapter.epoch_id, adapter.consumed_count, adapter.global_consumed_count


def test_prompts_come_one_after_the_other_over_epochs_and_an_epoch_may_be_gone_to(prompts):
    methods = {"get_next_batch", "shuffle", "get_checkpoint_state", "load_checkpoint_state"}
    assert HFDatasetAdapterBase.__abstractmethods__ == methods
    assert issubclass(AsyncDatasetAdapter, HFDatasetAdapterBase)
    assert not {"__len__", "__getitem__"} & set(dir(AsyncDatasetAdapter))

    with adapter_of(prompts) as adapter:
        found = [rows(adapter.get_next_batch(number)) for number in (4, 6, 15)]
        assert sorted(found[0] + found[1]) == list(range(10)) == sorted(found[2][:10])
        assert found[0] + found[1] != found[2][:10]
        assert (place(adapter), adapter.get_next_batch(0)) == ((2, 5, 25), [])
        with pytest.raises(ConfigError, match="AD440"):
            adapter.get_next_batch(-1)

    with adapter_of(prompts) as adapter:
        both = [rows(adapter.get_next_batch(10)) for _ in range(2)]
        adapter.shuffle(0)
        assert rows(adapter.get_next_batch(4)) == both[0][:4]
        adapter.shuffle(0)
        assert rows(adapter.get_next_batch(6)) == both[0][4:]
        adapter.shuffle(1)
        assert (place(adapter), rows(adapter.get_next_batch(3))) == ((1, 0, 30), both[1][:3])
        assert place(adapter) == (1, 3, 33)


def test_samples_are_slimes_own_one_for_each_prompt_and_media_become_multimodal_inputs(prompts, jsonl_file):
    def sample(n):
        metadata = {"row": n, "tags": ["a", "b"]}
        return SlimeSample(group_index=n, index=n, prompt=f"prompt {n}", label=str(n), metadata=metadata)

    with adapter_of(prompts, rollout_shuffle=False, n_samples_per_prompt=8) as adapter:
        assert adapter.get_next_batch(2) == [sample(0), sample(1)]
    path = jsonl_file([{"input": "see <image>", "image": ["a.png"], "metadata": {"row": 0}}])
    given = {"multimodal_keys": {"image": "image"}, "asyncdata_processor": "tests.support.slime_source.process_media"}
    with adapter_of(path, label_key=None, **given) as adapter:
        assert adapter.get_next_batch(1)[0].multimodal_inputs == {"images": ["picture a.png"]}


@pytest.mark.parametrize("order", ["stream", "legacy"])
@pytest.mark.parametrize("counts_alone", [False, True], ids=["state", "counts"])
@pytest.mark.parametrize("taken", [3, *(pytest.param(number, marks=pytest.mark.thorough) for number in (0, 10, 24))])
def test_it_continues_from_its_state_or_from_counts_also_over_renamed_rows(prompts, order, taken, counts_alone):
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
