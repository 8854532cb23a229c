"""A worker's reader of Parquet files: it decodes a row group up to the end of a block. Runs without numpy."""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from asyncdata.core.digest import digest
from asyncdata.sources.arrow.rows_to_json import RowWriter, block_rows
from asyncdata.sources.reader import FileChangedError
from asyncdata.sources.same_file import OpenFiles, SameFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from asyncdata.core.messages import Block, FileRef, Job, Overflow
    from asyncdata.sources.reader import BlockRows

__all__ = ("MAGIC", "ParquetFile", "ParquetReader", "RowGroups", "footer_digest", "footer_length")

MAGIC = b"PAR1"
_READ_BYTES = 256 * 1024  # of a column at a time: of a row group that is left early, the rest is not read
_BATCH_BYTES = 4 << 20
_MAX_BATCH_ROWS = 1024
_HELD_BYTES = 64 << 20


class ParquetReader:
    """Rows of Parquet files: a :class:`~asyncdata.sources.reader.BlockReader`.

    Parquet has no index of rows, so the rows before a block in its row group must be decoded, too. Consecutive blocks
    of one row group cost one pass over it.

    :param columns: the columns to read, in the order of a row's keys.
    :param footers: the digest of each file's footer at the start.
    """

    def __init__(self, job: Job, columns: list[str], footers: list[str], python_values: bool = False) -> None:
        self._files = job.files
        self._max_row_bytes = job.max_row_bytes
        self._columns = columns
        self._footers = footers
        self._python_values = python_values
        self._open = OpenFiles(self._opened)
        self._pass: tuple[ParquetFile, int, _Pass] | None = None
        self._held = _Held()

    def _opened(self, file_id: int) -> ParquetFile:
        return _File(self._files[file_id], self._columns, self._footers[file_id], self._python_values)

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """As the protocol says."""
        file = self._file(block.file_id)
        group = file.group_of(block.start)
        with _naming(file, group):
            batches = self._pass_over(file, group, block.start).rows(block.start, block.stop)
            rows = [row for batch in batches for row in file.write(batch)]
        return block_rows(rows, num_bytes, self._max_row_bytes)

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        """As the protocol says. Rows of one row group are read in one pass, or from memory if the group is small."""
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
            held = self._held.get((file_id, group), file)
            source = held or self._pass_over(file, group, rows[0])
            return file.write(pa.concat_batches([batch for row in rows for batch in source.rows(row, row + 1)]))

    def _pass_over(self, file: ParquetFile, group: int, row: int) -> _Pass:
        """The current pass if it is over this group of the open file, and before ``row``; otherwise a new pass."""
        if self._pass is not None:
            passed, passed_group, current = self._pass
            if passed is file and passed_group == group and current.first <= row:
                return current

        started = _Pass(file.batches(group), file.first_row(group))
        self._pass = file, group, started
        return started

    def _file(self, file_id: int) -> ParquetFile:
        """The open file; it is opened again if it was touched.

        :raises FileChangedError: if it has changed.
        """
        file = self._open.find(file_id)
        if file is not None and not file.is_untouched:
            self._open.close_file(file_id)
        return self._open.to_read(file_id)

    def check(self) -> None:
        """As the protocol says."""
        self._open.check()

    def close(self) -> None:
        """As the protocol says."""
        self._pass = None
        self._open.close()
        self._held = _Held()


class ParquetFile(Protocol):
    """An open file.

    :ivar path: its name.
    :ivar write: converts its rows to JSON texts.
    """

    path: str
    write: RowWriter

    @property
    def is_untouched(self) -> bool:
        """Whether it looks as when it was opened."""
        ...

    def group_of(self, row: int) -> int:
        """The row group of a row."""
        ...

    def first_row(self, group: int) -> int:
        """The first row of a row group."""
        ...

    def batches(self, group: int) -> Iterator[pa.RecordBatch]:
        """The rows of a row group."""
        ...

    def refuse_shrunk(self) -> None:
        """Raise if it has fewer bytes than at the start."""
        ...

    def check(self) -> None:
        """Raise if it has changed."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class RowGroups:
    """Where the row groups of a file begin, and how their rows are read."""

    def __init__(self, metadata: Any) -> None:
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._ends = list(accumulate(group.num_rows for group in groups))
        self._row_bytes = [group.total_byte_size // max(1, group.num_rows) for group in groups]

    def group_of(self, row: int) -> int:
        """As :class:`ParquetFile` says."""
        return bisect_right(self._ends, row)

    def first_row(self, group: int) -> int:
        """As :class:`ParquetFile` says."""
        return self._ends[group - 1] if group else 0

    def batches_of(self, parquet: Any, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a group of an open ``pyarrow.parquet.ParquetFile``."""
        num_rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // max(1, self._row_bytes[group])))
        found: Iterator[pa.RecordBatch] = parquet.iter_batches(
            num_rows, row_groups=[group], columns=columns, use_threads=False
        )
        return found


