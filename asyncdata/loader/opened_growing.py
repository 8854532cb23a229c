"""An open source that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from asyncdata.core.errors import ConfigError
from asyncdata.loader.opened_source import OpenedSource, Opening, with_block_cache
from asyncdata.order.shuffle import RowShuffle, Shuffle
from asyncdata.read_ahead.windows.growing_windows import GrowingOrder, GrowingWindows
from asyncdata.sources.base import room_of

if TYPE_CHECKING:
    from asyncdata.sources.growing import GrowingBlocks
    from asyncdata.sources.text.jsonl import JsonlSource

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
