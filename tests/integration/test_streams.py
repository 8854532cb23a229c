"""Loaders over sources read from front to back: one order, exact resume in one window, errors at their turn."""

from __future__ import annotations

import re
import threading
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog

from asyncdata import RowFn
from asyncdata.errors import EndOfData, SourceChangedError, SourceError
from tests.support.faults import until
from tests.support.inner import change
from tests.support.loaders import make
from tests.support.loading import NEVER_S, SHUFFLE, ids
from tests.support.streams import ListStream, frames, jsonl, members, rows_of, stream_order_of, windows_of, write

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 400
ROWS = [{"id": number, "pad": "x" * (number * 37 % 90)} for number in range(NUM_ROWS)]
LINES = jsonl(ROWS).splitlines()


@pytest.fixture
def path(tmp_path) -> Path:
    """A gzip file of several members, which begin in the middle of rows."""
    text = jsonl(ROWS)
    return write(tmp_path / "rows.jsonl.gz", members(text[n : n + 5000] for n in range(0, len(text), 5000)))


def expected_ids(num_epochs: int) -> list[int]:
    return stream_order_of(list(map(len, LINES)), SHUFFLE, 42, num_epochs)


def windows_before(number: int) -> list[list[int]]:
    return windows_of(list(map(len, LINES)), SHUFFLE.block_bytes * SHUFFLE.window_blocks)[:number]


class Watched(msgspec.Struct, frozen=True):
    """A source whose stream a test keeps hold of."""

    stream: Any

    def open(self, block_bytes: int) -> Any:
        return self.stream


def test_a_restart_reads_its_window_and_not_what_comes_before():
    stream = ListStream(LINES, at_once=5)
    with make(Watched(stream)) as loader:
        loader.get_next_batch(300)
        state = loader.state_dict()
    again = ListStream(LINES, at_once=5)

    with make(Watched(again), buffer_size=1) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(1)) == expected_ids(1)[300:301]

    *others, (epoch, at) = again.reads
    assert others in ([], [(0, None)])  # reading from the start may have begun before the state was loaded
    first = windows_before(state["position"][1] + 1)[-1][0]
    assert epoch == 0
    assert first - 5 < at["row"] <= first
    until(lambda: again.num_open == 0)  # by its thread, if that was reading when the loader was closed


def test_a_state_without_the_streams_part_is_replayed(path):
    with make(path) as loader:
        loader.get_next_batch(250)
        state = loader.state_dict()
    del state["stream"]
    assert state["canaries"] == []

    with structlog.testing.capture_logs() as logs, make(path) as loader:
        loader.load_state_dict({**state, "canaries": ["of", "another", "source"]})  # which are not waited for
        assert ids(loader.get_next_batch(50)) == expected_ids(1)[250:300]
    (replayed,) = [log["num_rows"] for log in logs if log["event"] == "stream.replayed"]
    # reading from the start may have begun before the state was loaded
    assert 0 < replayed <= sum(map(len, windows_before(state["position"][1])))


def test_requests_that_are_not_acknowledged_are_served_again_from_their_own_window():
    stream = ListStream(LINES, at_once=5)
    with make(Watched(stream), commit="on_ack") as loader:
        batches = [loader.get_next_batch(60) for _ in range(6)]
        loader.ack([sample for batch in batches[:2] for sample in batch])
        state = loader.state_dict()
    again = ListStream(LINES, at_once=5)

    with make(Watched(again), commit="on_ack") as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(240)) == expected_ids(1)[120:360]
    reads = [at for epoch, at in again.reads if epoch == 0]  # the next epoch may be read ahead
    assert reads.count(None) <= 1  # reading from the start may have begun before the state was loaded
    (at,) = filter(None, reads)
    assert at["row"] > 0


def test_an_error_that_passes_costs_no_row(tmp_path):
    """A network's, say: shuffled, the window that it interrupts is delivered whole after the restart."""
    fault = ConnectionError("reset by peer")
    with make(Watched(ListStream(LINES, fault=fault, fault_at=250))) as loader:
        found: list[int] = []
        with pytest.raises(SourceError, match="^AD304 cannot read list: reset by peer"):
            while True:
                found += ids(loader.get_next_batch(1))
        state = loader.state_dict()

    with make(Watched(ListStream(LINES))) as loader:
        loader.load_state_dict(state)
        found += ids(loader.get_next_batch(NUM_ROWS - len(found)))
    assert found == expected_ids(1)


