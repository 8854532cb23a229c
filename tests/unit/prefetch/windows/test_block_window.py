"""A window: where its rows lie in the slot, in the order of delivery, without having seen their bytes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import JsonlSource, SourceLocation
from asyncdata.core.messages import Job, Scanned
from asyncdata.prefetch.windows.base import ChunkOrigin
from asyncdata.prefetch.windows.block_window import Window
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.workers.request_handler import Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from asyncdata.sources.base import FileBlocks

BLOCK_BYTES, SLACK_BYTES = 32, 8
STRIDE = 1 + BLOCK_BYTES + SLACK_BYTES
LINES = [b'{"id": %d, "pad": "%s"}' % (number, b"x" * (number * 7 % 50)) for number in range(40)]


class Worker:
    """Scans into a slot, and reads rows out of it."""

    def __init__(self, files: FileBlocks) -> None:
        self.slot = bytearray(files.num_blocks * STRIDE)
        job = Job(files=files.files, tokenize=None, max_row_bytes=100, block_bytes=BLOCK_BYTES, slack_bytes=SLACK_BYTES)
        self.handler = Handler(job, [memoryview(self.slot)], FunctionTokenizer(lambda row: [row["id"]]))

    def rows(self, request: Any) -> list[bytes | None]:
        """The rows that a request means; None for one that is not wholly in the slot."""
        starts, lengths = array("i", request.starts), array("i", request.lengths)
        rows: list[bytes | None] = [bytes(self.slot[s : s + n]) for s, n in zip(starts, lengths, strict=True)]
        for item in request.overflow:
            rows[item.row] = None
        return rows


@pytest.fixture
def files(jsonl_file: Callable[..., Path]) -> FileBlocks:
    paths = [str(jsonl_file(LINES[:30], "a.jsonl")), str(jsonl_file([b"", *LINES[30:], b"\r"], "b.jsonl"))]
    return JsonlSource(paths, max_row_bytes=100).open(BLOCK_BYTES)


@pytest.fixture
def worker(files: FileBlocks) -> Iterator[Worker]:
    worker = Worker(files)
    yield worker
    worker.handler.close()


def window_of(files: FileBlocks, arrange: Any = np.arange) -> Window:
    return Window(files, files.blocks(range(files.num_blocks)), 0, STRIDE, arrange)


def scanned(window: Window, worker: Worker) -> Window:
    for part, scan in enumerate(window.scans()):
        window.add(part, worker.handler(scan))
    return window


def content(location: SourceLocation) -> bytes:
    with open(location.path, "rb") as file:
        file.seek(location.byte_offset)
        return file.read(location.num_bytes)


def test_a_window_is_read_by_requests_of_64_consecutive_blocks(jsonl_file: Callable[..., Path]) -> None:
    files = JsonlSource(str(jsonl_file([b"x" * 31] * 130))).open(BLOCK_BYTES)

    scans = list(window_of(files).scans())

    assert [len(scan.blocks) for scan in scans] == [64, 64, 2]
    assert [scan.base for scan in scans] == [0, 64 * STRIDE, 128 * STRIDE]
    assert [block.start for scan in scans for block in scan.blocks] == list(range(0, 130 * 32, 32))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [2, 1, 0]])
def test_its_rows_are_known_after_the_last_scan_in_any_order_of_replies(
    jsonl_file: Callable[..., Path], order: list[int]
) -> None:
    lines = [b"%031d" % number for number in range(130)]
    files = JsonlSource(str(jsonl_file(lines))).open(BLOCK_BYTES)
    worker, window = Worker(files), window_of(files)
    scans = list(window.scans())

    found = []
    for part in order:
        assert not window.is_ready
        found.append(window.add(part, worker.handler(scans[part])))

    assert found == [False, False, True]
    assert window.is_ready
    assert worker.rows(window.request(0, 130)) == lines
    worker.handler.close()


def test_rows_come_as_the_order_arranges_them(files: FileBlocks, worker: Worker) -> None:
    asked = []

    def backwards(num_rows: int) -> Any:
        asked.append(num_rows)
        return np.arange(num_rows)[::-1]

    window = scanned(window_of(files, backwards), worker)

    assert asked == [window.num_rows] == [40]
    assert window.num_blank == 2
    assert [content(window.location(row)) for row in range(40)] == LINES[::-1]


def test_a_request_means_the_rows_it_names(files: FileBlocks, worker: Worker) -> None:
    window = scanned(window_of(files), worker)

    for first, stop in ((0, 40), (0, 1), (17, 23), (39, 40), (5, 5)):
        request = window.request(first, stop)
        rows = worker.rows(request)
        assert len(rows) == stop - first
        assert all(row in (None, line) for row, line in zip(rows, LINES[first:stop], strict=True))
    whole = [row for row, found in enumerate(worker.rows(window.request(0, 40))) if found is not None]
    assert worker.rows(window.request_of(np.array(whole[::-1]))) == [LINES[row] for row in whole[::-1]]


def test_a_row_longer_than_the_over_read_is_named_with_its_place(files: FileBlocks, worker: Worker) -> None:
    """Whatever lies after it in the slot is another block's."""
    window = scanned(window_of(files), worker)

    request = window.request(0, 40)

    beyond = {item.row: (item.file_id, item.offset) for item in request.overflow}
    assert beyond == {row: window.key(row) for row in beyond}
    assert {row for row, found in enumerate(worker.rows(request)) if found is None} == set(beyond)
    assert set(beyond) == {
        row for row in range(40) if window.key(row)[1] % BLOCK_BYTES + len(LINES[row]) > BLOCK_BYTES + SLACK_BYTES
    }
    assert 0 < len(beyond) < 40


