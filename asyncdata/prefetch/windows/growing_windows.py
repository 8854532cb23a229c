"""Windows of a source that grows: each epoch has an order of its own, over what it covers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.order.order import Order
from asyncdata.prefetch.windows.block_windows import BlockWindows

if TYPE_CHECKING:
    from asyncdata.core.types import Position
    from asyncdata.prefetch.windows.block_windows import BlockWindow
    from asyncdata.sources.growing import GrowingBlocks
    from asyncdata.workers.base import Executor

__all__ = ("GrowingOrder", "GrowingWindows")


class GrowingOrder(Order):
    """The order of the first epoch; the snapshot keeps what each epoch covers."""

    @property
    def max_window_blocks(self) -> int:
        """The blocks that a window of any epoch may have."""
        return self.shuffle.window_blocks

    def description(self) -> dict[str, Any]:
        """What a snapshot must agree with, as builtins."""
        found = super().description()
        del found["num_blocks"]
        return {**found, "grows": True}


class GrowingWindows(BlockWindows):
    """See :class:`~asyncdata.prefetch.windows.block_windows.BlockWindows`."""

    def __init__(self, source: GrowingBlocks, order: Order, executor: Executor, stride: int) -> None:
        super().__init__(source, order, executor, stride)
        self._growing = source
        self._last: BlockWindow | None = None

    def restart(self) -> None:
        super().restart()
        self._last = None

    def open(self, epoch: int, number: int) -> BlockWindow | None:
        """As the base class says; an epoch is looked up as late as it can be, after all rows before it are sent."""
        if number == 0 and self._last is not None and not self._last.is_sent:
            return None

        self._source, now = self._growing.at(epoch), self._order
        self._order = Order(now.shuffle, now.seed, self._source.num_blocks)
        window = super().open(epoch, number)
        self._last = self._last if window is None else window
        return window

    def rows_after(self, position: Position) -> int | None:
        """None: not known."""
