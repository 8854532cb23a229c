"""``DataLoader``: batches and loops are slices of the order, epoch by epoch, to the end."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncdata import ConfigError, EndOfData, NoSamplesError, Position, Sample, SourceLocation, Status
from tests.support.loaders import make
from tests.support.loading import ids, line_of, order_of, write_rows
from tests.support.tokenize_fns import all_dropped, every_third_dropped

if TYPE_CHECKING:
    from pathlib import Path


NUM_ROWS = 200


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


# Batches


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_batch_is_a_slice_of_the_order_across_epochs(path, num_workers):
    expected = order_of(path, 3)
    sizes = [1, 7, 64, 200, 250]  # the last one holds an end of an epoch wherever it starts

    with make(path, num_workers=num_workers) as loader:
        batches = [loader.get_next_batch(size) for size in sizes]

    assert list(map(len, batches)) == sizes
    assert ids(sample for batch in batches for sample in batch) == expected[: sum(sizes)]


def test_a_batch_may_be_larger_than_all_that_is_read_ahead_and_than_an_epoch(path):
    with make(path, buffer_size=10) as loader:
        assert ids(loader.get_next_batch(2 * NUM_ROWS + 50)) == order_of(path, 3)[: 2 * NUM_ROWS + 50]


def test_a_sample_says_what_it_is_and_where_it_comes_from(path):
    with make(path, n_samples_per_prompt=2) as loader:
        loader.get_next_batch(4)
        first, second = loader.get_next_batch(2)

    row = int(first.tokens[0])
    line, offset = line_of(path, row)
    assert (first.index, second.index) == (4, 5)
    assert (first.group_index, second.group_index) == (2, 2)
    assert first.position == second.position == Position(0, 0, 2)
    assert first.source == SourceLocation(str(path), offset, len(path.read_bytes().splitlines()[row]))
    assert first.source.line_number() == line
    assert (first.label, first.prompt, first.metadata, first.extra) == (row, None, {}, {})
    assert first.tokens.dtype == np.int32
    assert not first.tokens.flags.writeable
    assert np.shares_memory(first.tokens, second.tokens)
    assert first.status is Status.PENDING


def test_samples_of_a_group_share_no_value_that_a_trainer_may_change(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": 1}) + "\n")
    fn = lambda row: {"input_ids": [1], "metadata": {"list": []}, "label": [1]}  # noqa: E731
    with make(path, fn, n_samples_per_prompt=2) as loader:
        first, second = loader.get_next_batch(2)

    first.metadata["list"].append(1)
    first.label.append(2)
    assert (second.metadata, second.label) == ({"list": []}, [1])


def test_groups_are_a_batch_regrouped(path):
    with make(path, n_samples_per_prompt=4) as loader:
        groups = loader.get_samples(3)
        batch = loader.get_next_batch(8)

    expected = order_of(path)
    assert [ids(group) for group in groups] == [[number] * 4 for number in expected[:3]]
    assert ids(batch) == [number for number in expected[3:5] for _ in range(4)]


def test_no_group_at_all_is_no_wait(path):
    with make(path) as loader:
        assert loader.get_samples(0) == []
        assert ids(loader.get_next_batch(5)) == order_of(path)[:5]


@pytest.mark.parametrize("number", [0, -1, 3, "2", 2.0, None])
def test_a_batch_must_be_whole_groups(path, number):
    with make(path, n_samples_per_prompt=2) as loader:
        with pytest.raises(ConfigError, match="^AD440 num_samples must be a positive multiple"):
            loader.get_next_batch(number)
        assert ids(loader.get_next_batch(2)) == [order_of(path)[0]] * 2


@pytest.mark.parametrize("number", [-1, "2", 2.0, None])
def test_a_number_of_groups_must_be_a_number(path, number):
    with make(path) as loader, pytest.raises(ConfigError, match="^AD440 num_groups"):
        loader.get_samples(number)


def test_a_number_may_be_numpys(path):
    with make(path) as loader:
        assert ids(loader.get_next_batch(np.int64(3))) == order_of(path)[:3]
        assert [ids(group) for group in loader.get_samples(np.int32(2))] == [[i] for i in order_of(path)[3:5]]


# Loops


def test_a_for_is_one_epoch_and_the_next_for_the_next(path):
    expected = order_of(path, 3)

    with make(path, batch_size=64) as loader:
        epochs = [[ids(batch) for batch in loader] for _ in range(3)]

    assert [list(map(len, batches)) for batches in epochs] == [[64, 64, 64, 8]] * 3
    assert [number for batches in epochs for batch in batches for number in batch] == expected


def test_a_for_that_ends_exactly_with_the_epoch_has_no_empty_batch(path):
    with make(path, batch_size=100) as loader:
        assert [[len(batch) for batch in loader] for _ in range(2)] == [[100, 100]] * 2


def test_a_for_that_is_left_goes_on_in_the_same_epoch(path):
    with make(path, batch_size=60) as loader:
        first = next(iter(loader))
        rest = list(loader)
        following = next(iter(loader))

    seen = [*ids(first), *(number for batch in rest for number in ids(batch)), *ids(following)]
    assert seen == order_of(path, 2)[: NUM_ROWS + 60]
    assert [len(batch) for batch in rest] == [60, 60, 20]


def test_drop_last_drops_the_short_batch_of_every_epoch_and_counts_it(path):
    expected = order_of(path, 2)

    with make(path, batch_size=64, drop_last=True) as loader:
        epochs = [[ids(batch) for batch in loader] for _ in range(2)]
        statistics = loader.statistics()

    assert epochs[0] == [expected[i : i + 64] for i in (0, 64, 128)]
    assert epochs[1] == [expected[NUM_ROWS + i : NUM_ROWS + i + 64] for i in (0, 64, 128)]
    assert statistics.dropped_total == {"drop_last": 16}


def test_an_epoch_of_less_than_a_batch_under_drop_last_is_an_error(path):
    with make(path, batch_size=NUM_ROWS + 1, drop_last=True) as loader, pytest.raises(NoSamplesError, match="AD406"):
        next(iter(loader))


def test_a_for_without_a_batch_size_says_so(path):
    with make(path) as loader, pytest.raises(ConfigError, match="iterating needs batch_size"):
        iter(loader)


def test_collate_fn_makes_what_the_loop_is_given(path):
    with make(path, batch_size=64, collate_fn=ids) as loader:
        assert [number for batch in loader for number in batch] == order_of(path)


@pytest.mark.thorough
@pytest.mark.parametrize("knobs", [{}, {"n_samples_per_prompt": 2}, {"commit": "on_ack"}, {"buffer_size": 3}], ids=str)
def test_a_batch_whose_collate_fn_raises_is_not_consumed(path, knobs):
    """Wherever it came from: the middle of what is ready, its edge, or a wait."""
    chance = random.Random(1)
    size = knobs.get("n_samples_per_prompt", 1)

    def collate(samples: list[Sample]) -> list[int]:
        if chance.random() < 0.5:
            raise RuntimeError("out of memory")
        return ids(samples)

    with make(path, batch_size=6, collate_fn=collate, **knobs) as loader:
        seen, num_failures = [], 0
        for _ in range(3):
            batches = iter(loader)
            while True:
                try:
                    seen += next(batches)
                except RuntimeError:
                    num_failures += 1
                except StopIteration:
                    break

    assert num_failures > 50
    assert seen == [number for number in order_of(path, 3) for _ in range(size)]


def test_set_epoch_goes_to_the_start_of_another_epoch(path):
    expected = order_of(path, 4)

    with make(path, batch_size=64) as loader:
        loader.set_epoch(2)  # before anything was read
        assert loader.epoch == 2
        assert ids(next(iter(loader))) == expected[400:464]
        loader.set_epoch(0)
        assert ids(loader.get_next_batch(10)) == expected[:10]
        loader.set_epoch(3)
        assert ids(sample for batch in loader for sample in batch) == expected[600:]
        assert loader.epoch == 4


def test_set_epoch_in_the_middle_of_that_epoch_changes_nothing(path):
    with make(path, batch_size=64) as loader:
        loader.get_next_batch(70)
        loader.set_epoch(0)
        assert ids(sample for batch in loader for sample in batch) == order_of(path)[70:]
        loader.set_epoch(1)
        assert ids(loader.get_next_batch(3)) == order_of(path, 2)[NUM_ROWS : NUM_ROWS + 3]


def test_the_usual_trainers_loop_sees_every_epoch_once(path):
    with make(path, batch_size=64) as loader:
        seen = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            seen += [number for batch in loader for number in ids(batch)]

    assert seen == order_of(path, 3)


def test_an_epoch_is_counted_from_zero(path):
    with make(path) as loader, pytest.raises(ConfigError, match="counted from 0"):
        loader.set_epoch(-1)


# The end


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_end_comes_with_the_partial_batch(path, num_workers):
    with make(path, epochs=2, num_workers=num_workers) as loader:
        seen = ids(loader.get_next_batch(390))
        with pytest.raises(EndOfData, match="^AD402 end of data after 2 epochs; 10 of 64 groups were left") as caught:
            loader.get_next_batch(64)
        with pytest.raises(EndOfData) as again:
            loader.get_next_batch(1)

    assert seen + ids(caught.value.samples) == order_of(path, 2)
    assert again.value.samples == []


def test_the_end_under_drop_last_comes_without(path):
    with make(path, epochs=1, drop_last=True) as loader:
        loader.get_next_batch(190)
        with pytest.raises(EndOfData) as caught:
            loader.get_next_batch(64)

    assert caught.value.samples == []


def test_the_end_of_groups_comes_with_groups(path):
    with make(path, epochs=1, n_samples_per_prompt=2) as loader:
        loader.get_samples(198)
        with pytest.raises(EndOfData) as caught:
            loader.get_samples(3)

    assert [len(group) for group in caught.value.groups] == [2, 2]


def test_loops_over_the_last_epoch_just_end(path):
    with make(path, epochs=2, batch_size=64) as loader:
        assert [len(list(loader)) for _ in range(4)] == [4, 4, 0, 0]


def test_groups_given_back_after_the_end_are_served(path):
    with make(path, epochs=1) as loader:
        batch = loader.get_next_batch(NUM_ROWS)
        loader.add_samples([[batch[7]]])
        assert loader.get_next_batch(1) == [batch[7]]
        with pytest.raises(EndOfData):
            loader.get_next_batch(1)


def test_an_epoch_that_yields_nothing_says_what_dropped_the_rows(path):
    with make(path, all_dropped) as loader:
        for _ in range(2):
            with pytest.raises(NoSamplesError) as caught:
                loader.get_next_batch(1)

    assert str(caught.value) == "AD401 epoch 0: 200 rows read, 0 kept: 200 by nothing is good enough"


def test_rows_that_are_dropped_are_counted_and_the_rest_come_in_order(path):
    with make(path, every_third_dropped, batch_size=10) as loader:
        seen = [number for batch in loader for number in ids(batch)]
        statistics = loader.statistics()

    assert seen == [number for number in order_of(path) if number % 3]
    assert statistics.dropped_total == {"tokenize_fn": 67}