@pytest.mark.parametrize(("num_beyond", "is_overflow"), [(0, False), (1, True)])
def test_a_row_is_complete_in_the_slot_or_is_read_again(
    jsonl_file: Callable[..., Path], num_beyond: int, is_overflow: bool
) -> None:
    row = b"x" * (BLOCK_BYTES + SLACK_BYTES + num_beyond)
    files = JsonlSource(str(jsonl_file([row, b"y" * 60]))).open(BLOCK_BYTES)
    worker = Worker(files)

    request = scanned(window_of(files), worker).request(0, 1)
    worker.handler.close()

    assert worker.rows(request) == [None if is_overflow else row]


def test_a_row_that_is_too_long_has_no_bytes(jsonl_file: Callable[..., Path]) -> None:
    files = JsonlSource(str(jsonl_file([b"1", b"x" * 101, b"2"])), max_row_bytes=100).open(BLOCK_BYTES)
    worker = Worker(files)

    window = scanned(window_of(files), worker)
    request = window.request(0, 3)
    worker.handler.close()

    assert array("i", request.lengths).tolist() == [1, -1, 1]
    assert request.overflow == []
    assert window.location(1) == SourceLocation(files.files[0].path, 2, -1)


def test_every_row_knows_its_file_and_offset(files: FileBlocks, worker: Worker) -> None:
    window = scanned(window_of(files), worker)

    assert [window.key(row)[0] for row in range(40)] == [0] * 30 + [1] * 10
    assert [content(window.location(row)) for row in range(40)] == LINES
    assert window.key(0) == (0, 0)
    assert window.key(30) == (1, 1)


def test_a_chunk_knows_its_rows_by_the_windows(files: FileBlocks, worker: Worker) -> None:
    window = scanned(window_of(files), worker)

    origin = ChunkOrigin(window, 10)

    assert (origin.location(5), origin.key(5)) == (window.location(15), window.key(15))


def test_rows_are_found_by_their_places(files: FileBlocks, worker: Worker) -> None:
    window = scanned(window_of(files, lambda num_rows: np.arange(num_rows)[::-1]), worker)
    rows = [0, 7, 31, 39]
    keys = {window.key(row) for row in rows}

    assert window.find(keys) == rows
    assert window.find({(0, 1), (1, 0), (7, 0), (0, 10**9)}) == [], "no row begins there"
    assert window.find(frozenset()) == []


def test_a_window_without_rows_is_ready_too(jsonl_file: Callable[..., Path]) -> None:
    files = JsonlSource(str(jsonl_file([b"", b" ", b"\t"]))).open(BLOCK_BYTES)
    window = window_of(files)

    empty = array("i")
    assert window.add(0, Scanned(array("i", [0]).tobytes(), empty.tobytes(), empty.tobytes(), empty.tobytes(), 3))

    assert (window.num_rows, window.num_blank, window.is_ready, window.fault) == (0, 3, True, None)
    assert window.find({(0, 0)}) == []
