"""A worker's reader of Parquet files: it decodes a row group up to the end of a block. Runs without numpy."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.files import path_of
from asyncdata.core.identity import FileRef, digest
from asyncdata.sources.arrow.rows_to_json import RowWriter, block_rows
from asyncdata.sources.files import BlockRows, FileChangedError, OpenFiles, SameFile, WideReader
from asyncdata.sources.remote.reads import Reads
from asyncdata.sources.remote.store import ObjectStamp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    import pyarrow as pa

    from asyncdata.core.messages import Block, Job, Overflow


MAGIC = b"PAR1"
_READ_BYTES = 256 * 1024  # of a column at a time: of a row group that is left early, the rest is not read
_BATCH_BYTES = 4 << 20
_MAX_BATCH_ROWS = 512  # decoded at once before it is known how long they are
_HELD_BYTES = 64 << 20


class ParquetReader:
    """Rows of Parquet files: a :class:`~asyncdata.sources.files.BlockReader`.

    Parquet has no index of rows, so the rows before a block in its row group must be decoded, too. Consecutive blocks
    of one row group cost one pass over it.

    :param columns: the columns to read, in the order of a row's keys.
    :param footers: the digest of each file's footer at the start.
    :ivar is_padded: whether fields of structs were left out, as they are null.
    """

    def __init__(self, job: Job, columns: list[str], footers: list[str], python_values: bool = False) -> None:
        self._files = job.files
        self._max_row_bytes = job.max_row_bytes
        self._columns = columns
        self._footers = footers
        self._python_values = python_values
        self._open = OpenFiles(self._opened)
        self._pass: _Pass | None = None
        self._held: dict[tuple[int, int], pa.Table] = {}  # row groups, the least recently used first
        self._too_large: set[tuple[int, int]] = set()
        self.is_padded = False

    def _opened(self, file_id: int) -> ParquetFile:
        return _LocalFile(self._files[file_id], self._columns, self._footers[file_id], self._python_values)

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        file = self._file(block.file_id)
        group = file.group_of(block.start)
        with _naming(file, group):
            batches = self._pass_over(file, group, block.start).rows(block.start, block.stop)
            rows = (row for batch in batches for row in file.write(batch))
            found = block_rows(rows, num_bytes, self._max_row_bytes)
        self.is_padded |= file.write.is_padded
        return found

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        """Single rows. Rows of one row group are read in one pass, or from memory if the group is small."""
        wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, place in enumerate(places):
            group = self._file(place.file_id).group_of(place.offset)
            wanted.setdefault((place.file_id, group), []).append((place.offset, number))
        found = [b""] * len(places)
        for (file_id, group), rows in sorted(wanted.items()):
            rows.sort()
            for (row, number), text in zip(rows, self._texts(file_id, group, [row for row, _ in rows]), strict=True):
                if len(text) != lengths[places[number].row]:
                    raise FileChangedError(
                        f"AD303 {self._files[file_id].path} was edited while it was read: row {row} is another one"
                    )

                found[number] = text
        return found

    def _texts(self, file_id: int, group: int, rows: list[int]) -> list[bytes]:
        import pyarrow as pa

        file = self._file(file_id)
        with _naming(file, group):
            held, first = self._held_group(file_id, group, file), file.first_row(group)
            if held is None:  # one by one: a row holds the memory of all that were decoded with it
                passed = self._pass_over(file, group, rows[0])
                return [text for row in rows for batch in passed.rows(row, row + 1) for text in file.write(batch)]

            batches = [batch for row in rows for batch in held.slice(row - first, 1).to_batches()]
            return file.write(pa.concat_batches(batches))

    def _pass_over(self, file: ParquetFile, group: int, row: int) -> _Pass:
        """The current pass if it is over this group of the open file, and before ``row``; otherwise a new pass."""
        if self._pass is None or self._pass.over != (file, group) or self._pass.first > row:
            self._pass = _Pass(file, group)
        return self._pass

    def _held_group(self, file_id: int, group: int, file: ParquetFile) -> pa.Table | None:
        """The whole row group, decoded once while there is room for it; None for one that is too large."""
        import pyarrow as pa

        key = file_id, group
        found = self._held.pop(key, None)
        if found is None and key not in self._too_large:
            batches, num_bytes = [], 0
            for batch in file.batches(group):
                batches.append(batch)
                num_bytes += batch.nbytes
                if num_bytes > _HELD_BYTES:
                    self._too_large.add(key)
                    return None

            while self._held and sum(held.nbytes for held in self._held.values()) + num_bytes > _HELD_BYTES:
                del self._held[next(iter(self._held))]
            found = pa.Table.from_batches(batches)
        if found is not None:
            self._held[key] = found  # the youngest now
        return found

    def _file(self, file_id: int) -> ParquetFile:
        """The open file; it is opened again if it was touched.

        :raises FileChangedError: if it has changed.
        """
        file = self._open.find(file_id)
        if file is not None and not file.is_untouched:
            self._open.close_file(file_id)
        return self._open.to_read(file_id)

    def check(self) -> None:
        self._open.check()

    def close(self) -> None:
        self._pass = None
        self._open.close()
        self._held.clear()


class ParquetFile(ABC):
    """An open file.

    :ivar path: its name.
    :ivar write: converts its rows to JSON texts.
    :ivar is_untouched: whether it looks as when it was opened.
    """

    is_untouched = True

    def __init__(self, path: str, metadata: Any, schema: pa.Schema, columns: list[str], python_values: bool) -> None:
        self.path = path
        self.write = RowWriter(schema, columns, python_values=python_values)
        self._columns = columns
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        self._row_bytes = [group.total_byte_size // max(1, group.num_rows) for group in groups]

    def group_of(self, row: int) -> int:
        """The row group of a row."""
        return bisect_right(self._ends, row)

    def first_row(self, group: int) -> int:
        """The first row of a row group."""
        return self._ends[group - 1] if group else 0

    def batches(self, group: int) -> Iterator[pa.RecordBatch]:
        """The rows of a row group, at most about twice ``_BATCH_BYTES`` at a time, or one row.

        The footer does not tell how long rows are: a text that is repeated is stored once. If a batch is too large, the
        row group is decoded again, fewer rows at a time.
        """
        opened, num_done, is_done = self.opened(group), 0, False
        while not is_done:
            num_rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // max(1, self._row_bytes[group])))
            place, is_done = 0, True
            for batch in opened.iter_batches(num_rows, row_groups=[group], columns=self._columns, use_threads=False):
                num_bytes, place = batch.get_total_buffer_size(), place + batch.num_rows
                if num_bytes > 2 * _BATCH_BYTES and batch.num_rows > 1:
                    self._row_bytes[group] = max(2 * self._row_bytes[group], num_bytes // batch.num_rows)
                    is_done = False
                    break

                if place > num_done:
                    yield batch.slice(max(0, num_done - place + batch.num_rows))
                    num_done = place

    @abstractmethod
    def opened(self, group: int) -> Any:
        """A ``pyarrow.parquet.ParquetFile`` that can read this row group."""

    def refuse_shrunk(self) -> None:  # noqa: B027 - of an object, each read was checked
        """Raise if it has fewer bytes than at the start."""

    def check(self) -> None:  # noqa: B027
        """Raise if it has changed."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""


