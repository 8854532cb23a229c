"""Finds the rows of lines in objects: all blocks of a request are read at once. Runs without numpy."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from asyncdata.core.identity import FileRef
from asyncdata.core.messages import Block, Job, Overflow
from asyncdata.sources.files import BlockRows, WideReader
from asyncdata.sources.line_scanner import read_block
from asyncdata.sources.remote.reads import Reads, coalesced
from asyncdata.sources.remote.store import ObjectStamp

Found = dict[Block, BlockRows | Callable[[], BlockRows]]

_MAX_ROW_IN_SLOT = 16 << 20
_MAX_KNOWN, _MAX_HELD_BYTES = 1 << 18, 64 << 20


class _BeyondError(Exception):
    """A row continues where nothing has been read yet."""


class _LongRows:
    """Which blocks begin inside a long row, and where it ends; the last 262144 of them.

    The bytes of such a row are held until its start is read, 64 MiB in all. As a newline before a block begins a row in
    it, what is known of a block begins one byte before the block.

    :param block_bytes: of all blocks of a file, except the last.
    :ivar usual_bytes: about the length of such a row.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.usual_bytes = self._num_held_bytes = 0
        self._known: dict[tuple[int, int], tuple[int, bool]] = {}
        self._held: dict[tuple[int, int], bytes] = {}
        self._lock = threading.Lock()

    def add(self, file_id: int, start: int, stop: int, data: bytes = b"", *, ends: bool) -> None:
        """There is no newline in ``[start, stop)``; if the row ``ends`` there, the next byte is one, or the file's end.

        :param data: these bytes, where they are to be held; none, if ``start`` is the row's.
        """
        size = self.block_bytes
        with self._lock:
            if not data:
                self.usual_bytes += (stop - start - self.usual_bytes) // 8
            for first in range(start - (start + 1) % size, stop, size):
                key, last = (file_id, first + 1), min(stop, first + size)
                if first < start and self._known.get(key) != (start, False):
                    continue  # the block begins before the row does

                held = self._held.pop(key, b"")
                self._known[key] = last, ends and last == stop
                self._num_held_bytes -= len(held)
                if data and len(held) >= start - first:
                    self._held[key] = held[: max(0, start - first)] + data[max(0, first - start) : last - start]
                    self._num_held_bytes += last - first
            while len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            while self._num_held_bytes > _MAX_HELD_BYTES:
                self._num_held_bytes -= len(self._held.pop(next(iter(self._held))))

    def at(self, file_id: int, start: int) -> tuple[int, bool, bytes]:
        """Up to where the block at ``start`` has no newline, 0 if that is not known; whether the row ends there; and
        the bytes up to there, if they are held.
        """
        with self._lock:
            return *self._known.get((file_id, start), (0, False)), self._held.get((file_id, start), b"")


