"""Parquet files in stores: a footer is a range, and a row group the ranges of its columns. Runs without numpy."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.digest import digest
from asyncdata.sources.arrow.parquet_reader import ParquetFile, ParquetReader, footer_length, leaves_of
from asyncdata.sources.reader import FileChangedError
from asyncdata.sources.remote.reads import Reads
from asyncdata.sources.remote.store import ObjectStamp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import pyarrow as pa

    from asyncdata.core.messages import Block, Job
    from asyncdata.core.read_counts import ReadCounts
    from asyncdata.sources.reader import BlockRows

_TAIL_BYTES = 64 << 10
_AHEAD_BYTES = 64 << 20
"""Bytes of row groups that are read ahead of the one that is decoded, at least one row group."""
_PADDING_BYTES = 100
"""Old writers count a column's bytes too low by at most so many: PARQUET-816."""


class ObjectFooter(NamedTuple):
    """The end of an object: its last bytes with the whole footer, and the footer's digest.

    :ivar digest: empty if there is no footer.
    """

    tail: bytes
    digest: str

    def pieces(self, stamp: ObjectStamp) -> list[tuple[int, bytes]]:
        """What is there of the object."""
        return [(stamp.num_bytes - len(self.tail), self.tail)]


def load_footer(reads: Reads, stamp: ObjectStamp) -> ObjectFooter:
    """Read the footer, by one request, or two if it is large.

    :raises SourceError: if it cannot be read.
    """
    size = stamp.num_bytes
    tail = reads.load(stamp, max(0, size - _TAIL_BYTES), size) if size else b""
    length = footer_length(tail, size)
    if length and length + 8 > len(tail):
        tail = reads.load(stamp, size - 8 - length, size)
    return ObjectFooter(tail, digest(tail[len(tail) - 8 - length : -8]) if length else "")


def ranges_file(reads: Reads, stamp: ObjectStamp, pieces: Sequence[tuple[int, bytes]]) -> pa.PythonFile:
    """An object as a file of which some ranges are there: (start, bytes) of each, in order."""
    import pyarrow as pa

    return pa.PythonFile(_RangesFile(stamp.num_bytes, pieces, partial(reads.load, stamp)), mode="r")


class _RangesFile:
    """A file of which only some ranges are there; others are loaded when they are read.

    :param load: loads the bytes ``[start, stop)``.
    :param pieces: (start, bytes) of those that are there, in order.
    """

    closed = False

    def __init__(self, num_bytes: int, pieces: Sequence[tuple[int, bytes]], load: Callable[[int, int], bytes]) -> None:
        self._num_bytes = num_bytes
        self._pieces = pieces
        self._load = load
        self._place = 0

    def read(self, num_bytes: int = -1) -> bytes:
        """Bytes from the current place."""
        start = self._place
        stop = self._num_bytes if num_bytes < 0 else min(self._num_bytes, start + num_bytes)
        self._place = stop
        for first, data in self._pieces:
            if first <= start and stop <= first + len(data):
                return data[start - first : stop - first]

        return self._load(start, stop) if stop > start else b""

    def seek(self, place: int, whence: int = 0) -> int:
        """Go to a place."""
        self._place = place + (0, self._place, self._num_bytes)[whence]
        return self._place

    def tell(self) -> int:
        """The current place."""
        return self._place

    def close(self) -> None:
        """There is nothing to close."""