class _LocalFile(ParquetFile):
    """A file of this machine."""

    def __init__(self, ref: FileRef, columns: list[str], footer: str, python_values: bool) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = ref.path
        self._ref = ref
        self._same = SameFile(ref)
        fd = self._same.fd
        try:
            self.refuse_shrunk()
            if os.fstat(fd).st_size != ref.num_bytes or footer_digest(fd, ref.num_bytes) != footer:
                raise FileChangedError(
                    f"AD303 {ref.path} was replaced or edited while it was read: its footer is another one"
                )

            self._same.check()
            self._file = pa.OSFile(path_of(fd))  # not by its name, which may belong to another file now
            self._parquet: Any = pq.ParquetFile(
                self._file, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
            )
            super().__init__(ref.path, self._parquet.metadata, self._parquet.schema_arrow, columns, python_values)
        except BaseException:
            self._same.close()
            raise

    def opened(self, group: int) -> Any:
        return self._parquet

    def refuse_shrunk(self) -> None:
        size = os.fstat(self._same.fd).st_size
        if size < self._ref.num_bytes:
            raise FileChangedError(
                f"AD302 {self.path} shrank from {self._ref.num_bytes} to {size} bytes while it was read"
            )

    def check(self) -> None:
        self.refuse_shrunk()
        self._same.check()

    @property
    def is_untouched(self) -> bool:  # type: ignore[override]
        return self._same.is_untouched

    def close(self) -> None:
        self._parquet.close()
        self._file.close()
        self._same.close()


