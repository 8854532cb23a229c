"""A worker's reader of Parquet files: it decodes a row group up to the end of a block. Runs without numpy."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from asyncdata.core.digest import digest
from asyncdata.sources.arrow.rows_to_json import RowWriter, block_rows
from asyncdata.sources.fingerprint import OpenFiles, SameFile
from asyncdata.sources.reader import FileChangedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from asyncdata.core.file_refs import FileRef
    from asyncdata.core.messages import Block, Job, Overflow
    from asyncdata.sources.reader import BlockRows

MAGIC = b"PAR1"
_READ_BYTES = 256 * 1024  # of a column at a time: of a row group that is left early, the rest is not read
_BATCH_BYTES = 4 << 20
_MAX_BATCH_ROWS = 512  # decoded at once before it is known how long they are
_HELD_BYTES = 64 << 20


class ParquetReader:
    """Rows of Parquet files: a :class:`~asyncdata.sources.reader.BlockReader`.

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
        ...

    def refuse_shrunk(self) -> None:  # noqa: B027 - of an object, each read was checked
        """Raise if it has fewer bytes than at the start."""

    def check(self) -> None:  # noqa: B027
        """Raise if it has changed."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""
        ...


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
            self._file = pa.OSFile(f"/proc/self/fd/{fd}")  # not by its name, which may belong to another file now
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
