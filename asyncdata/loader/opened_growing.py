"""Opens a source that grows: each epoch has an order of its own, over what it covers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from asyncdata.core.errors import ConfigError
from asyncdata.loader.opened_source import OpenedSource, Opening, with_block_cache
from asyncdata.order.order import Order
from asyncdata.order.shuffle import RowShuffle, Shuffle
from asyncdata.read_ahead.windows.block_windows import BlockWindow, BlockWindows
from asyncdata.sources.base import room_of

if TYPE_CHECKING:
    from asyncdata.core.types import Position
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.sources.growing import GrowingBlocks
    from asyncdata.sources.jsonl import JsonlSource


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


_REFUSED = "AD311 a source that grows does not work with"
_NO_FOLDER = (
    "world_size above 1 and no folder, as each rank could see other sizes: name one that all ranks share, and no other "
    'run: JsonlSource(..., grows="checkpoints/run-1/files")'
)
_NO_CLUSTER = "workers on other machines: leave executor out"


def opened_growing(source: JsonlSource, shuffle: Shuffle | RowShuffle, opening: Opening) -> OpenedSource:
    """Windows of blocks, of those that an epoch covers. There are no canaries: other rows would be the first ones.

    :raises ConfigError: AD311, for settings that need to know all rows, or all ranks, in advance.
    """
    if isinstance(shuffle, RowShuffle):
        raise ConfigError(f"{_REFUSED} an order of single rows, whose index has all rows: use shuffle=True")

    config = opening.config
    has_no_folder = config.ranks.world_size > 1 and not isinstance(source.grows, str)
    if config.executor is not None or has_no_folder:
        raise ConfigError(f"{_REFUSED} {_NO_FOLDER if has_no_folder else _NO_CLUSTER}")

    files = with_block_cache(cast("GrowingBlocks", source.open(shuffle.block_bytes)), config.cache)
    order = GrowingOrder(shuffle, config.seed, files.num_blocks)
    num_blocks = order.max_window_blocks
    job = opening.job(files, room_of(files, num_blocks))

    windows = GrowingWindows(files, order, opening.calls, job.stride)
    return OpenedSource(files, order, job, num_blocks * job.stride, 0, windows, files.close, growth=files)
