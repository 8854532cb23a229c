"""The channel: bounded, filled in any order, walked in the order of D, and able to go back one step."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from asyncdata.delivery.items import Run
from asyncdata.errors import SourceChangedError
from tests.support.chunks import BadRow, chunk_of
from tests.support.parts import Channel, ChunkEnd, Failure

GONE = SourceChangedError("gone")


def channel(*chunks, capacity=10, max_bytes=1 << 30):
    """A channel with these chunks."""
    line = Channel(capacity=capacity, max_bytes=max_bytes)
    for chunk in chunks:
        line.fill(line.enter(chunk.num_rows), chunk)
    return line


def shape(line):
    """The ready items in short: a run as (start, stop)."""
    return [(item.start, item.stop) if isinstance(item, Run) else type(item).__name__ for item in line.items(0)]


@given(st.permutations(range(6)))
def test_the_order_of_filling_does_not_matter(order):
    line = channel()
    chunks = [chunk_of(number, BadRow("AD101"), number) for number in range(6)]
    entries = [line.enter(3) for _ in chunks]

    for number in order:
        line.fill(entries[number], chunks[number])

    assert [item.chunk for item in line.items(0) if isinstance(item, ChunkEnd)] == chunks
    assert (line.num_produced, line.num_rows_in_flight) == (12, 0)


def test_an_entry_that_is_split_keeps_its_place():
    line = channel()
    first, last = line.enter(4), line.enter(1)

    rest = line.split(first, 1)
    assert (first.num_rows, rest.num_rows, line.num_rows_in_flight) == (1, 3, 5)

    line.fill(last, chunk_of(9))
    line.fill(rest, chunk_of(2, 3, 4))
    assert shape(line) == []

    line.fill(first, chunk_of(1))
    assert [item.chunk.num_rows for item in line.items(0) if isinstance(item, ChunkEnd)] == [1, 3, 1]


def test_items_are_numbered_and_those_before_the_head_are_removed():
    line = channel(chunk_of(1), chunk_of(2))
    run, end, other_run, other_end = line.items(0)

    assert [line.item(number) for number in range(5)] == [run, end, other_run, other_end, None]
    assert list(line.items(2)) == [other_run, other_end]
    assert [line.item(1), line.item(2)] == [None, other_run]
    assert [line.remembers(head) for head in range(4)] == [False, False, True, True]


def test_above_the_byte_budget_there_is_room_only_for_waiting_requests_and_dropped_rows_take_none():
    line = channel(chunk_of([1, 2], "short", [3], BadRow("AD1")), chunk_of(3), capacity=100, max_bytes=16)
    found = []
    for line.demand in (3, 2, 0):
        found.append((line.room(0), line.room(taken=1)))

    assert line.num_ready_bytes == 16
    assert found == [(97, 98), (0, 98), (0, 0)]
    line.items(1)
    assert line.num_ready_bytes == 16, "half a chunk is a chunk"
    line.items(3)
    assert (line.num_ready_bytes, line.room(0)) == (4, 97)


def test_nothing_follows_a_failure_and_everything_before_it_comes_first():
    line = channel()
    entry = line.enter(1)

    line.fail(GONE)
    assert not line.is_stopped

    line.fill(entry, chunk_of(1))
    assert shape(line) == [(0, 1), "ChunkEnd", "Failure"]
    assert list(line.items(0))[-1].error is GONE
    assert (line.is_stopped, line.room(0)) == (True, 0)


def test_an_entry_can_turn_out_to_be_a_failure():
    line = channel()
    first, second = line.enter(5), line.enter(5)

    line.fill(second, chunk_of(1))
    line.fill(first, Failure(GONE))

    assert line.is_stopped
    assert (line.num_rows_in_flight, line.num_produced) == (0, 0), "what follows a failure is not delivered"


def test_a_failure_may_overtake_what_no_one_will_fill():
    line = channel(chunk_of(1))
    entry = line.enter(1)

    line.fail(GONE, overtakes=True)
    assert line.is_stopped
    line.fill(entry, chunk_of(2))
    assert shape(line)[:3] == [(0, 1), "ChunkEnd", "Failure"]
