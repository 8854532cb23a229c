"""The windows of a stream are cut by its rows alone, however many come at once, and can be read from any state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import Shuffle
from asyncdata.core.callbacks import no_op
from asyncdata.prefetch.windows.stream_reader import StreamPass
from asyncdata.sources.stream import StreamOrder
from tests.support.streams import ListStream, windows_of

pytestmark = pytest.mark.thorough

lengths = st.lists(st.integers(0, 30), max_size=40)


def order_of(window_bytes: int, *, enabled: bool = True) -> StreamOrder:
    return StreamOrder(Shuffle(enabled=enabled, block_bytes=window_bytes, window_blocks=1), 1, 1)


def made(lengths: list[int], **settings: Any) -> ListStream:
    """A stream of rows of these lengths, each another one."""
    return ListStream([bytes([65 + i % 26]) * length for i, length in enumerate(lengths)], **settings)


def read_all(current: StreamPass, limit: int) -> list[tuple[list[int], list[bytes | None], Any]]:
    """Each window: the rows' numbers, their bytes, and the next one's state."""
    windows, memory = [], memoryview(bytearray(limit))
    while True:
        found = current.read_window(memory)
        spans = zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
        rows = [bytes(memory[start : start + length]) if length >= 0 else None for start, length in spans]
        windows.append((found.numbers.tolist(), rows, found.next_state))
        if found.is_last:
            return windows


@given(lengths=lengths, at_once=st.integers(1, 9), window_bytes=st.integers(1, 60), max_row_bytes=st.integers(0, 30))
def test_windows_are_cut_by_the_rows_alone(lengths, at_once, window_bytes, max_row_bytes):
    """Not by how many of them come at once, and not by how long a row may be."""
    stream = made(lengths, at_once=at_once, max_row_bytes=max_row_bytes)

    windows = read_all(StreamPass(stream, order_of(window_bytes), 0, None, no_op), 100)

    assert [numbers for numbers, _, _ in windows] == windows_of(lengths, window_bytes)
    rows = [row for _, rows, _ in windows for row in rows]
    assert rows == [row if len(row) <= max_row_bytes else None for row in stream.rows]


@given(
    lengths=lengths,
    at_once=st.integers(1, 9),
    again=st.integers(1, 9),
    window_bytes=st.integers(1, 60),
    has_states=st.booleans(),
)
def test_every_window_can_be_read_from_its_state_alone(lengths, at_once, again, window_bytes, has_states):
    order = order_of(window_bytes)
    stream = made(lengths, at_once=at_once, has_states=has_states)
    windows = read_all(StreamPass(stream, order, 0, None, no_op), 100)
    states = [None, *(state for _, _, state in windows[:-1])]
    assert windows[-1][2] is None

    for number, state in enumerate(states):
        stream.at_once = again
        current = StreamPass(stream, order, 0, state, no_op)
        assert state is None or current.start(state)
        assert current.number == number
        rest = read_all(current, 100)
        assert [window[:2] for window in rest] == [window[:2] for window in windows[number:]]
        if len(rest) > 1 and has_states:
            current = StreamPass(stream, order, 0, rest[0][2], no_op)
            assert current.start(rest[0][2])
            assert [window[:2] for window in read_all(current, 100)] == [window[:2] for window in rest[1:]]


@given(lengths=lengths.filter(len), window_bytes=st.integers(1, 60), data=st.data())
def test_another_row_at_a_states_place_is_noticed(lengths, window_bytes, data):
    order = order_of(window_bytes)
    windows = read_all(StreamPass(made(lengths), order, 0, None, no_op), 100)
    states = [state for _, _, state in windows[:-1]]
    if not states:
        return

    number = data.draw(st.integers(0, len(states) - 1))
    changed = made(lengths)
    first = windows[number + 1][0][0]
    changed.rows[first] = b"?" + changed.rows[first]

    assert not StreamPass(changed, order, 0, states[number], no_op).start(states[number])