@pytest.mark.thorough
@pytest.mark.parametrize("blanks", [b"\n", b" \r\n", b"\n" * 99_999 + b"{}\n"], ids=["newlines", "spaces", "some rows"])
@pytest.mark.parametrize("coding", ["gz", "zst"])
def test_a_few_bytes_that_decode_to_very_many_blank_lines_take_little_memory(tmp_path, coding, blanks):
    coded = {"gz": members, "zst": frames}[coding]
    text = blanks * (30_000_000 // len(blanks))
    path = write(tmp_path / f"rows.jsonl.{coding}", coded([b'{"id": 1}\n' + text + b'{"id": 2}\n']))
    with make(str(path), RowFn(), epochs=1) as loader:
        tracemalloc.start()
        try:
            rows = [sample.extra for batch in iter(lambda: taken(loader), []) for sample in batch]
            assert tracemalloc.get_traced_memory()[1] < 50e6
        finally:
            tracemalloc.stop()
        assert [row["id"] for row in rows if row] == [1, 2]
        assert loader.statistics().blank_lines_total == text.count(b"\n") - (len(rows) - 2)


def taken(loader):
    try:
        return loader.get_next_batch(100)
    except EndOfData as end:
        return end.samples


def test_a_window_that_zstd_has_to_hold_and_is_too_large_is_named(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    large = zstandard.ZstdCompressionParameters.from_level(1, window_log=30, enable_ldm=True)  # zstd --long=30
    coder = zstandard.ZstdCompressor(compression_params=large).compressobj()
    path = write(tmp_path / "rows.jsonl.zst", coder.compress(jsonl(ROWS)) + coder.flush())
    with pytest.raises(SourceError, match="AD122 .* byte 0 needs more than 128 MiB .* without --long"):
        make(str(path), epochs=1)


def test_rows_are_made_no_further_ahead_than_two_windows():
    stream = ListStream(LINES, at_once=1)
    with make(Watched(stream), buffer_size=1) as loader:
        loader.get_next_batch(1)
        assert stream.num_given <= sum(map(len, windows_before(3)))


class Forgetful(ListStream):
    """It begins at another row than its state says, as datasets that lose rows in their state do."""

    def read(self, order: Any, epoch: int, state: Any, check: Any) -> Any:
        return super().read(order, epoch, {"row": state["row"] + 1} if state else None, check)


@pytest.mark.parametrize("kind", [Forgetful, partial(ListStream, has_states=False)], ids=["forgetful", "stateless"])
def test_a_source_that_cannot_resume_at_its_row_is_read_from_the_start_and_that_is_logged(kind):
    with make(Watched(kind(LINES))) as loader:
        loader.get_next_batch(250)
        state = loader.state_dict()

    with structlog.testing.capture_logs() as logs, make(Watched(kind(LINES))) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(150)) == expected_ids(1)[250:]
    (replayed,) = [log["num_rows"] for log in logs if log["event"] == "stream.replayed"]
    # reading from the start may have begun before the state was loaded
    assert 0 < replayed <= sum(map(len, windows_before(state["position"][1])))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), r"AD129 the source raised KeyError('x') in window"),
        (SystemExit(3), "AD129 the source raised SystemExit(3) in window"),
        (FileNotFoundError(2, "No such file", "a.gz"), "AD304 cannot read a.gz: No such file"),
        (SourceChangedError("AD302 shrank"), "AD302 shrank"),
    ],
    ids=repr,
)
def test_whatever_a_source_raises_is_the_users_error(error, message):
    with (
        make(Watched(ListStream(LINES, fault=error, fault_at=100))) as loader,
        pytest.raises(SourceError, match=f"^{re.escape(message)}") as caught,
    ):
        loader.get_next_batch(NUM_ROWS)
    assert error in (caught.value, caught.value.__cause__)


