"""Tracked groups: each one that was served is trained, dropped and counted, or in the checkpoint."""

from __future__ import annotations

import dataclasses
import random
import sys
import types
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncdata import ConfigError, SnapshotError
from asyncdata.integrations.slime.data_source import source_with
from asyncdata.integrations.slime.miles_buffer import TrackingBuffer
from tests.support.slime_source import args_for, source_of, write_prompts

if TYPE_CHECKING:
    from asyncdata.integrations.slime import AsyncDataSource

NUM_ROWS = 23


@pytest.fixture
def given(tmp_path):
    return {
        "path": write_prompts(tmp_path / "p.jsonl", NUM_ROWS),
        "save": str(tmp_path),
        "load": str(tmp_path),
        "n_samples_per_prompt": 2,
    }


def numbers_of(groups):
    return [group[0].group_index for group in groups]


def tracked(source):
    source.track_groups()
    return source


class Model:
    """A run at random: what has come to each group, by its number."""

    def __init__(self, source: AsyncDataSource, seed: int) -> None:
        self.source, self.chance = source, random.Random(seed)
        self.out: list[Any] = []
        self.rollout_id = 0
        self.trained: dict[int, int] = {}
        self.dropped: Counter[str] = Counter()

    def step(self) -> None:
        if not self.out or self.chance.random() < 0.4:
            self.out += self.source.get_samples(self.chance.randint(1, 3))
            return

        group = self.out.pop(self.chance.randrange(len(self.out)))
        match self.chance.randint(0, 5):
            case 0:
                group[0].response = "half"
                self.source.add_samples([group])
            case 1:
                reason = self.chance.choice(["stale", "aborted"])
                self.source.drop_group(group, reason)
                self.dropped[reason] += 1
            case _:
                self.trained[group[0].group_index] = self.rollout_id
                self.source.consume_group(group)

    def end(self) -> None:
        self.rollout_id += 1
        self.source.end_rollout()

    def check(self, given: dict[str, Any], rollout_id: int) -> None:
        """The checkpoint of ``rollout_id``, as a restart finds it."""
        with source_of(**given) as restored:
            restored.load(rollout_id)
            held = numbers_of(restored.buffer)
            trained = {number for number, rollout in self.trained.items() if rollout <= rollout_id}
            assert len(held) == len(set(held)), "none twice"
            assert not trained & set(held), "what is trained is not served again"
            assert len(trained) + len(held) + self.dropped.total() == restored.sample_group_index
            drops = restored.statistics()
            assert {
                name: drops.get(f"asyncdata_dropped_groups_{name}_total", 0) for name in self.dropped
            } == self.dropped


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_has_each_group_that_is_neither_trained_nor_dropped(given, seed):
    with source_of(**given) as source:
        model = Model(tracked(source), seed)
        for _ in range(8):
            for _ in range(12):
                model.step()
            model.end()
            for _ in range(model.chance.randint(0, 9)):  # of the next rollout, which has begun
                model.step()
            source.save(model.rollout_id - 1)
            model.check(given, model.rollout_id - 1)


def test_a_group_is_saved_as_it_was_served(given):
    with source_of(**given) as source:
        (group,) = tracked(source).get_samples(1)
        group[0].response, group[0].tokens = "an answer", [1, 2]
        source.save(None)
    with source_of(**given) as source:
        source.load(None)
        (again,) = source.get_samples(1)

    assert numbers_of([again]) == [0]
    assert (again[0].response, again[0].tokens) == ("", [])


def test_after_a_restart_the_oldest_groups_are_served_first_and_then_fresh_ones(given):
    with source_of(**given) as source:
        first, second, third = tracked(source).get_samples(3)
        source.consume_group(second)
        source.end_rollout()
        source.consume_group(third)
        source.save(0)
    with source_of(**given) as source:
        source.load(0)
        assert numbers_of(tracked(source).get_samples(3)) == [0, 2, 3]


def test_rollouts_are_counted_from_the_one_that_is_loaded(given):
    with source_of(**given) as source:
        source.load(6)
        (group,) = tracked(source).get_samples(1)
        source.consume_group(group)
        source.end_rollout()
        source.save(7)
        with pytest.raises(SnapshotError, match="rollout 8 cannot be saved: the batch of rollout 8 is not complete"):
            source.save(8)


def test_the_driver_may_tell_the_rollout(given):
    with source_of(**given) as source:
        tracked(source).begin_rollout(4)
        source.consume_group(source.get_samples(1)[0])
        source.end_rollout()
        source.begin_rollout(5)
        source.save(4)
        assert source.statistics()["asyncdata_tracked_groups"] == 0


def test_a_rollout_that_was_saved_long_ago_is_refused(given):
    with source_of(**given) as source:
        for group in tracked(source).get_samples(6):
            source.consume_group(group)
            source.end_rollout()
        source.save(4)
        for old in (0, 3):
            with pytest.raises(SnapshotError, match=f"AD601 rollout {old} cannot be saved any more"):
                source.save(old)


