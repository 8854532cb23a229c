"""Rows are found in a text however it is cut, and windows in rows however they are given; and from any state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdata import Shuffle
from asyncdata.core.callbacks import no_op
from asyncdata.prefetch.windows.stream_reader import StreamPass
from asyncdata.sources.stream import StreamOrder
from asyncdata.sources.text.json_array_stream import split_array
from asyncdata.sources.text.line_stream import split_lines
from tests.support.streams import ListStream, cut, texts_of, windows_of

pytestmark = pytest.mark.thorough

sizes = st.lists(st.integers(1, 12), max_size=60)
lines = st.lists(
    st.binary(max_size=12).map(lambda text: text.replace(b"\n", b" "))
    | st.sampled_from([b"", b" ", b"\r", b"\t \v", b"\xef\xbb\xbf{}"]),
    max_size=12,
)
strings = st.text(st.sampled_from('a"\\[]{},: \né'), max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=12,
)


@given(found=lines, ends=st.booleans(), has_mark=st.booleans(), sizes=sizes, limit=st.integers(0, 12))
@example(found=[b"\xef\xbb\xbf"], ends=False, has_mark=False, sizes=[1, 1], limit=12)
@example(found=[b"xxxx\xef\xbb\xbfx"], ends=True, has_mark=False, sizes=[4, 4], limit=0)
def test_lines_are_the_rows_of_a_text_however_it_is_cut(found, ends, has_mark, sizes, limit):
    text = b"\n".join(found) + (b"\n" if ends and found else b"")
    text = (b"\xef\xbb\xbf" if has_mark else b"") + text
    expected, num_blank = [], 0
    for number, line in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n")):
        is_end = number == text.removeprefix(b"\xef\xbb\xbf").count(b"\n")
        if len(line) > limit or line.strip():
            expected.append((number, len(line), line if len(line) <= limit else None))
        elif not (is_end and not line):
            num_blank += 1

    parts = list(split_lines(cut(text, sizes), 0, 0, limit))

    lost = [row for row in rows_of(parts, limit) if row[2] is None]
    assert [row for row in rows_of(parts, limit) if row[2] is not None] == [row for row in expected if row[2]]
    assert lost == [row for row in expected if row[2] is None]
    if text.removeprefix(b"\xef\xbb\xbf"):
        assert sum(part.num_blank for part in parts) == num_blank


def rows_of(parts: list[Any], limit: int) -> list[tuple[int, int, bytes | None]]:
    return [
        row
        for part in parts
        for row in zip(part.numbers.tolist(), part.lengths.tolist(), texts_of(part, limit), strict=True)
    ]


@given(
    array=st.lists(values, max_size=6),
    indent=st.sampled_from([None, 0, 2]),
    around=st.text(st.sampled_from(" \n\r\t"), max_size=3),
    has_mark=st.booleans(),
    sizes=sizes,
)
def test_elements_are_the_rows_of_an_array_however_it_is_cut(array, indent, around, has_mark, sizes):
    text = (around + json.dumps(array, indent=indent, ensure_ascii=False) + around).encode()
    text = (b"\xef\xbb\xbf" if has_mark else b"") + text

    parts = list(split_array(cut(text, sizes), 0, 0, 1 << 20, "a.json"))

    rows = rows_of(parts, 1 << 20)
    assert [json.loads(row or b"?") for _, _, row in rows] == array
    assert [number for number, _, _ in rows] == list(range(len(array)))
    assert all(row == row.strip() for _, _, row in rows if row)


@given(array=st.lists(values, min_size=1, max_size=6), first=sizes, second=sizes, data=st.data())
def test_an_array_goes_on_at_any_place_that_it_gave(array, first, second, data):
    text = json.dumps(array, indent=1).encode()
    part = data.draw(st.sampled_from(list(split_array(cut(text, first), 0, 0, 1 << 20, "a.json"))))

    rest = list(split_array(cut(text[part.offset :], second), part.offset, part.number, 1 << 20, "a.json"))

    assert [json.loads(row or b"?") for _, _, row in rows_of(rest, 1 << 20)] == array[part.number :]


@given(found=lines, first=sizes, second=sizes, data=st.data())
def test_lines_go_on_at_any_place_that_they_gave(found, first, second, data):
    text = b"x\n" + b"\n".join(found)
    parts = list(split_lines(cut(text, first), 0, 0, 8))
    number = data.draw(st.integers(0, len(parts) - 1))
    part = parts[number]

    rest = list(split_lines(cut(text[part.offset :], second), part.offset, part.number, 8))

    assert rows_of(rest, 8) == rows_of(parts[number:], 8)


@given(array=st.lists(values, max_size=4), sizes=sizes, limit=st.integers(1, 20))
def test_elements_that_are_too_long_are_counted_and_not_held(array, sizes, limit):
    text = json.dumps(array, indent=1).encode()

    rows = rows_of(list(split_array(cut(text, sizes), 0, 0, limit, "a.json")), limit)

    whole = rows_of(list(split_array([text], 0, 0, 1 << 20, "a.json")), 1 << 20)
    assert rows == [(n, length, row if length <= limit else None) for n, length, row in whole]


# Windows

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
    resumed_again=st.booleans(),
)
def test_every_window_can_be_read_from_its_state_alone(
    lengths, at_once, again, window_bytes, has_states, resumed_again
):
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
        if resumed_again and len(rest) > 1 and has_states:
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


@given(seed=st.integers(), epoch=st.integers(0, 5), num_files=st.integers(1, 50))
def test_the_files_of_an_epoch_are_all_of_them_once(seed, epoch, num_files):
    order = StreamOrder(Shuffle(), seed, num_files)

    assert sorted(order.files(epoch)) == list(range(num_files))
    assert 1 <= order.key(epoch) <= 1 << 31
    assert np.array_equal(np.sort(order.rows(epoch, 3, 20)), np.arange(20))
