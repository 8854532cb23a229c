"""Arrow files in the stream format, which the library datasets uses: reads rows by index, and writes files.

They are memory-mapped, as in datasets: the format is made for that, and a row costs only its own bytes. If a mapped
file is truncated, a read beyond its end kills the process; so every reader checks the size first.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import msgspec

from asyncdata.sources.reader import FileChangedError
from asyncdata.sources.same_file import SameFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    import pyarrow as pa

    from asyncdata.core.messages import FileRef

__all__ = ("ArrowFile", "Part", "write_arrow")


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


class ArrowFile:
    """A memory-mapped Arrow file in the stream format.

    :param file: its state at the start; a file without one is never checked.
    :param columns: the numbers of the columns that :meth:`rows` gives; None: all.
    :param names: their names in the rows.
    :ivar names: the names of the columns in the file.
    :ivar num_rows: its rows.
    """

    def __init__(self, file: FileRef, columns: Sequence[int] | None = None, names: Sequence[str] = ()) -> None:
        import pyarrow as pa

        self._same = SameFile(file)
        self._map = pa.memory_map(f"/proc/self/fd/{self._same.fd}")
        try:
            with pa.ipc.open_stream(self._map) as reader:
                self.names = list(reader.schema.names)
                self._batches = list(reader)
        except pa.ArrowException as error:
            self.close()
            raise FileChangedError(f"AD303 {file.path} is no Arrow file any more: {error}") from error

        self._starts = list(accumulate((batch.num_rows for batch in self._batches), initial=0))
        self.num_rows = self._starts[-1]
        self._wanted = None if columns is None else (list(columns), list(names))
        self._chosen: dict[int, pa.RecordBatch] = {}

    def check(self) -> None:
        """Check that the file has not changed since the start.

        :raises FileChangedError: if it may have changed, or was truncated.
        """
        self._same.check()

    def rows(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Rows ``[start, stop)``."""
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[number + 1])
            yield self._batch(number).slice(start - self._starts[number], end - start)
            start = end

    def _batch(self, number: int) -> pa.RecordBatch:
        import pyarrow as pa

        if self._wanted is None:
            return self._batches[number]

        found = self._chosen.get(number)
        if found is None:
            columns, names = self._wanted
            arrays = [self._batches[number].column(column) for column in columns]
            found = self._chosen[number] = pa.RecordBatch.from_arrays(arrays, names=names)
        return found

    def close(self) -> None:
        """Close the file."""
        self._batches = []
        self._chosen = {}
        self._map.close()
        self._same.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
