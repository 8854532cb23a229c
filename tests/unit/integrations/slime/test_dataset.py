"""What code for slime's own data source reaches for: its samples by number, its counters, its filter, its class."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, InvalidGroupError, NoSamplesError, SnapshotMismatchError
from asyncdata.integrations.slime import AsyncDataSource, ReadOnlyDataSource, ReadOnlyError
from asyncdata.integrations.slime.sample import SlimeSample
from tests.support.slime_source import (
    args_for,
    labels,
    newest_first,
    no_rollout,
    numbers,
    set_rollout_id,
    source_of,
    write_prompts,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")

NUM_ROWS = 40


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", NUM_ROWS)


def order_of(epoch: int, num_rows: int = NUM_ROWS, seed: int = 42) -> list[str]:
    """The labels of an epoch in slime's order."""
    rows = list(range(num_rows))
    random.Random(seed + epoch).shuffle(rows)
    return [str(row) for row in rows]


# Samples by number


def test_the_datasets_samples_are_those_of_the_present_epoch_by_number(prompts):
    with source_of(prompts, rollout_shuffle=True, n_samples_per_prompt=3) as source:
        dataset = source.dataset
        assert [sample.label for sample in dataset.samples] == order_of(0)
        assert [dataset[number].label for number in (3, 0, -1, 3)] == [order_of(0)[n] for n in (3, 0, -1, 3)]
        for wanted in (slice(5, 9), slice(None, 3), slice(-2, None), slice(30, 2, -7), slice(4, 4), slice(None)):
            assert [sample.label for sample in dataset.samples[wanted]] == order_of(0)[wanted]
        assert (len(dataset), len(dataset.samples)) == (NUM_ROWS, NUM_ROWS)
        source.get_samples(NUM_ROWS)
        assert dataset.samples[0].label == order_of(0)[0]  # at its very end, the next epoch has not begun
        source.get_samples(1)
        assert [sample.label for sample in dataset.samples] == order_of(1)


def test_a_sample_by_number_is_a_fresh_one_without_numbers(prompts):
    with source_of(prompts, n_samples_per_prompt=3) as source:
        found = source.dataset[7]

        assert found == SlimeSample(prompt="prompt 7", label="7", metadata={"row": 7, "tags": ["a", "b"]})
        assert (found.group_index, found.index) == (None, None)
        assert source.dataset[7].metadata is not found.metadata


def test_looking_at_samples_changes_nothing_of_what_is_delivered(prompts):
    with source_of(prompts, rollout_shuffle=True) as source:
        found = []
        for number in range(NUM_ROWS):
            assert source.dataset[NUM_ROWS - 1 - number].label == order_of(0)[NUM_ROWS - 1 - number]
            found += labels(source.get_samples(1))

    assert found == order_of(0)


@pytest.mark.parametrize("number", [NUM_ROWS, -NUM_ROWS - 1, 10**9])
def test_a_number_that_is_not_there_is_an_index_error(prompts, number):
    with source_of(prompts) as source, pytest.raises(IndexError):
        source.dataset[number]


def test_a_number_of_another_kind_is_a_type_error(prompts):
    with source_of(prompts) as source, pytest.raises(TypeError):
        source.dataset["3"]


