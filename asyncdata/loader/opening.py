"""Opens the source: decides how it is read (blocks, stream or row index), in which order, and by which windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from asyncdata.core.errors import ConfigError
from asyncdata.core.imports import is_loaded_instance
from asyncdata.delivery.bad_rows import BadRowPolicy
from asyncdata.loader.opened_source import OpenedPart, OpenedSource, job_of, with_block_cache
from asyncdata.order.order import Order, Share
from asyncdata.order.shuffle import RowShuffle, Shuffle
from asyncdata.read_ahead.windows.block_windows import BlockWindows, Windows
from asyncdata.sources.base import Blocks, Source, room_of
from asyncdata.sources.resolve import described, warn_about_files

if TYPE_CHECKING:
    from asyncdata.batching.rules import PackRules
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.opened_source import Place
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.sources.stream import RowStream
    from asyncdata.sources.text.jsonl import JsonlSource

_LONG_ROWS_BYTES = 64 << 20
"""More room in a slot, where rows that do not fit would be read again, from a store. It takes memory only when used."""


def opened_part(
    name: str,
    source: Any,
    config: LoaderConfig,
    function: Any,
    plan: PackRules | None = None,
    share: Share | None = None,
) -> OpenedPart:
    """Open a source, and its quarantine; see :func:`opened_source`.

    :param name: of the part of a mixture; empty for the only source.
    :param source: what a loader takes as its source.
    """
    settings = config.bad_rows
    bad_rows = BadRowPolicy(settings.policy == "raise", settings.max, settings.excerpts)
    if not bad_rows.is_raised:
        from asyncdata.delivery.quarantine import Quarantine

        quarantine = Quarantine.opened(settings.path if settings.policy == "quarantine" else None)
        bad_rows = bad_rows._replace(pass_over=quarantine.add)
    opened = opened_source(described(source), config, function, bad_rows, plan, share)
    warn_about_files(opened.files)
    return OpenedPart(name, opened, config, function, bad_rows)


def opened_source(
    source: Source,
    config: LoaderConfig,
    function: Any,
    bad_rows: BadRowPolicy,
    plan: PackRules | None = None,
    share: Share | None = None,
) -> OpenedSource:
    """Open the source, and decide how it is read.

    :param bad_rows: what is done with bad rows that the row index excludes.
    :param plan: how packs are planned; None if they are not.
    :param share: the rows that are tokenized here; None: all.
    :raises SourceError: for files that cannot be read.
    :raises ConfigError: for a setting that cannot work.
    """
    shuffle: Shuffle | RowShuffle = config.order
    if plan is not None:
        from asyncdata.loader.opened_rows import shuffle_of_plan

        shuffle = shuffle_of_plan(plan, config)
    if share is not None and not (isinstance(shuffle, RowShuffle) and shuffle.only_kept):
        raise ConfigError(
            "AD453 a rank can leave rows to others only where every row is known to be one sample: use "
            "shuffle=RowShuffle(only_kept=True) or planned packs, or let every rank tokenize all rows"
        )

    if getattr(source, "grows", False):
        from asyncdata.loader.opened_growing import opened_growing

        return opened_growing(cast("JsonlSource", source), shuffle, config, function)

    if isinstance(shuffle, RowShuffle):
        from asyncdata.loader.opened_rows import opened_rows

        return opened_rows(source, shuffle, config, function, bad_rows, plan, share)

    files = with_block_cache(source.open(shuffle.block_bytes), config.cache)
    if is_loaded_instance(files, "asyncdata.sources.stream:RowStream"):
        return _opened_stream(cast("RowStream", files), shuffle, config, function)

    return _opened_blocks(files, shuffle, config, function)


def _opened_blocks(files: Blocks, shuffle: Shuffle, config: LoaderConfig, function: Any) -> OpenedSource:
    """Windows of blocks. The rows of a window are not known before it is read."""
    order = Order(shuffle, config.seed, files.num_blocks, files.block_bytes)
    num_blocks = order.max_window_blocks
    job = job_of(files, config, function, room_of(files, num_blocks))

    def open_windows(calls: Calls, _: Place) -> Windows:
        return BlockWindows(files, order, calls, job.stride)

    slot_bytes = num_blocks * job.stride + _LONG_ROWS_BYTES * bool(job.stores)
    return OpenedSource(files, order, job, slot_bytes, num_blocks, open_windows, files.close)


def _opened_stream(stream: RowStream, shuffle: Shuffle, config: LoaderConfig, function: Any) -> OpenedSource:
    """Windows of a stream, which is read from front to back. A slot has room for the longest allowed row."""
    from asyncdata.read_ahead.windows.stream_windows import StreamWindows
    from asyncdata.sources.stream import StreamOrder

    order = StreamOrder(shuffle, config.seed, len(stream.files))
    job = structs.replace(job_of(stream, config, function, shuffle.block_bytes), keeps_rows=True)

    def open_windows(calls: Calls, restart_point: Place) -> Windows:
        return StreamWindows(stream, order, calls, restart_point=restart_point)

    slot_bytes = max(order.window_bytes, stream.max_row_bytes) + 1
    return OpenedSource(stream, order, job, slot_bytes, 0, open_windows, stream.close)
