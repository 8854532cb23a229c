"""A worker's answers to a scan, and when the row index is built: which rows blocks have, and which of them are good.

No numpy.
"""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_right
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ShortageError
from asyncdata.core.messages import (
    NOT_IN_SLOT,
    TOO_LONG,
    Block,
    Index,
    Indexed,
    Overflow,
    Permute,
    Permuted,
    Scanned,
    Tokenized,
    reason_mark,
)
from asyncdata.sources.spool import write_part
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.rows import Buffer, RowDecoder, RowFault, WrongIdsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncdata.sources.files import BlockReader, BlockRows

    _Write = Callable[[list[Any], array[int], frozenset[int]], ColumnWriter]

PIECE_BYTES = 8 << 20
"""Rows are read and tokenized in pieces of at most so many bytes, or of one row. A block may have any number of bytes:
a text that is repeated takes little room in a file of Parquet."""


_GOOD, _NO_SAMPLE, _NO_OBJECT = 0, 1, 2
_NO_OBJECT_CODES = frozenset({"AD101", "AD104", "AD106", "AD108", "AD113", "AD117", "AD118", "AD119"})
"""Codes of rows that are not a JSON object. Rows with any other code have keys and values."""


def scanned_into(slot: memoryview, base: int, stop: int, blocks: Sequence[Block], reader: BlockReader) -> Scanned:
    """Copy the text of the blocks into ``slot[base:stop]``; the reply to their scan."""
    found, bases = [], []
    for block in blocks:
        text = reader.read_block(block, stop - base)
        slot[base : base + len(text.data)] = text.data
        found.append(text)
        bases.append(base)
        base += len(text.data)
    return scanned(found, bases)


def scanned(found: Sequence[BlockRows], bases: Sequence[int] | None = None) -> Scanned:
    """The reply to a scan of blocks with these rows.

    :param bases: where in the slot the text of each block is; None: it is not there.
    """
    counts, starts, lengths, offsets = array("i"), array("i"), array("i"), array("i")
    for text, base in zip(found, bases or [0] * len(found), strict=True):
        counts.append(len(text.lengths))
        lengths.extend(text.lengths)
        offsets.extend(text.offsets)
        starts.extend(base + start if start >= 0 and bases else NOT_IN_SLOT for start in text.starts)
    return Scanned(
        counts=counts.tobytes(),
        starts=starts.tobytes(),
        lengths=lengths.tobytes(),
        offsets=offsets.tobytes(),
        num_blank=sum(text.num_blank for text in found),
    )


def bytes_of(block: Block, found: BlockRows, reader: BlockReader, rows: range) -> list[Buffer]:
    """Some rows of a block; a row that is too long is empty."""
    data = memoryview(found.data)
    lost = [row for row in rows if found.starts[row] == NOT_IN_SLOT and found.lengths[row] != TOO_LONG]
    places = [Overflow(row, block.file_id, block.start + found.offsets[row]) for row in lost]
    raw = dict(zip(lost, reader.read_rows(places, found.lengths) if places else [], strict=True))
    spans = ((row, found.starts[row], found.lengths[row]) for row in rows)
    return [data[start : start + n] if start != NOT_IN_SLOT else raw.get(row, b"") for row, start, n in spans]


def pieces(lengths: Sequence[int]) -> Iterator[range]:
    """Rows of these lengths, in pieces of at most ``PIECE_BYTES``, or of one row."""
    first = size = 0
    for row, length in enumerate(lengths):
        if size + length > PIECE_BYTES and row > first:
            yield range(first, row)
            first, size = row, 0
        size += max(0, length)
    yield range(first, len(lengths))


class _FoundRows:
    """The rows of blocks that are read."""

    def __init__(self) -> None:
        self.counts, self.offsets, self.lengths = array("i"), array("i"), array("i")
        self.num_blank = 0

    def read(self, blocks: list[Block], reader: BlockReader, *, with_bytes: bool) -> Iterator[list[Buffer]]:
        """The bytes of the rows, in pieces; a row that is too long has none."""
        piece: list[Buffer] = []
        size = 0
        for block in blocks:
            found = reader.read_block(block, PIECE_BYTES)
            self.counts.append(len(found.lengths))
            self.offsets.extend(found.offsets)
            self.lengths.extend(found.lengths)
            self.num_blank += found.num_blank
            for rows in pieces(found.lengths) if with_bytes else ():
                piece += bytes_of(block, found, reader, rows)
                size += sum(found.lengths[row] for row in rows)
                if size > PIECE_BYTES:
                    yield piece
                    piece, size = [], 0
        yield piece
        reader.check()  # before anything that was read is stored


