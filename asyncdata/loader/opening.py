"""Opens the source: decides how it is read (blocks, stream or row index), in which order, and by which windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import is_loaded_instance
from asyncdata.delivery.bad_rows import BadRowPolicy
from asyncdata.loader.opened_source import OpenedPart, OpenedSource, Opening, with_block_cache
from asyncdata.order.order import Order, Share
from asyncdata.order.shuffle import RowShuffle, Shuffle
from asyncdata.read_ahead.windows.block_windows import BlockWindows
from asyncdata.sources.base import Source, room_of
from asyncdata.sources.resolve import described, warn_about_files

if TYPE_CHECKING:
    from asyncdata.batching.rules import PackRules
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.sources.jsonl import JsonlSource
    from asyncdata.sources.stream import RowStream

_LONG_ROWS_BYTES = 64 << 20
"""More room in a slot, where rows that do not fit would be read again, from a store. It takes memory only when used."""


def opened_part(
    name: str,
    source: Any,
    config: LoaderConfig,
    function: Any,
    calls: Calls,
    plan: PackRules | None = None,
    share: Share | None = None,
) -> OpenedPart:
    """Open a source, and its quarantine; see :class:`~asyncdata.loader.opened_source.Opening`.

    :param source: what a loader takes as its source.
    :raises SourceError: for files that cannot be read.
    :raises ConfigError: for a setting that cannot work.
    """
    settings = config.bad_rows
    bad_rows = BadRowPolicy(settings.policy == "raise", settings.max, settings.excerpts)
    if not bad_rows.is_raised:
        from asyncdata.delivery.quarantine import Quarantine

        quarantine = Quarantine.opened(settings.path if settings.policy == "quarantine" else None)
        bad_rows = bad_rows._replace(pass_over=quarantine.add)
    opening = Opening(name, config, function, calls, bad_rows, plan, share)
    opened = _opened_source(described(source), opening)
    warn_about_files(opened.files)
    return OpenedPart(opening, opened)


def _opened_source(source: Source, opening: Opening) -> OpenedSource:
    """Open the source, and decide how it is read."""
    config = opening.config
    shuffle: Shuffle | RowShuffle = config.order
    if opening.plan is not None:
        from asyncdata.loader.opened_rows import shuffle_of_plan

        shuffle = shuffle_of_plan(opening.plan, config)
    if opening.share is not None and not (isinstance(shuffle, RowShuffle) and shuffle.only_kept):
        raise ConfigError(
            "AD453 a rank can leave rows to others only where every row is known to be one sample: use "
            "shuffle=RowShuffle(only_kept=True) or planned packs, or let every rank tokenize all rows"
        )

    if getattr(source, "grows", False):
        from asyncdata.loader.opened_growing import opened_growing

        return opened_growing(cast("JsonlSource", source), shuffle, opening)

    if isinstance(shuffle, RowShuffle):
        from asyncdata.loader.opened_rows import opened_rows

        return opened_rows(source, shuffle, opening)

    files = with_block_cache(source.open(shuffle.block_bytes), config.cache)
    if is_loaded_instance(files, "asyncdata.sources.stream:RowStream"):
        return _opened_stream(cast("RowStream", files), shuffle, opening)

    order = Order(shuffle, config.seed, files.num_blocks, files.block_bytes)
    num_blocks = order.max_window_blocks
    job = opening.job(files, room_of(files, num_blocks))
    windows = BlockWindows(files, order, opening.calls, job.stride)
    slot_bytes = num_blocks * job.stride + _LONG_ROWS_BYTES * bool(job.stores)
    return OpenedSource(files, order, job, slot_bytes, num_blocks, windows, files.close)


def _opened_stream(stream: RowStream, shuffle: Shuffle, opening: Opening) -> OpenedSource:
    """Windows of a stream, which is read from front to back. A slot has room for the longest allowed row."""
    from asyncdata.read_ahead.windows.stream_windows import StreamWindows
    from asyncdata.sources.stream import StreamOrder

    order = StreamOrder(shuffle, opening.config.seed, len(stream.files))
    job = structs.replace(opening.job(stream, shuffle.block_bytes), keeps_rows=True)
    windows = StreamWindows(stream, order, opening.calls)
    slot_bytes = max(order.window_bytes, stream.max_row_bytes) + 1
    return OpenedSource(stream, order, job, slot_bytes, 0, windows, stream.close)
