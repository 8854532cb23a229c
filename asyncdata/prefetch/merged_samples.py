"""Merges samples from several buffers into the columns of one reply, in the order of the reply's rows.

Long values are joined from slices of a buffer; short ones are gathered by numpy, as a slice would cost more than the
bytes.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.messages import Column, Tokenized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdata.core.messages import Data

__all__ = ("Found", "Indices", "Piece", "gather", "kept_rows", "merge", "packed", "values_of")

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


class Values(NamedTuple):
    """A column of a reply (``""``: its tokens).

    :ivar data: the values of all samples, end to end.
    :ivar starts: where each sample's value begins in it, int64.
    :ivar sizes: bytes of each value, int64.
    """

    name: str
    data: Data
    starts: Indices
    sizes: Indices


class Found(NamedTuple):
    """The content of the records of a request's rows."""

    pieces: list[Piece]
    drops: dict[str, list[int]]
    notes: dict[str, list[int]]


def merge(found: Found, fresh: Tokenized | None, num_rows: int, busy_s: float) -> Tokenized:
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
    """The columns that have a value, or are declared, and the tokens."""
    yield ""

    names = sorted({name for piece in pieces for name in piece.sizes} - {""})
    for name in names:
        if name.startswith("@") or any(name in piece.sizes and piece.sizes[name].any() for piece in pieces):
            yield name


def _pieces_of(reply: Tokenized) -> Iterator[Piece]:
    """The samples of a reply."""
    if not reply.token_ends:
        return

    base, buffers, starts, sizes = 0, [], {}, {}
    for values in values_of(reply):
        starts[values.name], sizes[values.name] = base + values.starts, values.sizes
        base += len(values.data)
        buffers.append(values.data)
    yield Piece(memoryview(b"".join(buffers)), kept_rows(reply), starts, sizes)


def kept_rows(reply: Tokenized) -> Indices:
    """The rows of the request that have a sample."""
    kept = np.frombuffer(reply.kept, np.int32) if reply.kept else np.arange(len(reply.token_ends) // 4)
    return kept.astype(np.int64)


def values_of(reply: Tokenized) -> Iterator[Values]:
    """The columns of a reply, the tokens first."""
    yield _values("", reply.tokens, np.frombuffer(reply.token_ends, np.uint32).astype(np.int64) * 4)

    for name, column in reply.columns.items():
        yield _values(name, column.data, np.frombuffer(column.ends, np.uint32).astype(np.int64))


def _values(name: str, data: Data, ends: Indices) -> Values:
    starts = np.zeros_like(ends)  # np.diff(prepend=) takes ten times as long for few values
    starts[1:] = ends[:-1]
    return Values(name, data, starts, ends - starts)


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

    kind: Any = np.int32 if len(buffer) < 1 << 31 else np.int64  # a fifth of the time
    places = np.arange(num_bytes, dtype=kind)
    places += np.repeat((starts - np.cumsum(sizes) + sizes).astype(kind), sizes)
    return np.frombuffer(buffer, np.uint8).take(places).tobytes()


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