class _Object(ParquetFile):
    """An open object."""

    def __init__(
        self,
        reads: Reads,
        stamp: ObjectStamp,
        columns: list[str],
        found: ObjectFooter,
        footer: str,
        python_values: bool,
    ) -> None:
        import pyarrow.parquet as pq

        if found.digest != footer:
            raise FileChangedError(f"AD303 {stamp.path} was replaced: its footer is another one")

        self._reads = reads
        self._stamp = stamp
        self._begun: dict[int, Callable[[], list[bytes]]] = {}
        with pq.ParquetFile(ranges_file(reads, stamp, found.pieces(stamp))) as parquet:
            self._metadata = parquet.metadata
            super().__init__(stamp.path, self._metadata, parquet.schema_arrow, columns, python_values)
        self._leaves = leaves_of(self._metadata, columns)

    def ranges(self, group: int) -> list[tuple[int, int]]:
        """The bytes of the needed columns of a row group."""
        found = []
        for leaf in self._leaves:
            column = self._metadata.row_group(group).column(leaf)
            start = column.data_page_offset
            if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                start = column.dictionary_page_offset
            found.append((start, start + column.total_compressed_size + _PADDING_BYTES))
        found.sort()
        afters = [*(start for start, _ in found[1:]), self._stamp.num_bytes]
        return [(start, max(start, min(stop, after))) for (start, stop), after in zip(found, afters, strict=True)]

    def begin(self, group: int) -> int:
        """Begin to read a row group; its bytes."""
        ranges = self.ranges(group)
        if group not in self._begun:
            self._begun[group] = self._reads.begin([(self._stamp, *one) for one in ranges])
        return sum(stop - start for start, stop in ranges)

    def forget(self, group: int) -> None:
        """Read it from the store once more when it is needed."""
        self._begun.pop(group, None)

    def opened(self, group: int) -> Any:
        import pyarrow.parquet as pq

        self.begin(group)
        pieces = self._begun.pop(group)()
        starts = [start for start, _ in self.ranges(group)]
        file = ranges_file(self._reads, self._stamp, list(zip(starts, pieces, strict=True)))
        return pq.ParquetFile(file, metadata=self._metadata, pre_buffer=False, page_checksum_verification=True)

    def close(self) -> None:
        """Drop what was read ahead."""
        self._begun.clear()


class RemoteParquetReader(ParquetReader):
    """The same for objects: the footers of a request's blocks are read at once, then row groups, some ahead."""

    def __init__(self, job: Job, columns: list[str], footers: list[str], python_values: bool = False) -> None:
        super().__init__(job, columns, footers, python_values)
        self._reads = Reads(job.stores)
        self._tails: dict[int, Future[ObjectFooter]] = {}
        self._next: deque[tuple[int, int]] = deque()
        self._ahead: dict[tuple[int, int], int] = {}

    def watch(self, on_progress: Callable[[], object], counts: ReadCounts) -> None:
        self._reads.on_progress, self._reads.counts = on_progress, counts

    def give_up(self) -> None:
        self._reads.close()

    def expect(self, blocks: Sequence[Block]) -> None:
        # Something is left only of a request that failed: what it began may have failed too.
        self._tails.clear()
        for file_id, group in self._ahead:
            file = self._open.find(file_id)
            if isinstance(file, _Object):
                file.forget(group)
        for file_id in {block.file_id for block in blocks}:
            if self._open.find(file_id) is None and file_id not in self._tails:
                self._tails[file_id] = self._reads.start(load_footer, self._reads, self._stamp(file_id))
        groups = [(block.file_id, self._file(block.file_id).group_of(block.start)) for block in blocks]
        self._next = deque(one for before, one in pairwise([None, *groups]) if one is not None and one != before)
        self._ahead.clear()
        self._go_ahead()

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        key = block.file_id, self._file(block.file_id).group_of(block.start)
        self._ahead.pop(key, None)
        self._go_ahead()
        return super().read_block(block, num_bytes)

    def _go_ahead(self) -> None:
        """Begin to read row groups that are needed soon."""
        while self._next and (not self._ahead or sum(self._ahead.values()) < _AHEAD_BYTES):
            key = self._next.popleft()
            file = self._open.find(key[0])
            if isinstance(file, _Object):  # it may be closed again, where there are many
                self._ahead[key] = file.begin(key[1])

    def _opened(self, file_id: int) -> _Object:
        found = self._tails.pop(file_id, None)
        stamp = self._stamp(file_id)
        footer = found.result() if found is not None else load_footer(self._reads, stamp)
        return _Object(self._reads, stamp, self._columns, footer, self._footers[file_id], self._python_values)

    def _stamp(self, file_id: int) -> ObjectStamp:
        return ObjectStamp.of(self._files[file_id])

    def close(self) -> None:
        super().close()
        self._reads.close()
