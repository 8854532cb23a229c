"""A look at D without a loader: which rows a window has, where one lies, what becomes of it. For people, not training.

Rows are read, ordered and tokenized by the loader's own code, in this process, so that the two cannot drift apart.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.errors import ConfigError, NoSamplesError, SourceError
from asyncdata.core.messages import Job, Scan, Scanned, Tokenized
from asyncdata.core.types import Position, Sample, SampleRange, SourceLocation
from asyncdata.delivery.chunk import Chunk
from asyncdata.loader.config import LoaderConfig
from asyncdata.order.order import Order
from asyncdata.order.shuffle import Shuffle
from asyncdata.prefetch.windows.base import ChunkOrigin
from asyncdata.prefetch.windows.block_window import SLACK_BYTES, Window
from asyncdata.sources.base import room_of
from asyncdata.sources.resolve import described
from asyncdata.sources.stream import RowStream
from asyncdata.tokenization.base import open_tokenize_fn
from asyncdata.tokenization.resolve import resolved
from asyncdata.workers.base import error_of
from asyncdata.workers.request_handler import Handler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Self

    from asyncdata.core.messages import Reply, RowError
    from asyncdata.prefetch.windows.base import OpenWindow
    from asyncdata.sources.base import Blocks, Source
    from asyncdata.tokenization.base import BatchTokenizer, TokenizeFn
    from asyncdata.tokenization.column_writer import ColumnWriter

__all__ = (
    "Look",
    "OpenView",
    "WindowView",
    "Witness",
    "estimate_num_rows",
    "line_numbers",
    "open_order",
    "position_of",
    "rows_of_window",
)

_MAX_BLOCKS_FOR_ESTIMATE = 256
_PIECE_BYTES = 1 << 20


def open_order(
    source: Source | str | list[str], *, seed: int = 42, shuffle: bool | Shuffle = True
) -> tuple[Blocks, Order]:
    """The files and the order that a loader with these arguments has.

    :raises SourceError: for files that cannot be read; all of them are named.
    :raises ConfigError: for a setting that cannot work.
    """
    config = LoaderConfig.of({"seed": seed, "shuffle": shuffle})
    blocks = config.shuffle if isinstance(config.shuffle, Shuffle) else Shuffle(enabled=config.shuffle)
    files = described(source).open(blocks.block_bytes)
    if isinstance(files, RowStream):
        raise ConfigError(
            f"{files.files[0].path} is read from front to back: there is no looking into the middle of its order. A "
            "loader's samples have their position and source; or decompress the data, or convert it"
        )

    return files, Order(blocks, config.seed, files.num_blocks, files.block_bytes)


def rows_of_window(files: Blocks, order: Order, epoch: int, window: int) -> list[SourceLocation]:
    """The rows of a window in the order of delivery: row ``r`` is what position ``epoch:window:r`` is made of.

    Costs what reading the window costs: 32 MiB, unless ``Shuffle`` says otherwise.

    :raises ConfigError: if there is no such window.
    """
    with WindowView(files, order, epoch, window) as view:
        return [view.location(row) for row in range(view.num_rows)]


class Look(NamedTuple):
    """What a row is and what becomes of it.

    :ivar raw: its bytes; empty for a row longer than ``max_row_bytes``.
    :ivar sample: None if it yields none, or if nobody asked.
    :ivar dropped: why it yields no sample, or an empty string.
    :ivar error: what is wrong with it.
    """

    position: Position
    location: SourceLocation
    raw: bytes
    sample: Sample | None
    dropped: str
    error: RowError | None


class OpenView:
    """A window that has been read. Close it, or use ``with``.

    :param handler: has its memory, and what tokenizes.
    :param first: the position of its first row.
    :ivar num_rows: rows of the window.
    """

    def __init__(self, window: OpenWindow, handler: Handler, witness: Witness, first: Position) -> None:
        self.window = window
        self.num_rows = window.num_rows
        self._handler = handler
        self._witness = witness
        self._first = first

    def location(self, row: int) -> SourceLocation:
        """Where row ``row`` of the window's order lies."""
        return self.window.location(row)

    def look(self, row: int) -> Look:
        """Do with row ``row`` what a worker does.

        :raises ConfigError: if the window has no such row.
        """
        if not 0 <= row < self.num_rows:
            raise ConfigError(
                f"there is no row {row} in window {self._first.window} of epoch {self._first.epoch}: it has "
                f"{self.num_rows} rows, counted from 0"
            )

        reply = _tokenized(self._handler(self.window.request(row, row + 1)))
        position = Position(self._first.epoch, self._first.window, row)
        chunk = Chunk(reply, position, 1, ChunkOrigin(self.window, row), ends_epoch=False)
        return Look(
            position=position,
            location=self.location(row),
            raw=self._witness.raw,
            sample=SampleRange(chunk, 0, 1, 0, 0, 1).samples()[0] if chunk.num_samples else None,
            dropped=next((drop.reason for drop in chunk.drops), ""),
            error=next(iter(chunk.errors), None),
        )

    def close(self) -> None:
        """Close the files."""
        self._handler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WindowView(OpenView):
    """One window of D, read into this process's memory.

    :param tokenize_fn: what :meth:`look` makes samples with; one that is opened already is a :class:`Witness`.
    :raises ConfigError: if there is no such window.
    :raises SourceError: if it cannot be read.
    """

    def __init__(
        self,
        files: Blocks,
        order: Order,
        epoch: int,
        window: int,
        tokenize_fn: TokenizeFn | Callable[..., Any] | Witness | None = None,
    ) -> None:
        if epoch < 0 or not 0 <= window < order.num_windows:
            raise ConfigError(
                f"there is no window {window} in epoch {epoch}: an epoch has the windows 0 to {order.num_windows - 1}"
            )

        witness = tokenize_fn if isinstance(tokenize_fn, Witness) else Witness(tokenize_fn)
        blocks = files.blocks(order.blocks(epoch, window))
        job = _job(files, order)
        handler = Handler(job, [memoryview(bytearray(len(blocks) * job.stride))], witness)
        opened = Window(files, blocks, 0, job.stride, partial(order.rows, epoch, window))
        for part, scan in enumerate(opened.scans()):
            opened.add(part, _scanned(handler(scan)))
        super().__init__(opened, handler, witness, Position(epoch, window, 0))


