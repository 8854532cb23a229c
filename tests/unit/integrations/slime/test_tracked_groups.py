"""Tracked groups, and the data buffer of miles that tells where each ends.

What their checkpoints have is held by ``test_slime_rollouts_model``.
"""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import anyio
import pytest

from asyncdata.errors import ConfigError, SnapshotError
from asyncdata.integrations import slime
from asyncdata.integrations.slime import async_rollouts
from tests.support.parts import TrackingBuffer
from tests.support.peers.checkouts import stand_ins
from tests.support.slime_source import InMemory, args_for, source_of


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


def test_a_group_is_consumed_once(prompts, given):
    with source_of(prompts, **given) as source:
        source.track_groups()
        source.track_groups()
        (group,) = source.get_samples(1)
        source.consume_group(group)
        source.drop_group(group, "stale")
        with pytest.raises(ConfigError, match="group 0 was not served, or was consumed"):
            source.consume_group(group)
        assert source.statistics()["asyncdata_dropped_groups_total"] == 0, "it is the trainer's"


def test_without_tracking_no_group_can_end(prompts):
    with source_of(prompts) as source:
        (group,) = source.get_samples(1)
        for call in (source.end_rollout, lambda: source.consume_group(group), lambda: source.drop_group(group, "a")):
            with pytest.raises(ConfigError, match="call track_groups"):
                call()


def test_a_group_that_no_checkpoint_can_store_is_served_and_counted():
    dataset = InMemory(1)
    dataset.samples[0].metadata = {"lock": object()}
    with source_of(None) as source:
        source.dataset = dataset
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
