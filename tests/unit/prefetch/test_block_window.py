"""A window: where its rows lie in the slot, in the order of delivery, without having seen their bytes."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import JsonlSource, SourceLocation
from asyncdata.core.messages import NO_SLOT, Job, Overflow, Scanned
from asyncdata.prefetch.row_index.row_index import Places
from asyncdata.prefetch.windows.base import ChunkOrigin
from asyncdata.prefetch.windows.block_window import Window
from asyncdata.prefetch.windows.indexed_windows import IndexedWindow
from asyncdata.tokenization.user_function import FunctionTokenizer
from asyncdata.workers.request_handler import Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from asyncdata.sources.base import FileBlocks

BLOCK_BYTES, SLACK_BYTES = 32, 8
STRIDE = 1 + BLOCK_BYTES + SLACK_BYTES
LINES = [b'{"id": %d, "pad": "%s"}' % (number, b"x" * (number * 7 % 50)) for number in range(40)]
BACKWARDS = LINES[::-1]


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


def backwards(num_rows: int) -> Any:
    return np.arange(num_rows)[::-1]


def window_of(files: FileBlocks, arrange: Any = np.arange) -> Window:
    return Window(files, files.blocks(range(files.num_blocks)), 0, STRIDE, arrange)


@pytest.fixture
def read(jsonl_file: Callable[..., Path]) -> Iterator[Callable[..., tuple[Window, Worker, FileBlocks]]]:
    """A function that reads a window of these lines, of one file or several, by a worker."""
    workers = []

    def read(*files: list[bytes], order: Any = None, arrange: Any = np.arange) -> tuple[Window, Worker, FileBlocks]:
        paths = [str(jsonl_file(lines, f"{number}.jsonl")) for number, lines in enumerate(files)]
        opened = JsonlSource(paths, max_row_bytes=100).open(BLOCK_BYTES)
        worker, window = Worker(opened), window_of(opened, arrange)
        workers.append(worker)
        scans = list(window.scans())
        for number in range(len(scans)) if order is None else order:
            assert not window.is_ready
            window.add(number, worker.handler(scans[number]))
        assert window.is_ready
        return window, worker, opened

    yield read
    for worker in workers:
        worker.handler.close()


@pytest.fixture
def two_files(read: Any) -> Any:
    """Lines of two files, backwards."""
    return read(LINES[:30], [b"", *LINES[30:], b"\r"], arrange=backwards)


def content(location: SourceLocation) -> bytes:
    with open(location.path, "rb") as file:
        file.seek(location.byte_offset)
        return file.read(location.num_bytes)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_window_is_read_by_requests_of_64_blocks_in_any_order_of_replies(read: Any, order: list[int]) -> None:
    lines = [b"%031d" % number for number in range(130)]
    window, worker, files = read(lines, order=order)
    scans = list(window_of(files).scans())

    assert worker.rows(window.request(0, 130)) == lines
    assert [len(scan.blocks) for scan in scans] == [64, 64, 2]
    assert [scan.base for scan in scans] == [0, 64 * STRIDE, 128 * STRIDE]
    assert [block.start for scan in scans for block in scan.blocks] == list(range(0, 130 * 32, 32))


def test_every_row_has_its_place_and_comes_as_the_order_arranges_it(two_files: Any) -> None:
    window, worker, _ = two_files

    assert (window.num_rows, window.num_blank) == (40, 2)
    assert [window.key(row)[0] for row in range(40)] == [1] * 10 + [0] * 30
    assert (window.key(39), window.key(9)) == ((0, 0), (1, 1))
    assert [content(window.location(row)) for row in range(40)] == BACKWARDS
    origin = ChunkOrigin(window, 10)
    assert (origin.location(5), origin.key(5)) == (window.location(15), window.key(15))
    for first, stop in ((0, 40), (17, 23), (39, 40), (5, 5)):
        rows = worker.rows(window.request(first, stop))
        assert all(row in (None, line) for row, line in zip(rows, BACKWARDS[first:stop], strict=True))
    whole = [row for row, found in enumerate(worker.rows(window.request(0, 40))) if found is not None]
    assert worker.rows(window.request_of(np.array(whole[::-1]))) == [BACKWARDS[row] for row in whole[::-1]]


def test_a_row_longer_than_the_over_read_is_named_with_its_place(two_files: Any) -> None:
    """Whatever lies after it in the slot is another block's."""
    window, worker, _ = two_files

    request = window.request(0, 40)

    beyond = {item.row: (item.file_id, item.offset) for item in request.overflow}
    assert beyond == {row: window.key(row) for row in beyond}
    assert {row for row, found in enumerate(worker.rows(request)) if found is None} == set(beyond)
    most = BLOCK_BYTES + SLACK_BYTES
    assert set(beyond) == {row for row in range(40) if window.key(row)[1] % BLOCK_BYTES + len(BACKWARDS[row]) > most}
    assert 0 < len(beyond) < 40