class RemoteLineReader(WideReader):
    """Reads JSONL objects.

    Every read carries the etag and version of the start, so there is nothing to check afterwards.

    A row that continues beyond what is read of its block is completed when all blocks of a request are there: much of
    it is in other blocks then.
    """

    def __init__(self, job: Job) -> None:
        self._files = job.files
        self._slack_bytes = job.slack_bytes
        self._max_row_bytes = job.max_row_bytes
        self._reads = Reads(job.stores)
        self._expected: dict[Block, Future[Found]] = {}
        self._rows: dict[Block, BlockRows] = {}
        self._long = _LongRows(job.block_bytes)

    def expect(self, blocks: Sequence[Block]) -> None:
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()
        self._rows.clear()
        files: dict[int, list[Block]] = {}
        for block in blocks:
            if self._long.at(block.file_id, block.start)[0] >= block.stop - 1:  # no row begins in it
                self._rows[block] = BlockRows(b"", array("i"), array("i"), array("i"), 0)
            else:
                files.setdefault(block.file_id, []).append(block)
        for file_id, inside in files.items():
            stamp, missing, spans = self._stamp(file_id), [], []
            for block in inside:
                start, stop = self._span(block)
                data = self._reads.cached(stamp, start, stop)
                if data is None:
                    missing.append(block)
                    spans.append((start, stop) if self._reads.keeps(stamp) else self._unknown(block, start, stop))
                else:
                    self._expected[block] = self._reads.start(self._find, stamp, start, stop, [block], data)
            for piece in coalesced(spans):
                found = [missing[number] for number in piece.ranges]
                future = self._reads.start(self._find, stamp, piece.start, piece.stop, found)
                self._expected.update(dict.fromkeys(found, future))

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """The rows of ``block``. Those that go on far beyond it may be left out, if the slot has no room for them."""
        if block not in self._expected and block not in self._rows:
            self.expect([block])
        if self._expected:
            self._complete(num_bytes)
        return self._rows.pop(block)

    def _complete(self, num_bytes: int) -> None:
        """Wait for the rows of all expected blocks. If they are too many for the slot, the longest are left out."""
        found = {block: future.result()[block] for block, future in self._expected.items()}
        self._expected.clear()
        going_on = {block: self._reads.start(rows) for block, rows in found.items() if callable(rows)}
        self._rows |= {block: rows for block, rows in found.items() if not callable(rows)}
        self._rows |= {block: future.result() for block, future in going_on.items()}
        excess_bytes = sum(len(rows.data) for rows in self._rows.values()) - num_bytes
        for block, rows in sorted(self._rows.items(), key=lambda item: -len(item[1].data)):
            if excess_bytes <= 0:
                return

            last, rows.starts[-1] = rows.starts[-1], -1
            excess_bytes -= len(rows.data) - last
            self._rows[block] = rows._replace(data=rows.data[:last])

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        return self._reads.read(
            [(self._stamp(place.file_id), place.offset, place.offset + lengths[place.row]) for place in places]
        )

    def check(self) -> None:
        """Nothing is left to check: each read was."""

    def close(self) -> None:
        self._reads.close()

    def _stamp(self, file_id: int) -> ObjectStamp:
        return ObjectStamp.of(self._files[file_id])

    def _span(self, block: Block) -> tuple[int, int]:
        """The bytes that are read of a block, and kept on the disk: as ``read_block`` of a file reads them."""
        num_bytes = self._files[block.file_id].num_bytes
        return max(0, block.start - 1), min(block.stop + self._slack_bytes, num_bytes)

    def _unknown(self, block: Block, start: int, stop: int) -> tuple[int, int]:
        """The span without the rows that are known to continue at its start and at its end."""
        known = self._long.at(block.file_id, block.start)[0]
        stop = block.stop if self._long.at(block.file_id, block.stop)[0] else stop
        return (known if known - start > self._slack_bytes else start), stop

    def _fetch(self, stamp: ObjectStamp, start: int, stop: int, blocks: Sequence[Block]) -> bytes:
        data = self._reads.fetch(stamp, start, stop)
        for first, last in map(self._span, blocks if self._reads.keeps(stamp) else ()):
            self._reads.keep(stamp, first, last, data[first - start : last - start])
        return data

    def _find(self, stamp: ObjectStamp, start: int, stop: int, blocks: Sequence[Block], data: bytes = b"") -> Found:
        """The rows of blocks, or what completes them. The bytes ``[start, stop)`` are read, if they are not there."""
        data = data or self._fetch(stamp, start, stop, blocks)
        end = data.find(b"\n")
        size, file_id = end if end >= 0 else len(data), blocks[0].file_id
        if start and start + size - blocks[0].start >= self._slack_bytes:
            is_end = end >= 0 or start + size == self._files[file_id].num_bytes
            self._long.add(file_id, start, start + size, data[:size], ends=is_end)
        found: Found = {}
        for block in blocks:
            try:
                found[block] = self._rows_of(block, start, data, is_last_try=False)
            except _BeyondError:
                found[block] = partial(self._rows_of, block, start, data)
        return found

    def _rows_of(self, block: Block, start: int, data: bytes, *, is_last_try: bool = True) -> BlockRows:
        """The rows of a block, without the row that continues at its start if that is long."""

        def read(_: int, file: FileRef, first: int, size: int) -> bytes:
            if first >= start + len(data):
                if is_last_try:
                    return self._more(file, block.file_id, first, size)
                raise _BeyondError

            known = bytes(max(0, start - first))  # of a row that ends at ``start``
            return known + data[max(0, first - start) : first + size - start]

        file, slack_bytes = self._files[block.file_id], self._slack_bytes
        rows = read_block(0, file, block, slack_bytes, self._max_row_bytes, read, _MAX_ROW_IN_SLOT)
        if not rows.lengths:
            return rows._replace(data=b"")

        first, length = block.start + rows.offsets[-1], rows.lengths[-1]
        if first + length > block.stop + slack_bytes:
            self._long.add(block.file_id, first, first + length, ends=True)
        begin = rows.starts[0]
        if begin <= slack_bytes + 1:
            return rows

        starts = array("i", [start - begin if start >= 0 else start for start in rows.starts])
        return rows._replace(data=rows.data[begin:], starts=starts)

    def _more(self, file: FileRef, file_id: int, first: int, size: int) -> bytes:
        """Bytes of a row from ``first`` on, and a newline where it is known to end."""
        stamp, block_bytes = ObjectStamp.of(file), self._long.block_bytes
        begin = (first + 1) // block_bytes * block_bytes
        stop, ends, held = self._long.at(file_id, begin)
        if held[first + 1 - begin :]:
            return held[first + 1 - begin :] + b"\n" * ends

        if stop <= first:  # nothing is known of it
            stop, ends = min(first + max(size, self._long.usual_bytes // 2 - 4 * size), file.num_bytes), False
        starts = [begin]
        for start in range(begin + block_bytes, stop + 1, block_bytes):
            if self._long.at(file_id, start)[0]:
                stop = start - 1
                break
            starts.append(start)
        if not self._reads.keeps(stamp):
            return self._reads.fetch(stamp, first, stop) + b"\n" * ends

        blocks = [Block(file_id, start, min(start + block_bytes, file.num_bytes)) for start in starts]
        (start, there), (_, last) = self._span(blocks[0]), self._span(blocks[-1])
        data = self._reads.cached(stamp, start, there) or self._fetch(stamp, start, last, blocks)
        return data[first - start : stop - start] + b"\n" * ends
