"""A worker's reader of the Arrow files of a dataset: it reads any row directly, through the dataset's index mapping.

The files are in the stream format, which the library datasets uses. They are memory-mapped, as there: the format is
made for that, and a row costs only its own bytes. If a mapped file is truncated, a read beyond its end kills the
process; so every reader checks the size first. Runs without numpy and without datasets.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.files import path_of
from asyncdata.core.identity import FileRef
from asyncdata.core.settings import prepared
from asyncdata.sources.arrow.rows_to_json import RowWriter, block_rows
from asyncdata.sources.files import BlockRows, FileChangedError, SameFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

    from asyncdata.core.messages import Block, Job, Overflow

_PIECE_BYTES, _FIRST_ROWS, _MAX_ROWS = 4 << 20, 16, 256  # converted at once; rows before it is known how long they are


class Part(msgspec.Struct, frozen=True):
    """Rows ``[start, stop)`` of an Arrow file.

    :ivar num_stored: rows of the file.
    :ivar columns: the numbers of the columns that are read.
    """

    path: str
    start: int
    stop: int
    num_stored: int
    columns: list[int]


class ArrowReader:
    """Rows of a dataset by their index: a :class:`~asyncdata.sources.files.BlockReader`.

    :param columns: the names of the columns, in the order of a row's keys.
    :param data: the parts of files with the rows, in order.
    :param indices: the parts of files with the mapping from an index to a row of ``data``; empty for the identity.
    :param sizes: bytes of each file at the start.
    :param stamps: the other recorded facts of the files, as a :class:`~asyncdata.core.messages.FileRef` each.
    :ivar is_padded: whether fields of structs were left out, as they are null.
    """

    def __init__(
        self,
        job: Job,
        columns: list[str],
        data: list[dict[str, Any]],
        indices: list[dict[str, Any]],
        sizes: dict[str, int],
        stamps: Sequence[list[Any]] = (),
    ) -> None:
        self._max_row_bytes = job.max_row_bytes
        self._title = job.files[0].path
        files = {path: FileRef(path, num_bytes) for path, num_bytes in sizes.items()}
        files |= {file.path: file for file in msgspec.convert(stamps, prepared(list[FileRef]))}
        self._data = _Rows(data, columns, files)
        self._indices = _Rows(indices, ["indices"], files)
        self._has_indices = bool(indices)
        self._writers: dict[int, RowWriter] = {}
        self._piece_rows = _FIRST_ROWS
        self.is_padded = False

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        return block_rows(self.each(range(block.start, block.stop)), num_bytes, self._max_row_bytes)

    def each(self, rows: Sequence[int]) -> Iterator[bytes]:
        """The JSON texts of these rows one by one, of which at most about ``_PIECE_BYTES`` are held."""
        while rows:
            texts, rows = self.texts(rows[: self._piece_rows]), rows[self._piece_rows :]
            fitting = _PIECE_BYTES * len(texts) // max(1, sum(map(len, texts)))
            self._piece_rows = max(1, min(_MAX_ROWS, 4 * self._piece_rows, fitting))
            yield from texts

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        found = self.texts([place.offset for place in places])
        for place, text in zip(places, found, strict=True):
            if len(text) != lengths[place.row]:
                raise FileChangedError(f"AD303 {self._title}: row {place.offset} was another one before")

        return found

    def texts(self, rows: Sequence[int]) -> list[bytes]:
        """The JSON texts of the rows with these indices, in this order."""
        import pyarrow as pa

        self.check()  # a read beyond the end of a truncated file would kill the process
        numbers = self._looked_up(rows) if self._has_indices else rows
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        places, found = iter(order), [b""] * len(order)
        for part, runs in groupby(self._data.runs([numbers[place] for place in order]), itemgetter(0)):
            batch = pa.concat_batches([run for _, run in runs])
            writer = self._writer(part, batch)
            for text in writer(batch):
                found[next(places)] = text
            self.is_padded |= writer.is_padded
        return found

    def index_pieces(self) -> Iterator[bytes]:
        """The index mapping as uint64, in pieces."""
        for _, batch in self._indices.all():
            values = batch.column(0)
            width = values.type.bit_width // 8
            yield values.buffers()[1][values.offset * width : (values.offset + len(values)) * width].to_pybytes()

    def _looked_up(self, rows: Sequence[int]) -> list[int]:
        order = sorted(range(len(rows)), key=rows.__getitem__)
        places, found = iter(order), [0] * len(order)
        for _, batch in self._indices.runs([rows[place] for place in order]):
            for number in batch.column(0).to_pylist():
                found[next(places)] = number
        return found

    def _writer(self, part: int, batch: pa.RecordBatch) -> RowWriter:
        if part not in self._writers:
            self._writers[part] = RowWriter(batch.schema, batch.schema.names)
        return self._writers[part]

    def check(self) -> None:
        self._indices.check()
        self._data.check()

    def close(self) -> None:
        self._data.close()
        self._indices.close()


class _Rows:
    """The rows of some parts, numbered across all of them."""

    def __init__(self, parts: list[dict[str, Any]], names: list[str], files: dict[str, FileRef]) -> None:
        self._parts = msgspec.convert(parts, prepared(list[Part]))
        self._starts = list(accumulate((part.stop - part.start for part in self._parts), initial=0))
        self._names = names
        self._refs = files
        self._files: dict[str, ArrowFile] = {}
        self._tables: dict[tuple[str, tuple[int, ...]], pa.Table] = {}  # of the files, with the wanted columns

    def check(self) -> None:
        """Check that the open files have not changed.

        :raises FileChangedError: naming a file that has changed, or was truncated.
        """
        for file in self._files.values():
            file.check()

    def runs(self, numbers: Sequence[int]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows with the sorted ``numbers``, in ranges, each with the number of its part."""
        place = 0
        while place < len(numbers):
            first = place
            place += 1
            while place < len(numbers) and numbers[place] == numbers[place - 1] + 1:
                place += 1
            yield from self._range(numbers[first], numbers[place - 1] + 1)

    def all(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Every row."""
        return self._range(0, self._starts[-1])

    def _range(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            part, end = self._parts[number], min(stop, self._starts[number + 1])
            shift = part.start - self._starts[number]
            for batch in self._table(part).slice(start + shift, end - start).to_batches():
                yield number, batch
            start = end

    def _table(self, part: Part) -> pa.Table:
        key = part.path, tuple(part.columns)
        if key not in self._tables:
            if part.path not in self._files:
                self._files[part.path] = ArrowFile(self._refs[part.path])
                self._files[part.path].check()
            self._tables[key] = self._files[part.path].table.select(part.columns).rename_columns(self._names)
        return self._tables[key]

    def close(self) -> None:
        self._tables.clear()
        while self._files:
            self._files.popitem()[1].close()


class ArrowFile:
    """A memory-mapped Arrow file in the stream format.

    :param file: its state at the start; a file without one is never checked.
    :ivar table: its rows.
    """

    def __init__(self, file: FileRef) -> None:
        import pyarrow as pa

        self._same = SameFile(file)
        self._map = pa.memory_map(path_of(self._same.fd))
        try:
            with pa.ipc.open_stream(self._map) as reader:
                self.table: pa.Table = reader.read_all()
        except pa.ArrowException as error:
            self.close()
            raise FileChangedError(f"AD303 {file.path} is no Arrow file any more: {error}") from error

    def check(self) -> None:
        """Check that the file has not changed since the start.

        :raises FileChangedError: if it may have changed, or was truncated.
        """
        self._same.check()

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        self._same.close()


def write_arrow(path: str, batches: Iterable[pa.RecordBatch]) -> Part:
    """Write a new file with these batches (at least one), without the metadata of their columns.

    :raises OSError: if it cannot be written.
    """
    import pyarrow as pa

    it = iter(batches)
    first = next(it)
    num_rows, schema = 0, first.schema.remove_metadata()
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in chain([first], it):
            writer.write_batch(batch.replace_schema_metadata(None))
            num_rows += batch.num_rows
    return Part(path, 0, num_rows, num_rows, list(range(len(schema))))
