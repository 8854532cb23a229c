"""The order D, opened to inspect single rows: which rows a window has, and the sample that a row becomes.

The loader's own code opens the source, the order and the windows, and a worker's own code tokenizes the rows, in a
thread of this process. So what is shown is what a loader with the same arguments delivers.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from anyio.from_thread import start_blocking_portal

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import ConfigError, NoSamplesError, SnapshotError, SourceError
from asyncdata.core.messages import Tokenized
from asyncdata.core.types import Position, Sample, SampleRange, SourceLocation
from asyncdata.delivery.chunk import Chunk
from asyncdata.loader.config import BadRows, LoaderConfig
from asyncdata.loader.opening import opened_source
from asyncdata.loader.packing_choice import PackingChoice
from asyncdata.order.order import Order
from asyncdata.order.shuffle import RowShuffle
from asyncdata.prefetch.windows.base import ChunkOrigin
from asyncdata.sources.resolve import described
from asyncdata.sources.stream import RowStream
from asyncdata.tokenization.base import open_tokenize_fn
from asyncdata.tokenization.resolve import resolved
from asyncdata.workers.base import error_of
from asyncdata.workers.inline import InlineExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.batching.packers.xtuner import LoaderPacking
    from asyncdata.core.messages import Reply, Request, RowError
    from asyncdata.prefetch.windows.base import OpenWindow
    from asyncdata.sources.base import Source
    from asyncdata.tokenization.base import BatchTokenizer, TokenizeFn
    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.workers.base import Crashed

__all__ = ("InspectedRow", "OpenedOrder", "WindowView")


class InspectedRow(NamedTuple):
    """A row, and the sample that it becomes.

    :ivar raw: its bytes; empty for a row longer than ``max_row_bytes``.
    :ivar sample: None if the row yields none, or if there is no tokenize function.
    :ivar dropped: why it yields no sample, or an empty string.
    :ivar error: what is wrong with the row; None for a good one.
    """

    position: Position
    location: SourceLocation
    raw: bytes
    sample: Sample | None
    dropped: str
    error: RowError | None

    @property
    def fault(self) -> str | None:
        """The code and the reason of the error, in one text."""
        return None if self.error is None else f"{self.error.code} {self.error.reason}"


class OpenedOrder:
    """The order D of a loader with these arguments. Close it, or use ``with``.

    :param tokenize_fn: None to inspect rows without tokenizing them.
    :param packing: changes D where packs are planned.
    :param knobs: of the loader, such as ``seed`` and ``shuffle``.
    :ivar files: the source, opened.
    :ivar order: as the loader has it.
    :raises SourceError: for files that cannot be read; all of them are named.
    :raises ConfigError: for a setting that cannot work.
    """

    def __init__(
        self,
        source: Source | str | list[str],
        tokenize_fn: TokenizeFn | Callable[..., Any] | str | None = None,
        *,
        packing: LoaderPacking | None = None,
        length_grouping: LengthGrouping | None = None,
        **knobs: Any,
    ) -> None:
        config = LoaderConfig.of({**knobs, "num_workers": 0, "bad_rows": BadRows(policy="skip", max=None)})
        plan = PackingChoice.of(config, packing, length_grouping, is_filtered=False).plan
        function = None if tokenize_fn is None else resolved(tokenize_fn)
        if function is None and (plan is not None or _needs_samples(config.order)):
            raise ConfigError("this order leaves out rows that yield no sample: say how rows are tokenized")

        self._tokenizer = _RecordingTokenizer(function)
        self._source = opened_source(described(source), config, function, no_op, plan)
        self.files, self.order = self._source.files, self._source.order
        self._executor = InlineExecutor(self._tokenizer)
        self._windows = self._source.windows(self._executor, on_ready=self._notify)
        self._streamed = Position()  # the window of a stream that can be read next without reading others again
        self._changed: anyio.Event | None = None
        self._is_closed = False
        with ExitStack() as stack:
            stack.callback(self._source.close)
            self._start(stack)
            self._stack = stack.pop_all()

    def _start(self, stack: ExitStack) -> None:
        self._executor.prepare(self._source.slot_bytes)
        self._portal = stack.enter_context(start_blocking_portal())
        stack.callback(self._portal.call, self._portal.stop, True)
        self._executor.watch(self._notify)
        self._serving = self._portal.start_task_soon(self._serve)
        self._portal.start_task_soon(self._windows.run)
        self._portal.call(self._windows.restart)

    def close(self) -> None:
        """Close the files and end the thread."""
        self._is_closed = True
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Windows and rows

    def windows(self, epoch: int, first: int = 0) -> Iterator[WindowView]:
        """The windows of an epoch from window ``first`` on, one at a time: each is closed before the next is read."""
        for number in range(first, sys.maxsize):
            with self.window(epoch, number) as view:
                yield view
                if view.is_last:
                    return

    def window(self, epoch: int, number: int) -> WindowView:
        """One window; of a stream, all windows before it are read too.

        :raises ConfigError: if there is no such window.
        :raises SourceError: if it cannot be read.
        """
        if epoch < 0 or number < 0:
            raise self._no_window(epoch, number)

        if isinstance(self.files, RowStream):
            first = self._streamed.window if self._streamed.epoch == epoch else 0
            for before in range(first if first <= number else 0, number):
                with self._opened(epoch, before) as view:
                    if view.is_last:
                        raise self._no_window(epoch, number)
            self._streamed = Position(epoch, number + 1)
        return self._opened(epoch, number)

    def _opened(self, epoch: int, number: int) -> WindowView:
        try:
            window = self._portal.call(self._open, epoch, number)
            if window.fault is not None:
                raise window.fault
        except SnapshotError as error:  # how the windows say that there is no such place
            raise self._no_window(epoch, number) from error

        return WindowView(self, window, Position(epoch, number))

    def _no_window(self, epoch: int, number: int) -> ConfigError:
        has = f": an epoch has the windows 0 to {self.order.num_windows - 1}" if isinstance(self.order, Order) else ""
        return ConfigError(f"there is no window {number} in epoch {epoch}{has}")

    def first(self, num_rows: int, epoch: int = 0) -> Iterator[InspectedRow]:
        """The first rows of an epoch, in the order of delivery."""
        for view in self.windows(epoch) if num_rows > 0 else ():
            yield from map(view.inspect, range(min(num_rows, view.num_rows)))
            num_rows -= view.num_rows
            if num_rows <= 0:
                return

    def at(self, position: Position) -> InspectedRow:
        """The row at a position.

        :raises ConfigError: if there is none.
        """
        with self.window(position.epoch, position.window) as view:
            return view.inspect(position.row)

    def position_of(self, number: int) -> Position:
        """The position of row ``number`` of the run, counted from 0 across epochs. Where no row is dropped, that is the
        sample with this index.

        Costs a read of every window before it; of whole epochs before it, only the first is read.

        :raises NoSamplesError: if there is no row at all.
        """
        position, num_rows = self._walk(0, number)
        if position is None and num_rows:
            epoch, left = divmod(number, num_rows)
            position, _ = self._walk(epoch, left)
        if position is not None:
            return position

        if num_rows:
            raise SourceError("AD303 the files changed while they were read; try again when nothing writes to them")

        raise NoSamplesError("AD202 the files have no row: every line is blank")

    def _walk(self, epoch: int, number: int) -> tuple[Position | None, int]:
        """The position of row ``number`` of ``epoch``, or None and how many rows the epoch has."""
        num_rows = 0
        for view in self.windows(epoch):
            if number < num_rows + view.num_rows:
                return Position(epoch, view.first.window, number - num_rows), num_rows

            num_rows += view.num_rows
        return None, num_rows

    # Called by WindowView

    def inspect(self, window: OpenWindow, position: Position) -> InspectedRow:
        """A row of an open window, tokenized as a worker does it."""
        self._tokenizer.raw = b""
        reply = self._portal.call(self._ask, window.request(position.row, position.row + 1))
        if not isinstance(reply, Tokenized):
            raise error_of(reply)

        chunk = Chunk(reply, position, 1, ChunkOrigin(window, position.row), ends_epoch=False)
        return InspectedRow(
            position=position,
            location=window.location(position.row),
            raw=self._tokenizer.raw,
            sample=SampleRange(chunk, 0, 1, 0, 0, 1).samples()[0] if chunk.num_samples else None,
            dropped=next((drop.reason for drop in chunk.drops), ""),
            error=next(iter(chunk.errors), None),
        )

    def release(self, window: OpenWindow) -> None:
        """Free the slot of a window."""
        if not self._is_closed:
            self._portal.call(self._executor.slots.release, window.slot)

    # In the portal's thread

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def _serve(self) -> None:
        try:
            await self._executor.run(self._source.job)
        finally:
            self._notify()  # a waiting call must not wait any longer

    async def _until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            if self._serving.done():
                self._serving.result()
            self._changed = anyio.Event()
            await self._changed.wait()

    async def _open(self, epoch: int, number: int) -> OpenWindow:
        opened: list[OpenWindow] = []

        def is_opened() -> bool:
            window = opened[0] if opened else self._windows.open(epoch, number)
            opened[:] = [] if window is None else [window]
            return window is not None and (window.is_ready or window.fault is not None)

        await self._until(is_opened)
        return opened[0]

    async def _ask(self, request: Request) -> Reply | Crashed:
        replies: list[Reply | Crashed] = []
        self._executor.submit(request, replies.append)
        await self._until(lambda: bool(replies))
        return replies[0]


class WindowView:
    """One window of D that has been read. Close it before the next one is opened, or use ``with``.

    :ivar first: the position of its first row.
    :ivar num_rows: rows of the window.
    :ivar is_last: whether it is the epoch's last one.
    """

    def __init__(self, opened: OpenedOrder, window: OpenWindow, first: Position) -> None:
        self.first = first
        self.num_rows = window.num_rows
        self.is_last = window.is_last
        self._opened = opened
        self._window = window

    def locations(self) -> list[SourceLocation]:
        """Where the window's rows lie, in the order of delivery."""
        return [self._window.location(row) for row in range(self.num_rows)]

    def find(self, keys: set[tuple[int, int]]) -> list[int]:
        """The rows at these places, rising; a place is the number of a file, and an offset or a row's number there."""
        return self._window.find(keys)

    def inspect(self, row: int) -> InspectedRow:
        """Row ``row``, tokenized as a worker does it.

        :raises ConfigError: if the window has no such row.
        """
        epoch, number = self.first.epoch, self.first.window
        if not 0 <= row < self.num_rows:
            raise ConfigError(
                f"there is no row {row} in window {number} of epoch {epoch}: it has {self.num_rows} rows, counted "
                "from 0"
            )

        return self._opened.inspect(self._window, Position(epoch, number, row))

    def close(self) -> None:
        """Free the window's memory for another one."""
        self._opened.release(self._window)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _RecordingTokenizer:
    """Stores the bytes of the row that is tokenized. A description that opens to itself."""

    def __init__(self, tokenize_fn: TokenizeFn | Callable[..., Any] | None) -> None:
        self.raw = b""
        self._tokenize: BatchTokenizer | None = None if tokenize_fn is None else open_tokenize_fn(tokenize_fn)

    def resolve(self) -> Self:
        return self

    def fingerprints(self) -> dict[str, str]:
        return {}

    def settings(self) -> dict[str, Any]:
        return {}

    def open(self) -> Self:
        return self

    def __call__(self, rows: Sequence[bytes | memoryview], out: ColumnWriter) -> None:
        self.raw = bytes(rows[0]) if rows else b""
        if self._tokenize is not None:
            self._tokenize(rows, out)


def _needs_samples(order: Any) -> bool:
    return isinstance(order, RowShuffle) and order.only_kept
