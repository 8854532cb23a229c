"""A worker's answers to a scan, and when the row index is built: which rows blocks have, and which of them are good.

No numpy.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.messages import Indexed, Overflow, Permuted, Scanned
from asyncdata.core.row_codes import NOT_IN_SLOT, TOO_LONG, reason_mark
from asyncdata.core.shortage import ShortageError
from asyncdata.sources.spool import write_part
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.rows import RowDecoder, RowFault, WrongIdsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.core.messages import Block, Index, Permute, Tokenized
    from asyncdata.sources.reader import BlockReader, BlockRows

__all__ = ("ALL_BYTES", "bytes_of", "index_blocks", "permute", "scanned", "scanned_into")

ALL_BYTES = 1 << 62
"""Room for any block."""

Buffer = bytes | memoryview

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


def bytes_of(block: Block, found: BlockRows, reader: BlockReader) -> list[Buffer]:
    """The rows of a block; a row that is too long is empty."""
    data = memoryview(found.data)
    raw: list[Buffer] = [
        data[s : s + n] if s != NOT_IN_SLOT else b"" for s, n in zip(found.starts, found.lengths, strict=True)
    ]
    places = [
        Overflow(row, block.file_id, block.start + found.offsets[row])
        for row, (start, length) in enumerate(zip(found.starts, found.lengths, strict=True))
        if start == NOT_IN_SLOT and length != TOO_LONG
    ]
    for place, row in zip(places, reader.read_rows(places, found.lengths) if places else [], strict=True):
        raw[place.row] = row
    return raw


class _FoundRows(NamedTuple):
    """The rows of the blocks, and their bytes; the bytes of a row that is too long are empty."""

    counts: array[int]
    offsets: array[int]
    lengths: array[int]
    raw: list[Buffer]
    num_blank: int


def index_blocks(
    request: Index,
    reader: BlockReader,
    write: Callable[[list[Buffer], array[int], frozenset[int]], ColumnWriter],
) -> Indexed:
    """Find the rows of the request's blocks.

    :param write: runs the tokenize function over rows, except those in a set of row numbers.
    """
    rows = _read(request.blocks, reader, with_bytes=request.check != "none" or bool(request.spool))
    offsets = write_part(request.spool, rows.raw, is_kept=request.is_kept) if request.spool else rows.offsets
    if request.check == "none":
        found = ColumnWriter()
    elif request.check == "json":
        found = _decode(rows)
    else:
        found = _write(request, rows, write)
    reply = found.finish(0, 0.0)
    num_tokens = _num_tokens(reply, len(rows.lengths)) if request.check == "samples" else b""
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
    )


def _write(
    request: Index, rows: _FoundRows, write: Callable[[list[Buffer], array[int], frozenset[int]], ColumnWriter]
) -> ColumnWriter:
    try:
        return write(rows.raw, rows.lengths, frozenset(request.lost))
    except (WrongIdsError, ShortageError) as error:
        if error.row >= 0:
            error.place = _place(error.row, request.blocks, rows)
        raise


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


def _read(blocks: list[Block], reader: BlockReader, *, with_bytes: bool) -> _FoundRows:
    rows = _FoundRows(array("i"), array("i"), array("i"), [], 0)
    num_blank = 0
    for block in blocks:
        found = reader.read_block(block, ALL_BYTES)
        rows.counts.append(len(found.lengths))
        rows.offsets.extend(found.offsets)
        rows.lengths.extend(found.lengths)
        num_blank += found.num_blank
        if with_bytes:
            rows.raw.extend(bytes_of(block, found, reader))
    reader.check()  # before anything that was read is stored
    return rows._replace(num_blank=num_blank)


def _decode(rows: _FoundRows) -> ColumnWriter:
    out, decode = ColumnWriter(), RowDecoder(())
    for row, raw in enumerate(rows.raw):
        if rows.lengths[row] == TOO_LONG:
            out.fail(row, RowFault("AD108", "the row is longer than max_row_bytes"))
            continue

        try:
            decode(raw)
        except RowFault as fault:
            out.fail(row, fault)
    return out


def permute(request: Permute) -> Permuted:
    """Shuffle with Python's own generator, as slime's dataset does: the order is the same."""
    rows = array("I", range(request.num_rows))
    random.Random(request.seed).shuffle(rows)
    return Permuted(rows.tobytes())
