"""Windows of a stream: read by one thread, one after the other, into slots; again from a state; and given up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import structlog

from asyncdata import Position, Shuffle, SourceChangedError, SourceError
from asyncdata.prefetch.windows.stream_windows import StreamWindow, StreamWindows
from asyncdata.sources.stream import StreamOrder
from asyncdata.workers.base import NUM_SLOTS
from asyncdata.workers.slots import Slots
from tests.support.streams import ListStream, windows_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROWS = [b"%03d" % number + b"x" * (number * 7 % 11) for number in range(100)]
WINDOW_BYTES = 64
WINDOWS = windows_of([len(row) for row in ROWS], WINDOW_BYTES)
NEVER_S = 30.0


class Memory:
    """What windows need of an executor."""

    def __init__(self) -> None:
        self.slots = Slots(NUM_SLOTS)
        self.slot_bytes = [memoryview(bytearray(WINDOW_BYTES + 20)) for _ in range(NUM_SLOTS)]

    def memory(self, slot: int) -> memoryview:
        return self.slot_bytes[slot]

    def texts(self, window: StreamWindow) -> list[bytes | None]:
        """The rows of a window, in its order, where its requests say that they lie."""
        request = window.request(0, window.num_rows)
        assert request.slot == window.slot
        spans = zip(np.frombuffer(request.starts, np.int32), np.frombuffer(request.lengths, np.int32), strict=True)
        memory = self.slot_bytes[window.slot]
        return [bytes(memory[start : start + length]) if length >= 0 else None for start, length in spans]


class Reader:
    """Windows that are being served, as the service does it, and what they say."""

    def __init__(self, stream: ListStream, *, shuffle: bool = False) -> None:
        self.stream = stream
        self.memory = Memory()
        self.order = StreamOrder(Shuffle(enabled=shuffle, block_bytes=WINDOW_BYTES, window_blocks=1), 7, 1)
        self.restart_point = Position()
        self.windows = StreamWindows(
            stream,
            self.order,
            self.memory,  # type: ignore[arg-type] # all that it needs
            restart_point=lambda: self.restart_point,
            on_ready=self._on_ready,
        )
        self._arrived = anyio.Event()

    def _on_ready(self) -> None:
        self._arrived.set()
        self._arrived = anyio.Event()

    def open(self, epoch: int, number: int) -> StreamWindow | None:
        return self.windows.open(epoch, number)

    async def window(self, epoch: int, number: int) -> StreamWindow:
        """A window that is ready, or has a fault."""
        window = self.open(epoch, number)
        assert window is not None
        while not (window.is_ready or window.fault):
            await self._arrived.wait()
        return window

    async def texts(self, epoch: int, number: int) -> list[bytes | None]:
        """The rows of a window, whose slot is free again then."""
        window = await self.window(epoch, number)
        if window.fault is not None:
            raise window.fault

        texts = self.memory.texts(window)
        self.memory.slots.release(window.slot)
        return texts


def serve(body: Callable[[Reader], Awaitable[None]], reader: Reader) -> None:
    """Run ``body`` while windows are read."""

    async def main() -> None:
        with anyio.fail_after(NEVER_S):
            async with anyio.create_task_group() as group:
                group.start_soon(reader.windows.run)
                await body(reader)
                group.cancel_scope.cancel()

    anyio.run(main)


def rows_of(numbers: list[int]) -> list[bytes]:
    return [ROWS[number] for number in numbers]


# Reading


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_windows_are_the_rows_in_their_order(at_once):
    reader = Reader(ListStream(ROWS, at_once=at_once))

    async def body(reader: Reader) -> None:
        for epoch in range(2):
            for number, numbers in enumerate(WINDOWS):
                window = await reader.window(epoch, number)
                assert reader.memory.texts(window) == rows_of(numbers)
                assert window.is_last == (number == len(WINDOWS) - 1)
                assert [window.key(row) for row in range(window.num_rows)] == [(0, row) for row in numbers]
                last = window.location(len(numbers) - 1)
                assert (last.row_number, last.num_bytes) == (numbers[-1], len(ROWS[numbers[-1]]))
                reader.memory.slots.release(window.slot)

    serve(body, reader)
    assert [read[0] for read in reader.stream.reads] == [0, 1], "one pass for each epoch"
    assert reader.stream.num_open == 0


def test_a_window_waits_for_a_slot():
    reader = Reader(ListStream(ROWS))

    async def body(reader: Reader) -> None:
        windows = [await reader.window(0, number) for number in range(NUM_SLOTS)]
        assert reader.open(0, NUM_SLOTS) is None
        reader.memory.slots.release(windows[0].slot)
        assert await reader.texts(0, NUM_SLOTS) == rows_of(WINDOWS[NUM_SLOTS])

    serve(body, reader)


@pytest.mark.parametrize(
    ("rows", "max_row_bytes", "windows"),
    [
        pytest.param([b"a", b"b" * 2000, b"c"], 10, [[b"a"], [None], [b"c"]], id="a row that is too long has no bytes"),
        pytest.param([b"a", b"b" * 74, b"c"], 1000, [[b"a"], [b"b" * 74], [b"c"]], id="a row larger than a window"),
        pytest.param([b"0", b"1", b"2", b"3", b"4"], 10, [[b"0", b"1", b"2"], [b"3", b"4"]], id="very short rows"),
    ],
)
def test_windows_end_by_their_bytes_and_by_their_rows(monkeypatch, rows, max_row_bytes, windows):
    monkeypatch.setattr("asyncdata.prefetch.windows.stream_reader.MAX_WINDOW_ROWS", 3)
    reader = Reader(ListStream(rows, max_row_bytes=max_row_bytes, at_once=2))

    async def body(reader: Reader) -> None:
        assert [await reader.texts(0, number) for number in range(len(windows))] == windows

    serve(body, reader)


# From a state


def states_of(reader: Reader) -> list[Any]:
    """The state at each window, as a snapshot at that window would have it."""
    states: list[Any] = []

    async def body(reader: Reader) -> None:
        for number in range(len(WINDOWS)):
            states.append(reader.windows.state_at(Position(0, number, 3)))
            await reader.texts(0, number)

    serve(body, reader)
    return states


@pytest.mark.parametrize("epoch", [0, 1], ids=["a source without states", "a snapshot without one"])
def test_without_a_state_the_rows_before_a_window_are_read_again_and_that_is_logged(epoch):
    reader = Reader(ListStream(ROWS, has_states=epoch == 1))
    if epoch == 0:
        states = states_of(Reader(ListStream(ROWS, has_states=False)))
        assert states[5].at is None
        reader.windows.resume_at(Position(0, 5), states[5])

    async def body(reader: Reader) -> None:
        assert await reader.texts(epoch, 5) == rows_of(WINDOWS[5])
        assert await reader.texts(epoch, 6) == rows_of(WINDOWS[6])

    with structlog.testing.capture_logs() as logs:
        serve(body, reader)
    assert logs == [
        {"event": "stream.replayed", "log_level": "warning", "epoch": epoch, "window": 5, "num_rows": WINDOWS[5][0]}
    ]


def test_the_state_of_an_earlier_window_is_better_than_none():
    states = states_of(Reader(ListStream(ROWS)))
    stream = ListStream(ROWS)
    reader = Reader(stream)
    reader.windows.resume_at(Position(0, 6), states[4])

    async def body(reader: Reader) -> None:
        assert await reader.texts(0, 6) == rows_of(WINDOWS[6])

    serve(body, reader)
    assert stream.num_given < sum(map(len, WINDOWS[4:8]))


def test_a_source_that_resumes_at_another_row_is_read_from_the_start():
    """As datasets that lose rows in their state do."""
    states = states_of(Reader(ListStream(ROWS)))

    class Forgetful(ListStream):
        def read(self, order: Any, epoch: int, state: Any, check: Any) -> Any:
            return super().read(order, epoch, {"row": state["row"] + 1} if state else None, check)

    reader = Reader(Forgetful(ROWS))
    reader.windows.resume_at(Position(0, 5), states[5])

    async def body(reader: Reader) -> None:
        for number in range(5, len(WINDOWS)):
            assert await reader.texts(0, number) == rows_of(WINDOWS[number])

    with structlog.testing.capture_logs() as logs:
        serve(body, reader)
    assert [(log["event"], log["num_rows"]) for log in logs] == [("stream.replayed", WINDOWS[5][0])]
    assert reader.stream.num_open == 0


@pytest.mark.parametrize("rows", [ROWS[::-1], ROWS[:30]], ids=["turned", "fewer"])
def test_where_another_row_is_found_nothing_is_delivered(rows):
    states = states_of(Reader(ListStream(ROWS)))
    reader = Reader(ListStream(rows))
    reader.windows.resume_at(Position(0, 5), states[5])

    async def body(reader: Reader) -> None:
        with pytest.raises(SourceChangedError, match="^AD303 list: window 5 of epoch 0 begins with another row than"):
            await reader.texts(0, 5)

    serve(body, reader)


# What is wrong


FAULT_AT = WINDOWS[3][2]


def broken(fault: BaseException) -> ListStream:
    return ListStream(ROWS, fault=fault, fault_at=FAULT_AT)


def test_unshuffled_the_rows_before_such_an_error_come_first():
    reader = Reader(broken(KeyError("x")))

    async def body(reader: Reader) -> None:
        for number in range(3):
            await reader.texts(0, number)
        assert await reader.texts(0, 3) == rows_of(WINDOWS[3][:2])
        with pytest.raises(SourceError):
            await reader.texts(0, 4)

    serve(body, reader)


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
def test_whatever_a_source_raises_is_the_users_error_in_place_of_the_window_that_it_interrupts(error, message):
    """It may pass, and its first rows alone would come in another order than all of them after a restart."""
    reader = Reader(broken(error), shuffle=True)

    async def body(reader: Reader) -> None:
        for number in range(3):
            await reader.texts(0, number)
        window = await reader.window(0, 3)
        assert isinstance(window.fault, SourceError)
        assert str(window.fault) == message
        assert error in (window.fault, window.fault.__cause__)

    serve(body, reader)
    assert reader.stream.num_open == 0


def test_data_that_has_changed_is_not_read_again():
    class Changed(ListStream):
        def check_unchanged(self) -> None:
            raise SourceChangedError("AD303 edited")

    reader = Reader(Changed(ROWS))

    async def body(reader: Reader) -> None:
        assert await reader.texts(0, 0) == rows_of(WINDOWS[0])
        for epoch, number in ((0, 3), (1, 0)):
            with pytest.raises(SourceChangedError, match="AD303 edited"):
                await reader.texts(epoch, number)

    serve(body, reader)
    assert [read[0] for read in reader.stream.reads] == [0]


# Given up


class Gate:
    """Holds up the reader at a row, until it is opened."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.has_come = threading.Event()
        self.opened = threading.Event()

    def __call__(self, row: int) -> None:
        if row == self.row:
            self.has_come.set()
            assert self.opened.wait(NEVER_S)

    async def wait(self) -> None:
        assert await anyio.to_thread.run_sync(self.has_come.wait, NEVER_S)