def test_a_row_that_yields_no_sample_is_an_error_by_its_number_and_passed_over_in_slices(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", 6, {2: b'{"input": "no label"}', 5: b'{"label": 1}'})
    with source_of(path) as source:
        with pytest.raises(NoSamplesError, match="AD401 prompt 2 of epoch 0"):
            source.dataset[2]
        with pytest.raises(NoSamplesError, match="AD401 prompt 5 of epoch 0"):
            source.dataset[5]

        assert source.dataset[3].label == "3"
        assert [sample.label for sample in source.dataset.samples] == ["0", "1", "3", "4"]
        assert [sample.label for sample in source.dataset.samples[1:4]] == ["1", "3"]


def test_more_samples_than_are_read_at_once_are_all_there(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", 700)
    with source_of(path) as source:
        assert [sample.label for sample in source.dataset.samples] == [str(n) for n in range(700)]
        assert [sample.label for sample in source.dataset.samples[10:690]] == [str(n) for n in range(10, 690)]


def test_in_the_stream_order_samples_have_no_numbers(prompts):
    with source_of(prompts, asyncdata_order="stream") as source, pytest.raises(TypeError, match="--num-rollout"):
        source.dataset[0]


def test_media_are_in_samples_by_number_too(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"input": "see <image>", "label": "a", "pictures": ["one"]}\n')
    given = {
        "multimodal_keys": {"image": "pictures"},
        "asyncdata_processor": "tests.support.slime_source.process_media",
    }
    with source_of(path, **given) as source:
        assert source.dataset[0].multimodal_inputs == {"images": ["picture one"]}


def test_shuffle_shows_another_epoch_as_slimes_dataset_does(prompts):
    with source_of(prompts, rollout_shuffle=True) as source:
        source.dataset.shuffle(3)
        assert [sample.label for sample in source.dataset.samples] == order_of(3)
        assert labels(source.get_samples(2)) == order_of(0)[:2]


def test_the_dataset_of_one_source_serves_another(prompts):
    with source_of(prompts, rollout_shuffle=True) as one, source_of(None, rollout_shuffle=True) as other:
        other.dataset = one.dataset
        assert labels(other.get_samples(NUM_ROWS + 2)) == order_of(0) + order_of(1)[:2]


@pytest.mark.thorough
def test_reading_samples_by_number_leaves_no_state(prompts):
    source = AsyncDataSource(args_for(prompts, asyncdata_num_workers=1, rollout_shuffle=True))
    assert source.dataset[0].label == order_of(0)[0]
    del source
    gc.collect()


# Settable counters


@pytest.mark.parametrize("shuffled", [True, False])
def test_the_offset_may_be_set_to_any_place_of_the_epoch(prompts, shuffled):
    expected = order_of(0) if shuffled else [str(n) for n in range(NUM_ROWS)]
    with source_of(prompts, rollout_shuffle=shuffled) as source:
        source.get_samples(10)
        for offset in (0, 5, 39, 12):
            source.sample_offset = offset
            assert (source.epoch_id, source.sample_offset) == (0, offset)
            assert labels(source.get_samples(1)) == [expected[offset]]
            assert source.sample_offset == offset + 1


def test_at_the_very_end_the_next_epoch_has_not_begun(prompts):
    with source_of(prompts, rollout_shuffle=True) as source:
        source.sample_offset = NUM_ROWS
        assert (source.epoch_id, source.sample_offset) == (0, NUM_ROWS)
        assert labels(source.get_samples(2)) == order_of(1)[:2]
        assert (source.epoch_id, source.sample_offset) == (1, 2)


def test_the_epoch_may_be_set(prompts):
    with source_of(prompts, rollout_shuffle=True) as source:
        source.get_samples(3)
        source.epoch_id = 5
        assert labels(source.get_samples(2)) == order_of(5)[3:5]


def test_groups_and_samples_are_numbered_from_what_is_set(prompts):
    with source_of(prompts, n_samples_per_prompt=2) as source:
        source.sample_group_index, source.sample_index = 100, 7
        assert numbers(source.get_samples(2)) == [(100, [7, 8]), (101, [9, 10])]


@pytest.mark.parametrize("order", ["legacy", "stream"])
def test_what_is_set_is_in_the_checkpoint(prompts, tmp_path, order):
    given = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run"), "asyncdata_order": order}
    with source_of(prompts, **given) as source:
        source.sample_offset = 17
        source.save(0)
        expected = labels(source.get_samples(5))
    with source_of(prompts, **given) as source:
        source.load(0)
        assert source.sample_offset == 17
        assert labels(source.get_samples(5)) == expected


def test_in_the_stream_order_the_offset_counts_the_prompts_of_the_epoch(prompts):
    given = {"asyncdata_order": "stream", "rollout_shuffle": True}
    with source_of(prompts, **given) as source:
        expected = labels(source.get_samples(NUM_ROWS))
    with source_of(prompts, **given) as source:
        source.sample_offset = 30
        assert labels(source.get_samples(10)) == expected[30:]
        source.epoch_id, source.sample_offset = 0, 4
        assert labels(source.get_samples(3)) == expected[4:7]


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["legacy", "stream"])
@pytest.mark.parametrize("value", [-1, 1.5, "3", None, NUM_ROWS + 1])
def test_a_place_that_is_not_there_is_refused_and_changes_nothing(prompts, order, value):
    with source_of(prompts, asyncdata_order=order) as source:
        expected = labels(source.get_samples(3))
        source.sample_offset = 0
        assert labels(source.get_samples(2)) == expected[:2]
        with pytest.raises(ConfigError, match="sample_offset"):
            source.sample_offset = value
        assert source.sample_offset == 2
        assert labels(source.get_samples(1)) == expected[2:]


def test_a_place_that_a_rollout_sets_is_not_in_the_checkpoint_of_the_one_before(prompts, tmp_path):
    given = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    with source_of(prompts, **given) as source:
        set_rollout_id(0)
        source.get_samples(4)
        set_rollout_id(1)
        source.sample_offset = 20
        source.save(0)
    with source_of(prompts, **given) as source:
        source.load(0)
        assert source.sample_offset == 4


class InMemory:
    def __init__(self) -> None:
        self.samples = [SlimeSample(label=str(n)) for n in range(5)]

    def __len__(self) -> int:
        return len(self.samples)


class Counting:
    """A streaming dataset."""

    def __init__(self) -> None:
        self.consumed_count = self.epoch_id = 0

    def get_next_batch(self, num_samples: int) -> list[Any]:
        first, self.consumed_count = self.consumed_count, self.consumed_count + num_samples
        return [SlimeSample(label=str(n)) for n in range(first, first + num_samples)]

    def get_checkpoint_state(self) -> dict[str, Any]:
        return {"epoch_id": 0, "consumed_count": self.consumed_count, "global_consumed_count": 0}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        self.consumed_count = state["consumed_count"]


def test_the_offset_may_be_set_whatever_the_dataset(prompts):
    given = {"asyncdata_dataset": "tests.support.slime_source.dataset_of_args"}
    for dataset in (InMemory(), Counting()):
        with source_of("unused", dataset=dataset, **given) as source:
            source.sample_offset = 3
            assert labels(source.get_samples(2)) == ["3", "4"]
    with source_of("unused", dataset=InMemory(), **given) as source, pytest.raises(ConfigError, match="sample_offset"):
        source.sample_offset = 6
    with source_of(None) as source:
        source.sample_offset = 3
        assert source.sample_offset == 3


# The filter


def test_the_buffer_filter_may_be_replaced(prompts):
    with source_of(prompts, label_key="label") as source:
        assert callable(source.buffer_filter)
        source.buffer_filter = newest_first
        source.add_samples(source.get_samples(3))
        assert labels(source.get_samples(2)) == ["2", "1"]


# Without a buffer


def read_only(path: Path | None, **given: Any) -> ReadOnlyDataSource:
    return ReadOnlyDataSource(args_for(path, **given))


def test_the_read_only_source_serves_what_the_other_serves_and_takes_nothing_back(prompts):
    given = {"rollout_shuffle": True, "n_samples_per_prompt": 2}
    with source_of(prompts, **given) as source:
        expected = source.get_samples(50)
    source = read_only(prompts, **given)
    groups = source.get_samples(50)

    assert groups == expected
    assert source.get_samples(0) == []
    assert len(source) == NUM_ROWS
    for nothing in (None, []):
        source.add_samples(nothing)
    with pytest.raises(ReadOnlyError, match="AD432 a ReadOnlyDataSource takes no groups back") as caught:
        source.add_samples(groups[:1])
    assert isinstance(caught.value, RuntimeError)  # as with slime
    assert isinstance(caught.value, InvalidGroupError)
    assert not hasattr(source, "buffer")
    assert source.get_buffer_length() is None
    assert source.statistics()["asyncdata_buffered_groups"] == 0
    source.close()


def test_the_read_only_source_continues_from_both_kinds_of_checkpoint(prompts, tmp_path):
    given = {"rollout_shuffle": True, "save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    source = read_only(prompts, **given)
    set_rollout_id(0)
    source.get_samples(7)
    set_rollout_id(1)
    source.get_samples(3)
    source.update_metadata({"late": 1})
    source.save(0)
    source.close()
    for make in (read_only, lambda path, **more: AsyncDataSource(args_for(path, **more))):
        source = make(prompts, **given)
        source.load(0)
        assert (source.sample_offset, source.get_metadata()) == (7, {})
        assert labels(source.get_samples(3)) == order_of(0)[7:10]
        set_rollout_id(None)
        source.save(0)
        source.load(0)
        source.sample_offset = 7
        source.save(0)
        source.close()


def test_the_read_only_source_refuses_a_checkpoint_with_groups_in_the_buffer_or_counts_them(prompts, tmp_path):
    given = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    with source_of(prompts, **given) as source:
        source.add_samples(source.get_samples(5)[:2])
        source.save(0)
    source = read_only(prompts, **given)
    with pytest.raises(SnapshotMismatchError, match=r"AD603 .*another buffer: saved 2 groups, present none"):
        source.load(0)
    assert source.sample_offset == 0
    source.close()

    source = read_only(prompts, **given, asyncdata_allow_changed=["buffer"])
    source.load(0)
    assert source.sample_offset == 5
    assert source.statistics()["asyncdata_dropped_groups_read_only_total"] == 2
    source.close()


# slime's class

STAND_IN = """
import abc, dataclasses, sys, types
names = ["{0}", "{0}.utils", "{0}.utils.types", "{0}.rollout", "{0}.rollout.data_source"]
for name in names:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
class DataSource(abc.ABC):
    @abc.abstractmethod
    def get_samples(self, num_samples): ...
Sample = dataclasses.make_dataclass("Sample", [
    (name, object, None) for name in "group_index index prompt tokens label metadata".split()
])
Sample.__module__ = "{0}.utils.types"
sys.modules["{0}.rollout.data_source"].DataSource = DataSource
sys.modules["{0}.utils.types"].Sample = Sample
"""


@pytest.mark.thorough
@pytest.mark.parametrize("package", ["slime", "miles"])
def test_a_source_is_an_instance_of_the_frameworks_own_class(package, tmp_path):
    code = STAND_IN.format(package) + (
        "from types import SimpleNamespace\n"
        "from asyncdata.integrations.slime import AsyncDataSource, ReadOnlyDataSource\n"
        "for kind in (AsyncDataSource, ReadOnlyDataSource):\n"
        "    source = kind(SimpleNamespace(rollout_global_dataset=False))\n"
        "    print(isinstance(source, DataSource), isinstance(3, DataSource))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout.split() == ["True", "False"] * 2, done.stderr


def test_where_the_frameworks_class_cannot_be_had_the_source_works_all_the_same(monkeypatch, prompts):
    monkeypatch.setitem(sys.modules, "slime", types.ModuleType("slime"))
    monkeypatch.setitem(sys.modules, "slime.utils", types.ModuleType("slime.utils"))
    module = types.ModuleType("slime.utils.types")
    module.Sample = type("Sample", (SlimeSample,), {"__module__": "slime.utils.types"})
    monkeypatch.setitem(sys.modules, "slime.utils.types", module)
    with source_of(prompts) as source:
        assert labels(source.get_samples(1)) == ["0"]
