"""The channel: bounded, filled in any order, walked in the order of D, and able to go back one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
from hypothesis import given

from asyncdata import SourceChangedError
from asyncdata.delivery.channel import AlreadyAcked, BadRowItem, Channel, ChunkEnd, Failure, Run
from tests.support.chunks import BadRow, chunk_of

if TYPE_CHECKING:
    from asyncdata.delivery.chunk import Chunk

NO_LIMIT = 1 << 30


def channel(capacity: int = 10, max_bytes: int = NO_LIMIT, **rules: Any) -> Channel:
    return Channel(capacity=capacity, max_bytes=max_bytes, **rules)


def filled(channel: Channel, *chunks: Chunk) -> Channel:
    for chunk in chunks:
        channel.fill(channel.enter(chunk.num_rows), chunk)
    return channel


def shape(channel: Channel, head: int = 0) -> list[Any]:
    """The ready items in short: a run as (start, stop), a sample that is done as its number."""
    names: list[Any] = []
    for item in channel.items(head):
        if isinstance(item, Run):
            names.append((item.start, item.stop))
        elif isinstance(item, AlreadyAcked):
            names.append(item.sample)
        elif isinstance(item, BadRowItem):
            names.append(item.error.code)
        else:
            names.append(type(item).__name__)
    return names


# Order


@given(st.permutations(range(6)))
def test_the_order_of_filling_does_not_matter(order: list[int]) -> None:
    line = channel()
    chunks = [chunk_of(number, BadRow("AD101"), number) for number in range(6)]
    entries = [line.enter(3) for _ in chunks]

    for number in order:
        line.fill(entries[number], chunks[number])

    assert [item.chunk for item in line.items(0) if isinstance(item, ChunkEnd)] == chunks
    assert (line.num_produced, line.num_rows_in_flight) == (12, 0)


def test_a_split_entry_keeps_its_place() -> None:
    line = channel()
    first, last = line.enter(4), line.enter(1)

    rest = line.split(first, 1)
    assert (first.num_rows, rest.num_rows, line.num_rows_in_flight) == (1, 3, 5)

    line.fill(last, chunk_of(9))
    line.fill(rest, chunk_of(2, 3, 4))
    assert shape(line) == []

    line.fill(first, chunk_of(1))
    ends = [item.chunk.num_rows for item in line.items(0) if isinstance(item, ChunkEnd)]
    assert ends == [1, 3, 1]


def test_a_shortened_entry_gives_back_its_rows() -> None:
    line = channel(capacity=10)
    entry = line.enter(8)

    line.shorten(entry, 3)

    assert (entry.num_rows, line.num_rows_in_flight, line.room(0)) == (3, 3, 7)


# Segments


def test_items_are_numbered_and_those_before_the_head_are_removed() -> None:
    line = filled(channel(), chunk_of(1), chunk_of(2))
    run, end, other_run, other_end = line.items(0)

    assert [line.item(number) for number in range(5)] == [run, end, other_run, other_end, None]
    assert list(line.items(2)) == [other_run, other_end]
    assert line.item(1) is None
    assert line.item(2) is other_run
    assert [line.remembers(head) for head in range(4)] == [False, False, True, True]


# Room


def test_room_is_the_capacity_less_ready_and_in_flight_rows() -> None:
    line = channel(capacity=10)
    assert line.room(0) == 10

    entry = line.enter(4)
    assert line.room(0) == 6

    line.fill(entry, chunk_of(1, "short", 2, BadRow("AD1")))
    assert line.room(0) == 8, "dropped and bad rows take no room"
    assert line.room(taken=2) == 10


def test_above_the_byte_budget_there_is_room_only_for_waiting_requests() -> None:
    line = filled(channel(capacity=100, max_bytes=8), chunk_of([1, 2], [3]))
    assert line.num_ready_bytes == 12
    assert line.room(0) == 0

    line.demand = 2
    assert line.room(0) == 98

    line.demand = 1
    assert line.room(0) == 0
    assert line.room(taken=1) == 99


def test_bytes_are_free_once_their_chunk_is_delivered() -> None:
    line = filled(channel(max_bytes=8), chunk_of(1, 2), chunk_of(3))

    line.items(1)
    assert line.num_ready_bytes == 12, "half a chunk is a chunk"

    line.items(2)
    assert line.num_ready_bytes == 4


# Ends


def test_nothing_follows_a_failure_and_everything_before_it_comes_first() -> None:
    line = channel()
    entry = line.enter(1)
    error = SourceChangedError("gone")

    line.fail(error)
    assert not line.is_stopped

    line.fill(entry, chunk_of(1))
    *_, last = line.items(0)
    assert shape(line) == [(0, 1), "ChunkEnd", "Failure"]
    assert isinstance(last, Failure)
    assert last.error is error
    assert line.is_stopped
    assert line.room(0) == 0


def test_an_entry_can_turn_out_to_be_a_failure() -> None:
    line = channel()
    first, second = line.enter(5), line.enter(5)

    line.fill(second, chunk_of(1))
    line.fill(first, Failure(SourceChangedError("gone")))

    assert line.is_stopped
    assert line.num_rows_in_flight == 0
    assert line.num_produced == 0, "what follows a failure is not delivered"


def test_a_failure_may_overtake_what_no_one_will_fill() -> None:
    line = filled(channel(), chunk_of(1))
    entry = line.enter(1)

    line.fail(SourceChangedError("gone"), overtakes=True)
    assert line.is_stopped
    line.fill(entry, chunk_of(2))
    assert shape(line)[:3] == [(0, 1), "ChunkEnd", "Failure"]
