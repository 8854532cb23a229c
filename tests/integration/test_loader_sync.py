"""``DataLoader``: what a plain trainer does with it, and what it may do wrong."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import (
    BadRowError,
    ConfigError,
    DataLoader,
    EndOfData,
    FilterError,
    InvalidGroupError,
    JsonlSource,
    LoaderClosedError,
    LoaderForkedError,
    NoSamplesError,
    Position,
    PrefetchTimeoutError,
    PromptTokenizeFn,
    Sample,
    Shuffle,
    SourceChangedError,
    SourceLocation,
    Status,
    TooManyBadRowsError,
    WorkerError,
)
from asyncdata.order.order import Order
from asyncdata.prefetch.producer import Producer
from tests.support import worker_fns
from tests.support.closing import is_alive, num_closing, service_of, slow_to_close
from tests.support.loading import NEVER_S, SHUFFLE, ids, line_of, order_of, write_rows
from tests.support.tokenize_fns import (
    all_dropped,
    every_third_dropped,
    fails_on_13,
    hangs_on_13,
    kills_on_13,
    row_id,
    waits_for_a_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ROWS = 200


def make(path: Path, tokenize_fn: Any = row_id, **knobs: Any) -> DataLoader:
    """A loader that fails rather than hangs, inline where nothing else is asked for."""
    return DataLoader(path, tokenize_fn=tokenize_fn, **{"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 30} | knobs)


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def until(condition: Callable[[], object]) -> None:
    """Until another thread has done its part: looked at again and again, as nobody tells us."""
    deadline = time.monotonic() + NEVER_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


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


# Giving back


def test_what_is_given_back_comes_first_each_once_and_then_the_order_goes_on(path):
    expected = order_of(path)

    with make(path, n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(6)
        groups[1][0].response = "half a"
        loader.add_samples([groups[1], groups[4]])
        assert loader.statistics().buffered_groups == 2
        again = loader.get_samples(3)
        after = loader.get_samples(1)

    assert again[:2] == [groups[1], groups[4]]  # the very samples: equality is identity
    assert again[0][0].response == "half a"
    assert [ids(group)[0] for group in [*again[2:], *after]] == expected[6:8]


def test_a_sample_made_by_hand_may_be_added(path):
    mine = Sample(prompt="mine", tokens=np.array([9, 9], np.int32), metadata={"a": 1})

    with make(path) as loader:
        loader.add_samples([[mine]])
        assert loader.get_next_batch(2)[0] is mine


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda groups: [*groups, groups[0][:1]], "group 3 has 1 samples, and n_samples_per_prompt is 2"),
        (lambda groups: [*groups, [1, 2]], "group 3 must be a list of Sample, got a list of int"),
        (lambda groups: [*groups, groups[0]], "group 3 is in the buffer already"),
        (lambda groups: groups[0][0], "takes a list of groups, got Sample"),
        (lambda groups: [setattr(groups[2][1], "reward", object()) or group for group in groups], "group 2: .*reward"),
    ],
)
def test_groups_are_added_all_or_none(path, spoil, match):
    with make(path, n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(3)
        with pytest.raises(InvalidGroupError, match=f"^AD432 .*{match}"):
            loader.add_samples(spoil(groups))
        assert loader.statistics().buffered_groups == 0
        assert ids(loader.get_next_batch(2)) == [order_of(path)[3]] * 2


def test_a_filter_chooses(path):
    with make(path, buffer_filter=lambda buffer, num_groups: buffer[-1:]) as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[:3])
        served = loader.get_samples(2)
        left = loader.statistics().buffered_groups

    assert served[0] == groups[2]
    assert ids(served[1]) == order_of(path)[4:5]
    assert left == 2


def test_a_filter_by_import_path(path):
    with make(path, buffer_filter="tests.support.filters:newest_first") as loader:
        groups = loader.get_samples(3)
        loader.add_samples(groups)
        assert loader.get_samples(3) == groups[::-1]


def test_a_filter_that_breaks_its_contract_takes_nothing(path):
    wrong: list[Any] = [lambda buffer, number: 1 / 0, lambda buffer, number: [[]], lambda buffer, number: None]

    for function in wrong:
        with make(path, buffer_filter=function) as loader:
            groups = loader.get_samples(2)
            loader.add_samples(groups)
            with pytest.raises(FilterError, match="^AD43[01] "):
                loader.get_samples(1)
            assert loader.statistics().buffered_groups == 2


def test_a_filter_that_gives_too_much_is_capped_and_loses_nothing(path):
    with make(path, buffer_filter=lambda buffer, number: buffer) as loader:
        groups = loader.get_samples(5)
        loader.add_samples(groups)
        assert loader.get_samples(2) == groups[:2]
        assert loader.get_samples(3) == groups[2:]


@pytest.mark.parametrize("name", ["tests.support.filters:nothing", "no path", 7])
def test_a_filter_that_is_none_is_refused_at_once(path, name):
    with pytest.raises(ConfigError):
        make(path, buffer_filter=name)


# Bad rows


def bad_row_at(loader: DataLoader) -> tuple[list[int], BadRowError]:
    """What is delivered one by one before a bad row stops it, and how; twice, as nothing may be passed."""
    seen = []
    with pytest.raises(BadRowError) as caught:
        while True:
            seen += ids(loader.get_next_batch(1))
    with pytest.raises(BadRowError) as again:
        loader.get_next_batch(1)
    assert str(again.value) == str(caught.value)
    return seen, caught.value


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("buffer_size", [1, 20, 1000])
def test_a_bad_row_stops_the_stream_at_its_turn_with_file_line_and_byte(path, num_workers, buffer_size):
    expected = order_of(path)

    with make(path, fails_on_13, num_workers=num_workers, buffer_size=buffer_size) as loader:
        seen, error = bad_row_at(loader)

    line, offset = line_of(path, 13)
    assert seen == expected[: expected.index(13)]
    assert (error.code, error.path, error.line, error.byte_offset) == ("AD421", str(path), line, offset)
    assert str(error).startswith(
        f"AD421 {path}:{line} (byte {offset}): the tokenize function raised KeyError('thirteen')\n"
    )


def test_a_bad_row_takes_nothing_of_a_larger_batch(path):
    expected = order_of(path)
    turn = expected.index(13)

    with make(path, fails_on_13) as loader:
        for _ in range(2):
            with pytest.raises(BadRowError):
                loader.get_next_batch(turn + 1)
        assert ids(loader.get_next_batch(turn)) == expected[:turn]


def test_bad_rows_are_skipped_and_counted(path):
    with make(path, fails_on_13, on_bad_row="skip", batch_size=50) as loader:
        seen = [number for batch in loader for number in ids(batch)]
        statistics = loader.statistics()

    assert seen == [number for number in order_of(path) if number != 13]
    assert (statistics.bad_rows_total, statistics.dropped_total) == (1, {"bad row AD421": 1})


def test_bad_rows_go_to_quarantine(path, tmp_path):
    lines = path.read_bytes().splitlines()
    lines[50] = b'{"id": 50, oops'
    path.write_bytes(b"\n".join(lines) + b"\n")
    quarantine = tmp_path / "bad.jsonl"
    knobs = {"on_bad_row": "quarantine", "quarantine_path": str(quarantine), "batch_size": 10}

    with make(path, fails_on_13, **knobs) as loader:
        seen = sorted(number for batch in loader for number in ids(batch))

    assert seen == [number for number in range(NUM_ROWS) if number not in (13, 50)]
    records = {record["code"]: record for record in map(json.loads, quarantine.read_text().splitlines())}
    line, offset = line_of(path, 50)
    assert records.keys() == {"AD101", "AD421"}
    assert (records["AD101"]["path"], records["AD101"]["line"], records["AD101"]["byte_offset"]) == (
        str(path),
        line,
        offset,
    )


def test_more_bad_rows_than_the_budget_stop_the_stream(path):
    def never(row: dict[str, Any]) -> list[int]:
        raise ValueError("no")

    with make(path, never, on_bad_row="skip", max_bad_rows=3) as loader:
        for _ in range(2):
            with pytest.raises(TooManyBadRowsError, match="^a bad row, after max_bad_rows=3 of them: AD421 ") as caught:
                loader.get_next_batch(1)

    assert f"{path}:{line_of(path, order_of(path)[3])[0]} (byte " in str(caught.value)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("buffer_size", [1, 50, 1000])
def test_a_row_that_kills_workers_is_found_and_named_at_its_turn(path, num_workers, buffer_size):
    expected = order_of(path)

    with make(path, kills_on_13, num_workers=num_workers, buffer_size=buffer_size) as loader:
        seen, error = bad_row_at(loader)

    line, offset = line_of(path, 13)
    assert (error.code, error.line, error.byte_offset) == ("AD423", line, offset)
    assert error.reason == "its worker died (SIGSEGV)"
    assert seen == expected[: expected.index(13)]


def test_a_row_that_kills_workers_does_so_a_few_times_and_no_more(tmp_path):
    """Here it is one of the fixed rows, too, that are to show whether the tokens are the same after a resume."""
    path = write_rows(tmp_path / "rows.jsonl", 1000, {0: {"do": "die"}})

    with make(path, worker_fns.as_told, num_workers=2, on_bad_row="skip", buffer_size=50, epochs=1) as loader:
        assert sorted(ids(loader.get_next_batch(999))) == list(range(1, 1000))
        assert loader.statistics().worker_restarts_total <= 2 + 3 * 2


@pytest.mark.parametrize("what", ["dies", "hangs"])
def test_a_row_that_kills_a_batch_is_told_from_the_row_that_was_read_last(path, what):
    """A tokenizer reads row by row, and says so, and then encodes all at once."""
    expected = order_of(path)
    description = worker_fns.ReadsThenEncodes(what)

    with make(path, description, num_workers=1, on_bad_row="skip", epochs=1, row_timeout_s=0.5) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == [number for number in expected if number != 13]
        assert loader.statistics().bad_rows_total == 1


def test_a_row_that_kills_workers_is_skipped_and_its_neighbours_are_not(path):
    with make(path, kills_on_13, num_workers=2, on_bad_row="skip", batch_size=64) as loader:
        seen = [number for batch in loader for number in ids(batch)]
        state = loader.state_dict()

    assert seen == [number for number in order_of(path) if number != 13]
    assert state["journal"] == [[0, line_of(path, 13)[1]]]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_row_that_hangs_is_named_at_its_turn(path, num_workers):
    expected = order_of(path)

    with make(path, hangs_on_13, num_workers=num_workers, row_timeout_s=0.3) as loader:
        seen, error = bad_row_at(loader)

    assert (error.code, error.line) == ("AD422", 14)
    assert error.reason == "no result in 0.3 s; its worker was killed (SIGKILL)"
    assert seen == expected[: expected.index(13)]


# Files that change


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("buffer_size", [1, 1000])
def test_a_file_cut_short_stops_the_stream_at_the_first_window_that_is_read_after_it(
    tmp_path, num_workers, buffer_size
):
    """The windows before it are delivered to their last row, however much was read ahead. What is left of the file may
    not be what was there: who writes a file anew cuts it first.
    """
    path = write_rows(tmp_path / "rows.jsonl", 1000)
    lines = path.read_bytes().splitlines(keepends=True)
    shuffle = Shuffle(enabled=False, block_bytes=4096, window_blocks=2)
    with make(path, num_workers=num_workers, shuffle=shuffle, buffer_size=buffer_size) as loader:
        seen = []
        os.truncate(path, 40_000)
        with pytest.raises(SourceChangedError, match="^AD302 .* shrank"):
            while True:
                seen += ids(loader.get_next_batch(1))

    order = Order(shuffle, 42, -(-len(b"".join(lines)) // 4096))
    ends = [4096 * (int(order.blocks(0, window)[-1]) + 1) for window in range(order.num_windows)]
    starts = [sum(map(len, lines[:row])) for row in range(1000)]
    num_rows = [sum(start < end for start in starts) for end in (0, *ends)]  # to the end of each window
    assert seen == list(range(len(seen)))
    assert len(seen) in num_rows
    assert len(seen) < 1000


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("buffer_size", [1, 1000])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_file_replaced_during_an_epoch_stops_the_stream(path, num_workers, buffer_size, is_known):
    """At the next epoch's start it is looked at again, and wherever a worker opens it that had not; how much was read
    ahead by then is not told. What is delivered is of the file that it was.
    """
    with make(path, num_workers=num_workers, buffer_size=buffer_size) as loader:
        if is_known:
            loader.state_dict()  # with a fingerprint of the content
        seen = ids(loader.get_next_batch(1))
        other = path.with_name("other")
        other.write_bytes(path.read_bytes().replace(b"x", b"y"))
        other.rename(path)
        with pytest.raises(SourceChangedError, match="^AD303 .* was replaced or edited"):
            while True:
                seen += ids(loader.get_next_batch(1))

    assert 0 < len(seen) <= 8 * NUM_ROWS
    assert num_workers or len(seen) % NUM_ROWS == 0
    assert seen == order_of(path, -(-len(seen) // NUM_ROWS))[: len(seen)]


def test_a_file_that_grows_is_read_to_where_it_ended_at_the_start(path):
    expected = order_of(path, 3)

    with make(path) as loader:
        loader.get_next_batch(1)
        with path.open("a") as file:
            file.write('{"id": 1000}\n' * 500)
        assert ids(loader.get_next_batch(3 * NUM_ROWS - 1)) == expected[1:]


# Waiting


def gated(tmp_path: Path, row: int) -> tuple[Path, Path]:
    """Rows of which one waits for a file, and the file."""
    gate = tmp_path / "gate"
    return write_rows(tmp_path / "gated.jsonl", NUM_ROWS, {row: {"gate": str(gate)}}), gate


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_timeout_says_why_and_consumes_nothing(tmp_path, num_workers):
    first = order_of(write_rows(tmp_path / "gated.jsonl", NUM_ROWS))[40]
    path, gate = gated(tmp_path, first)
    expected = order_of(path)
    turn = expected.index(first)

    with make(path, waits_for_a_file, num_workers=num_workers, buffer_size=4) as loader:
        seen = ids(loader.get_next_batch(turn))
        with pytest.raises(PrefetchTimeoutError) as caught:
            loader.get_next_batch(5, timeout_s=0.3)
        gate.touch()
        seen += ids(loader.get_next_batch(50))

    line, offset = line_of(path, first)
    message, diagnosis = str(caught.value), caught.value.diagnosis
    assert message.startswith("AD510 no data for 0.")
    assert "0 samples are ready, 5 more are needed" in message
    assert "stage: tokenize: the workers cannot keep up, or one hangs (busy for " in message
    assert "workers: busy 0." in message
    assert f"oldest row in flight: {path}:{line} (byte {offset})" in message
    assert "try: more num_workers, a larger buffer_size" in message
    assert diagnosis["oldest_row"]["byte_offset"] == offset
    assert diagnosis["statistics"]["workers"][0]["state"] == "busy"
    json.dumps(diagnosis)
    assert isinstance(caught.value, TimeoutError)
    assert seen == expected[: turn + 50]


def test_a_timeout_of_the_loader_holds_for_every_call(tmp_path):
    path, gate = gated(tmp_path, 0)
    with make(path, waits_for_a_file, shuffle=False, timeout_s=0.1, batch_size=2) as loader:
        with pytest.raises(PrefetchTimeoutError):
            loader.get_next_batch(1)
        with pytest.raises(PrefetchTimeoutError):
            loader.get_samples(1)
        with pytest.raises(PrefetchTimeoutError):
            next(iter(loader))
        gate.touch()
        assert ids(loader.get_next_batch(2, timeout_s=30)) == [0, 1]


def test_a_timeout_while_workers_start_says_so(path, tmp_path):
    slow = worker_fns.Opening("waits", str(tmp_path))
    with make(path, slow, num_workers=2) as loader:
        with pytest.raises(PrefetchTimeoutError, match="stage: start: the workers are "):
            loader.get_next_batch(1, timeout_s=0.5)
        (tmp_path / "open").touch()
        assert ids(loader.get_next_batch(3)) == order_of(path)[:3]


def test_a_timeout_of_nothing_takes_what_is_there(path):
    with make(path) as loader:
        until(lambda: loader.statistics().ready_samples >= 10)
        assert ids(loader.get_next_batch(10, timeout_s=0)) == order_of(path)[:10]


def test_it_reads_ahead_from_the_start_and_no_further_than_it_may(path):
    with make(path, buffer_size=10, dp_size=3) as loader:
        until(lambda: loader.statistics().ready_samples == 30)
        statistics = loader.statistics()
        assert (statistics.capacity_samples, statistics.in_flight_rows) == (30, 0)
        assert (statistics.samples_total, statistics.waits_total) == (0, 0)


def test_a_budget_of_bytes_bounds_what_is_read_ahead_and_stops_nothing(path):
    with make(path, max_ready_bytes=1) as loader:
        assert ids(loader.get_next_batch(300)) == order_of(path, 2)[:300]


# Several at once


def test_threads_get_disjoint_slices_and_nothing_is_lost(path):
    expected = order_of(path, 20)
    taken: list[list[int]] = []

    def work(loader: DataLoader, size: int) -> None:
        taken.extend(ids(loader.get_next_batch(size)) for _ in range(60))

    with make(path, num_workers=2, buffer_size=30) as loader:
        threads = [threading.Thread(target=work, args=(loader, size)) for size in (1, 5, 8, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    total = 60 * (1 + 5 + 8 + 20)
    starts = {tuple(expected[i : i + size]): i for size in (1, 5, 8, 20) for i in range(total)}
    assert sorted(number for batch in taken for number in batch) == sorted(expected[:total])
    assert all(tuple(batch) in starts for batch in taken), "a batch is a slice of D"


def test_waiting_threads_are_served_in_the_order_in_which_they_came(tmp_path):
    path, gate = gated(tmp_path, 0)
    taken: dict[int, list[int]] = {}

    def work(loader: DataLoader, number: int) -> None:
        taken[number] = ids(loader.get_next_batch(4))

    with make(path, waits_for_a_file, shuffle=False) as loader:
        threads = []
        for number in range(4):
            threads.append(threading.Thread(target=work, args=(loader, number)))
            threads[-1].start()
            until(lambda number=number: num_waiting(loader) == number + 1)
        gate.touch()
        for thread in threads:
            thread.join()

    assert taken == {number: list(range(4 * number, 4 * number + 4)) for number in range(4)}


def num_waiting(loader: DataLoader) -> int:
    return len(loader._engine.coordinator._requests)  # noqa: SLF001 - nothing public counts them


def test_a_thread_that_gives_up_lets_the_next_one_pass(tmp_path):
    path, gate = gated(tmp_path, 0)
    taken = []
    with make(path, waits_for_a_file, shuffle=False) as loader:
        waiting = threading.Thread(target=lambda: taken.extend(ids(loader.get_next_batch(3))))
        with pytest.raises(PrefetchTimeoutError):
            loader.get_next_batch(1, timeout_s=0.05)
        waiting.start()
        gate.touch()
        waiting.join()

    assert taken == [0, 1, 2]


def test_it_may_be_used_inside_a_running_loop(path):
    async def main() -> list[int]:
        with make(path, num_workers=1) as loader:
            return ids(loader.get_next_batch(20))

    assert asyncio.run(main()) == order_of(path)[:20]


def test_loaders_may_be_nested_in_one_anothers_callbacks(path, tmp_path):
    """A tokenize function, a collate function and a filter each use a loader of their own."""
    other = write_rows(tmp_path / "other.jsonl", 50)

    with make(other) as inner:

        def tokenize(row: dict[str, Any]) -> dict[str, Any]:
            return {"input_ids": [row["id"]], "label": ids(inner.get_next_batch(1))}

        def collate(samples: list[Sample]) -> list[int]:
            return ids(inner.get_next_batch(len(samples)))

        def choose(buffer: list[Any], number: int) -> list[Any]:
            inner.get_next_batch(1)
            return buffer[:number]

        with make(path, tokenize, collate_fn=collate, buffer_filter=choose, batch_size=5, buffer_size=10) as outer:
            batch = outer.get_next_batch(5)
            outer.add_samples([[batch[0]]])
            assert outer.get_next_batch(1)[0] is batch[0]
            assert len(next(iter(outer))) == 5

        assert ids(batch) == order_of(path)[:5]
        assert [sample.label for sample in batch] == [[number] for number in order_of(other)[:5]]


def test_many_loaders_live_side_by_side(path):
    loaders = [make(path, seed=seed) for seed in range(5)]
    try:
        batches = [[ids(loader.get_next_batch(40)) for loader in loaders] for _ in range(2)]
    finally:
        for loader in loaders:
            loader.close()

    for seed in range(5):
        assert batches[0][seed] + batches[1][seed] == order_of(path, seed=seed)[:80]


# Processes


def in_a_forked_child(function: Callable[[], None]) -> int:
    """The exit status of a forked child that runs ``function``: 0 if it returns, 1 if it raises, -14 if it hangs."""
    import signal

    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            function()
        except BaseException as error:
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(path):
    with make(path, num_workers=1, batch_size=2) as loader:
        loader.get_next_batch(5)

        def use_it() -> None:
            calls: list[Callable[[], Any]] = [
                lambda: loader.get_next_batch(1),
                lambda: loader.get_samples(1),
                lambda: next(iter(loader)),
                lambda: loader.add_samples([]),
                lambda: loader.load_state_dict(state),
                lambda: loader.set_epoch(1),
                lambda: loader.start(),
            ]
            for call in calls:
                with pytest.raises(LoaderForkedError, match="^AD503 the loader was made in process"):
                    call()
            loader.close()
            loader.close()

        state = loader.state_dict()
        assert in_a_forked_child(use_it) == 0
        assert ids(loader.get_next_batch(5)) == order_of(path)[5:10]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_may_close_whatever_the_parents_threads_were_doing(path):
    """Here the lock is held for ever in the child, as the thread that holds it is not there."""
    with make(path) as loader:
        loader.get_next_batch(1)
        lock = loader._engine.coordinator._lock  # noqa: SLF001 - to be in the middle of a delivery
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                done.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        try:
            assert in_a_forked_child(loader.close) == 0
        finally:
            done.set()
            holder.join()


UNCLOSED = """
import sys
from asyncdata import DataLoader
from tests.support.tokenize_fns import row_id

