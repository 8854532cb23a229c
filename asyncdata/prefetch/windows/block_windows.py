"""Opens windows: what a producer asks for the next rows of the order, whatever kind of source they come from."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from asyncdata.core.messages import Scanned
from asyncdata.core.types import Position
from asyncdata.prefetch.windows.block_window import Window, no_such_place
from asyncdata.workers.base import Crashed, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from asyncdata.checkpoint.snapshot import StreamState
    from asyncdata.core.messages import Block, Reply, Scan
    from asyncdata.order.order import Order
    from asyncdata.prefetch.windows.block_window import OpenWindow, Tokens
    from asyncdata.sources.base import Blocks
    from asyncdata.workers.base import Executor

__all__ = ("AnywhereWindows", "BlockWindows", "CachedTokens", "Windows")

_MAX_TRIES = 5
_KEPT_SIZES = 15


class Windows(Protocol):
    """Opens windows, in the order in which they are wanted.

    :ivar num_blank: blank lines passed over so far.
    :ivar restart_point: tells the first position that a restart would need now; set by who knows it.
    :ivar on_ready: called, in the service's thread, when a window became ready, or has a fault, other than by the reply
        to a request; after a reply, everybody looks again anyway (:meth:`~asyncdata.workers.base.Executor.watch`).
    :ivar read_s: seconds for which a window is being read here already, in the trainer's process; 0 for none.
    """

    num_blank: int
    restart_point: Callable[[], Position]
    on_ready: Callable[[], object]

    @property
    def read_s(self) -> float: ...

    async def run(self) -> None:
        """Do what must be done here, in the trainer's process, until cancelled; return at once if that is nothing."""
        ...

    async def finish(self) -> None:
        """The loader is closing: what was read is put where later runs find it. Soon, or it is cancelled."""
        ...

    def restart(self) -> None:
        """What was opened before is given up, and its slots are free."""
        ...

    def open(self, epoch: int, number: int) -> OpenWindow | None:
        """Begin to read window ``number`` of ``epoch``; None where there is no room yet.

        :raises SourceChangedError: if the data is not what it was.
        """
        ...

    def state_at(self, position: Position) -> StreamState | None:
        """What a snapshot keeps besides ``position``, so that its window is found again soon.

        Any thread may ask.
        """
        ...

    def resume_at(self, position: Position, state: StreamState | None) -> None:
        """A restart at ``position`` is about to come, from a snapshot that kept ``state``. Any thread may say so."""
        ...

    def rows_after(self, position: Position) -> int | None:
        """Rows of the epoch from ``position`` on, as far as can be told now; None if it cannot. Any thread may ask."""
        ...


class AnywhereWindows:
    """Windows that workers can read from anywhere: a position is all that a restart needs."""

    restart_point: Callable[[], Position]
    on_ready: Callable[[], object]
    read_s = 0.0

    async def run(self) -> None:
        """As the protocol says: nothing."""

    async def finish(self) -> None:
        """As the protocol says: nothing."""

    def state_at(self, position: Position) -> None:
        """As the protocol says: nothing."""

    def resume_at(self, position: Position, state: StreamState | None) -> None:
        """As the protocol says."""


class CachedTokens(Protocol):
    """The token cache, as windows see it (``token_cache.cache``)."""

    def restart(self) -> None: ...

    def is_ready(self, epoch: int, number: int) -> bool: ...

    def window(self, blocks: Sequence[Block]) -> Tokens: ...

    async def run(self) -> None: ...

    async def finish(self) -> None: ...


class BlockWindows(AnywhereWindows):
    """Windows of blocks, which workers scan into slots.

    :param stride: bytes of a slot that one block takes.
    :param cache: None without one.
    """

    def __init__(
        self, source: Blocks, order: Order, executor: Executor, stride: int, cache: CachedTokens | None = None
    ) -> None:
        self.num_blank = 0
        self._cache = cache
        self._source = source
        self._order = order
        self._executor = executor
        self._stride = stride
        self._sizes: dict[tuple[int, int], int] = {}

    async def run(self) -> None:
        """As the protocol says: what the token cache needs a thread for."""
        if self._cache is not None:
            await self._cache.run()

    async def finish(self) -> None:
        """As the protocol says: in the token cache."""
        if self._cache is not None:
            await self._cache.finish()

    def restart(self) -> None:
        """As the protocol says."""
        if self._cache is not None:
            self._cache.restart()

    def open(self, epoch: int, number: int) -> Window | None:
        """As the protocol says."""
        if number == 0 and epoch > 0:
            self._source.check_unchanged()
        if number >= self._order.num_windows:
            raise no_such_place(Position(epoch, number), f"an epoch has {self._order.num_windows} windows")

        if self._cache is not None and not self._cache.is_ready(epoch, number):
            return None

        slot = self._executor.slots.hold()
        if slot is None:
            return None

        blocks = self._source.blocks(self._order.blocks(epoch, number))
        tokens = self._cache.window(blocks) if self._cache is not None else None
        window = Window(self._source, blocks, slot, self._stride, partial(self._order.rows, epoch, number), tokens)
        window.is_last = number + 1 == self._order.num_windows
        for part, scan in enumerate(window.scans()):
            self._submit(scan, partial(self._on_scanned, (epoch, number), window, part), _MAX_TRIES)
        return window

    def _submit(self, scan: Scan, on_scanned: Callable[[Any], object], num_tries: int) -> None:
        def on_reply(reply: Reply | Crashed) -> None:
            if isinstance(reply, Crashed) and num_tries > 1:  # no row is to blame: workers are killed from outside
                self._submit(scan, on_scanned, num_tries - 1)
            else:
                on_scanned(reply)

        self._executor.submit(scan, on_reply)

    def _on_scanned(self, place: tuple[int, int], window: Window, part: int, reply: Reply | Crashed) -> None:
        if not isinstance(reply, Scanned):
            window.fault = error_of(reply)
        elif window.add(part, reply):
            self.num_blank += window.num_blank
            recent = list(self._sizes.items())[-_KEPT_SIZES:]
            self._sizes = dict([*recent, (place, window.num_rows)])  # another one: other threads look at it

    def rows_after(self, position: Position) -> int | None:
        """As the protocol says; windows of the epoch that are still to be read count like the last one that was."""
        number = position.window if position.row else position.window - 1
        size = self._sizes.get((position.epoch, number))
        if size is None:
            return None

        return max(0, size - position.row if position.row else 0) + size * (self._order.num_windows - number - 1)
