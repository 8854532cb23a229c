"""The description of an open source, and what all kinds of them have in common: the workers' job, kept blocks."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.files import cache_folder, check_ours
from asyncdata.core.messages import BlockCacheSpec, Job
from asyncdata.read_ahead.source import Canaries, Supply
from asyncdata.read_ahead.windows import SLACK_BYTES, Windows
from asyncdata.sources.base import Blocks, Files
from asyncdata.tokenization.base import describe, fingerprints_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.batching.planned import PackRules, PlannedOrder
    from asyncdata.delivery.bad_rows import BadRowPolicy
    from asyncdata.delivery.channel import Exclusions
    from asyncdata.loader.config import Cache, LoaderConfig
    from asyncdata.order.order import Order, RowOrder, Share
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.read_ahead.row_index import RowIndex
    from asyncdata.sources.growing import GrowingBlocks
    from asyncdata.sources.stream import StreamOrder

    BlocksT = TypeVar("BlocksT", bound=Blocks)


class Opening(NamedTuple):
    """What one source of a loader is opened with: the only one, or a part of a mixture.

    :ivar name: of the part; empty for the only one.
    :ivar config: the loader's configuration, as it holds for it.
    :ivar calls: what it asks workers for.
    :ivar bad_rows: what is done with its bad rows, also with those that the row index excludes.
    :ivar plan: how packs are planned; None if they are not.
    :ivar share: the rows that are tokenized here; None: all.
    """

    name: str
    config: LoaderConfig
    function: Any
    calls: Calls
    bad_rows: BadRowPolicy
    plan: PackRules | None = None
    share: Share | None = None

    def job(self, files: Blocks, block_bytes: int) -> Job:
        """The workers' job: what they read, and by which function."""
        return Job(
            files=files.files,
            tokenize=None if self.config.num_workers == 0 else describe(self.function),
            max_row_bytes=files.max_row_bytes,
            block_bytes=block_bytes,
            slack_bytes=SLACK_BYTES,
            reader=files.reader,
            with_token_sums=self.config.digest == "tokens",
            stores=list(getattr(files, "stores", ())),
        )


class OpenedPart(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One source of a loader, open, with the order D over it. How it is read is decided here once.

    :ivar order: as far as it is known before reading.
    :ivar slot_bytes: memory of a slot.
    :ivar canary_blocks: blocks from which canaries may be taken.
    :ivar windows: the windows of D.
    :ivar close: closes the source; removes files that were written only for this run.
    :ivar index: the row index; None if the order needs none.
    :ivar growth: what each epoch covers; None if all cover the same.
    """

    opening: Opening
    files: Blocks
    order: Order | RowOrder | PlannedOrder | StreamOrder
    job: Job
    slot_bytes: int
    canary_blocks: int
    windows: Windows
    close: Callable[[], object]
    index: RowIndex | None = None
    growth: GrowingBlocks | None = None

    @property
    def name(self) -> str:
        """Of the part; empty for the only one."""
        return self.opening.name

    def supply(self, decisions: Exclusions | None) -> Supply:
        """What it is read with.

        :param decisions: which rows are left out by their outcomes.
        """
        calls, num_files = self.opening.calls, len(self.files.files)
        canaries = Canaries(self.files, calls, self.job.stride, self.canary_blocks)
        return Supply(self.name, self.windows, canaries, calls, num_files, self.opening.bad_rows, decisions)

    def fingerprints(self) -> dict[str, Any]:
        """Digests of all that its tokens depend on. The first call reads a little of every file."""
        return {"data": self.files.fingerprint(), **self._of_function}

    @cached_property
    def _of_function(self) -> dict[str, str]:
        """Computed once: the workers have loaded it, even if its files change later."""
        return fingerprints_of(self.opening.function)


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
