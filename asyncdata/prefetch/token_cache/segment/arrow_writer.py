"""Writes a segment: spilled replies, in delivery order, become record batches in the order of the file.

Arrow moves the rows; Python never handles single rows. If a piece is requested again because its worker was killed, it
is written to the same place.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.cache_messages import Stored, StorePlan
from asyncdata.prefetch.token_cache.segment.layout import (
    ENTRY,
    RECORD_WORDS,
    WORDS_PER_COLUMN,
    Names,
    Word,
    checksum,
    pad,
)
from asyncdata.prefetch.token_cache.segment.spill import Spill
from asyncdata.prefetch.token_cache.segment.write_index import Origins, write_at, write_index

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.cache_messages import CacheJob, StoreTokens
    from asyncdata.core.messages import Data

__all__ = ("store",)

_LENGTH = struct.Struct("<I")
_OVERWRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_END_OF_STREAM = struct.pack("<iI", -1, 0)
_ROOMS = 8
"""A block whose samples need the room of more blocks than this is not stored. (Blocks after a long row are empty.)"""

_decode_plan = msgspec.msgpack.Decoder(StorePlan).decode
Array = np.ndarray[Any, Any]


def store(request: StoreTokens, cache: CacheJob, digest_of: Callable[[int], str]) -> Stored:
    """Append the blocks of the request's plan to the segment.

    :param digest_of: returns the digest of the content of a file of the job.
    :raises OSError: if it cannot be written.
    :raises DamagedError: if the content of a file cannot be identified.
    """
    path = os.path.join(cache.folder, request.file)
    with open(os.path.join(cache.folder, request.plan), "rb") as file:
        plan = _decode_plan(file.read())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, request.offset)
        return _Piece(request, plan, cache, fd).store(digest_of)
    finally:
        os.close(fd)


class _Column(NamedTuple):
    """A column of all samples of the piece, in the order of the file.

    :ivar values: a binary array of Arrow's; for the tokens, an int32 array.
    :ivar offsets: where each value begins, in bytes, and the last one ends: int64 of shape (num_samples + 1,).
    """

    values: Any
    offsets: Array


class _Rows(NamedTuple):
    """The piece's rows, in the order of the file: verdicts and notes as records have them."""

    verdicts: Array
    notes: Array
    columns: list[_Column]


