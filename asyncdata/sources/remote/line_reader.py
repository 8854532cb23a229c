"""Finds the rows of lines in objects: all blocks of a request are read at once. Runs without numpy."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.messages import Block
from asyncdata.sources.reader import BlockRows
from asyncdata.sources.remote.reads import Reads, coalesced
from asyncdata.sources.remote.store import ObjectStamp
from asyncdata.sources.text.line_scanner import read_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from asyncdata.core.messages import FileRef, Job, Overflow
    from asyncdata.core.read_counts import ReadCounts

__all__ = ("RemoteLineReader",)

_MAX_ROW_IN_SLOT = 16 << 20
_MAX_KNOWN = 1 << 18
_MAX_HELD_BYTES = 64 << 20


class _BeyondError(Exception):
    """A row goes on where nothing has been read yet."""


class _LongRows:
    """Which blocks begin inside a long row, and where it ends; the last 262144 of them.

    The bytes of such a row are held until its start is read, 64 MiB in all. As a newline before a block begins a row in
    it, what is known of a block begins one byte before the block.

    :param block_bytes: of all blocks of a file, except the last.
    :ivar usual_bytes: about the length of such a row.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.usual_bytes = 0
        self._known: dict[tuple[int, int], tuple[int, bool]] = {}
        self._held: dict[tuple[int, int], bytes] = {}
        self._num_held_bytes = 0
        self._lock = threading.Lock()

    def add(self, file_id: int, start: int, stop: int, data: bytes = b"", *, ends: bool) -> None:
        """There is no newline in ``[start, stop)``; if the row ``ends`` there, the next byte is one, or the file's end.

        :param data: these bytes, where they are to be held.
        """
        size = self.block_bytes
        with self._lock:
            if not data:
                self.usual_bytes += (stop - start - self.usual_bytes) // 8
            for first in range(start - (start + 1) % size, stop, size):
                key, last = (file_id, first + 1), min(stop, first + size)
                held = self._held.get(key, b"")
                if first < start and self._known.get(key) != (start, False):
                    continue

                self._known[key] = last, ends and last == stop
                self._num_held_bytes -= len(self._held.pop(key, b""))
                if data and (first >= start or len(held) == start - first):
                    self._held[key] = held[: max(0, start - first)] + data[max(0, first - start) : last - start]
                    self._num_held_bytes += last - first
            while len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            while self._num_held_bytes > _MAX_HELD_BYTES:
                self._num_held_bytes -= len(self._held.pop(next(iter(self._held))))

    def at(self, file_id: int, start: int) -> tuple[int, bool]:
        """Up to where the block at ``start`` has no newline, 0 if that is not known; and whether a row ends there."""
        return self._known.get((file_id, start), (0, False))

    def held(self, file_id: int, start: int) -> bytes:
        """The bytes of that block up to there, if they are held."""
        return self._held.get((file_id, start), b"")


class _Found(NamedTuple):
    """The bytes of an object from ``start`` on, and the rows of blocks in them; None: one goes on beyond them."""

    start: int
    data: bytes
    rows: dict[Block, BlockRows | None]


