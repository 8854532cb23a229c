"""Gathers cached samples from a slot in the order of a chunk: a worker does this instead of tokenizing.

Long values are joined from slices of the slot; short ones are gathered by numpy, as a slice would cost more than the
bytes.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.messages import Column, Tokenized
from asyncdata.prefetch.token_cache.segment.layout import RECORD_WORDS, WORDS_PER_COLUMN, Names, Word, decode_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdata.core.messages import Data

__all__ = ("Piece", "cached_rows", "gather", "merge", "packed")

_SHORT_BYTES = 96
"""Below this mean length numpy is faster than slices."""

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Piece(NamedTuple):
    """Samples in one buffer.

    :ivar rows: of the request, int64.
    :ivar starts: column (``""``: tokens) -> where each sample's value begins in the buffer, int64.
    :ivar sizes: column -> bytes of each value, int64.
    """

    buffer: memoryview
    rows: Indices
    starts: dict[str, Indices]
    sizes: dict[str, Indices]


class _Found(NamedTuple):
    """The content of the records of a request's rows."""

    pieces: list[Piece]
    drops: dict[str, list[int]]
    notes: dict[str, list[int]]


def cached_rows(slot: memoryview, rows: Indices, records: Indices) -> _Found:
    """Read the records of these rows, at these offsets of the slot."""
    found = _Found([], {}, {})
    words = np.frombuffer(slot[: len(slot) // 4 * 4], np.int32)
    places = records >> 2
    firsts = places - (words[places] >> 2)
    layouts = words[firsts - 1]
    if len(rows) and (layouts == layouts[0]).all():
        _read_records(slot, words, rows, places, firsts, found)
        return found

    for layout in np.unique(layouts).tolist():
        chosen = layouts == layout
        _read_records(slot, words, rows[chosen], places[chosen], firsts[chosen], found)
    return found


def _read_records(
    slot: memoryview, words: np.ndarray[Any, Any], rows: Indices, places: Indices, firsts: Indices, found: _Found
) -> None:
    """The same for rows whose blocks have the same columns."""
    names = _names(slot, words, int(firsts[0]))
    records = _records_at(words, places, names.record_words)
    for number in np.flatnonzero(records[:, Word.VERDICT]).tolist():
        reason = _names(slot, words, int(firsts[number])).reasons[-1 - int(records[number, Word.VERDICT])]
        found.drops.setdefault(reason, []).append(int(rows[number]))
    for number in np.flatnonzero(records[:, Word.NOTES]).tolist():
        bits = int(records[number, Word.NOTES])
        for bit, note in enumerate(_names(slot, words, int(firsts[number])).notes):
            if bits >> bit & 1:
                found.notes.setdefault(note, []).append(int(rows[number]))
    is_kept = records[:, Word.VERDICT] == 0
    if not is_kept.all():
        rows, places, records = rows[is_kept], places[is_kept], records[is_kept]
    starts, sizes = {}, {}
    for number, name in enumerate(("", *names.columns)):
        word = RECORD_WORDS + WORDS_PER_COLUMN * number
        starts[name] = (places << 2) + records[:, word]
        sizes[name] = records[:, word + 1].astype(np.int64)
    found.pieces.append(Piece(slot, rows, starts, sizes))


def _records_at(words: np.ndarray[Any, Any], places: Indices, record_words: int) -> np.ndarray[Any, Any]:
    """Records, int32 of shape (num_rows, record_words). Each is copied whole: as one of the items of its size, of which
    there is one at every word.
    """
    items = np.ndarray((len(words) - record_words + 1,), f"V{4 * record_words}", words, strides=(4,))
    return items[places].view(np.int32).reshape(len(places), record_words)


def _names(slot: memoryview, words: np.ndarray[Any, Any], first: int) -> Names:
    stop = 4 * first - 8
    return decode_names(bytes(slot[stop - int(words[first - 2]) : stop]))


def merge(found: _Found, fresh: Tokenized | None, num_rows: int, busy_s: float) -> Tokenized:
    """The reply to a request of ``num_rows`` rows, of which those of ``fresh`` are just tokenized."""
    pieces = [piece for piece in found.pieces if len(piece.rows)]
    drops, notes = packed(found.drops), packed(found.notes)
    if fresh is not None:
        pieces += _pieces_of(fresh)
        drops, notes = _merged(drops, fresh.drops), _merged(notes, fresh.notes)
    rows = np.concatenate([piece.rows for piece in pieces]) if pieces else np.empty(0, np.int64)
    order = np.argsort(rows, kind="stable") if np.any(rows[1:] < rows[:-1]) else None
    columns = {name: _column(pieces, name, order) for name in _names_of(pieces)}
    tokens, token_ends = columns.pop("", (b"", b""))
    return Tokenized(
        tokens=tokens,
        token_ends=(np.frombuffer(token_ends, np.uint32) // 4).astype(np.uint32).tobytes(),
        kept=b"" if len(rows) == num_rows else np.sort(rows).astype(np.int32).tobytes(),
        columns={name: Column(*column) for name, column in columns.items()},
        drops=drops,
        errors=fresh.errors if fresh is not None else [],
        busy_s=busy_s,
        notes=notes,
    )


def _names_of(pieces: list[Piece]) -> Iterator[str]:
    """The columns that have a value, and the tokens."""
    yield ""

    names = sorted({name for piece in pieces for name in piece.sizes} - {""})
    for name in names:
        if any(name in piece.sizes and piece.sizes[name].any() for piece in pieces):
            yield name


def _pieces_of(reply: Tokenized) -> Iterator[Piece]:
    """The samples of a reply."""
    num_samples = len(reply.token_ends) // 4
    if not num_samples:
        return

    kept = np.frombuffer(reply.kept, np.int32) if reply.kept else np.arange(num_samples)
    token_ends = np.frombuffer(reply.token_ends, np.uint32).astype(np.int64) * 4
    buffers = {"": (reply.tokens, token_ends)} | {
        name: (column.data, np.frombuffer(column.ends, np.uint32).astype(np.int64))
        for name, column in reply.columns.items()
    }
    base, starts, sizes = 0, {}, {}
    for name, (data, ends) in buffers.items():
        sizes[name] = np.diff(ends, prepend=0)
        starts[name] = base + ends - sizes[name]
        base += len(data)
    whole = memoryview(b"".join(data for data, _ in buffers.values()))
    yield Piece(whole, kept.astype(np.int64), starts, sizes)


def _column(pieces: list[Piece], name: str, order: Indices | None) -> tuple[bytes, bytes]:
    """A column's values end to end, and where each stops (uint32)."""
    if not pieces:
        return b"", b""

    nothing = [np.zeros(len(piece.rows), np.int64) for piece in pieces]
    starts = [piece.starts.get(name, zeros) for piece, zeros in zip(pieces, nothing, strict=True)]
    sizes = [piece.sizes.get(name, zeros) for piece, zeros in zip(pieces, nothing, strict=True)]
    if len(pieces) == 1 and order is None:
        return gather(pieces[0].buffer, starts[0], sizes[0]), _ends(sizes[0])

    values = [
        piece.buffer[start : start + size]
        for piece, some_starts, some_sizes in zip(pieces, starts, sizes, strict=True)
        for start, size in zip(some_starts.tolist(), some_sizes.tolist(), strict=True)
    ]
    all_sizes = np.concatenate(sizes)
    if order is not None:
        values, all_sizes = [values[number] for number in order.tolist()], all_sizes[order]
    return b"".join(values), _ends(all_sizes)


def gather(buffer: memoryview, starts: Indices, sizes: Indices) -> bytes:
    """The slices of ``buffer`` with these offsets and sizes, end to end."""
    num_bytes = int(sizes.sum())
    if num_bytes >= _SHORT_BYTES * len(sizes):
        stops = (starts + sizes).tolist()
        return b"".join([buffer[start:stop] for start, stop in zip(starts.tolist(), stops, strict=True)])

    shifts = starts - np.cumsum(sizes) + sizes
    places = np.arange(num_bytes) + np.repeat(shifts, sizes)
    return np.frombuffer(buffer, np.uint8)[places].tobytes()


def _ends(sizes: Indices) -> bytes:
    return np.cumsum(sizes).astype(np.uint32).tobytes()


def packed(rows_by_name: dict[str, list[int]]) -> dict[str, Data]:
    """Each name's rows in ascending order, as a reply has them."""
    return {name: array("i", sorted(rows)).tobytes() for name, rows in rows_by_name.items()}


def _merged(some: dict[str, Data], others: dict[str, Data]) -> dict[str, Data]:
    """Each name's rows of both, in ascending order."""
    merged = dict(some)
    for name, rows in others.items():
        both = np.frombuffer(b"".join([merged.get(name, b""), rows]), np.int32)
        merged[name] = np.sort(both).tobytes()
    return merged
