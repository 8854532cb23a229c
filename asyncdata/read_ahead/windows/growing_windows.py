"""Windows of a source that grows: each epoch has an order of its own, over what it covers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.order.order import Order
from asyncdata.read_ahead.windows.block_windows import BlockWindow, BlockWindows

if TYPE_CHECKING:
    from asyncdata.core.types import Position
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.sources.growing import GrowingBlocks


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
    """See :class:`~asyncdata.read_ahead.windows.block_windows.BlockWindows`. An epoch is looked up late."""

    is_late = True

    def __init__(self, source: GrowingBlocks, order: Order, calls: Calls, stride: int) -> None:
        super().__init__(source, order, calls, stride)
        self._growing = source

    async def opened(self, epoch: int, number: int) -> BlockWindow:
        self._source, now = self._growing.at(epoch), self._order
        self._order = Order(now.shuffle, now.seed, self._source.num_blocks)
        return await super().opened(epoch, number)

    def share_before(self, position: Position) -> float:
        """0: not known."""
        return 0.0

    def rows_after(self, position: Position) -> int | None:
        """None: not known."""