@pytest.mark.parametrize(("num_beyond", "is_overflow"), [(0, False), (1, True)])
def test_a_row_is_complete_in_the_slot_or_is_read_again(read: Any, num_beyond: int, is_overflow: bool) -> None:
    row = b"x" * (BLOCK_BYTES + SLACK_BYTES + num_beyond)
    window, worker, _ = read([row, b"y" * 60])

    assert worker.rows(window.request(0, 1)) == [None if is_overflow else row]


def test_a_row_that_is_too_long_has_no_bytes(read: Any) -> None:
    window, _, files = read([b"1", b"x" * 101, b"2"])
    request = window.request(0, 3)

    assert array("i", request.lengths).tolist() == [1, -1, 1]
    assert request.overflow == []
    assert window.location(1) == SourceLocation(files.files[0].path, 2, -1)


def test_rows_are_found_by_their_places(two_files: Any) -> None:
    window, _, _ = two_files
    rows = [0, 7, 31, 39]

    assert window.find({window.key(row) for row in rows}) == rows
    assert window.find({(0, 1), (1, 0), (7, 0), (0, 10**9)}) == [], "no row begins there"
    assert window.find(frozenset()) == []


def test_a_window_without_rows_is_ready_too(jsonl_file: Callable[..., Path]) -> None:
    window = window_of(JsonlSource(str(jsonl_file([b"", b" ", b"\t"]))).open(BLOCK_BYTES))

    assert window.add(0, Scanned(array("i", [0]).tobytes(), b"", b"", b"", 3))

    assert (window.num_rows, window.num_blank, window.is_ready, window.fault) == (0, 3, True, None)
    assert window.find({(0, 0)}) == []


# Windows of single rows


def rows_of_file_3(lengths: list[int], expected: list[int] | None = None) -> IndexedWindow:
    """Rows a hundred bytes from one another."""
    nothing: Any = None
    numbers = np.arange(len(lengths))
    places = Places(np.full(len(lengths), 3), 100 * numbers, np.array(lengths, np.int32), numbers)
    made = IndexedWindow(nothing, nothing)
    made.fill(places, None if expected is None else np.array(expected, np.int32), is_last=True)
    return made


def test_rows_are_read_from_their_places_but_for_those_that_are_too_long_or_another_ranks() -> None:
    request = rows_of_file_3([5, 6, -1, 8]).request(1, 4)
    shared = rows_of_file_3([5, 6, -1, 8, 9], [1, -1, 7, -4, 0]).request(1, 5)

    assert request.slot == NO_SLOT
    assert array("i", request.lengths).tolist() == [6, -1, 8]
    assert request.overflow == [Overflow(0, 3, 100), Overflow(2, 3, 300)]
    assert request.expected == b""
    assert array("i", shared.expected).tolist() == [-1, 7, -4, 0]
    assert array("i", shared.lengths).tolist() == [6, -1, 8, 9]
    assert shared.overflow == [Overflow(3, 3, 400)]
