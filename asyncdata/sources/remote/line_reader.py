"""Finds the rows of lines in objects: all blocks of a request are read at once. Runs without numpy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asyncdata.sources.remote.reads import Reads, coalesced
from asyncdata.sources.remote.store import ObjectStamp
from asyncdata.sources.text.line_scanner import read_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from asyncdata.core.messages import Block, FileRef, Job, Overflow
    from asyncdata.core.read_counts import ReadCounts
    from asyncdata.sources.reader import BlockRows

__all__ = ("RemoteLineReader",)


class RemoteLineReader:
    """The :class:`~asyncdata.sources.reader.WideReader` of JSONL objects.

    Every read carries the etag and version of the start, so there is nothing to check afterwards.
    """

    def __init__(self, job: Job) -> None:
        self._files = job.files
        self._slack_bytes = job.slack_bytes
        self._max_row_bytes = job.max_row_bytes
        self._reads = Reads(job.stores)
        self._expected: dict[Block, Future[dict[Block, BlockRows]]] = {}

    def watch(self, on_progress: Callable[[], object], counts: ReadCounts) -> None:
        self._reads.on_progress, self._reads.counts = on_progress, counts

    def give_up(self) -> None:
        self._reads.close()

    def expect(self, blocks: Sequence[Block]) -> None:
        for future in self._expected.values():
            future.cancel()
        self._expected.clear()
        files: dict[int, list[Block]] = {}
        for block in blocks:
            files.setdefault(block.file_id, []).append(block)
        for file_id, inside in files.items():
            stamp, missing = self._stamp(file_id), []
            for block in inside:
                start, stop = self._span(block)
                data = self._reads.cached(stamp, start, stop)
                if data is None:
                    missing.append(block)
                else:
                    self._expected[block] = self._reads.start(self._rows, stamp, start, data, [block])
            for piece in coalesced([self._span(block) for block in missing]):
                found = [missing[number] for number in piece.ranges]
                future = self._reads.start(self._find, stamp, piece.start, piece.stop, found)
                self._expected.update(dict.fromkeys(found, future))

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """As the protocol says; a block with its over-read always fits."""
        if block not in self._expected:
            self.expect([block])
        return self._expected.pop(block).result()[block]

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

    def _span(self, block: Block) -> tuple[int, int]:
        """The bytes that are read of a block: as ``read_block`` of a file reads them."""
        num_bytes = self._files[block.file_id].num_bytes
        return max(0, block.start - 1), min(block.stop + self._slack_bytes, num_bytes)

    def _find(self, stamp: ObjectStamp, start: int, stop: int, blocks: Sequence[Block]) -> dict[Block, BlockRows]:
        data = self._reads.fetch(stamp, start, stop)
        for block in blocks:
            first, last = self._span(block)
            self._reads.keep(stamp, first, last, data[first - start : last - start])
        return self._rows(stamp, start, data, blocks)

    def _rows(self, stamp: ObjectStamp, start: int, data: bytes, blocks: Sequence[Block]) -> dict[Block, BlockRows]:
        """The rows of blocks of which the bytes from ``start`` are there."""
        read = partial(self._read, stamp, start, data)
        file = self._files[blocks[0].file_id]
        return {block: read_block(0, file, block, self._slack_bytes, self._max_row_bytes, read) for block in blocks}

    def _read(
        self, stamp: ObjectStamp, start: int, data: bytes, fd: int, file: FileRef, first: int, size: int
    ) -> bytes:
        """Bytes of the object: of what was read already, or, beyond it, by another request."""
        if start <= first and first + size <= start + len(data):
            return data[first - start : first - start + size]

        return self._reads.load(stamp, first, first + size)