class _Piece:
    """One request."""

    def __init__(self, request: StoreTokens, plan: StorePlan, cache: CacheJob, fd: int) -> None:
        self._request = request
        self._plan = plan
        self._cache = cache
        self._fd = fd
        self._names = Names(plan.columns, plan.reasons, plan.notes)
        self._record_bytes = 4 * self._names.record_words
        self._counts = np.frombuffer(plan.counts, np.int32)
        self._end = request.offset
        self._entries = np.zeros(len(self._counts), ENTRY)
        self._records: list[bytes] = []

    def store(self, digest_of: Callable[[int], str]) -> Stored:
        rows = _read_spills(self._plan, self._cache.folder)
        schema = _schema(self._names.columns)
        if not self._request.offset:
            self._write(schema.serialize())
        stored = self._write_blocks(rows, schema)
        entries = self._entries[stored]
        self._write_aside(entries, [self._records[number] for number in stored])
        if self._request.is_last:
            self._seal(digest_of)
        return Stored(self._end, np.array(stored, np.int32).tobytes(), int(entries["num_rows"].sum()))

    def _write(self, data: Any) -> None:
        self._end = write_at(self._fd, data, self._end)

    def _write_blocks(self, rows: _Rows, schema: Any) -> list[int]:
        """Write a batch for each block; return the blocks that were written."""
        batch = _batch(rows.columns, schema)
        ends = np.cumsum(self._counts, dtype=np.int64)
        before = np.concatenate(([0], np.cumsum(rows.verdicts == 0)))
        plan, entries = self._plan, self._entries
        entries["file"] = np.frombuffer(plan.file_ids, np.int32)
        entries["start"] = np.frombuffer(plan.starts, np.int64)
        entries["stop"] = np.frombuffer(plan.stops, np.int64)
        entries["num_rows"], entries["num_blank"] = self._counts, np.frombuffer(plan.blanks, np.int32)
        entries["text_sum"] = np.frombuffer(plan.sums, np.uint64)
        stored = []
        for number, stop in enumerate(ends.tolist()):
            first = stop - int(self._counts[number])
            samples = slice(int(before[first]), int(before[stop]))
            if self._write_block(number, slice(first, stop), samples, rows, batch, schema):
                stored.append(number)
        return stored

    def _write_block(self, number: int, places: slice, samples: slice, rows: _Rows, batch: Any, schema: Any) -> bool:
        """Write the block if it is not too large; return whether it was written."""
        data = batch.slice(samples.start, samples.stop - samples.start).serialize()
        body_at, body_bytes, values_at = _positions(data, schema)
        records = self._records_of(places, samples, rows, values_at)
        if pad(len(records)) + pad(body_bytes) > _ROOMS * (self._cache.room_bytes + 1):
            self._records.append(b"")
            return False

        entry = self._entries[number : number + 1]
        entry["num_samples"] = samples.stop - samples.start
        entry["body"], entry["body_bytes"] = self._end + body_at, body_bytes
        body = memoryview(data)[body_at : body_at + body_bytes]
        entry["body_sum"], entry["records_sum"] = checksum(body), checksum(records)
        self._records.append(records)
        self._write(data)
        return True

    def _records_of(self, places: slice, samples: slice, rows: _Rows, values_at: list[int]) -> bytes:
        """The records of a block's rows, with the offsets of their values in the body."""
        num_rows = places.stop - places.start
        records = np.zeros((num_rows, self._names.record_words), np.int32)
        back = np.arange(num_rows, dtype=np.int64) * self._record_bytes
        records[:, Word.BACK] = back
        records[:, Word.OFFSET] = np.frombuffer(self._plan.offsets, np.int32)[places]
        records[:, Word.LENGTH] = np.frombuffer(self._plan.lengths, np.int32)[places]
        records[:, Word.VERDICT] = rows.verdicts[places]
        records[:, Word.NOTES] = rows.notes[places]
        kept = np.flatnonzero(rows.verdicts[places] == 0)
        to_body = pad(num_rows * self._record_bytes) - back[kept]
        for number, (column, at) in enumerate(zip(rows.columns, values_at, strict=True)):
            offsets = column.offsets[samples.start : samples.stop + 1]
            word = RECORD_WORDS + WORDS_PER_COLUMN * number
            records[kept, word] = to_body + at + offsets[:-1] - offsets[:1]
            records[kept, word + 1] = np.diff(offsets)
        return records.tobytes()

    def _write_aside(self, entries: Array, records: list[bytes]) -> None:
        """Records and entries come after all batches: until then, they are in a file of their own."""
        path = _aside(self._cache.folder, self._request.file, self._request.piece)
        with open(os.open(path, _OVERWRITE, 0o600), "wb") as file:
            file.write(_LENGTH.pack(len(entries)))
            file.write(entries.tobytes())
            file.writelines(records)

    def _seal(self, digest_of: Callable[[int], str]) -> None:
        """All batches are written: end the stream, and write records, entries, meta and footer."""
        self._write(_END_OF_STREAM)
        pieces = []
        for piece in range(self._request.piece + 1):
            with open(_aside(self._cache.folder, self._request.file, piece), "rb") as file:
                pieces.append(self._copy_records(file.read()))
        entries = np.concatenate(pieces)
        counts = int(entries["num_rows"].sum()), int(entries["num_samples"].sum())
        self._end = write_index(self._fd, self._end, entries, self._names, counts, Origins(self._cache, digest_of))

    def _copy_records(self, data: bytes) -> Array:
        """Append the records that were written aside; the entries, which say where they are now."""
        (number,) = _LENGTH.unpack_from(data)
        entries = np.frombuffer(data, ENTRY, number, _LENGTH.size).copy()
        sizes = entries["num_rows"].astype(np.int64) * self._record_bytes
        entries["records"] = self._end + np.cumsum(sizes) - sizes
        self._write(memoryview(data)[_LENGTH.size + entries.nbytes :])
        return entries


