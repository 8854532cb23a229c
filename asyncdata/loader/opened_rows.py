"""An open source whose rows are ordered one by one, over the row index; also for planned packs."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import msgspec

from asyncdata.batching.planned import PackRules, PlannedOrder
from asyncdata.batching.xtuner_packing import PresetPacking
from asyncdata.core.errors import ConfigError, LoaderClosedError, get_logger
from asyncdata.core.files import TemporaryFolder, cache_folder, check_ours
from asyncdata.core.identity import canonical, digest
from asyncdata.core.messages import REMOTE_LINES, Job, ReaderSpec
from asyncdata.core.threads import no_op
from asyncdata.loader.opened_source import OpenedPart, Opening, with_block_cache
from asyncdata.order.order import Order, RowOrder
from asyncdata.order.shuffle import RowShuffle, Shuffle
from asyncdata.read_ahead.index_file import IndexFile, hold_rows, make_room
from asyncdata.read_ahead.indexed_windows import IndexedWindows
from asyncdata.read_ahead.indexer import Indexer, SharedIndexer
from asyncdata.read_ahead.ranks import SharedScans
from asyncdata.read_ahead.row_index import RowIndex
from asyncdata.read_ahead.windows import BlockWindow, BlockWindows
from asyncdata.sources.base import Blocks, Source, room_of
from asyncdata.sources.stream import RowStream
from asyncdata.tokenization.base import fingerprints_of, has_fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.loader.config import LoaderConfig

    Function = Any
    from collections.abc import Sequence

    from asyncdata.core.types import Position
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.sources.growing import GrowingBlocks
    from asyncdata.sources.jsonl import JsonlSource


_log = get_logger(__name__)
_INDEX_BLOCK_BYTES = 1 << 20
_MAX_CANARY_BLOCKS = 8
_NO_VERSION = "the tokenize function has no attribute version, so it is not known when its samples change"


def index_identity(files: Blocks, job: Job, check: str, function: Function) -> str:
    """The digest of all that the index depends on; empty if that is not known."""
    if check == "samples" and not has_fingerprint(function):
        return ""

    what = {
        "data": files.fingerprint()["digest"],
        "reader": [
            job.reader.identity,
            {name: job.reader.settings[name] for name in job.reader.settings if name != "stamps"},
        ],
        "limits": [job.block_bytes, job.max_row_bytes],
        "check": check,
        "function": fingerprints_of(function) if check == "samples" else None,
    }
    return digest(canonical(what))


def opened_rows(source: Source, shuffle: RowShuffle, opening: Opening) -> OpenedPart:
    """Open the source; :func:`asyncdata.loader.opening.opened_part` says more."""
    plan, seed = opening.plan, opening.config.seed
    files = with_block_cache(_open_rows(source, plan), opening.config.cache)
    order = RowOrder(shuffle, seed) if plan is None else _planned_order(plan, shuffle, seed, files)
    return _IndexedSource(files, order, opening).opened()


def _planned_order(plan: PackRules, shuffle: RowShuffle, seed: int, files: Blocks) -> PlannedOrder:
    is_preset = isinstance(plan.packing, PresetPacking)
    return PlannedOrder(plan, shuffle, seed, [file.path for file in files.files] if is_preset else [])


def _open_rows(source: Source, plan: PackRules | None) -> Blocks:
    """The source as blocks whose rows can be read one by one."""
    files = source.open(_INDEX_BLOCK_BYTES)
    if not isinstance(files, RowStream):
        return files

    blocks = files.as_blocks(_INDEX_BLOCK_BYTES)
    if blocks is None:
        raise ConfigError(_needs_rows(files, plan))

    return blocks


def shuffle_of_plan(plan: PackRules, config: LoaderConfig) -> RowShuffle:
    """The order in which rows are numbered for the plan. Only rows that yield a sample get a number."""
    shuffle = config.order
    if not plan.has_own_packs:
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
        f"AD453 {type(plan.packing).__name__} has an order of rows of its own, which shuffle={config.shuffle!r} would "
        "not change: leave shuffle out; or, for some of the rows, use RowShuffle(method='none', first=..., stop=...)"
    )


def _needs_rows(files: RowStream, plan: PackRules | None) -> str:
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


class _IndexedSource:
    """Rows ordered one by one, over the row index."""

    def __init__(self, files: Blocks, order: RowOrder | PlannedOrder, opening: Opening) -> None:
        config, shuffle = opening.config, order.shuffle
        self._files = files
        self._order = order
        self._opening = opening
        self._job = opening.job(files, _INDEX_BLOCK_BYTES)
        self._identity = index_identity(files, self._job, shuffle.looks_at, opening.function)
        folder = cache_folder() if config.cache.folder is None else config.cache.folder
        self._folder = folder and f"{folder}/index"  # empty: the index is not stored
        self._ranks = ranks = config.ranks
        self._is_shared = ranks.exchange is not None and ranks.world_size > 1
        if self._folder and not self._identity:
            _log.info("index.not_stored", reason=_NO_VERSION)
        self._remove: Callable[[], object] = no_op
        self._refuse_foreign()
        self._make_room(config.cache.max_row_index_bytes)
        # A rank that reads few of the rows fetches these from the store; to copy all of them, it would fetch all.
        is_spooled = not (files.reads_single_rows or (self._is_shared and files.reader is REMOTE_LINES))
        self._index = RowIndex(files, shuffle, self._spool_folder() if is_spooled else "")
        if self._index.spool:
            spooled = {"inner": files.reader.path, "settings": files.reader.settings, "folder": self._index.spool}
            reader = ReaderSpec("asyncdata.sources.spool:SpoolReader", spooled)
            self._job = msgspec.structs.replace(self._job, reader=reader)
        self._indexer = self._made_indexer()

    def opened(self) -> OpenedPart:
        """Its description."""
        files, job = self._files, self._job
        # Any block of an array except the first would need the array to be read up to there at every start.
        canary_blocks = 1 if any(files.are_arrays) else _MAX_CANARY_BLOCKS
        slot_bytes = min(_MAX_CANARY_BLOCKS, files.num_blocks) * job.stride
        opening, order, index = self._opening, self._order, self._index
        windows = IndexedWindows(files, order, opening.calls, index, self._indexer, opening.share)
        return OpenedPart(opening, files, order, job, slot_bytes, canary_blocks, windows, self._close, index)

    def _made_indexer(self) -> Indexer:
        files, check, ranks = self._files, self._order.shuffle.looks_at, self._ranks
        settings = files, self._opening.calls, self._index, check, self._file(), self._opening.bad_rows
        if not self._is_shared:
            return Indexer(*settings)

        return SharedIndexer(
            *settings,
            ranks=ranks,
            identity=f"{files.fingerprint()['digest']} {self._identity} {check} {files.num_blocks}",
        )

    def _close(self) -> None:
        self._indexer.leave()
        if not self._index.is_complete:  # calls may wait for it
            self._index.fail(LoaderClosedError("the loader was closed before its rows were counted"))
        self._files.close()
        self._remove()

    def _refuse_foreign(self) -> None:
        """Refuse an index that another user may have written: it would choose this run's rows."""
        if self._identity and self._folder:
            with suppress(OSError):  # a folder that cannot be used: the index is built again, and that is logged
                for suffix in ("index", "places", "rows"):
                    path = f"{self._folder}/{self._identity}.{suffix}"
                    check_ours(path, "Cache(folder=...)", is_folder=suffix == "rows")

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
    """See :class:`~asyncdata.read_ahead.windows.BlockWindows`. An epoch is looked up late."""

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


