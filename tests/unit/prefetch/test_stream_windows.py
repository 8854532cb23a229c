"""Windows of a stream: read by one thread, one after the other, into slots; again from a state; and given up."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata import Position, Shuffle
from asyncdata.errors import SourceChangedError, SourceError
from asyncdata.prefetch.windows.stream_windows import StreamWindow, StreamWindows
from asyncdata.sources.stream import StreamOrder
from asyncdata.workers.slots import NUM_SLOTS, Slots
from tests.support.streams import ListStream, windows_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.asyncio

ROWS = [b"%03d" % number + b"x" * (number * 7 % 11) for number in range(100)]
WINDOW_BYTES = 64
WINDOWS = windows_of([len(row) for row in ROWS], WINDOW_BYTES)
NEVER_S = 240.0


class Reader:
    """Windows that are being served, as the service does it, and what they need of an executor."""

    def __init__(self, stream: ListStream, *, shuffle: bool) -> None:
        self.slots = Slots(NUM_SLOTS)
        self.slot_bytes = [memoryview(bytearray(WINDOW_BYTES + 20)) for _ in range(NUM_SLOTS)]
        self.memory = self.slot_bytes.__getitem__
        order = StreamOrder(Shuffle(enabled=shuffle, block_bytes=WINDOW_BYTES, window_blocks=1), 7, 1)
        self.windows = StreamWindows(stream, order, self, restart_point=Position, on_ready=self._on_ready)  # type: ignore[arg-type]
        self._arrived = anyio.Event()

    def _on_ready(self) -> None:
        self._arrived.set()
        self._arrived = anyio.Event()

    async def window(self, epoch: int, number: int) -> StreamWindow:
        """A window that is ready, or has a fault."""
        window = self.windows.open(epoch, number)
        assert window is not None
        while not (window.is_ready or window.fault):
            await self._arrived.wait()
        return window

    async def texts(self, epoch: int, number: int) -> list[bytes | None]:
        """The rows of a window, in its order, where its requests say that they lie. Its slot is free again then."""
        window = await self.window(epoch, number)
        if window.fault is not None:
            raise window.fault

        request = window.request(0, window.num_rows)
        assert request.slot == window.slot
        spans = zip(np.frombuffer(request.starts, np.int32), np.frombuffer(request.lengths, np.int32), strict=True)
        memory = self.slot_bytes[window.slot]
        texts = [bytes(memory[start : start + length]) if length >= 0 else None for start, length in spans]
        self.slots.release(window.slot)
        return texts


@contextlib.asynccontextmanager
async def served(stream: ListStream, *, shuffle: bool = False, state: Any = None, at: int = 5) -> AsyncIterator[Reader]:
    """Windows are read, from a state on if there is one; in the end no pass over the stream is open."""
    reader = Reader(stream, shuffle=shuffle)
    if state is not None:
        reader.windows.resume_at(Position(0, at), state)
    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            group.start_soon(reader.windows.run)
            yield reader
            group.cancel_scope.cancel()
    assert stream.num_open == 0


def rows_of(window: int) -> list[bytes]:
    return [ROWS[number] for number in WINDOWS[window]]


# Reading


@pytest.mark.parametrize("at_once", [1, 3, 1000])
async def test_windows_are_the_rows_in_their_order(at_once):
    stream = ListStream(ROWS, at_once=at_once)

    async with served(stream) as reader:
        for epoch in range(2):
            for number, numbers in enumerate(WINDOWS):
                window = await reader.window(epoch, number)
                assert window.is_last == (number == len(WINDOWS) - 1)
                assert [window.key(row) for row in range(window.num_rows)] == [(0, row) for row in numbers]
                last = window.location(len(numbers) - 1)
                assert (last.row_number, last.num_bytes) == (numbers[-1], len(ROWS[numbers[-1]]))
                reader.slots.release(window.slot)

    assert [read[0] for read in stream.reads] == [0, 1], "one pass for each epoch"


async def test_a_window_waits_for_a_slot():
    async with served(ListStream(ROWS)) as reader:
        windows = [await reader.window(0, number) for number in range(NUM_SLOTS)]
        assert reader.windows.open(0, NUM_SLOTS) is None
        reader.slots.release(windows[0].slot)
        assert await reader.texts(0, NUM_SLOTS) == rows_of(NUM_SLOTS)


@pytest.mark.parametrize(
    ("rows", "max_row_bytes", "windows"),
    [
        pytest.param([b"a", b"b" * 2000, b"c"], 10, [[b"a"], [None], [b"c"]], id="a row that is too long has no bytes"),
        pytest.param([b"a", b"b" * 74, b"c"], 1000, [[b"a"], [b"b" * 74], [b"c"]], id="a row larger than a window"),
        pytest.param([b"0", b"1", b"2", b"3", b"4"], 10, [[b"0", b"1", b"2"], [b"3", b"4"]], id="very short rows"),
        pytest.param(ROWS, 1000, [rows_of(number) for number in range(len(WINDOWS))], id="rows of all lengths"),
    ],
)
async def test_windows_end_by_their_bytes_and_by_their_rows(monkeypatch, rows, max_row_bytes, windows):
    monkeypatch.setattr("asyncdata.prefetch.windows.stream_reader.MAX_WINDOW_ROWS", 3 if len(rows) < 9 else 99)
    async with served(ListStream(rows, max_row_bytes=max_row_bytes, at_once=2)) as reader:
        assert [await reader.texts(0, number) for number in range(len(windows))] == windows


# From a state


async def states_of(stream: ListStream) -> list[Any]:
    """The state at each window, as a snapshot at that window would have it."""
    states: list[Any] = []
    async with served(stream) as reader:
        for number in range(len(WINDOWS)):
            states.append(reader.windows.state_at(Position(0, number, 3)))
            await reader.texts(0, number)
    return states


@pytest.mark.parametrize("epoch", [0, 1], ids=["a source without states", "a snapshot without one"])
async def test_without_a_state_the_rows_before_a_window_are_read_again_and_that_is_logged(epoch):
    state = None
    if epoch == 0:
        state = (await states_of(ListStream(ROWS, has_states=False)))[5]
        assert state.at is None

    with capture_logs() as logs:
        async with served(ListStream(ROWS, has_states=epoch == 1), state=state) as reader:
            assert await reader.texts(epoch, 5) == rows_of(5)
            assert await reader.texts(epoch, 6) == rows_of(6)
    assert logs == [
        {"event": "stream.replayed", "log_level": "warning", "epoch": epoch, "window": 5, "num_rows": WINDOWS[5][0]}
    ]


async def test_the_state_of_an_earlier_window_is_better_than_none():
    states, stream = await states_of(ListStream(ROWS)), ListStream(ROWS)

    async with served(stream, state=states[4], at=6) as reader:
        assert await reader.texts(0, 6) == rows_of(6)

    assert stream.num_given < sum(map(len, WINDOWS[4:8]))


async def test_a_source_that_resumes_at_another_row_is_read_from_the_start():
    """As datasets that lose rows in their state do."""

    class Forgetful(ListStream):
        def read(self, order: Any, epoch: int, state: Any, check: Any) -> Any:
            return super().read(order, epoch, {"row": state["row"] + 1} if state else None, check)

    states = await states_of(ListStream(ROWS))
    with capture_logs() as logs:
        async with served(Forgetful(ROWS), state=states[5]) as reader:
            for number in range(5, len(WINDOWS)):
                assert await reader.texts(0, number) == rows_of(number)
    assert [(log["event"], log["num_rows"]) for log in logs] == [("stream.replayed", WINDOWS[5][0])]


@pytest.mark.parametrize("rows", [ROWS[::-1], ROWS[:30]], ids=["turned", "fewer"])
async def test_where_another_row_is_found_nothing_is_delivered(rows):
    states = await states_of(ListStream(ROWS))

    async with served(ListStream(rows), state=states[5]) as reader:
        with pytest.raises(SourceChangedError, match="^AD303 list: window 5 of epoch 0 begins with another row than"):
            await reader.texts(0, 5)


# What is wrong


def broken(fault: BaseException) -> ListStream:
    return ListStream(ROWS, fault=fault, fault_at=WINDOWS[3][2])


async def test_unshuffled_the_rows_before_an_error_come_first():
    async with served(broken(KeyError("x"))) as reader:
        for number in range(3):
            await reader.texts(0, number)
        assert await reader.texts(0, 3) == rows_of(3)[:2]
        with pytest.raises(SourceError):
            await reader.texts(0, 4)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), "AD129 the source raised KeyError('x') in window 3 of epoch 0"),
        (SystemExit(3), "AD129 the source raised SystemExit(3) in window 3 of epoch 0"),
        (FileNotFoundError(2, "No such file", "a.gz"), "AD304 cannot read a.gz: No such file"),
        (ConnectionError("reset by peer"), "AD304 cannot read list: reset by peer"),
        (SourceChangedError("AD302 shrank"), "AD302 shrank"),
    ],
    ids=repr,
)
async def test_whatever_a_source_raises_is_the_users_error_in_place_of_the_window_that_it_interrupts(error, message):
    """It may pass, and its first rows alone would come in another order than all of them after a restart."""
    async with served(broken(error), shuffle=True) as reader:
        for number in range(3):
            await reader.texts(0, number)
        window = await reader.window(0, 3)

    assert isinstance(window.fault, SourceError)
    assert str(window.fault) == message
    assert error in (window.fault, window.fault.__cause__)


async def test_data_that_has_changed_is_not_read_again():
    class Changed(ListStream):
        def check_unchanged(self) -> None:
            raise SourceChangedError("AD303 edited")

    stream = Changed(ROWS)
    async with served(stream) as reader:
        assert await reader.texts(0, 0) == rows_of(0)
        for epoch, number in ((0, 3), (1, 0)):
            with pytest.raises(SourceChangedError, match="AD303 edited"):
                await reader.texts(epoch, number)

    assert [read[0] for read in stream.reads] == [0]


# Given up


async def test_a_window_that_is_given_up_keeps_its_slot_until_the_thread_has_noticed():
    stream, has_come, is_open = ListStream(ROWS, at_once=1), threading.Event(), threading.Event()

    def gate(row: int) -> None:
        if row == 2:
            has_come.set()
            assert is_open.wait(NEVER_S)

    stream.on_row = gate
    async with served(stream) as reader:
        given_up, waiting = reader.windows.open(0, 0), reader.windows.open(0, 1)
        assert await anyio.to_thread.run_sync(has_come.wait, NEVER_S)
        assert reader.windows.read_s > 0
        for window in (given_up, waiting):
            reader.slots.release(window.slot)
        reader.windows.restart()

        free = [reader.slots.hold() for _ in range(3)]
        assert given_up.slot not in free
        assert free.count(None) == 1
        for slot in free[:2]:
            reader.slots.release(slot)
        is_open.set()
        assert await reader.texts(0, 0) == rows_of(0)
        assert not (given_up.is_ready or given_up.fault or waiting.is_ready)
        assert reader.windows.read_s == 0.0
        assert all(reader.slots.hold() is not None for _ in range(NUM_SLOTS))


async def test_a_source_whose_end_fails_is_not_the_end_of_the_run():
    class Unclosable(ListStream):
        def read(self, *args: Any) -> Any:
            try:
                yield from super().read(*args)
            finally:
                raise OSError("cannot let go")

    with capture_logs() as logs:
        async with served(Unclosable(ROWS)) as reader:
            await reader.texts(0, 0)
            assert await reader.texts(1, 0) == rows_of(0)
    assert {(log["event"], log["reason"]) for log in logs} == {("stream.close_failed", "OSError('cannot let go')")}


@pytest.mark.parametrize("second", ["was read", "was not begun"])
async def test_a_pass_is_closed_if_the_end_comes_between_the_thread_and_the_loop(monkeypatch, second):
    is_held, in_thread, calls = anyio.Event(), anyio.to_thread.run_sync, []

    async def held_back(call: Callable[..., object], *args: object, **options: object) -> object:
        """The second window is read, and does not arrive; or its thread does not start."""
        calls.append(call)
        found = None if len(calls) == 2 and second == "was not begun" else await in_thread(call, *args)
        if len(calls) == 2:
            is_held.set()
            await anyio.sleep_forever()
        return found

    monkeypatch.setattr(anyio.to_thread, "run_sync", held_back)
    stream = ListStream(ROWS)
    async with served(stream) as reader:
        await reader.texts(0, 0)
        reader.windows.open(0, 1)
        await is_held.wait()
        assert stream.num_open == 1