def test_a_copy_of_a_group_is_known_by_its_number(given):
    with source_of(**given) as source:
        first, second, third = tracked(source).get_samples(3)
        source.consume_group([first[0], first[1]])
        source.drop_group([second[0], second[1]], "stale")
        source.add_samples([[third[0], third[1]]])
        statistics = source.statistics()

    assert statistics["asyncdata_tracked_groups"] == 0
    assert statistics["asyncdata_dropped_groups_stale_total"] == 1
    assert statistics["asyncdata_buffered_groups"] == 1


def test_a_group_is_consumed_once(given):
    with source_of(**given) as source:
        (group,) = tracked(source).get_samples(1)
        source.consume_group(group)
        source.drop_group(group, "stale")
        with pytest.raises(ConfigError, match="group 0 was not served, or was consumed"):
            source.consume_group(group)
        assert source.statistics()["asyncdata_dropped_groups_total"] == 0, "it is the trainer's"


def test_without_tracking_no_group_can_end(given):
    with source_of(**given) as source:
        (group,) = source.get_samples(1)
        for call in (source.end_rollout, lambda: source.consume_group(group), lambda: source.drop_group(group, "a")):
            with pytest.raises(ConfigError, match="call track_groups"):
                call()


def test_a_group_that_no_checkpoint_can_store_is_served_and_named(given):
    with source_of(**given) as source:
        (sample,) = source.dataset.samples[:1]
        sample.metadata = {"lock": object()}
        source.dataset = Dataset(samples=[sample])
        tracked(source).get_samples(1)
        assert source.statistics()["asyncdata_unpersistable_groups_total"] == 1


class Dataset(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.samples)


# The data buffer


@dataclasses.dataclass(frozen=True)
class Input:
    args: Any
    unused_handler_fn: Any


class Plain:
    """As little of a data buffer as ours needs: first in, first out."""

    def __init__(self, input: Any) -> None:
        self.handle = input.unused_handler_fn
        self._buffer: list[Any] = []

    async def put(self, input: Any) -> None:
        if input.verdict == "aborted":
            self.handle(input.prompt_group)
        elif input.verdict != "filtered":
            self._buffer.append(input)

    async def get(self, **context: Any) -> Any:
        while (entry := self._buffer.pop(0)).verdict == "stale":
            self.handle(entry.prompt_group)
        return entry

    def get_metrics(self) -> dict[str, float]:
        return {"queue": len(self._buffer)}


class Buffer(TrackingBuffer, Plain): ...


@pytest.mark.parametrize("handler", ["drop", "retry"])
def test_the_data_buffer_tells_where_each_group_ends(given, handler):
    async def run(source: AsyncDataSource) -> Any:
        back = source.add_samples if handler == "retry" else lambda groups: None
        buffer = Buffer(Input(source.args, lambda group: back([group])))
        for group, verdict in zip(source.get_samples(4), ("aborted", "stale", "filtered", "kept"), strict=True):
            await buffer.put(SimpleNamespace(prompt_group=group, verdict=verdict))
        kept = await buffer.get(current_version=1)
        return kept, buffer.get_metrics()

    with source_of(**given) as source:
        kept, metrics = anyio.run(run, source)
        source.save(0)

        assert numbers_of([kept.prompt_group]) == [3]
        reasons = ("dynamic_filter",) if handler == "retry" else ("aborted", "dynamic_filter", "stale")
        prefix = "rollout/asyncdata/"
        expected = {"queue": 0, f"{prefix}tracked_groups": 0, f"{prefix}dropped_groups_total": len(reasons)}
        assert metrics == expected | {f"{prefix}dropped_groups_{reason}_total": 1 for reason in reasons}
        assert numbers_of(source.buffer) == ([0, 1] if handler == "retry" else [])


def test_a_data_buffer_needs_our_data_source_with_the_same_arguments(given):
    with source_of(**given) as source:
        assert source_with(source.args) is source
        with pytest.raises(
            ConfigError, match=r"pass --data-source-path asyncdata\.integrations\.slime\.AsyncDataSource"
        ):
            Buffer(Input(args_for(None), print))


def test_a_data_buffer_of_another_layout_is_refused(given):
    class Empty:
        def __init__(self, input: Any) -> None: ...

    kind = type("Odd", (TrackingBuffer, Empty), {})
    with source_of(**given) as source, pytest.raises(ConfigError, match="Odd cannot see which ones it drops"):
        kind(Input(source.args, print))


def test_the_data_buffer_is_miles_own_class_with_ours_before_it(monkeypatch):
    import asyncdata.integrations.slime as slime
    from asyncdata.integrations.slime import miles_buffer

    for module in (slime, miles_buffer):
        monkeypatch.delitem(vars(module), "AsyncDataBuffer", raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "miles", None)
        with pytest.raises(ConfigError, match="AsyncDataBuffer needs miles"):
            slime.AsyncDataBuffer  # noqa: B018 - the access is what is tested

    stand_in = types.ModuleType("miles.rollout.fully_async_data_buffer")
    vars(stand_in)["DefaultDataBuffer"] = Plain
    for name in ("miles", "miles.rollout", stand_in.__name__):
        monkeypatch.setitem(sys.modules, name, stand_in)
    found = slime.AsyncDataBuffer

    assert found.__mro__[1:3] == (TrackingBuffer, Plain)
    for module in (slime, miles_buffer):
        monkeypatch.delitem(vars(module), "AsyncDataBuffer", raising=False)
