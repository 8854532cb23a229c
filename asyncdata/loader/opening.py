"""Opens the source: decides how it is read (blocks, stream or row index), in which order, and by which windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import structs

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import is_loaded_instance
from asyncdata.delivery.bad_rows import BadRowPolicy
from asyncdata.loader.opened_source import OpenedPart, Opening, with_block_cache
from asyncdata.order.order import Order, Share
from asyncdata.order.shuffle import RowShuffle, Shuffle
from asyncdata.read_ahead.windows import BlockWindows
from asyncdata.sources.base import Source, room_of
from asyncdata.sources.resolve import described, warn_about_files
from asyncdata.workers.machine import available_memory, num_usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.batching.planned import PackRules
    from asyncdata.core.messages import Job
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.sources.jsonl import JsonlSource
    from asyncdata.sources.stream import RowStream
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.tokenization.part_functions import PartFunctions
    from asyncdata.workers.pool import Pool
    from asyncdata.workers.popen import EarlyForkServer

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
    return opened


def _opened_source(source: Source, opening: Opening) -> OpenedPart:
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
        from asyncdata.loader.opened_rows import opened_growing

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
    return OpenedPart(opening, files, order, job, slot_bytes, num_blocks, windows, files.close)


def _opened_stream(stream: RowStream, shuffle: Shuffle, opening: Opening) -> OpenedPart:
    """Windows of a stream, which is read from front to back. A slot has room for the longest allowed row."""
    from asyncdata.read_ahead.stream_windows import StreamWindows
    from asyncdata.sources.stream import StreamOrder

    order = StreamOrder(shuffle, opening.config.seed, len(stream.files))
    job = structs.replace(opening.job(stream, shuffle.block_bytes), keeps_rows=True)
    windows = StreamWindows(stream, order, opening.calls)
    slot_bytes = max(order.window_bytes, stream.max_row_bytes) + 1
    return OpenedPart(opening, stream, order, job, slot_bytes, 0, windows, stream.close)


_COPIES = "asyncdata.sources.spool:SpoolReader"
_FIRST_WORKERS = 1
"""The first number of workers, if it is tuned. A second worker would load its tokenizer while the trainer starts, and
delay the first batch; if it is needed, it is added soon."""


def connect_cluster(executor: Pool, job: Job) -> None:
    """Connect with the cluster.

    :raises ConfigError: AD496, for what needs a disk of this machine; or if there is no cluster.
    """
    check_cluster(job)
    from asyncdata.workers.ray.executor import ClusterExecutor

    assert isinstance(executor, ClusterExecutor)
    executor.actors.connect()


def check_cluster(job: Job) -> None:
    """Refuse what needs a disk of this machine.

    :raises ConfigError: AD496.
    """
    if any(one.reader.path == _COPIES for one in (job, *job.parts)):
        raise ConfigError(
            "AD496 single rows of this source are read from copies on the disk of this machine, which other nodes do "
            "not see: use shuffle=True, which reads whole blocks; or JSONL files, whose rows need no copies; or leave "
            "executor out"
        )


class TuningLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers there are at first, and how many there may be.

    :ivar max_worker_bytes: memory of all workers together.
    """

    min_workers: int
    max_workers: int
    max_worker_bytes: int


def limits_of(config: LoaderConfig) -> TuningLimits:
    """The workers that a configuration allows."""
    given, memory = config.limits, config.limits.max_ready_bytes
    if config.executor is not None:
        least, most = config.executor.first_workers, config.executor.max_workers
    elif config.num_workers is None:
        least, most = _FIRST_WORKERS, given.max_workers or num_usable_cpus()
    else:
        least = most = max(1, config.num_workers)  # 0 is one thread
    if config.num_workers is None:
        memory = given.max_memory_bytes or available_memory() // 2
    return TuningLimits(min_workers=least, max_workers=most, max_worker_bytes=max(0, memory - given.max_ready_bytes))


def executor_of(
    config: LoaderConfig,
    limits: TuningLimits,
    function: TokenizeFn | Callable[..., Any],
    early: EarlyForkServer | None = None,
) -> Pool:
    """The executor of the configuration.

    :param early: the workers' fork server, if it was started early.
    """
    given, cluster = config.limits, config.executor
    is_mixture = is_loaded_instance(function, "asyncdata.tokenization.part_functions:PartFunctions")
    num_parts = len(cast("PartFunctions", function).functions) if is_mixture else 1
    if config.num_workers == 0:
        from asyncdata.workers.inline import InlineExecutor

        return InlineExecutor(function, num_parts)

    from asyncdata.workers.pool import Pool
    from asyncdata.workers.process_pool import Processes

    def processes(least: int, most: int) -> Processes:
        return Processes(least, given.row_timeout_s, most, early, given.max_bytes_per_worker)

    if cluster is None:
        return Pool([processes(limits.min_workers, limits.max_workers)], num_parts)

    from asyncdata.workers.ray.executor import ClusterExecutor

    num_local = cluster.local_workers
    local = processes(num_local, num_local) if num_local else None
    return ClusterExecutor(cluster, row_timeout_s=given.row_timeout_s, local=local, num_parts=num_parts)
