"""What is read and in which order: the source, opened, with the order over it and whoever opens its windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from asyncdata.canaries import Canaries
from asyncdata.errors import TooManyBadRowsError
from asyncdata.fingerprint import canonical, digest
from asyncdata.index_file import IndexFile, cache_folder
from asyncdata.indexed_windows import IndexedWindows
from asyncdata.indexing import Indexer
from asyncdata.log import get_logger
from asyncdata.order import Order, RowOrder, RowShuffle
from asyncdata.row_index import RowIndex
from asyncdata.tokenization.base import TokenizeFn, describe, fingerprints_of
from asyncdata.window import SLACK_BYTES
from asyncdata.windows import BlockWindows
from asyncdata.wire import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.config import LoaderConfig
    from asyncdata.errors import BadRowError
    from asyncdata.executors.base import Executor
    from asyncdata.sources.base import Blocks, Source
    from asyncdata.windows import Windows

__all__ = ("Reading", "open_reading")

_log = get_logger(__name__)
_INDEX_BLOCK_BYTES = 1 << 20
_MAX_CANARY_BLOCKS = 8

Function = Any


class Reading(Protocol):
    """A source that is open, and D over it.

    :ivar slot_bytes: memory of a slot.
    """

    files: Blocks
    job: Job
    slot_bytes: int

    @property
    def order(self) -> Order | RowOrder:
        """D, as far as it is known without reading."""
        ...

    @property
    def index(self) -> RowIndex | None:
        """Where every row lies; None where the order needs no index."""
        ...

    def windows(self, executor: Executor) -> Windows:
        """Opens the windows of D."""
        ...

    def canaries(self, executor: Executor) -> Canaries:
        """The fixed rows."""
        ...


def open_reading(
    source: Source, config: LoaderConfig, function: Function, quarantine: Callable[[BadRowError], object]
) -> Reading:
    """Look at the data, and decide how it is read.

    :param quarantine: called with each bad row that the row index leaves out.
    :raises SourceError: for files that cannot be read.
    :raises ConfigError: for a setting that cannot work.
    """
    shuffle = config.order
    if isinstance(shuffle, RowShuffle):
        return _IndexedReading(source.open(_INDEX_BLOCK_BYTES), shuffle, config, function, quarantine)

    files = source.open(shuffle.block_bytes)
    return _BlockReading(files, Order(shuffle, config.seed, files.num_blocks), _job(files, config, function))


def _job(files: Blocks, config: LoaderConfig, function: Function) -> Job:
    order = config.order
    return Job(
        files=files.files,
        tokenize=None if config.num_workers == 0 else describe(function),
        max_row_bytes=files.max_row_bytes,
        block_bytes=_INDEX_BLOCK_BYTES if isinstance(order, RowShuffle) else order.block_bytes,
        slack_bytes=SLACK_BYTES,
        reader=files.reader,
    )


class _BlockReading:
    """Windows of blocks: nothing is known of the rows before they are read."""

    index = None

    def __init__(self, files: Blocks, order: Order, job: Job) -> None:
        self.files = files
        self.order = order
        self.job = job
        self.slot_bytes = order.max_window_blocks * job.stride

    def windows(self, executor: Executor) -> BlockWindows:
        return BlockWindows(self.files, self.order, executor, self.job.stride)

    def canaries(self, executor: Executor) -> Canaries:
        return Canaries(self.files, executor, self.job.stride, self.order.max_window_blocks)


class _IndexedReading:
    """Rows ordered one by one, over the row index."""

    def __init__(
        self,
        files: Blocks,
        shuffle: RowShuffle,
        config: LoaderConfig,
        function: Function,
        quarantine: Callable[[BadRowError], object],
    ) -> None:
        self.files = files
        self.order = RowOrder(shuffle, config.seed)
        self.index = RowIndex(files, shuffle)
        self.job = _job(files, config, function)
        self.slot_bytes = min(_MAX_CANARY_BLOCKS, files.num_blocks) * self.job.stride
        self._config = config
        self._function = function
        self._quarantine = quarantine
        self._num_bad_rows = 0

    def windows(self, executor: Executor) -> IndexedWindows:
        check = self.order.shuffle.check
        indexer = Indexer(self.files, executor, self.index, check, self._file(check), self._pass_over)
        return IndexedWindows(self.files, self.order, executor, self.index, indexer)

    def canaries(self, executor: Executor) -> Canaries:
        return Canaries(self.files, executor, self.job.stride, _MAX_CANARY_BLOCKS)

    def _pass_over(self, error: BadRowError) -> None:
        config = self._config
        if config.on_bad_row == "raise":
            raise error

        self._quarantine(error)
        self._num_bad_rows += 1
        if config.max_bad_rows is not None and self._num_bad_rows > config.max_bad_rows:
            raise TooManyBadRowsError(f"a bad row, after max_bad_rows={config.max_bad_rows} of them: {error}")

    def _file(self, check: str) -> IndexFile | None:
        """Where the index is kept; None where it must be made anew every time."""
        folder = cache_folder() if self._config.cache_dir is None else self._config.cache_dir
        if not folder or (check == "samples" and not _has_fingerprint(self._function)):
            return None

        what = {
            "data": self.files.fingerprint()["digest"],
            "reader": [self.job.reader.path, self.job.reader.settings],
            "limits": [self.job.block_bytes, self.job.max_row_bytes],
            "check": check,
            "function": fingerprints_of(self._function) if check == "samples" else None,
        }
        try:
            return IndexFile(f"{folder}/index", digest(canonical(what)))
        except OSError as error:
            _log.warning("index.not_written", path=folder, reason=str(error))
            return None


def _has_fingerprint(function: Function) -> bool:
    return isinstance(function, TokenizeFn) or getattr(function, "version", None) is not None