class _Pass:
    """A row group, from front to back.

    :ivar over: the file and the row group; None after an error, as nothing can be read after it.
    :ivar first: the first row that can still be read.
    """

    def __init__(self, file: ParquetFile, group: int) -> None:
        self.over: tuple[ParquetFile, int] | None = (file, group)
        self.first = file.first_row(group)
        self._batches = file.batches(group)
        self._batch: pa.RecordBatch | None = None

    def rows(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The rows ``[start, stop)``, none of them before :attr:`first`."""
        while True:
            end = self.first + (0 if self._batch is None else self._batch.num_rows)
            if self._batch is not None and start < end:
                num_rows = min(stop, end) - start
                yield self._batch.slice(start - self.first, num_rows)
                start += num_rows
            if start >= stop:
                return

            try:
                batch = next(self._batches, None)
            except BaseException:
                self.over = None
                raise

            self.first, self._batch = end, batch
            if batch is None:
                raise ValueError(f"it ends before row {stop}")


@contextmanager
def _naming(file: ParquetFile, group: int) -> Iterator[None]:
    """An error of Arrow in a row group, with the file and whether the file has changed."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if not file.is_untouched:
            file.refuse_shrunk()
            raise FileChangedError(f"AD303 {file.path} was edited while it was read: {error}") from error

        reason = f"row group {group} cannot be decoded: {error}".replace("\n", " ")
        raise OSError(errno.EIO, reason, file.path) from error


def footer_digest(fd: int, num_bytes: int) -> str:
    """Digest of the file's footer, which says where everything lies and how large it is; empty if it has none."""
    length = footer_length(os.pread(fd, 8, max(0, num_bytes - 8)), num_bytes)
    return digest(os.pread(fd, length, num_bytes - 8 - length)) if length else ""


def footer_length(tail: bytes, num_bytes: int) -> int:
    """Bytes of the footer of a file that ends with ``tail``; 0 if it has none."""
    length = int.from_bytes(tail[-8:-4], "little")
    return length if tail[-4:] == MAGIC and length <= num_bytes - 12 else 0


def leaves_of(metadata: Any, columns: Sequence[str]) -> list[int]:
    """The numbers of the stored columns that these columns of rows are made of."""
    tops = tuple(f"{name}." for name in columns)
    numbers = range(metadata.num_columns)
    return [number for number in numbers if f"{metadata.schema.column(number).path}.".startswith(tops)]


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


class RemoteParquetReader(ParquetReader, WideReader):
    """The same for objects: the footers of a request's blocks are read at once, then row groups, some ahead."""

    def __init__(self, job: Job, columns: list[str], footers: list[str], python_values: bool = False) -> None:
        super().__init__(job, columns, footers, python_values)
        self._reads = Reads(job.stores)
        self._tails: dict[int, Future[ObjectFooter]] = {}
        self._next: deque[tuple[int, int]] = deque()
        self._ahead: dict[tuple[int, int], int] = {}

    def expect(self, blocks: Sequence[Block]) -> None:
        # Something is left only of a request that failed: what it began may have failed too.
        self._tails.clear()
        for file_id, group in self._ahead:
            file = self._open.find(file_id)
            if isinstance(file, _Object):
                file.forget(group)
        for file_id in {block.file_id for block in blocks}:
            if self._open.find(file_id) is None and file_id not in self._tails:
                self._tails[file_id] = self._reads.start(load_footer, self._reads, ObjectStamp.of(self._files[file_id]))
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
        stamp = ObjectStamp.of(self._files[file_id])
        footer = found.result() if found is not None else load_footer(self._reads, stamp)
        return _Object(self._reads, stamp, self._columns, footer, self._footers[file_id], self._python_values)

    def close(self) -> None:
        super().close()
        self._reads.close()