class Witness:
    """Keeps the bytes that the tokenizer is given, which are those that a worker's is given."""

    def __init__(self, tokenize_fn: TokenizeFn | Callable[..., Any] | None) -> None:
        self.raw = b""
        self._tokenizer: BatchTokenizer | None = None
        if tokenize_fn is not None:
            self._tokenizer = open_tokenize_fn(resolved(tokenize_fn))

    def __call__(self, rows: Sequence[bytes | memoryview], out: ColumnWriter) -> None:
        self.raw = bytes(rows[0]) if rows else b""
        if self._tokenizer is not None:
            self._tokenizer(rows, out)


def _job(files: Blocks, order: Order) -> Job:
    return Job(
        files=files.files,
        tokenize=None,
        max_row_bytes=files.max_row_bytes,
        block_bytes=room_of(files, order.max_window_blocks),
        slack_bytes=SLACK_BYTES,
        reader=files.reader,
    )


def _scanned(reply: Reply) -> Scanned:
    if not isinstance(reply, Scanned):
        raise error_of(reply)

    return reply


def _tokenized(reply: Reply) -> Tokenized:
    if not isinstance(reply, Tokenized):
        raise error_of(reply)

    return reply


def position_of(files: Blocks, order: Order, number: int) -> Position:
    """The position of row ``number`` of the run, counted from 0 across epochs. Where no row is dropped, that is the
    sample with this index.

    Costs a read of every window before it; of whole epochs that are passed, only the first is read.

    :raises NoSamplesError: if there is no row at all.
    """
    position, num_rows = _walk(files, order, 0, number)
    if position is not None:
        return position

    if num_rows == 0:
        raise NoSamplesError("AD202 the files have no row: every line is blank")

    epoch, left = divmod(number, num_rows)
    position, _ = _walk(files, order, epoch, left)
    if position is None:
        raise SourceError("AD303 the files changed while they were read; try again when nobody writes to them")

    return position


def _walk(files: Blocks, order: Order, epoch: int, number: int) -> tuple[Position | None, int]:
    """The position of row ``number`` of ``epoch``, or None and how many rows the epoch has."""
    num_rows = 0
    for window in range(order.num_windows):
        with WindowView(files, order, epoch, window) as view:
            if number < num_rows + view.num_rows:
                return Position(epoch, window, number - num_rows), num_rows

            num_rows += view.num_rows
    return None, num_rows


def estimate_num_rows(files: Blocks, order: Order) -> int:
    """Rows of an epoch, judged by some blocks; exact where there are few of them, and where rows are numbered."""
    if files.location(0, 0, 0).row_number is not None:
        return files.extent

    num_looked_at = min(files.num_blocks, _MAX_BLOCKS_FOR_ESTIMATE)
    blocks = files.blocks([number * files.num_blocks // num_looked_at for number in range(num_looked_at)])
    job = _job(files, order)
    handler = Handler(job, [memoryview(bytearray(num_looked_at * job.stride))], Witness(None))
    try:
        reply = _scanned(handler(Scan(0, 0, blocks)))
    finally:
        handler.close()
    num_rows = int(np.frombuffer(reply.counts, np.int32).sum())
    return round(num_rows * files.extent / sum(block.stop - block.start for block in blocks))


def line_numbers(locations: Sequence[SourceLocation]) -> list[int]:
    """The line of each location, counted from 1. Reads each file once, up to the last of its locations."""
    lines = [0] * len(locations)
    paths = {location.path for location in locations}
    for path in paths:
        numbers = [number for number, location in enumerate(locations) if location.path == path]
        numbers.sort(key=lambda number: locations[number].byte_offset)
        offset, line = 0, 1
        with open(path, "rb", buffering=0) as file:
            for number in numbers:
                while offset < locations[number].byte_offset:
                    piece = file.read(min(_PIECE_BYTES, locations[number].byte_offset - offset))
                    if not piece:
                        break

                    offset += len(piece)
                    line += piece.count(b"\n")
                lines[number] = line
    return lines
