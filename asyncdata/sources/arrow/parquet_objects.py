"""Parquet files in stores: a footer is a range, and a row group the ranges of its columns. Runs without numpy."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.digest import digest
from asyncdata.sources.arrow.parquet_reader import ParquetReader, RowGroups, footer_length
from asyncdata.sources.arrow.rows_to_json import RowWriter
from asyncdata.sources.reader import FileChangedError
from asyncdata.sources.remote.reads import Reads
from asyncdata.sources.remote.store import ObjectStamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    import pyarrow as pa

    from asyncdata.core.messages import Block, Job
    from asyncdata.core.read_counts import ReadCounts
    from asyncdata.sources.reader import BlockRows

__all__ = ("ObjectFooter", "RangesFile", "RemoteParquetReader", "load_footer")

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


class RangesFile:
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

    def size(self) -> int:
        """Bytes of the whole."""
        return self._num_bytes

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def writable(self) -> bool:
        """It is not."""
        return False

    def flush(self) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """There is nothing to close."""


class _Object(RowGroups):
    """An open object: a :class:`~asyncdata.sources.arrow.parquet_reader.ParquetFile`. Each read was checked."""

    is_untouched = True

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

        self.path = stamp.path
        self._reads = reads
        self._stamp = stamp
        self._columns = columns
        self._begun: dict[int, Callable[[], list[bytes]]] = {}
        start = stamp.num_bytes - len(found.tail)
        with pq.ParquetFile(self._file([(start, found.tail)])) as parquet:
            self._metadata = parquet.metadata
            self.write = RowWriter(parquet.schema_arrow, columns, python_values=python_values)
        super().__init__(self._metadata)
        tops = tuple(f"{name}." for name in columns)
        schema = self._metadata.schema
        numbers = range(self._metadata.num_columns)
        self._leaves = [number for number in numbers if f"{schema.column(number).path}.".startswith(tops)]

    def _file(self, pieces: Sequence[tuple[int, bytes]]) -> pa.PythonFile:
        import pyarrow as pa

        file = RangesFile(self._stamp.num_bytes, pieces, lambda start, stop: self._reads.load(self._stamp, start, stop))
        return pa.PythonFile(file, mode="r")

    def ranges(self, group: int) -> list[tuple[int, int]]:
        """The bytes of the needed columns of a row group."""
        columns = [self._metadata.row_group(group).column(leaf) for leaf in self._leaves]
        found = []
        for column in columns:
            start = column.data_page_offset
            if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                start = column.dictionary_page_offset
            found.append((start, min(self._stamp.num_bytes, start + column.total_compressed_size + _PADDING_BYTES)))
        found.sort()
        firsts = [start for start, _ in found]
        return [
            (start, max(start, min(stop, after)) if after is not None else stop)
            for (start, stop), after in zip(found, [*firsts[1:], None], strict=True)
        ]

    def begin(self, group: int) -> int:
        """Begin to read a row group; its bytes."""
        ranges = self.ranges(group)
        if group not in self._begun:
            self._begun[group] = self._reads.begin([(self._stamp, *one) for one in ranges])
        return sum(stop - start for start, stop in ranges)

    def batches(self, group: int) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        self.begin(group)
        pieces = self._begun.pop(group)()
        starts = [start for start, _ in self.ranges(group)]
        file = self._file(list(zip(starts, pieces, strict=True)))
        parquet: Any = pq.ParquetFile(file, metadata=self._metadata, pre_buffer=False, page_checksum_verification=True)
        return self.batches_of(parquet, group, self._columns)

    def refuse_shrunk(self) -> None:
        """Each read was checked."""

    def check(self) -> None:
        """Each read was checked."""

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
        """As the protocol says."""
        self._reads.on_progress, self._reads.counts = on_progress, counts

    def give_up(self) -> None:
        """As the protocol says."""
        self._reads.close()

    def expect(self, blocks: Sequence[Block]) -> None:
        """As the protocol says."""
        for file_id in {block.file_id for block in blocks}:
            if self._open.find(file_id) is None and file_id not in self._tails:
                self._tails[file_id] = self._reads.start(load_footer, self._reads, self._stamp(file_id))
        groups = [(block.file_id, self._file(block.file_id).group_of(block.start)) for block in blocks]
        self._next = deque(one for before, one in pairwise([None, *groups]) if one is not None and one != before)
        self._ahead.clear()
        self._go_ahead()

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """As the protocol says."""
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
        """As the protocol says."""
        super().close()
        self._reads.close()
