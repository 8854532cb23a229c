"""Segments of single rows, which orders of rows write and read: each row can be read and checked by itself.

Such a segment has the rows in any order::

    row | row | ... | entries | meta | footer

A row is the number of bytes of each column (int32; the first column has the tokens), and the values end to end, filled
up to a multiple of four bytes. An entry says which row it is and where it is. Meta and footer are those of segments of
blocks. A row without a sample has an entry only.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.core.cache_messages import RowsPlan, Stored
from asyncdata.prefetch.merged_samples import Found, Piece
from asyncdata.prefetch.token_cache.segment.layout import DamagedError, Names, checksum
from asyncdata.prefetch.token_cache.segment.reader import Segment
from asyncdata.prefetch.token_cache.segment.spill import Spill
from asyncdata.prefetch.token_cache.segment.write_index import Origins, write_at, write_index

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.cache_messages import CachedPlaces, CacheJob, StoreTokens
    from asyncdata.prefetch.token_cache.segment.reader import Segments

__all__ = ("ROW_ENTRY", "RowSegment", "RowsRefusedError", "read_rows", "store_rows")

ROW_ENTRY = np.dtype(
    [
        ("file", "<i4"),
        ("verdict", "<i4"),
        ("start", "<i8"),
        ("at", "<i8"),
        ("num_bytes", "<i4"),
        ("notes", "<i4"),
        ("row_sum", "<u8"),
        ("text_sum", "<u8"),
    ]
)
_MAX_TABLES = 12
"""Segments whose entries a worker keeps: 3 MB each. Of further ones, single entries are read."""

_decode_plan = msgspec.msgpack.Decoder(RowsPlan).decode

Array = np.ndarray[Any, Any]


class RowsRefusedError(Exception):
    """A row cannot be read from its segment."""

    def __init__(self, segment: str, cause: OSError | DamagedError) -> None:
        super().__init__(str(cause))
        self.segment = segment
        self.cause = cause


class RowSegment(Segment):
    """A segment of rows, open for reading; see :class:`~asyncdata.prefetch.token_cache.segment.reader.Segment`."""

    _table: Array | None = None

    def entries(self) -> Array:
        """All entries, as an array of :data:`ROW_ENTRY`; ``start`` is the row's number in its file.

        :raises DamagedError: if they are damaged.
        """
        if self._table is not None:
            return self._table

        data = self._read(self._footer.entries, self.num_entries * ROW_ENTRY.itemsize)
        if checksum(data) != self.meta.entries_sum:
            raise DamagedError("the checksum of its entries does not match")

        return np.frombuffer(data, ROW_ENTRY)

    def entries_of(self, numbers: Array, *, keep_all: bool) -> Array:
        """These entries.

        :param keep_all: keep all entries in memory, for other calls.
        :raises DamagedError: if there are none of these numbers, or they are damaged.
        """
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.num_entries:
            raise DamagedError("it has no such entry")

        if keep_all:
            self._table = self.entries()
            return self._table[numbers]

        size = ROW_ENTRY.itemsize
        found = [self._read(self._footer.entries + size * number, size) for number in numbers.tolist()]
        return np.frombuffer(b"".join(found), ROW_ENTRY)

    def read_rows(self, entries: Array) -> memoryview:
        """The rows of these entries, end to end.

        :raises DamagedError: if one is not what was written.
        """
        ends = np.cumsum(entries["num_bytes"], dtype=np.int64).tolist()
        buffer = memoryview(bytearray(ends[-1] if ends else 0))
        columns = (entries["at"].tolist(), entries["row_sum"].tolist(), _seeds(entries).tolist())
        for first, end, at, row_sum, seed in zip([0, *ends], ends, *columns, strict=False):
            room = buffer[first:end]
            if os.preadv(self._fd, [room], at) != end - first:
                room[:] = self._read(at, end - first)
            if checksum(room, seed) != row_sum:
                raise DamagedError(f"the row at byte {at} is not what was written")

        return buffer

    def verify(self) -> None:
        """Compare every byte that is used with its checksum.

        :raises DamagedError: naming the first that does not match.
        """
        entries = self.entries()
        for first in range(0, len(entries), 1024):
            self.read_rows(entries[first : first + 1024])


def read_rows(segments: Segments[RowSegment], cached: CachedPlaces) -> tuple[Found, dict[int, int]]:
    """The cached rows of a request; and what the text was of each row whose file was touched.

    :raises RowsRefusedError: if one of them cannot be read.
    """
    rows, owners = np.frombuffer(cached.rows, np.int32), np.frombuffer(cached.owners, np.int32)
    numbers, found = np.frombuffer(cached.entries, np.int32), Found([], {}, {})
    are_sure, sums = np.frombuffer(cached.are_sure, np.bool_), dict[int, int]()
    for owner in np.unique(owners).tolist():
        chosen = owners == owner
        try:
            segment, keep_all = segments.get(cached.segments[owner]), segments.num_known <= _MAX_TABLES
            entries = segment.entries_of(numbers[chosen], keep_all=keep_all)
            _read_rows(segment, rows[chosen], entries, found)
            unsure = ~are_sure[chosen]
            sums.update(zip(rows[chosen][unsure].tolist(), entries["text_sum"][unsure].tolist(), strict=True))
        except (OSError, DamagedError) as error:
            raise RowsRefusedError(cached.segments[owner], error) from error

    return found, sums


def _read_rows(segment: RowSegment, rows: Array, entries: Array, found: Found) -> None:
    """Add the rows with these entries of a segment."""
    names, verdicts, notes = segment.meta.names, entries["verdict"], entries["notes"]
    buffer = segment.read_rows(entries)
    for number in np.flatnonzero(verdicts).tolist():
        found.drops.setdefault(names.reasons[-1 - int(verdicts[number])], []).append(int(rows[number]))
    for bit, note in enumerate(names.notes if notes.any() else ()):
        if noted := rows[notes >> bit & 1 == 1].tolist():
            found.notes.setdefault(note, []).extend(noted)
    kept = np.flatnonzero(verdicts == 0)
    if not len(kept):
        return

    num_bytes = entries["num_bytes"].astype(np.int64)
    firsts = (np.cumsum(num_bytes) - num_bytes)[kept]
    num_columns = 1 + len(names.columns)
    sizes = np.frombuffer(buffer, np.int32)[(firsts >> 2)[:, None] + np.arange(num_columns)].astype(np.int64)
    starts = firsts[:, None] + 4 * num_columns + np.cumsum(sizes, axis=1) - sizes
    columns = list(enumerate(("", *names.columns)))
    found.pieces.append(
        Piece(
            buffer,
            rows[kept].astype(np.int64),
            {name: starts[:, number] for number, name in columns},
            {name: sizes[:, number] for number, name in columns},
        )
    )


def _seeds(entries: Array) -> Array:
    """Seeds of the rows' checksums, uint64: the checksum is also of verdict and notes."""
    verdicts, notes = entries["verdict"].astype(np.uint32), entries["notes"].astype(np.uint32)
    seeds: Array = verdicts.astype(np.uint64) << np.uint64(32) | notes
    return seeds


