"""Recognises the dialect of chats by the first row of their source, before any worker starts: so all have the same."""

from __future__ import annotations

from array import array
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from msgspec import structs

from asyncdata.core.errors import ConfigError, SourceError, get_logger
from asyncdata.core.messages import NOT_IN_SLOT, TOO_LONG, Job, Overflow, RowError, Scan, Scanned, Tokenize, Tokenized
from asyncdata.core.threads import no_op
from asyncdata.delivery.bad_rows import error_at
from asyncdata.order.shuffle import Shuffle
from asyncdata.read_ahead.windows import SLACK_BYTES
from asyncdata.sources.resolve import described
from asyncdata.sources.stream import RowStream, StreamOrder
from asyncdata.tokenization.base import named
from asyncdata.tokenization.functions.chat import ChatTokenizeFn
from asyncdata.tokenization.functions.dialects import DIALECTS, fitting
from asyncdata.tokenization.part_functions import PartFunctions
from asyncdata.tokenization.rows import RowFault, decode_object
from asyncdata.workers.base import error_of
from asyncdata.workers.request_handler import Handler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.core.types import SourceLocation
    from asyncdata.loader.mix import Mix
    from asyncdata.sources.base import Blocks
    from asyncdata.tokenization.column_writer import Buffer, ColumnWriter

_log = get_logger(__name__)
_ROWS_LOOKED_AT = 20
"""Bad rows, and rows of no dialect, may come first."""
_PLACES_SHOWN = 3


class _Recognised(NamedTuple):
    """A function whose rows are of a dialect, as the row at ``place`` is."""

    function: ChatTokenizeFn
    dialect: str
    place: str


def with_dialects(source: Any, tokenize_fn: Any) -> Any:
    """The tokenize function with the dialect of its rows, if that is to be recognised; of a mixture, for each part.

    :param source: what a loader takes as its source.
    :raises ConfigError: AD115, if the first row is of two dialects.
    :raises SourceError: for files that cannot be read.
    """
    if not isinstance(tokenize_fn, PartFunctions):
        found = _recognised("", source, tokenize_fn)
        return tokenize_fn if found is None else _with_dialect([found])

    parts = zip(cast("Mix", source).leaves(), tokenize_fn.functions, strict=True)
    each = [_recognised(leaf.name, leaf.part.source, function) for leaf, function in parts]
    alike: dict[tuple[int, str], list[_Recognised]] = {}
    for found in filter(None, each):
        alike.setdefault((id(found.function), found.dialect), []).append(found)
    made = {key: _with_dialect(group) for key, group in alike.items()}  # loaded once for all parts of a dialect
    pairs = zip(tokenize_fn.functions, each, strict=True)
    return PartFunctions([fn if it is None else made[id(it.function), it.dialect] for fn, it in pairs])


def _with_dialect(found: list[_Recognised]) -> ChatTokenizeFn:
    first, places = found[0], [each.place for each in found]
    more = f" and {len(places) - _PLACES_SHOWN} more" if len(places) > _PLACES_SHOWN else ""
    dialect_row = ", ".join(places[:_PLACES_SHOWN]) + more
    return structs.replace(first.function, dialect=first.dialect, dialect_row=dialect_row)


def _recognised(part: str, source: Any, tokenize_fn: Any) -> _Recognised | None:
    """None if there is nothing to recognise, or no row of a dialect comes first."""
    function = named(tokenize_fn)
    if not isinstance(function, ChatTokenizeFn) or not function.is_of_any_dialect:
        return None

    try:
        return _by_first_row(part, source, function)
    except (ConfigError, SourceError) as error:
        if not part:
            raise

        from asyncdata.loader.mixture_engine import of_part

        raise of_part(error, part) from error


def _by_first_row(part: str, source: Any, function: ChatTokenizeFn) -> _Recognised | None:
    for raw, location in islice(_rows(source), _ROWS_LOOKED_AT):
        try:
            seen = fitting(decode_object(raw))
        except RowFault:
            continue  # a worker reports it

        if not seen:
            continue

        names = " and ".join(map(ascii, seen))
        row = error_at(location, RowError(0, "AD115", f"{names} can both be read: say which by dialect=..."))
        if len(seen) > 1:
            raise ConfigError(str(row))

        numbers = {"line": row.line, "row_number": row.row_number, "byte_offset": row.byte_offset}
        kind, number = next(pair for pair in numbers.items() if pair[1] is not None)
        place = f"{row.path}:{number}" if kind == "line" else f"{row.path} ({kind.partition('_')[0]} {number})"
        reason = f"it has {' and '.join(map(repr, DIALECTS[seen[0]].required))}"
        more = {"part": part} if part else {}
        _log.info("chat.dialect", dialect=seen[0], reason=reason, path=row.path, **{kind: number}, **more)
        return _Recognised(function, seen[0], place)
    return None


def _rows(source: Any) -> Iterator[tuple[Buffer, SourceLocation]]:
    """The rows of a source, in the order of its files."""
    with closing(described(source).open(Shuffle().block_bytes)) as opened:
        yield from _of_stream(opened) if isinstance(opened, RowStream) else _of_blocks(opened)


def _of_stream(stream: RowStream) -> Iterator[tuple[Buffer, SourceLocation]]:
    order = StreamOrder(Shuffle(enabled=False), 0, len(stream.files))
    title = stream.files[0].path
    try:
        with closing(stream.read(order, 0, None, no_op)) as pieces:
            for rows in pieces:
                start = 0
                offsets = [-1] * len(rows.numbers) if rows.offsets is None else rows.offsets.tolist()
                for number, length, offset in zip(rows.numbers.tolist(), rows.lengths.tolist(), offsets, strict=True):
                    if length <= stream.max_row_bytes:
                        yield rows.data[start : start + length], stream.location(rows.file_id, number, length, offset)
                        start += length + 1
    except OSError as error:
        raise SourceError(f"AD304 cannot read {error.filename or title}: {error.strerror or error}") from error


def _of_blocks(blocks: Blocks) -> Iterator[tuple[Buffer, SourceLocation]]:
    """The rows as a worker reads them."""
    job = Job(
        files=blocks.files,
        tokenize=None,
        max_row_bytes=blocks.max_row_bytes,
        block_bytes=blocks.room_bytes,
        slack_bytes=SLACK_BYTES,
        reader=blocks.reader,
        stores=list(getattr(blocks, "stores", ())),
    )
    found: list[Buffer] = []

    def keep(rows: Sequence[Buffer], out: ColumnWriter) -> None:
        found[:] = map(bytes, rows)
        for row in range(len(rows)):
            out.drop(row, "read")

    with closing(Handler(job, [memoryview(b"")], keep)) as handler:
        for number in range(blocks.num_blocks):
            (block,) = blocks.blocks([number])
            reply = handler(Scan(0, 0, [block], with_samples=True))
            if not isinstance(reply, Scanned):
                raise error_of(reply)

            lengths, offsets = (memoryview(each).cast("i") for each in (reply.lengths, reply.offsets))
            places = [place for place in zip(lengths, offsets, strict=True) if place[0] != TOO_LONG]
            for row, (length, offset) in enumerate(places):
                start = block.start + offset
                if reply.samples is None:  # too much to be read at once
                    not_here, size = array("i", [NOT_IN_SLOT]).tobytes(), array("i", [length]).tobytes()
                    read = handler(Tokenize(0, not_here, size, [Overflow(0, block.file_id, start)]))
                    if not isinstance(read, Tokenized):
                        raise error_of(read)

                yield found[row if reply.samples else 0], blocks.location(block.file_id, start, length)
