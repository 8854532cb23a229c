"""Opens windows of blocks, which the workers scan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.messages import Failed, Scanned
from asyncdata.core.types import Position
from asyncdata.prefetch.windows.base import AnywhereWindows, CachedTokens, no_such_place
from asyncdata.prefetch.windows.block_window import Window
from asyncdata.prefetch.windows.ready_rows import ReadyRows
from asyncdata.workers.base import MAX_LOSSES, Crashed, error_of

if TYPE_CHECKING:
    from asyncdata.core.messages import Reply, Scan
    from asyncdata.order.order import Order
    from asyncdata.sources.base import Blocks
    from asyncdata.workers.base import Executor

__all__ = ("BlockWindows",)

_KEPT_SIZES = 15
_SCANS_OF_EACH = 3
"""Scans of a window for each worker, if they are answered with samples."""
_MAX_LOSSES_WITH_SAMPLES = 2


class BlockWindows(AnywhereWindows):
    """Windows of blocks, which workers scan into slots.

    :param stride: bytes of a slot that one block takes.
    :param cache: the token cache, if there is one.
    """

    def __init__(
        self, source: Blocks, order: Order, executor: Executor, stride: int, cache: CachedTokens | None = None
    ) -> None:
        self.num_blank = 0
        self._cache: CachedTokens | None = cache
        self._source = source
        self._order = order
        self._executor = executor
        self._stride = stride
        self._sizes: dict[tuple[int, int], int] = {}

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
        arrange, stride = partial(self._order.rows, epoch, number), self._stride
        if self._executor.answers_with_samples:
            share = -(-len(blocks) // (_SCANS_OF_EACH * self._executor.num_workers))
            window = Window(self._source, blocks, slot, stride, arrange, None, ReadyRows(), share)
        else:
            tokens = self._cache.window(blocks) if self._cache is not None else None
            window = Window(self._source, blocks, slot, stride, arrange, tokens)
        window.is_last = number + 1 == self._order.num_windows
        for part, scan in enumerate(window.scans()):
            self._scan((epoch, number), window, part, scan)
        return window

    def _scan(self, place: tuple[int, int], window: Window, part: int, scan: Scan) -> None:
        max_losses = _MAX_LOSSES_WITH_SAMPLES if scan.with_samples else MAX_LOSSES
        self._executor.submit(scan, partial(self._on_scanned, place, window, part, scan), max_losses)

    def _on_scanned(
        self, place: tuple[int, int], window: Window, part: int, scan: Scan, reply: Reply | Crashed
    ) -> None:
        if scan.with_samples and (isinstance(reply, Crashed) or (isinstance(reply, Failed) and reply.row >= 0)):
            # A row is to blame. With their text here, the rows are tokenized at their turn, and that row is found.
            self._scan(place, window, part, msgspec.structs.replace(scan, with_samples=False))
        elif not isinstance(reply, Scanned):
            window.fault = error_of(reply)
        elif window.add(part, reply):
            self.num_blank += window.num_blank
            recent = list(self._sizes.items())[-_KEPT_SIZES:]
            self._sizes = dict([*recent, (place, window.num_rows)])  # a new dict, as other threads read it

    def rows_after(self, position: Position) -> int | None:
        """As the protocol says; windows that are not read yet are estimated by the size of the current one."""
        number = position.window if position.row else position.window - 1
        size = self._sizes.get((position.epoch, number))
        if size is None:
            return None

        return max(0, size - position.row if position.row else 0) + size * (self._order.num_windows - number - 1)