def _aside(folder: str, file: str, piece: int) -> str:
    return os.path.join(folder, f"{file}.{piece}")


def _schema(columns: list[str]) -> Any:
    import pyarrow as pa

    fields = [pa.field("tokens", pa.list_(pa.int32())), *(pa.field(name, pa.binary()) for name in columns)]
    return pa.schema(fields)


def _batch(columns: list[_Column], schema: Any) -> Any:
    """All samples, of which slices are written."""
    import pyarrow as pa

    tokens = columns[0]
    numbers = pa.Array.from_buffers(pa.int32(), int(tokens.offsets[-1]) // 4, [None, tokens.values.buffers()[2]])
    lists = pa.ListArray.from_arrays(pa.array((tokens.offsets // 4).astype(np.int32)), numbers)
    return pa.RecordBatch.from_arrays([lists, *(column.values for column in columns[1:])], schema=schema)


def _positions(data: Any, schema: Any) -> tuple[int, int, list[int]]:
    """Where the body of a serialized batch begins, its bytes, and where in it each column's values begin."""
    import pyarrow as pa

    message = pa.ipc.read_message(data)
    body = message.body
    if body is None or not body.size:
        return data.size, 0, [0] * len(schema)

    batch = pa.ipc.read_record_batch(message, schema)
    values = [column.buffers()[-1] for column in batch.columns]
    starts = [buffer.address - body.address if buffer is not None and buffer.size else 0 for buffer in values]
    return body.address - data.address, body.size, starts


def _read_spills(plan: StorePlan, folder: str) -> _Rows:
    """The rows of the plan, in the order of the file."""
    names = Names(plan.columns, plan.reasons, plan.notes)
    places, ends = np.frombuffer(plan.places, np.int32), np.frombuffer(plan.ends, np.int32)
    order = np.argsort(places, kind="stable")
    bounds = np.searchsorted(places[order], ends)
    verdicts, notes = np.zeros(len(places), np.int32), np.zeros(len(places), np.int32)
    parts: list[list[Any]] = [[] for _ in ("", *plan.columns)]
    for number, (start, stop) in enumerate(zip([0, *bounds.tolist()], bounds.tolist(), strict=False)):
        if start == stop:
            continue

        first = int(ends[number - 1]) if number else 0
        spill = _Spill(os.path.join(folder, plan.spills[number]), names, int(ends[number]) - first)
        rows = places[order[start:stop]] - first
        verdicts[start:stop], notes[start:stop] = spill.verdicts[rows], spill.notes[rows]
        for part, found in zip(parts, spill.take(rows, plan.columns), strict=True):
            part.append(found)
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    numbers = np.cumsum(verdicts == 0) - 1
    verdicts, notes, numbers = verdicts[back], notes[back], numbers[back]
    return _Rows(verdicts, notes, [_in_order(part, numbers[verdicts == 0]) for part in parts])


class _Spill(Spill):
    """A spill whose values Arrow moves."""

    def take(self, rows: Array, columns: list[str]) -> list[Any]:
        """The values of these rows, of those that are samples, for the tokens and each column: binary arrays."""
        import pyarrow as pa

        samples = self.samples_of(rows[self.verdicts[rows] == 0])
        return [_binary(*values).take(pa.array(samples)) for values in self.values(columns)]


def _binary(data: Data, ends: Array) -> Any:
    import pyarrow as pa

    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends
    return pa.Array.from_buffers(pa.binary(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _in_order(parts: list[Any], numbers: Array) -> _Column:
    """The values of these numbers in ``parts``, end to end."""
    import pyarrow as pa

    if not parts or not len(numbers):
        return _Column(_binary(b"", np.empty(0, np.int64)), np.zeros(1, np.int64))

    values = pa.concat_arrays(parts).take(pa.array(numbers))
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    return _Column(values, offsets.astype(np.int64))