def gated(row: int) -> tuple[ListStream, Gate]:
    stream, gate = ListStream(ROWS, at_once=1), Gate(row)
    stream.on_row = gate
    return stream, gate


def test_a_window_that_is_given_up_keeps_its_slot_until_the_thread_has_noticed():
    stream, gate = gated(2)
    reader = Reader(stream)

    async def body(reader: Reader) -> None:
        given_up, waiting = reader.open(0, 0), reader.open(0, 1)
        assert given_up is not None
        assert waiting is not None
        await gate.wait()
        assert reader.windows.read_s > 0
        for window in (given_up, waiting):
            reader.memory.slots.release(window.slot)
        reader.windows.restart()

        free = [reader.memory.slots.hold(), reader.memory.slots.hold(), reader.memory.slots.hold()]
        assert given_up.slot not in free
        assert free.count(None) == 1
        for slot in free[:2]:
            assert slot is not None
            reader.memory.slots.release(slot)
        gate.opened.set()
        assert await reader.texts(0, 0) == rows_of(WINDOWS[0])
        assert not (given_up.is_ready or given_up.fault or waiting.is_ready)
        assert reader.windows.read_s == 0.0
        assert all(reader.memory.slots.hold() is not None for _ in range(NUM_SLOTS))

    serve(body, reader)
    assert stream.num_open == 0