def store_rows(request: StoreTokens, cache: CacheJob, digest_of: Callable[[int], str]) -> Stored:
    """Write a segment of the rows of the request's plan.

    :param digest_of: returns the digest of the content of a file of the job.
    :raises OSError: if it cannot be written.
    :raises DamagedError: if the content of a file cannot be identified.
    """
    with open(os.path.join(cache.folder, request.plan), "rb") as file:
        plan = _decode_plan(file.read())
    names = Names(plan.columns, plan.reasons, plan.notes)
    ends = np.frombuffer(plan.ends, np.int32).tolist()
    are_kept = np.frombuffer(plan.are_kept, np.bool_)
    entries = np.zeros(len(are_kept), ROW_ENTRY)
    entries["file"] = np.frombuffer(plan.file_ids, np.int32)
    entries["start"] = np.frombuffer(plan.numbers, np.int64)
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(os.path.join(cache.folder, request.file), flags, 0o600), "r+b", buffering=0) as out:
        fd, end = out.fileno(), 0
        for name, first, stop in zip(plan.spills, [0, *ends], ends, strict=False):
            spill = Spill(os.path.join(cache.folder, name), names, stop - first)
            end = _write_spill(fd, end, spill, names, np.flatnonzero(are_kept[first:stop]), entries[first:stop])
        stored = entries[are_kept]
        counts = len(stored), int(np.count_nonzero(stored["verdict"] == 0))
        end = write_index(fd, end, stored, names, counts, Origins(cache, digest_of))
    return Stored(end, np.arange(len(stored), dtype=np.int32).tobytes(), len(stored))


def _write_spill(fd: int, end: int, spill: Spill, names: Names, rows: Array, entries: Array) -> int:
    """Write these rows of a spill, and set their entries; return the offset after them."""
    entries["verdict"], entries["notes"], entries["text_sum"] = spill.verdicts, spill.notes, spill.text_sums
    rows = rows[spill.verdicts[rows] == 0]
    samples = spill.samples_of(rows)
    pieces: list[list[Any]] = []
    sizes = np.empty((len(rows), 1 + len(names.columns)), np.int32)
    for number, (data, ends) in enumerate(spill.values(names.columns)):
        starts, stops = np.concatenate(([0], ends))[samples], ends[samples]
        sizes[:, number] = stops - starts
        view = memoryview(data)
        pieces.append([view[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)])
    heads = [sizes[number].tobytes() for number in range(len(rows))]
    fill = [bytes(-total % 4) for total in sizes.sum(axis=1).tolist()]
    written = [b"".join(parts) for parts in zip(heads, *pieces, fill, strict=True)]
    lengths = np.array([len(row) for row in written], np.int64)
    entries["num_bytes"][rows] = lengths
    entries["at"][rows] = end + np.cumsum(lengths) - lengths
    seeds = _seeds(entries)
    entries["row_sum"] = [checksum(b"", seed) for seed in seeds.tolist()]
    entries["row_sum"][rows] = [checksum(row, seed) for row, seed in zip(written, seeds[rows].tolist(), strict=True)]
    return write_at(fd, b"".join(written), end)
