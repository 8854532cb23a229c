"""The token cache as the windows see it: which blocks are cached, and whether a scan is to store the others.

A worker that answers a scan with samples reads the cached blocks, and appends those that it had to tokenize, so nothing
is asked for twice. Order, channel, snapshots and errors do not depend on the cache: it changes only the time.

The first window of a start is tokenized row by row, as its first rows are waited for. If some of its blocks are not
cached, they are tokenized once more to store them, when the workers have nothing else to do.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import numpy as np

from asyncdata.core.cache_messages import ListTokens, Refused, TokensListed
from asyncdata.core.callbacks import no_op
from asyncdata.core.log import get_logger
from asyncdata.core.messages import NO_SLOT, Scan, Scanned
from asyncdata.prefetch.token_cache.catalog import RowCatalog
from asyncdata.prefetch.token_cache.folder import remove_segment
from asyncdata.workers.base import Crashed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.cache_messages import CachedBlock, CachedRows, Stored
    from asyncdata.core.messages import Block, Reply, Tokenized
    from asyncdata.prefetch.merged_samples import Indices
    from asyncdata.prefetch.token_cache.catalog import Catalog
    from asyncdata.prefetch.token_cache.folder import CacheFolder
    from asyncdata.workers.base import Executor, OnReply

__all__ = ("TokenCache",)

_log = get_logger(__name__)
_NAMES_PER_REQUEST = 64
_BLOCKS_PER_SCAN = 8
_MAX_WRITE_S = 1.0
"""If storing a scan's blocks takes longer than this, and longer than tokenizing them, some windows are not stored."""

_WINDOWS_LEFT_OUT = 4
_MAX_LOSSES = 2