def opened_growing(source: JsonlSource, shuffle: Shuffle | RowShuffle, opening: Opening) -> OpenedPart:
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
    return OpenedPart(opening, files, order, job, num_blocks * job.stride, 0, windows, files.close, growth=files)


def shared_scans(config: LoaderConfig, parts: Sequence[OpenedPart]) -> SharedScans:
    """The scans of the parts' windows, from now on divided by ``config.ranks.exchange``.

    :raises ConfigError: if nothing can be divided (AD487).
    """
    if config.executor is not None:
        raise ConfigError(
            "AD487 Ranks(exchange=...) divides what workers of this machine read: leave executor out, or leave "
            "exchange out"
        )

    identity = cache(lambda: digest(canonical(list(map(_identity, parts)))))
    scans = SharedScans(config.ranks, identity)
    are_divided = [part.windows.share(scans, number) for number, part in enumerate(parts)]
    if not any(are_divided):
        raise ConfigError(
            "AD487 Ranks(exchange=...) divides windows of blocks, and there are none here: data that are read from "
            'front to back have none, nor have parts of a mixture with shuffle="full". Use shuffle=True, or leave '
            "exchange out"
        )

    return scans


def _identity(part: OpenedPart) -> list[object]:
    """What the scans of a part depend on. Data that grow are other data when the next rank looks at them."""
    found = part.fingerprints()
    if part.growth is not None:
        del found["data"]
    return [found, part.order.description(), part.job.max_row_bytes, part.job.with_token_sums]