loader = DataLoader(sys.argv[1], tokenize_fn=row_id, num_workers=int(sys.argv[2]), buffer_size=50)
sys.stdout.write(str(len(loader.get_next_batch(5))))
if sys.argv[3] == "del":
    del loader
"""


def run_script(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", text, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=NEVER_S, check=False)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("way", ["del", "exit"])
def test_an_unclosed_loader_is_warned_about_and_holds_up_nobody(path, num_workers, way):
    done = run_script(UNCLOSED, str(path), str(num_workers), way)

    assert (done.returncode, done.stdout) == (0, "5")
    assert "ResourceWarning: unclosed DataLoader: use `with`, or call close()" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore:unclosed DataLoader:ResourceWarning")
def test_a_loader_may_be_collected_by_its_own_thread_whatever_that_is_doing(path, monkeypatch):
    start = Producer.start
    monkeypatch.setattr(Producer, "start", lambda *arguments: gc.collect() and None or start(*arguments))
    loader = make(path, num_workers=1)
    loader.get_next_batch(1)
    thread = next(thread for thread in threading.enumerate() if thread.name == "asyncdata-service")
    gc.disable()
    try:
        cycle: list[Any] = [loader]
        cycle.append(cycle)
        loader.set_epoch(3)  # its thread is to begin anew, and collects
        del loader, cycle
        thread.join(NEVER_S / 2)
    finally:
        gc.enable()

    assert not thread.is_alive()


def test_a_loader_that_was_never_used_need_not_be_closed(path):
    loader = make(path)
    del loader


def test_a_loader_cannot_be_copied(path):
    with make(path) as loader:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copied(loader)


# Closing


def test_closing_ends_a_wait(tmp_path):
    path, gate = gated(tmp_path, 0)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            loader.get_next_batch(1, timeout_s=NEVER_S)
        except LoaderClosedError as error:
            caught.append(error)

    with make(path, waits_for_a_file, shuffle=False, num_workers=1) as loader:
        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        until(lambda: num_waiting(loader) == 3)
        loader.close()
        for thread in waiting:
            thread.join(NEVER_S / 2)
    gate.touch()

    assert [str(error) for error in caught] == ["AD502 the loader was closed by close()"] * 3


def test_a_second_close_waits_for_the_first(path, monkeypatch):
    loader = make(path)
    loader.get_next_batch(1)
    should, may = slow_to_close(loader, monkeypatch)
    was_alive: list[bool] = []

    def close() -> None:
        loader.close()
        was_alive.append(is_alive(loader))

    first, second = threading.Thread(target=close), threading.Thread(target=close)
    first.start()
    assert should.wait(NEVER_S)
    second.start()
    until(lambda: not second.is_alive() or num_closing() == 2)
    may.set()
    first.join(NEVER_S)
    second.join(NEVER_S)

    assert was_alive == [False, False]


def test_a_close_that_was_interrupted_is_finished_by_the_next(path, monkeypatch):
    loader = make(path)
    loader.get_next_batch(1)
    service = service_of(loader)
    with monkeypatch.context() as patch:
        patch.setattr(service, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loader.close()

    loader.close()

    assert not is_alive(loader)


def interrupted() -> None:
    raise KeyboardInterrupt


def test_after_closing_every_use_says_so(path):
    loader = make(path, batch_size=2)
    batch = loader.get_next_batch(2)
    loader.close()
    loader.close()

    uses: list[Callable[[], Any]] = [
        lambda: loader.get_next_batch(1),
        lambda: loader.get_samples(1),
        lambda: next(iter(loader)),
        lambda: loader.add_samples([batch]),
        lambda: loader.ack(),
        lambda: loader.load_state_dict(state),
        lambda: loader.set_epoch(1),
        lambda: loader.start(),
    ]
    state = loader.state_dict()
    for use in uses:
        with pytest.raises(LoaderClosedError, match=r"^AD502 the loader was closed by close\(\)"):
            use()
    assert loader.statistics().samples_total == 2


def test_a_closed_loaders_state_is_that_of_its_last_delivery(path):
    with make(path) as loader:
        loader.get_next_batch(33)
    state = loader.state_dict()

    with make(path) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(3)) == order_of(path)[33:36]


def test_samples_outlive_their_loader(path):
    with make(path, num_workers=1) as loader:
        batch = loader.get_next_batch(50)

    assert ids(batch) == order_of(path)[:50]
    assert [sample.label for sample in batch] == order_of(path)[:50]


def test_closing_while_workers_start_is_closing(path):
    for _ in range(3):
        loader = make(path, num_workers=2)
        loader.start()
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unclosed_loader_is_closed_even_if_warnings_are_errors(path, num_workers, monkeypatch):
    """The warning cannot leave ``__del__``; nothing may stay alive for it."""
    told = []
    with monkeypatch.context() as patched, warnings.catch_warnings():
        patched.setattr(sys, "unraisablehook", lambda unraisable: told.append(str(unraisable.exc_value)))
        warnings.simplefilter("error", ResourceWarning)
        loader = make(path, num_workers=num_workers)
        loader.get_next_batch(1)
        del loader
        gc.collect()

    assert told == ["unclosed DataLoader: use `with`, or call close()"]


def test_closing_does_not_wait_for_a_row_that_never_ends(tmp_path):
    """Inline, the thread is left behind; it ends here with its gate."""
    path, gate = gated(tmp_path, 0)
    loader = make(path, waits_for_a_file, shuffle=False)
    loader.start()
    until(lambda: loader.statistics().workers[0].state == "busy")
    loader.close()
    gate.touch()


# Settings


def test_any_function_runs_inline_and_workers_say_what_they_need(path):
    with make(path, lambda row: [row["id"]]) as loader:
        assert ids(loader.get_next_batch(3)) == order_of(path)[:3]

    with pytest.raises(ConfigError, match="^AD420 .*num_workers=0 to run it in this process"):
        make(path, lambda row: [row["id"]], num_workers=1)


def test_a_function_by_its_import_path(path):
    with make(path, "tests.support.tokenize_fns:row_id", num_workers=1) as loader:
        assert ids(loader.get_next_batch(3)) == order_of(path)[:3]


@pytest.mark.parametrize("name", ["nowhere", "nowhere:fn", "tests.support.tokenize_fns:nothing", "a b:c"])
def test_a_function_that_cannot_be_imported_is_refused_at_once(path, name):
    with pytest.raises(ConfigError, match="^AD420 "):
        make(path, name)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_tokenizer_that_cannot_be_opened_is_an_error_at_every_call(path, num_workers):
    with make(path, worker_fns.Opening("raises"), num_workers=num_workers) as loader:
        for _ in range(2):
            with pytest.raises(WorkerError, match="^AD426 the tokenize function cannot be opened: FileNotFoundError"):
                loader.get_next_batch(1)
        loader.set_epoch(3)
        with pytest.raises(WorkerError, match="^AD426 "):
            loader.get_next_batch(1)


def test_a_function_that_calls_exit_has_a_bad_row(path):
    special = write_rows(path, NUM_ROWS, {13: {"do": "exit"}})
    for num_workers in (0, 1):
        with make(special, worker_fns.as_told, num_workers=num_workers) as loader:
            _, error = bad_row_at(loader)
        assert (error.code, error.line) == ("AD421", 14)


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"batchsize": 3}, "there is no knob 'batchsize'"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": "3"}, "batch_size"),
        ({"batch_size": 3, "n_samples_per_prompt": 2}, "no multiple of n_samples_per_prompt"),
        ({"num_workers": -1}, "num_workers"),
        ({"buffer_size": 0}, "buffer_size"),
        ({"epochs": 0}, "epochs"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"on_bad_row": "ignore"}, "on_bad_row"),
        ({"commit": "later"}, "commit"),
        ({"backend": "curio"}, "backend"),
        ({"seed": 1.5}, "seed"),
        ({"shuffle": "maybe"}, "shuffle"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_once(path, knobs, match):
    with pytest.raises(ConfigError, match=match):
        make(path, **knobs)


def test_a_source_is_a_path_a_list_a_folder_a_glob_or_a_description(path):
    folder = str(path.parent)
    sources: list[Any] = [
        str(path),
        path,
        [str(path)],
        [path],
        (path,),
        folder,
        f"{folder}/*.jsonl",
        JsonlSource(str(path)),
    ]
    for source in sources:
        with make(source) as loader:
            assert ids(loader.get_next_batch(3)) == order_of(path)[:3]


@pytest.mark.parametrize("source", [7, None, b"rows.jsonl", {"rows.jsonl"}])
def test_anything_else_is_no_source(source):
    with pytest.raises(ConfigError, match="^a source is a path"):
        make(source)


def test_a_prompt_is_tokenized_by_workers_as_inline(tmp_path, small_tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {i} + {i}?", "label": i}) + "\n" for i in range(100)))
    fn = PromptTokenizeFn(str(small_tokenizer), prompt_key="prompt", label_key="label")

    found = []
    for num_workers in (0, 2):
        with make(path, fn, num_workers=num_workers) as loader:
            batch = loader.get_next_batch(100)
            found.append([(sample.prompt, sample.label, sample.tokens.tolist()) for sample in batch])

    assert found[0] == found[1]
    assert sorted(label for _, label, _ in found[0]) == list(range(100))


# What it says of itself


def test_statistics_count_what_was_delivered(path):
    with make(path, n_samples_per_prompt=2, num_workers=1) as loader:
        loader.get_next_batch(20)
        statistics = loader.statistics()

    assert (statistics.samples_total, statistics.groups_total, statistics.tokens_total) == (20, 10, 10)
    assert (statistics.epoch, statistics.window) == (0, 0)
    assert statistics.waits_total == 1
    assert statistics.data_wait_seconds_total > 0
    assert len(statistics.workers) == 1
    flat = statistics.to_dict()
    assert flat["asyncdata_samples_total"] == 20
    assert flat["asyncdata_workers"] == 1
    assert all(isinstance(value, int | float) for value in flat.values())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_statistics_may_be_asked_for_whenever(tmp_path, num_workers):
    path, gate = gated(tmp_path, 0)
    loader = make(path, waits_for_a_file, shuffle=False, num_workers=num_workers)
    assert loader.statistics().ready_samples == 0
    loader.start()
    until(lambda: loader.statistics().to_dict()["asyncdata_workers_busy"] == 1)
    loader.close()
    gate.touch()
    assert loader.statistics().samples_total == 0


def test_blank_lines_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"id": 0}\r\n   \n\n{"id": 1}')
    with make(path, shuffle=False, epochs=1) as loader:
        assert ids(loader.get_next_batch(2)) == [0, 1]
        assert loader.statistics().blank_lines_total == 3