class _File(RowGroups):
    """A file of this machine."""

    def __init__(self, ref: FileRef, columns: list[str], footer: str, python_values: bool) -> None:
        self._ref = ref
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = ref.path
        self._columns = columns
        self._same = SameFile(ref)
        fd = self._same.fd
        try:
            self._touched = _touched(fd)
            _refuse_another(fd, ref, footer)
            self._same.check()
            self._file = pa.OSFile(f"/proc/self/fd/{fd}")  # not by its name, which may belong to another file now
            self._parquet: Any = pq.ParquetFile(
                self._file, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
            )
            self.write = RowWriter(self._parquet.schema_arrow, columns, python_values=python_values)
        except BaseException:
            self._same.close()
            raise

        super().__init__(self._parquet.metadata)

    def refuse_shrunk(self) -> None:
        _refuse_shrunk(self._same.fd, self._ref)

    def check(self) -> None:
        self.refuse_shrunk()
        self._same.check()

    @property
    def is_untouched(self) -> bool:
        return _touched(self._same.fd) == self._touched

    def batches(self, group: int) -> Iterator[pa.RecordBatch]:
        return self.batches_of(self._parquet, group, self._columns)

    def close(self) -> None:
        self._parquet.close()
        self._file.close()
        self._same.close()


class _Pass:
    """A row group, from front to back.

    :ivar first: the first row that can still be read.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], first: int) -> None:
        self.first = first
        self._batches = batches
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

            self.first, self._batch = end, next(self._batches, None)
            if self._batch is None:
                raise ValueError(f"it ends before row {stop}")


class _Held:
    """A cache of decoded row groups with a limit in bytes; the oldest is removed first."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], _Batches] = {}
        self._too_large: set[tuple[int, int]] = set()

    def get(self, key: tuple[int, int], file: ParquetFile) -> _Batches | None:
        """The row group; None for one that is too large."""
        found = self._groups.pop(key, None)
        if found is None and key not in self._too_large:
            found = self._decode(key, file)
        if found is not None:
            self._groups[key] = found  # the youngest now
        return found

    def _decode(self, key: tuple[int, int], file: ParquetFile) -> _Batches | None:
        batches, num_bytes = [], 0
        for batch in file.batches(key[1]):
            batches.append(batch)
            num_bytes += batch.nbytes
            if num_bytes > _HELD_BYTES:
                self._too_large.add(key)
                return None

        while self._groups and sum(group.num_bytes for group in self._groups.values()) + num_bytes > _HELD_BYTES:
            del self._groups[next(iter(self._groups))]
        return _Batches(batches, file.first_row(key[1]), num_bytes)


class _Batches:
    """A row group in memory."""

    def __init__(self, batches: list[pa.RecordBatch], first: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._batches = batches
        self._starts = list(accumulate((batch.num_rows for batch in batches), initial=first))

    def rows(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            num_rows = min(stop, self._starts[number + 1]) - start
            yield self._batches[number].slice(start - self._starts[number], num_rows)
            start += num_rows


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


def _touched(fd: int) -> tuple[int, int]:
    """What differs if the file was written to; what else there is to look at costs more."""
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def _refuse_shrunk(fd: int, ref: FileRef) -> int:
    """The file's size, which is not less than it was."""
    size = os.fstat(fd).st_size
    if size < ref.num_bytes:
        raise FileChangedError(f"AD302 {ref.path} shrank from {ref.num_bytes} to {size} bytes while it was read")

    return size


def _refuse_another(fd: int, ref: FileRef, footer: str) -> None:
    size = _refuse_shrunk(fd, ref)
    if size != ref.num_bytes or footer_digest(fd, size) != footer:
        raise FileChangedError(f"AD303 {ref.path} was replaced or edited while it was read: its footer is another one")


def footer_digest(fd: int, num_bytes: int) -> str:
    """Digest of the file's footer, which says where everything lies and how large it is; empty if it has none."""
    length = footer_length(os.pread(fd, 8, max(0, num_bytes - 8)), num_bytes)
    return digest(os.pread(fd, length, num_bytes - 8 - length)) if length else ""


def footer_length(tail: bytes, num_bytes: int) -> int:
    """Bytes of the footer of a file that ends with ``tail``; 0 if it has none."""
    length = int.from_bytes(tail[-8:-4], "little")
    return length if tail[-4:] == MAGIC and length <= num_bytes - 12 else 0
