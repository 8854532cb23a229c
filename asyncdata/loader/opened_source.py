"""The description of an open source, and what all kinds of them have in common: the workers' job, kept blocks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.files import cache_folder, check_ours
from asyncdata.core.messages import BlockCacheSpec, Job
from asyncdata.read_ahead.canaries import Canaries
from asyncdata.read_ahead.source import Supply
from asyncdata.read_ahead.windows.block_windows import SLACK_BYTES, Windows
from asyncdata.sources.base import Blocks, Files
from asyncdata.tokenization.base import describe, fingerprints_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.batching.planned import PlannedOrder
    from asyncdata.core.types import Position
    from asyncdata.delivery.bad_rows import BadRowPolicy
    from asyncdata.loader.config import Cache, LoaderConfig
    from asyncdata.loader.outcomes import PartOutcomes
    from asyncdata.order.order import Order, RowOrder
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.read_ahead.row_index.row_index import RowIndex
    from asyncdata.sources.growing import GrowingBlocks
    from asyncdata.sources.stream import StreamOrder

    Place = Callable[[], Position]
    """Returns the first position that a restart would need now."""
    Call = Callable[[], object]
    BlocksT = TypeVar("BlocksT", bound=Blocks)


class OpenedSource(msgspec.Struct, frozen=True):
    """An open source, with the order D over it. How it is read is decided here once.

    :ivar order: as far as it is known before reading.
    :ivar slot_bytes: memory of a slot.
    :ivar canary_blocks: blocks from which canaries may be taken.
    :ivar open: opens the windows of D. It is given the first position that a restart would need now, as a function.
    :ivar close: closes the source; removes files that were written only for this run.
    :ivar index: the row index; None if the order needs none.
    :ivar growth: what each epoch covers; None if all cover the same.
    """

    files: Blocks
    order: Order | RowOrder | PlannedOrder | StreamOrder
    job: Job
    slot_bytes: int
    canary_blocks: int
    open: Callable[[Calls, Place], Windows]
    close: Call
    index: RowIndex | None = None
    growth: GrowingBlocks | None = None


class OpenedPart:
    """One source of a loader, open: the only one, or a part of a mixture.

    :ivar name: of the part; empty for the only one.
    :ivar config: the loader's configuration, as it holds for it.
    :ivar bad_rows: what is done with its bad rows.
    :ivar calls: what it asks workers for; this and ``windows`` are set by :meth:`open`.
    """

    calls: Calls
    windows: Windows

    def __init__(
        self, name: str, source: OpenedSource, config: LoaderConfig, function: Any, bad_rows: BadRowPolicy
    ) -> None:
        self.name = name
        self.source = source
        self.config = config
        self.function = function
        self.bad_rows = bad_rows
        self._function_fingerprints: dict[str, str] | None = None

    def open(self, calls: Calls, restart_point: Place) -> None:
        """Open the windows; see :class:`OpenedSource`."""
        self.calls = calls
        self.windows = self.source.open(calls, restart_point)

    def supply(self, memory: PartOutcomes | None) -> Supply:
        """What it is read with.

        :param memory: what is remembered of its rows.
        """
        source, decisions = self.source, None if memory is None else memory.exclusions
        canaries = Canaries(source.files, self.calls, source.job.stride, source.canary_blocks)
        num_files = len(source.files.files)
        return Supply(self.name, self.windows, canaries, self.calls, num_files, self.bad_rows, decisions)

    def fingerprints(self) -> dict[str, Any]:
        """Digests of all that its tokens depend on. The first call reads a little of every file."""
        if self._function_fingerprints is None:  # once: the workers have loaded it, even if its files change later
            self._function_fingerprints = fingerprints_of(self.function)
        return {"data": self.source.files.fingerprint(), **self._function_fingerprints}


def job_of(files: Blocks, config: LoaderConfig, function: Any, block_bytes: int) -> Job:
    """The workers' job: what they read, and by which function."""
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


def with_block_cache(files: BlocksT, cache: Cache) -> BlocksT:
    """The opened source, whose objects are kept on the local disk if ``cache`` asks for it.

    :raises ConfigError: if the folder cannot be made, or belongs to another user.
    """
    opened: object = files
    if cache.remote_max_bytes is not None and isinstance(opened, Files) and _has_objects(opened):
        folder = cache_folder() if cache.folder is None else cache.folder
        path = os.path.join(os.path.abspath(os.path.expanduser(folder)), "blocks")
        try:
            check_ours(path, "Cache(folder=...)", is_folder=True)
            os.makedirs(path, 0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"AD345 blocks of objects cannot be kept in {path}: {error.strerror or error}; set Cache(folder=...) "
                "to a folder that can be written, or leave remote_max_bytes out"
            ) from error

        opened.keep_blocks(BlockCacheSpec(path, cache.remote_max_bytes))
    return files


def _has_objects(files: Files) -> bool:
    return any(file.pin is not None for file in files.files)