def test_a_source_whose_end_fails_is_not_the_end_of_the_run():
    class Unclosable(ListStream):
        def read(self, *args: Any) -> Any:
            try:
                yield from super().read(*args)
            finally:
                raise OSError("cannot let go")

    reader = Reader(Unclosable(ROWS))

    async def body(reader: Reader) -> None:
        await reader.texts(0, 0)
        assert await reader.texts(1, 0) == rows_of(WINDOWS[0])

    with structlog.testing.capture_logs() as logs:
        serve(body, reader)
    assert {log["event"] for log in logs} == {"stream.close_failed"}
    assert logs[0]["reason"] == "OSError('cannot let go')"


@pytest.mark.parametrize("second", ["was read", "was not begun"])
def test_a_pass_is_closed_if_the_end_comes_between_the_thread_and_the_loop(monkeypatch, second):
    is_held = anyio.Event()
    in_thread, calls = anyio.to_thread.run_sync, []

    async def held_back(call: Callable[..., object], *args: object, **options: object) -> object:
        """The second window is read, and does not arrive; or its thread does not start."""
        calls.append(call)
        found = None if len(calls) == 2 and second == "was not begun" else await in_thread(call, *args)
        if len(calls) == 2:
            is_held.set()
            await anyio.sleep_forever()
        return found

    monkeypatch.setattr(anyio.to_thread, "run_sync", held_back)
    reader = Reader(ListStream(ROWS))

    async def body(reader: Reader) -> None:
        await reader.texts(0, 0)
        reader.open(0, 1)
        await is_held.wait()
        assert reader.stream.num_open == 1

    serve(body, reader)

    assert reader.stream.num_open == 0