class RemoteLineReader:
    """The :class:`~asyncdata.sources.reader.WideReader` of JSONL objects.

    Every read carries the etag and version of the start, so there is nothing to check afterwards.

    Rows that go on beyond what is read of their block are completed when all blocks of a request are there: most of
    their bytes are in other blocks then.
    """

    def __init__(self, job: Job) -> None:
        self._files = job.files
        self._slack_bytes = job.slack_bytes
        self._max_row_bytes = job.max_row_bytes
        self._reads = Reads(job.stores)
        self._expected: dict[Block, Future[_Found]] = {}
        self._rows: dict[Block, BlockRows] = {}
        self._long = _LongRows(job.block_bytes)

    def watch(self, on_progress: Callable[[], object], counts: ReadCounts) -> None:
        self._reads.on_progress, self._reads.counts = on_progress, counts

    def give_up(self) -> None:
        self._reads.close()

    def expect(self, blocks: Sequence[Block]) -> None:
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()
        self._rows.clear()
        files: dict[int, list[Block]] = {}
        for block in blocks:
            files.setdefault(block.file_id, []).append(block)
        for file_id, inside in files.items():
            stamp = self._stamp(file_id)
            missing: list[tuple[Block, tuple[int, int]]] = []
            for block in inside:
                start, stop = self._span(stamp, block)
                data = self._reads.cached(stamp, start, stop) if start < stop else b""
                if data is None:
                    missing.append((block, (start, stop)))
                else:
                    self._expected[block] = self._reads.start(self._find, start, data, [block])
            for piece in coalesced([span for _, span in missing]):
                found = [missing[number] for number in piece.ranges]
                future = self._reads.start(self._fetch, stamp, piece.start, piece.stop, found)
                self._expected.update((block, future) for block, _ in found)

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """As the protocol says; the rows that begin and end in a block and its over-read always fit."""
        if block not in self._expected and block not in self._rows:
            self.expect([block])
        if self._expected:
            self._complete(num_bytes)
        return self._rows.pop(block)

    def _complete(self, num_bytes: int) -> None:
        """Take the rows of all expected blocks. A row that goes on beyond its block fits, or is left out."""
        found = {block: future.result() for block, future in self._expected.items()}
        under_way = {
            block: self._reads.start(self._rows_of, block, one.start, one.data, self._more)
            for block, one in found.items()
            if one.rows[block] is None
        }
        self._expected.clear()
        for block, one in found.items():
            self._rows[block] = one.rows[block] or under_way[block].result()
        too_many = sum(len(rows.data) for rows in self._rows.values()) - num_bytes
        for block, rows in sorted(self._rows.items(), key=lambda item: -len(item[1].data)):
            if too_many <= 0:
                return

            last = rows.starts[-1]
            rows.starts[-1] = -1
            too_many -= len(rows.data) - last
            self._rows[block] = rows._replace(data=rows.data[:last])

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        return self._reads.read(
            [(self._stamp(place.file_id), place.offset, place.offset + lengths[place.row]) for place in places]
        )

    def check(self) -> None:
        """As the protocol says: each read was checked."""

    def close(self) -> None:
        self._reads.close()

    def _stamp(self, file_id: int) -> ObjectStamp:
        return ObjectStamp.of(self._files[file_id])

    def _span(self, stamp: ObjectStamp, block: Block) -> tuple[int, int]:
        """The bytes of the block that have to be read. What is kept on the disk is always a whole block."""
        start, stop = self._whole(block)
        known, _ = self._long.at(block.file_id, block.start)
        if known >= block.stop - 1:
            return stop, stop

        if self._reads.keeps(stamp):
            return start, stop

        if self._long.at(block.file_id, block.stop) != (0, False):  # what goes on there is known
            stop = block.stop
        return (known if known - start > self._slack_bytes else start), stop

    def _whole(self, block: Block) -> tuple[int, int]:
        """The bytes that ``read_block`` of a file reads."""
        stop = min(block.stop + self._slack_bytes, self._files[block.file_id].num_bytes)
        return max(0, block.start - 1), stop

    def _fetch(
        self, stamp: ObjectStamp, start: int, stop: int, wanted: Sequence[tuple[Block, tuple[int, int]]]
    ) -> _Found:
        data = self._reads.fetch(stamp, start, stop)
        for _, (first, last) in wanted:
            self._reads.keep(stamp, first, last, data[first - start : last - start])
        return self._find(start, data, [block for block, _ in wanted])

    def _find(self, start: int, data: bytes, blocks: Sequence[Block]) -> _Found:
        """The rows of blocks of which the bytes from ``start`` are there."""
        end = data.find(b"\n")
        size, file_id = end if end >= 0 else len(data), blocks[0].file_id
        if start and start + size - blocks[0].start >= self._slack_bytes:
            ends = end >= 0 or start + size == self._files[file_id].num_bytes
            self._long.add(file_id, start, start + size, data[:size], ends=ends)
        rows: dict[Block, BlockRows | None] = {}
        for block in blocks:
            try:
                rows[block] = self._rows_of(block, start, data, _nothing_more)
            except _BeyondError:
                rows[block] = None
        return _Found(start, data, rows)

    def _rows_of(
        self, block: Block, start: int, data: bytes, more: Callable[[FileRef, int, int, int], bytes]
    ) -> BlockRows:
        """The rows of a block; of a long row that began before it, nothing."""

        def read(_: int, file: FileRef, first: int, size: int) -> bytes:
            if first >= start + len(data):
                return more(file, block.file_id, first, size)

            unread = bytes(max(0, start - first))  # of a row that is known to end at ``start``
            return unread + data[max(0, first - start) : first + size - start]

        if not data:
            return BlockRows(b"", array("i"), array("i"), array("i"), 0)

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
        (stop, ends), held = self._long.at(file_id, begin), self._long.held(file_id, begin)
        starts = range(begin, begin + 1)
        if stop <= first:  # nothing is known
            size = max(size, self._long.usual_bytes // 2 - 4 * size)
            stop, ends, held = min(first + size, file.num_bytes), False, b""
            starts = range(begin, stop + 1, block_bytes)
            for start in starts[1:]:
                if self._long.at(file_id, start) != (0, False):
                    stop, starts = start - 1, range(begin, start, block_bytes)
                    break
        if held:
            data = held[first + 1 - begin :]
        elif self._reads.keeps(stamp):
            blocks = [Block(file_id, s, min(s + block_bytes, file.num_bytes)) for s in starts]
            data = self._kept(stamp, blocks)[first + 1 - begin :]
            data = data[: stop - first] if ends else data
        else:
            data = self._reads.fetch(stamp, first, stop)
        return data + b"\n" if ends else data

    def _kept(self, stamp: ObjectStamp, blocks: Sequence[Block]) -> bytes:
        """The bytes of neighbouring blocks, or of the first; they are on the disk afterwards."""
        spans = [self._whole(block) for block in blocks]
        data = self._reads.cached(stamp, *spans[0])
        if data is None:
            start, stop = spans[0][0], spans[-1][1]
            data = self._reads.fetch(stamp, start, stop)
            for first, last in spans:
                self._reads.keep(stamp, first, last, data[first - start : last - start])
        return data


def _nothing_more(*_: object) -> bytes:
    raise _BeyondError
