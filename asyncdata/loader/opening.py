"""Opens the source: decides how it is read (blocks, stream or row index), in which order, and by which windows."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from asyncdata.batching.planned.plan import PlannedOrder
from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import ConfigError, LoaderClosedError, TooManyBadRowsError
from asyncdata.core.file_owner import check_ours
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Job
from asyncdata.core.specs import ReaderSpec
from asyncdata.core.temporary_folder import TemporaryFolder
from asyncdata.core.types import Position
from asyncdata.delivery.bad_rows import without_text
from asyncdata.loader.block_cache import with_block_cache
from asyncdata.loader.index_identity import index_folder, index_identity
from asyncdata.loader.open_token_cache import CachedJob, cache_of, row_cache_of, stream_cache_of
from asyncdata.order.order import Order, RowOrder
from asyncdata.order.shuffle import RowShuffle
from asyncdata.prefetch.canaries import Canaries
from asyncdata.prefetch.row_index.builder import Indexer
from asyncdata.prefetch.row_index.eviction import hold_rows, make_room
from asyncdata.prefetch.row_index.index_file import IndexFile
from asyncdata.prefetch.row_index.row_index import RowIndex
from asyncdata.prefetch.windows.block_window import SLACK_BYTES
from asyncdata.prefetch.windows.block_windows import BlockWindows
from asyncdata.prefetch.windows.indexed_windows import IndexedWindows
from asyncdata.prefetch.windows.stream_windows import StreamWindows
from asyncdata.sources.base import room_of
from asyncdata.sources.stream import RowStream, StreamOrder
from asyncdata.tokenization.base import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.batching.planned.plan import Plan
    from asyncdata.core.errors import BadRowError
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.order.rank_share import Share
    from asyncdata.order.replay_order import ReplayOrder
    from asyncdata.order.shuffle import Shuffle
    from asyncdata.prefetch.token_cache.cache import TokenCache
    from asyncdata.prefetch.windows.base import Windows
    from asyncdata.sources.base import Blocks, Source
    from asyncdata.workers.base import Executor

    Place = Callable[[], Position]
    Call = Callable[[], object]

__all__ = ("OpenedSource", "opened_replay", "opened_source")

_log = get_logger(__name__)
_INDEX_BLOCK_BYTES = 1 << 20
_MAX_CANARY_BLOCKS = 8

Function = Any


class OpenedSource(Protocol):
    """An open source, with the order D over it.

    :ivar slot_bytes: memory of a slot.
    """

    files: Blocks
    job: Job
    slot_bytes: int

    @property
    def order(self) -> Order | RowOrder | PlannedOrder | StreamOrder | ReplayOrder:
        """The order D, as far as it is known before reading."""
        ...

    @property
    def index(self) -> RowIndex | None:
        """The row index; None if the order needs none."""
        ...

    @property
    def token_cache(self) -> TokenCache | None:
        """The token cache, if there is one."""
        ...

    def windows(self, executor: Executor, restart_point: Place = Position, on_ready: Call = no_op) -> Windows:
        """The opener of the windows of D.

        :param restart_point: returns the first position that a restart would need now.
        :param on_ready: called, in the service's thread, when a window became ready, or has a fault, without a reply.
        """
        ...

    def canaries(self, executor: Executor) -> Canaries:
        """The canaries of this source."""
        ...

    def close(self) -> None:
        """Close the source; remove files that were written only for this run."""
        ...


def opened_source(
    source: Source,
    config: LoaderConfig,
    function: Function,
    quarantine: Callable[[BadRowError], object],
    plan: Plan | None = None,
    share: Share | None = None,
) -> OpenedSource:
    """Open the source, and decide how it is read.

    :param quarantine: called with each bad row that the row index excludes.
    :param plan: how packs are planned; None if they are not.
    :param share: the rows that are tokenized here; None: all.
    :raises SourceError: for files that cannot be read.
    :raises ConfigError: for a setting that cannot work.
    """
    shuffle = config.order if plan is None else _shuffle_of_plan(plan, config)
    _check_share(share, shuffle)
    if isinstance(shuffle, RowShuffle):
        files = with_block_cache(_open_rows(source, plan), config.cache)
        rows = RowOrder(shuffle, config.seed) if plan is None else PlannedOrder(plan, shuffle, config.seed)
        return _IndexedSource(files, rows, config, function, quarantine, share)

    files = with_block_cache(source.open(shuffle.block_bytes), config.cache)
    if isinstance(files, RowStream):
        stream_order = StreamOrder(shuffle, config.seed, len(files.files))
        cached = stream_cache_of(files, _job(files, config, function, shuffle.block_bytes), config, function)
        return _StreamSource(files, stream_order, cached)

    order = Order(shuffle, config.seed, files.num_blocks, files.block_bytes)
    job = _job(files, config, function, room_of(files, order.max_window_blocks))
    return _BlockSource(files, order, cache_of(files, job, order.max_window_blocks, config, function))


def opened_replay(source: Source, config: LoaderConfig, function: Function, order: ReplayOrder) -> OpenedSource:
    """Open the source of a part whose rows come again; they are read one by one, by the row index.

    :raises ConfigError: for a source whose rows can only be read from front to back.
    """
    return _IndexedSource(_open_rows(source, None), order, config, function, no_op, None)


def _open_rows(source: Source, plan: Plan | None) -> Blocks:
    """The source as blocks whose rows can be read one by one."""
    files = source.open(_INDEX_BLOCK_BYTES)
    if not isinstance(files, RowStream):
        return files

    blocks = files.as_blocks(_INDEX_BLOCK_BYTES)
    if blocks is None:
        raise ConfigError(_needs_rows(files, plan))

    return blocks


def _shuffle_of_plan(plan: Plan, config: LoaderConfig) -> RowShuffle:
    """The order in which rows are numbered for the plan. Only rows that yield a sample get a number."""
    shuffle = config.order
    if not plan.is_shuffled:
        if isinstance(shuffle, RowShuffle):
            return msgspec.structs.replace(shuffle, only_kept=True)

        raise ConfigError(
            f"AD453 packs can be planned only over an order of single rows, which shuffle={config.shuffle!r} is not: "
            'use shuffle="full" or a RowShuffle, or pack without a plan'
        )

    if config.shuffle is True or config.shuffle == "full":
        return RowShuffle(method="none", only_kept=True)

    if isinstance(shuffle, RowShuffle) and shuffle.method == "none":
        return msgspec.structs.replace(shuffle, only_kept=True)

    raise ConfigError(
        f"AD453 XTunerPacking has an order of rows of its own, which shuffle={config.shuffle!r} would not change: "
        "leave shuffle out; or, for some of the rows, use RowShuffle(method='none', first=..., stop=...)"
    )


def _check_share(share: Share | None, shuffle: Shuffle | RowShuffle) -> None:
    if share is None or (isinstance(shuffle, RowShuffle) and shuffle.only_kept):
        return

    raise ConfigError(
        "AD453 a rank can leave rows to others only where every row is known to be one sample: use "
        "shuffle=RowShuffle(only_kept=True) or planned packs, or let every rank tokenize all rows"
    )


def _needs_rows(files: RowStream, plan: Plan | None) -> str:
    path = files.files[0].path
    if plan is not None:
        return (
            f"AD453 {path} can only be read from front to back, and a plan of packs needs every row by itself: use "
            "SoftPacking or HardPacking, which need no plan, or decompress or convert the data"
        )

    return (
        f"{path} can only be read from front to back, and this shuffle needs every row by "
        "itself: use shuffle=True, which mixes windows, or decompress or convert the data"
    )


def _job(files: Blocks, config: LoaderConfig, function: Function, block_bytes: int) -> Job:
    return Job(
        files=files.files,
        tokenize=None if config.num_workers == 0 else describe(function),
        max_row_bytes=files.max_row_bytes,
        block_bytes=block_bytes,
        slack_bytes=SLACK_BYTES,
        reader=files.reader,
        with_token_sums=config.digest == "tokens",
        stores=list(getattr(files, "stores", ())),
    )


class _BlockSource:
    """Windows of blocks. The rows of a window are not known before it is read."""

    index = None
    token_cache: TokenCache | None = None

    def __init__(self, files: Blocks, order: Order, cached: CachedJob) -> None:
        self.files = files
        self.order = order
        self.job = cached.job
        self.slot_bytes = order.max_window_blocks * self.job.stride
        self._cached = cached

    def windows(self, executor: Executor, restart_point: Place = Position, on_ready: Call = no_op) -> BlockWindows:
        self.token_cache = self._cached.open(executor)
        return BlockWindows(self.files, self.order, executor, self.job.stride, self.token_cache)

    def canaries(self, executor: Executor) -> Canaries:
        return Canaries(self.files, executor, self.job.stride, self.order.max_window_blocks)

    def close(self) -> None:
        self._cached.close()
        self.files.close()


class _StreamSource:
    """Windows of a stream, which is read from front to back. A slot has room for the longest allowed row."""

    index = None
    token_cache: TokenCache | None = None

    def __init__(self, stream: RowStream, order: StreamOrder, cached: CachedJob) -> None:
        self.files: Blocks = stream
        self.order = order
        self.job = cached.job
        self._cached = cached
        self.slot_bytes = max(order.window_bytes, stream.max_row_bytes) + 1
        self._stream = stream

    def windows(self, executor: Executor, restart_point: Place = Position, on_ready: Call = no_op) -> StreamWindows:
        self.token_cache = cache = self._cached.open_rows(executor)
        knobs: dict[str, Any] = {"restart_point": restart_point, "on_ready": on_ready, "cache": cache}
        return StreamWindows(self._stream, self.order, executor, **knobs)

    def canaries(self, executor: Executor) -> Canaries:
        return Canaries(self.files, executor, self.job.stride, 0)

    def close(self) -> None:
        self._cached.close()
        self.files.close()


class _IndexedSource:
    """Rows ordered one by one, over the row index."""

    token_cache: TokenCache | None = None

    def __init__(
        self,
        files: Blocks,
        order: RowOrder | PlannedOrder | ReplayOrder,
        config: LoaderConfig,
        function: Function,
        quarantine: Callable[[BadRowError], object],
        share: Share | None,
    ) -> None:
        shuffle = order.shuffle
        self.files = files
        self.order = order
        self._share = share
        self._cached = row_cache_of(files, _job(files, config, function, _INDEX_BLOCK_BYTES), config, function)
        self.job = self._cached.job
        self._identity = index_identity(files, self.job, shuffle.check, function)
        self._folder = index_folder(config)
        self._remove: Callable[[], object] = no_op
        self._refuse_foreign()
        self._make_room(config.cache.max_row_index_bytes)
        self.index = RowIndex(files, shuffle, "" if files.reads_single_rows else self._spool_folder())
        if self.index.spool:
            spooled = {"inner": files.reader.path, "settings": files.reader.settings, "folder": self.index.spool}
            self.job = msgspec.structs.replace(
                self.job, reader=ReaderSpec("asyncdata.sources.spool:SpoolReader", spooled)
            )
        self.slot_bytes = min(_MAX_CANARY_BLOCKS, files.num_blocks) * self.job.stride
        self._config = config
        self._function = function
        self._quarantine = quarantine
        self._num_bad_rows = 0

    def windows(self, executor: Executor, restart_point: Place = Position, on_ready: Call = no_op) -> IndexedWindows:
        def indexer(on_growth: Callable[[], object]) -> Indexer:
            check, excerpts = self.order.shuffle.check, self._config.bad_rows.excerpts
            return Indexer(files, executor, index, check, self._file(), self._pass_over, on_growth, shows_rows=excerpts)

        files, index = self.files, self.index
        self.token_cache = cache = self._cached.open_rows(executor, index)
        knobs: dict[str, Any] = {"restart_point": restart_point, "cache": cache}
        return IndexedWindows(files, self.order, executor, index, indexer, self._share, **knobs)

    def canaries(self, executor: Executor) -> Canaries:
        # Any block of an array except the first would need the array to be read up to there at every start.
        max_blocks = 1 if any(self.files.are_arrays) else _MAX_CANARY_BLOCKS
        return Canaries(self.files, executor, self.job.stride, max_blocks)

    def close(self) -> None:
        if not self.index.is_complete:  # calls may wait for it
            self.index.fail(LoaderClosedError("the loader was closed before its rows were counted"))
        self._cached.close()
        self.files.close()
        self._remove()

    def _pass_over(self, error: BadRowError) -> None:
        config = self._config
        error = error if config.bad_rows.excerpts else without_text(error)
        if config.bad_rows.policy == "raise":
            raise error

        self._quarantine(error)
        self._num_bad_rows += 1
        if config.bad_rows.max is not None and self._num_bad_rows > config.bad_rows.max:
            raise TooManyBadRowsError(f"a bad row, after BadRows(max={config.bad_rows.max}) of them: {error}")

    def _refuse_foreign(self) -> None:
        """Refuse an index that another user may have written: it would choose this run's rows."""
        if self._identity and self._folder:
            with suppress(OSError):  # a folder that cannot be used: the index is built again, and that is logged
                check_ours(f"{self._folder}/{self._identity}.index", "Cache(folder=...)", is_folder=False)
                check_ours(f"{self._folder}/{self._identity}.rows", "Cache(folder=...)", is_folder=True)

    def _make_room(self, max_bytes: int | None) -> None:
        if max_bytes is None or not self._folder:
            return

        try:
            removed = make_room(self._folder, max_bytes, self._identity)
        except OSError as error:
            _log.warning("index.not_evicted", path=self._folder, reason=str(error))
            return

        if removed:
            num_bytes = sum(index.num_bytes for index in removed)
            _log.info("index.evicted", path=self._folder, num_indexes=len(removed), num_bytes=num_bytes)

    def _spool_folder(self) -> str:
        """The folder that rows are copied to: in the cache, or a temporary one if the index is not stored."""
        if self._identity and self._folder:
            folder = f"{self._folder}/{self._identity}.rows"
            try:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                self._remove = weakref.finalize(self, os.close, hold_rows(folder))
            except OSError as error:
                _log.warning("index.not_written", path=folder, reason=str(error))
            else:
                return folder

        temporary = TemporaryFolder("rows")
        self._remove = temporary.close
        return temporary.path

    def _file(self) -> IndexFile | None:
        """The file that stores the index; None if the index is not stored."""
        if not (self._identity and self._folder):
            return None

        try:
            return IndexFile(self._folder, self._identity)
        except OSError as error:
            _log.warning("index.not_written", path=self._folder, reason=str(error))
            return None