def test_data_that_has_changed_is_not_read_again():
    class Changed(ListStream):
        def check_unchanged(self) -> None:
            raise SourceChangedError("AD303 edited")

    stream = Changed(LINES)
    with make(Watched(stream)) as loader:
        loader.get_next_batch(NUM_ROWS)
        with pytest.raises(SourceChangedError, match="AD303 edited"):
            loader.get_next_batch(1)
    assert [epoch for epoch, _ in stream.reads] == [0]


def test_a_source_whose_end_fails_is_not_the_end_of_the_run():
    class Unclosable(ListStream):
        def read(self, *args: Any) -> Any:
            try:
                yield from super().read(*args)
            finally:
                raise OSError("cannot let go")

    with structlog.testing.capture_logs() as logs, make(Watched(Unclosable(LINES))) as loader:
        loader.get_next_batch(10)
        loader.set_epoch(1)
        assert ids(loader.get_next_batch(10)) == expected_ids(2)[NUM_ROWS : NUM_ROWS + 10]
    closed = {log["reason"] for log in logs if log["event"] == "stream.close_failed"}
    assert closed == {"OSError('cannot let go')"}


def test_the_state_of_an_earlier_window_is_better_than_none():
    with make(Watched(ListStream(LINES))) as loader:
        loader.get_next_batch(200)
        state = loader.state_dict()
    again, window = ListStream(LINES), state["position"][1] + 2

    with make(Watched(again), buffer_size=1) as loader:
        loader.load_state_dict({**state, "position": [0, window, 0]})
        first = len(sum(windows_before(window), []))
        assert ids(loader.get_next_batch(1)) == expected_ids(1)[first : first + 1]
    assert any(at for epoch, at in again.reads if epoch == 0)


class Gate:
    """Holds a source back where it makes this row for the first time, until it is opened; all rows that it made."""

    def __init__(self, stream: ListStream, row: int) -> None:
        self.row, self.rows = row, list[int]()
        self.has_come, self.is_open = threading.Event(), threading.Event()
        stream.on_row = self.made

    def made(self, row: int) -> None:
        self.rows.append(row)
        if row == self.row:
            self.has_come.set()
            assert self.is_open.wait(NEVER_S)


def test_restarts_while_a_row_is_made_change_no_row_and_every_pass_is_closed():
    stream = ListStream(LINES, at_once=1)
    gate = Gate(stream, windows_before(2)[1][5])
    with make(Watched(stream), buffer_size=1) as loader:
        state = loader.state_dict()
        loader.get_next_batch(1)
        assert gate.has_come.wait(NEVER_S)
        for _ in range(5):  # more often than there are slots
            loader.load_state_dict(state)
        gate.is_open.set()
        assert ids(loader.get_next_batch(NUM_ROWS)) == expected_ids(1)
    until(lambda: stream.num_open == 0)


class Endless(ListStream):
    """After row 200 no row comes any more, and no end."""

    num_idle = 0

    def read(self, *args: Any) -> Any:
        for rows in super().read(*args):
            yield rows
            while rows.numbers[-1] >= 200:
                self.num_idle += 1
                yield rows_of([], 201, self.max_row_bytes, None)


@pytest.mark.parametrize("end", ["restart", "close"])
def test_rows_before_a_state_are_read_no_further_once_they_are_not_needed(end):
    """There may be millions of them."""
    with make(Watched(ListStream(LINES, has_states=False))) as loader:
        start = loader.state_dict()
        loader.get_next_batch(350)
        state = loader.state_dict()
    stream = Endless(LINES, at_once=1, has_states=False)

    with make(Watched(stream), buffer_size=1) as loader:
        loader.load_state_dict(state)
        until(lambda: stream.num_idle > 0)
        if end == "restart":
            loader.load_state_dict(start)
            assert ids(loader.get_next_batch(10)) == expected_ids(1)[:10]
    until(lambda: stream.num_open == 0)


def test_windows_of_very_short_rows_end_by_their_number(monkeypatch):
    change(monkeypatch, most_rows_of_a_stream_window=3)
    with make(Watched(ListStream([b'{"id": %d}' % row for row in range(5)])), shuffle=False) as loader:
        places = [(sample.position.window, sample.position.row) for sample in loader.get_next_batch(5)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
