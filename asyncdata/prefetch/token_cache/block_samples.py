"""Cuts a reply into the samples of single blocks, and joins those of blocks into one reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.messages import Column, Tokenized
from asyncdata.prefetch.merged_samples import kept_rows, values_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.messages import Data, RowError
    from asyncdata.prefetch.merged_samples import Indices, Values

__all__ = ("BlockSamples", "blocks_of", "joined")


class BlockSamples(NamedTuple):
    """What became of the rows of a block.

    :ivar first: its first sample in the reply; ``stop``: one more than its last one.
    :ivar reply: of this block alone.
    """

    num_rows: int
    first: int
    stop: int
    reply: Tokenized


def blocks_of(reply: Tokenized, counts: Sequence[int]) -> list[BlockSamples]:
    """The reply, for blocks of so many rows."""
    kept, values = kept_rows(reply), list(values_of(reply))
    found, row = [], 0
    for count in counts:
        first, stop = np.searchsorted(kept, (row, row + count)).tolist()
        one = _reply(
            {each.name: _slice(each, first, stop) for each in values},
            kept[first:stop] - row,
            count,
            _between(reply.drops, row, row + count),
            _between(reply.notes, row, row + count),
            [_moved(error, -row) for error in reply.errors if row <= error.row < row + count],
        )
        found.append(BlockSamples(count, first, stop, one))
        row += count
    return found


def joined(parts: Sequence[tuple[int, Tokenized]]) -> Tokenized:
    """The reply for blocks, each with its number of rows, one after the other."""
    firsts = np.cumsum([0, *(count for count, _ in parts)]).tolist()
    replies = list(zip(firsts, (part for _, part in parts), strict=False))
    values = [{each.name: each for each in values_of(part)} for _, part in replies]
    nothing = [np.zeros(len(part.token_ends) // 4, np.int64) for _, part in replies]
    columns = {}
    for name in {name for each in values for name in each}:
        sizes = [each[name].sizes if name in each else none for each, none in zip(values, nothing, strict=True)]
        data = b"".join([each[name].data for each in values if name in each])
        columns[name] = Column(data, _packed(np.cumsum(np.concatenate(sizes)), np.uint32))
    return _reply(
        columns,
        np.concatenate([kept_rows(part) + first for first, part in replies]),
        firsts[-1],
        _all_rows([(first, part.drops) for first, part in replies]),
        _all_rows([(first, part.notes) for first, part in replies]),
        [_moved(error, first) for first, part in replies for error in part.errors],
    )


def _reply(
    columns: dict[str, Column],
    kept: Indices,
    num_rows: int,
    drops: dict[str, Data],
    notes: dict[str, Data],
    errors: list[RowError],
) -> Tokenized:
    """A reply of these columns, of which the one without a name has the tokens."""
    tokens = columns.pop("")
    return Tokenized(
        tokens=tokens.data,
        token_ends=_packed(np.frombuffer(tokens.ends, np.uint32) // 4, np.uint32),
        kept=b"" if len(kept) == num_rows else _packed(kept, np.int32),
        columns=columns,
        drops=drops,
        errors=errors,
        busy_s=0.0,
        notes=notes,
    )


def _slice(values: Values, first: int, stop: int) -> Column:
    """The values ``[first, stop)``."""
    if first == stop:
        return Column(b"", b"")

    begin, sizes = int(values.starts[first]), values.sizes[first:stop]
    return Column(values.data[begin : begin + int(sizes.sum())], _packed(np.cumsum(sizes), np.uint32))


def _packed(values: Any, dtype: Any) -> bytes:
    data: bytes = values.astype(dtype).tobytes()
    return data


def _moved(error: RowError, num_rows: int) -> RowError:
    return msgspec.structs.replace(error, row=error.row + num_rows)


def _between(rows_by_name: dict[str, Data], first: int, stop: int) -> dict[str, Data]:
    """The rows of each name in ``[first, stop)``, counted from ``first``; names without one are left out."""
    found: dict[str, Data] = {}
    for name, data in rows_by_name.items():
        rows = np.frombuffer(data, np.int32)
        if len(chosen := rows[(rows >= first) & (rows < stop)]):
            found[name] = _packed(chosen - first, np.int32)
    return found


def _all_rows(parts: list[tuple[int, dict[str, Data]]]) -> dict[str, Data]:
    """The rows of each name in all parts, which begin at these rows."""
    rows = dict[str, list[Any]]()
    for first, rows_by_name in parts:
        for name, data in rows_by_name.items():
            rows.setdefault(name, []).append(np.frombuffer(data, np.int32) + first)
    return {name: _packed(np.concatenate(pieces), np.int32) for name, pieces in rows.items()}