class TokenCache:
    """The token cache of one loader.

    :param max_bytes: limit for all caches in the parent folder; None: no limit.
    :ivar num_rows_read: rows that were delivered from the cache.
    """

    def __init__(self, catalog: Catalog, folder: CacheFolder, executor: Executor, max_bytes: int | None) -> None:
        self.num_rows_read = 0
        self._folder = folder
        self._executor = executor
        self._max_bytes = max_bytes
        self._catalog = catalog
        self._refused: set[str] = set()
        self._listed: set[str] = set()
        self._is_looked_at = self._has_failed = self._is_behind = False
        self._num_left_out = self._num_in_flight = self._num_stored = 0
        self._epoch = 0
        self._later: list[Block] = []
        self._idle: anyio.Event | None = None
        self._begin()

    @property
    def num_bytes(self) -> int:
        """Bytes of the segments that have rows of this data."""
        return sum(self._catalog.sizes.values())

    @property
    def is_idle(self) -> bool:
        """Whether all that was to be stored is stored."""
        return not self._num_in_flight and not (self._later and self.is_on)

    @property
    def is_on(self) -> bool:
        """Whether this process stores blocks."""
        return self._folder.is_ours and not self._has_failed

    # Called by the windows.

    def restart(self) -> None:
        """Drop the requests in flight."""
        self._num_in_flight = 0
        self._epoch = 0
        self._later = []
        if not self._is_looked_at:
            self._look(num=_NAMES_PER_REQUEST)

    def is_ready(self, epoch: int, number: int) -> bool:
        """Whether window ``number`` of ``epoch`` may be opened. If not, it may be after the reply to a request.

        The first window waits until the first segments are listed. No window waits for more: rows of segments that are
        not listed yet are tokenized.
        """
        if not self._is_looked_at:
            return False

        if number == 0 and epoch > 0 and epoch != self._epoch:  # once per epoch, even if there is no slot yet
            self._epoch = epoch
            self._begin()
            self._look(num=0)
        return True

    def find(self, blocks: Sequence[Block]) -> list[CachedBlock]:
        """The blocks that are cached, by their index in ``blocks``."""
        return self._catalog.find(blocks)

    def find_rows(self, file_ids: Indices, offsets: Indices) -> CachedRows | None:
        """Where single rows are; None if none of them is cached."""
        return self._catalog.find_rows(file_ids, offsets) if isinstance(self._catalog, RowCatalog) else None

    def answered(self, reply: Tokenized) -> None:
        """Take what a reply for single rows says of the cache."""
        self.read(reply.num_cached)
        for name, refusal in reply.refused.items():
            self._refuse(name, 0, refusal)

    def read(self, num_rows: int) -> None:
        """Count rows that are delivered from the cache."""
        self.num_rows_read += num_rows

    def stores(self) -> bool:
        """Whether the next window is to be stored."""
        if self._num_left_out:
            self._num_left_out -= 1
            return False

        return self.is_on

    def submit(self, scan: Scan, on_reply: OnReply) -> None:
        """Submit a scan with samples, and take what its reply says of the cache."""
        self._num_in_flight += 1
        self._executor.submit(scan, partial(self._on_scanned, scan, on_reply), _MAX_LOSSES)

    def _on_scanned(self, scan: Scan, on_reply: OnReply, reply: Reply | Crashed) -> None:
        self._num_in_flight -= 1
        if isinstance(reply, Scanned):
            self._take_refused(scan, reply)
            self.stored(scan.blocks, reply.stored, reply.samples.busy_s if reply.samples is not None else 0.0)
        on_reply(reply)
        if self._idle is not None:
            self._store_rest()

    def _take_refused(self, scan: Scan, reply: Scanned) -> None:
        items = {item.block: item for item in scan.cached}
        for refusal in reply.refused:
            block, name = scan.blocks[refusal.block], items[refusal.block].segment
            if refusal.kind in ("damaged", "gone"):
                self._refuse(name, block.start, refusal)
            else:
                self._catalog.forget_block(block)

    def stored(self, blocks: Sequence[Block], stored: Stored, busy_s: float) -> None:
        """Take what a reply says of these blocks, which took ``busy_s`` seconds to tokenize."""
        path = self._folder.path
        entries = np.frombuffer(stored.entries, np.int64)
        if len(entries):
            chosen = [blocks[number] for number in np.frombuffer(stored.blocks, np.int32).tolist()]
            self._catalog.add(stored.segment, stored.num_bytes, chosen, entries, stored.stop)
        self._num_stored += stored.num_rows
        if self._num_stored and not self._num_in_flight:  # about once for each window
            _log.info("token_cache.stored", path=path, num_rows=self._num_stored)
            self._num_stored = 0
        if stored.num_evicted_bytes:
            _log.info("token_cache.evicted", path=path, num_bytes=stored.num_evicted_bytes)
        if stored.fault:
            self._fail(stored.fault)
        elif stored.is_full and self.is_on:
            self._has_failed = True
            _log.info("token_cache.full", path=path, max_bytes=self._max_bytes)
        elif stored.write_s > max(_MAX_WRITE_S, busy_s):
            self._num_left_out = _WINDOWS_LEFT_OUT
            if not self._is_behind:
                self._is_behind = True
                _log.warning("token_cache.behind", path=path, write_s=round(stored.write_s, 3))

    def postpone(self, blocks: Sequence[Block]) -> None:
        """Store these blocks when there is nothing else to do."""
        self._later = list(blocks) if self.is_on else []

    def store_later(self) -> None:
        """Store blocks that were postponed, as far as workers have nothing else to do."""
        while self._later and self.is_on and self._executor.num_wanted > 0:
            cached = {item.block for item in self.find(self._later)}
            missing = [block for number, block in enumerate(self._later) if number not in cached]
            blocks, self._later = missing[:_BLOCKS_PER_SCAN], missing[_BLOCKS_PER_SCAN:]
            if blocks:
                num_storing = -(-len(missing) // _BLOCKS_PER_SCAN)
                self.submit(Scan(NO_SLOT, 0, blocks, num_storing=num_storing), no_op)

    def _begin(self) -> None:
        """Become the writer, if there is none and this process can."""
        try:
            if not self._has_failed:
                self._folder.lock()
        except OSError as error:
            self._fail(f"{error.filename or self._folder.path}: {error.strerror}")

    def _fail(self, reason: str) -> None:
        """The disk or a worker failed: store nothing more; the run itself continues."""
        if not self._has_failed:
            self._has_failed = True
            _log.warning("token_cache.not_written", path=self._folder.path, reason=reason)

    def _refuse(self, name: str, offset: int, refusal: Refused) -> None:
        """Do not use a segment again; remove it if it is damaged."""
        if name in self._refused:
            return

        self._refused.add(name)
        self._catalog.forget([name])
        if refusal.kind == "damaged":
            path = f"{self._folder.path}/{name}"
            _log.warning("token_cache.refused", path=path, offset=offset, reason=refusal.reason)
            if self._folder.is_ours:
                with suppress(OSError):
                    remove_segment(path)

    # Listing the segments. Workers do it, as there may be many.

    def _look(self, *, num: int) -> None:
        self._listed.clear()
        self._executor.submit(ListTokens(None, num), self._on_listed)

    def _on_listed(self, reply: Reply | Crashed) -> None:
        self._is_looked_at = True
        if not isinstance(reply, TokensListed):
            reason = reply.reason if isinstance(reply, Crashed) else getattr(reply, "message", type(reply).__name__)
            _log.warning("token_cache.not_read", path=self._folder.path, reason=reason)
            return

        for listing in reply.segments:
            self._catalog.take(listing)
        for name, reason in reply.faults.items():
            self._refuse(name, 0, Refused(0, "damaged", reason))
        self._catalog.forget(set(self._catalog.sizes) - reply.names.keys())
        self._list_more(reply.names)

    def _list_more(self, names: dict[str, int]) -> None:
        """List what has been added to segments; each once, as the last entry may never be complete."""
        known, done = self._catalog.stops, self._refused | self._listed
        grown = [name for name, stop in names.items() if stop > known.get(name, 0) and name not in done]
        if grown:
            chosen = {name: known.get(name, 0) for name in grown[:_NAMES_PER_REQUEST]}
            self._listed.update(chosen)
            self._executor.submit(ListTokens(chosen), self._on_listed)

    # Called by the service.

    async def finish(self) -> None:
        """Wait until all that was to be stored is stored."""
        self._idle = anyio.Event()
        self._store_rest()
        await self._idle.wait()

    def _store_rest(self) -> None:
        """The loader is closing: store what was postponed, if workers take it."""
        self.store_later()
        if self._idle is not None and not self._num_in_flight:
            self._idle.set()
