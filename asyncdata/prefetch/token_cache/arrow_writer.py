"""Writes a segment of the token cache. Arrow serializes the batches; it is imported by the first worker that writes."""

from __future__ import annotations

import os
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.messages import encode
from asyncdata.prefetch.merged_samples import values_of
from asyncdata.prefetch.token_cache.segment import HEAD, SUFFIX, TOKENS, checksum, index_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.messages import Tokenized
    from asyncdata.prefetch.token_cache.segment import Entry

__all__ = ("SegmentWriter",)


class _Batches(NamedTuple):
    """Samples, of which slices become batches.

    :ivar bounds: column -> where each value begins among those of all of them, and the last one ends: int64 of shape
        (num_samples + 1,).
    """

    batch: Any
    bounds: dict[str, np.ndarray[Any, np.dtype[np.int64]]]


class SegmentWriter:
    """A new segment, in this folder.

    :param columns: of its samples, besides the tokens; a sample without one of them has an empty value.
    :ivar name: of the first file.
    :ivar stop: where the next entry will be in the index.
    :ivar write_s: seconds for which it was being written.
    :raises OSError: if it cannot be made.
    """

    def __init__(self, folder: str, columns: Sequence[str]) -> None:
        import pyarrow as pa

        self.name = f"{secrets.token_hex(8)}{SUFFIX}"
        self.columns = frozenset(columns)
        self.stop, self.write_s = 0, 0.0
        fields = [pa.field("tokens", pa.list_(pa.int32())), *(pa.field(name, pa.binary()) for name in sorted(columns))]
        self._schema = pa.schema(fields)
        path = os.path.join(folder, self.name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._index = os.open(index_of(path), flags, 0o600)
        try:
            self._data = os.open(path, flags, 0o600)
        except BaseException:
            os.close(self._index)
            raise

        self._end = _write(self._data, self._schema.serialize(), 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of both files."""
        return self._end + self.stop

    def batches(self, samples: Tokenized) -> _Batches:
        """These samples as this segment has them."""
        import pyarrow as pa

        values = {each.name: each for each in values_of(samples)}
        num_samples = len(samples.token_ends) // 4
        bounds, arrays = {}, []
        for name in (TOKENS, *self._schema.names[1:]):
            found = values.get(name)
            data = b"" if found is None else found.data
            bounds[name] = places = np.zeros(num_samples + 1, np.int64)
            if found is not None:
                places[1:] = found.starts + found.sizes
            if name == TOKENS:
                numbers = pa.Array.from_buffers(pa.int32(), len(data) // 4, [None, pa.py_buffer(data)])
                arrays.append(pa.ListArray.from_arrays(pa.array((places >> 2).astype(np.int32)), numbers))
            else:
                buffers = [None, pa.py_buffer(places.astype(np.int32)), pa.py_buffer(data)]
                arrays.append(pa.Array.from_buffers(pa.binary(), num_samples, buffers))
        return _Batches(pa.RecordBatch.from_arrays(arrays, schema=self._schema), bounds)

    def append(self, batches: _Batches, start: int, stop: int, entry: Entry, most_bytes: int) -> int | None:
        """Append the samples ``[start, stop)`` as a block; return where its entry is, or None if it is too large.

        :param entry: without what is found out here.
        :param most_bytes: the segment may grow by.
        :raises OSError: if it cannot be written. Nothing more may be appended then.
        """
        data = batches.batch.slice(start, stop - start).serialize()
        at, body, firsts = _positions(data, self._schema)
        values = {}
        for (name, places), first in zip(batches.bounds.items(), firsts, strict=True):
            ends = (places[start + 1 : stop + 1] - places[start]).astype(np.uint32)
            if name == TOKENS or (len(ends) and ends[-1]):
                values[name] = first, ends.tobytes()
        placed = msgspec.structs.replace(
            entry, values=values, body=self._end + at, body_bytes=len(body), body_sum=checksum(body)
        )
        row = encode(placed)
        if data.size + HEAD.size + len(row) > most_bytes:
            return None

        began, found = time.perf_counter(), self.stop
        self._end = _write(self._data, data, self._end)
        self.stop = _write(self._index, HEAD.pack(len(row), checksum(row)) + row, self.stop)
        self.write_s += time.perf_counter() - began
        return found

    def close(self) -> None:
        """Close both files."""
        os.close(self._data)
        os.close(self._index)


def _write(fd: int, data: Any, offset: int) -> int:
    """Write all of ``data``; return the offset after it."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(fd, left, offset)
        offset += written
        left = left[written:]
    return offset


def _positions(data: Any, schema: Any) -> tuple[int, memoryview, list[int]]:
    """Where the body of a serialized batch begins, the body, and where in it the values of each column begin."""
    import pyarrow as pa

    message = pa.ipc.read_message(data)
    body = message.body
    if body is None or not body.size:
        return data.size, memoryview(b""), [0] * len(schema)

    batch = pa.ipc.read_record_batch(message, schema)
    values = [column.buffers()[-1] for column in batch.columns]
    firsts = [buffer.address - body.address if buffer is not None and buffer.size else 0 for buffer in values]
    return body.address - data.address, memoryview(body), firsts