def index_blocks(request: Index, reader: BlockReader, write: _Write) -> Indexed:
    """Find the rows of the request's blocks.

    :param write: runs the tokenize function over rows, except those in a set of row numbers.
    """
    rows, found = _FoundRows(), ColumnWriter(only_counts=True)
    checked = _checked(request, reader, rows, found, write)
    if request.spool:
        offsets = write_part(request.spool, checked, is_kept=request.is_kept)
    else:
        deque(checked, 0)
        offsets = rows.offsets
    reply = found.finish(0, 0.0)
    is_counted = request.check == "samples"
    num_tokens = _num_tokens(reply, len(rows.lengths)) if is_counted else b""
    costs = _costs(reply, len(rows.lengths)) if is_counted and "cost" in reply.columns else b""
    marks = bytearray(len(rows.lengths)) if reply.drops or reply.errors or request.lost else bytearray()
    for row in request.lost:
        marks[row] = _NO_SAMPLE
    for number, dropped in enumerate(reply.drops.values()):
        for row in array("i", dropped):
            marks[row] = reason_mark(number)
    for error in reply.errors:
        marks[error.row] = _NO_OBJECT if error.code in _NO_OBJECT_CODES else _NO_SAMPLE
    return Indexed(
        counts=rows.counts.tobytes(),
        offsets=offsets.tobytes(),
        lengths=rows.lengths.tobytes(),
        marks=bytes(marks),
        num_blank=rows.num_blank,
        drops={reason: len(numbers) // 4 for reason, numbers in reply.drops.items()},
        errors=reply.errors,
        num_tokens=num_tokens,
        costs=costs,
    )


def _checked(
    request: Index, reader: BlockReader, rows: _FoundRows, found: ColumnWriter, write: _Write
) -> Iterator[Buffer]:
    """The rows of the request's blocks, each piece of them after it was looked at."""
    look: _Write | None = {"json": _decode, "samples": write}.get(request.check)
    first = 0
    for piece in rows.read(request.blocks, reader, with_bytes=look is not None or bool(request.spool)):
        lengths, passed = rows.lengths[: first + len(piece)], frozenset(request.lost).union(range(first))
        try:
            if look is not None:
                found.extend(look([*[b""] * first, *piece], lengths, passed))
        except (WrongIdsError, ShortageError) as error:
            if error.row >= 0:
                error.place = _place(error.row, request.blocks, rows)
            raise

        first += len(piece)
        yield from piece


def _place(row: int, blocks: list[Block], rows: _FoundRows) -> Overflow:
    """Where a row of the request lies."""
    number = bisect_right(list(accumulate(rows.counts)), row)
    return Overflow(row, blocks[number].file_id, blocks[number].start + rows.offsets[row])


def _num_tokens(reply: Tokenized, num_rows: int) -> bytes:
    """The number of tokens of each row, as bytes of int32."""
    counts, start = array("i", bytes(4 * num_rows)), 0
    for row, end in zip(array("i", reply.kept), array("I", reply.token_ends), strict=True):
        counts[row] = end - start
        start = end
    return counts.tobytes()


def _costs(reply: Tokenized, num_rows: int) -> bytes:
    """The cost of each row, as bytes of float64; NaN where it has none of its own."""
    costs, column, start = array("d", [math.nan]) * num_rows, reply.columns["cost"], 0
    for row, end in zip(array("i", reply.kept), array("I", column.ends), strict=True):
        if end > start:
            costs[row] = float(column.data[start:end])
        start = end
    return costs.tobytes()


def _decode(raw: list[Buffer], lengths: array[int], passed: frozenset[int]) -> ColumnWriter:
    out, decode = ColumnWriter(), RowDecoder(())
    for row in range(len(raw)):
        if lengths[row] == TOO_LONG and row not in passed:
            out.fail(row, RowFault("AD108", "the row is longer than max_row_bytes"))
        elif row not in passed:
            try:
                decode(raw[row])
            except RowFault as fault:
                out.fail(row, fault)
    return out


def permute(request: Permute) -> Permuted:
    """Shuffle with Python's own generator, as slime's dataset does: the order is the same."""
    rows = array("I", range(request.num_rows))
    random.Random(request.seed).shuffle(rows)
    return Permuted(rows.tobytes())
