"""The token cache as the windows see it: which blocks of a window are cached, and how the others are stored.

Workers read the cache: a scan of a cached block puts samples into the slot instead of text. A chunk whose rows are all
cached is read from the slot; if only some rows are cached, a worker merges them with the others. So order, channel,
snapshots and errors do not depend on the cache: it changes only the time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asyncdata.core.cache_messages import ListTokens, TokensListed
from asyncdata.core.log import get_logger
from asyncdata.prefetch.token_cache.catalog import Catalog
from asyncdata.prefetch.token_cache.slot_chunk import CachedRows, PlacedRows
from asyncdata.prefetch.token_cache.window_tokens import WindowTokens
from asyncdata.prefetch.token_cache.writer import Recorder
from asyncdata.workers.base import Crashed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdata.core.cache_messages import CachedBlock, Refused
    from asyncdata.core.messages import Block, Reply
    from asyncdata.prefetch.merged_samples import Indices
    from asyncdata.prefetch.token_cache.catalog import Numbered
    from asyncdata.prefetch.token_cache.folder import CacheFolder
    from asyncdata.prefetch.token_cache.segment.gather import Int32
    from asyncdata.workers.base import Executor

__all__ = ("NAMES_PER_REQUEST", "TokenCache")

_log = get_logger(__name__)
NAMES_PER_REQUEST = 64


class TokenCache:
    """The token cache of one loader.

    :param max_bytes: limit for all caches in the parent folder; None: no limit.
    :param room_bytes: bytes of a slot for each block, in addition to those for its text.
    :ivar num_rows_read: rows that were read from the cache.
    :ivar reads_in_place: whether this process reads cached chunks from the slot. If not, workers answer for each chunk,
        which is needed if its tokens are hashed.
    """

    def __init__(
        self,
        source: Numbered,
        num_blocks: int,
        folder: CacheFolder,
        executor: Executor,
        max_bytes: int | None,
        room_bytes: int,
    ) -> None:
        self.num_rows_read = 0
        self.reads_in_place = True
        self._room_bytes = room_bytes
        self._folder = folder
        self._executor = executor
        self._catalog = Catalog(source, num_blocks)
        self._recorder = Recorder(folder, executor, self._catalog, max_bytes)
        self._recorder.begin()
        self._refused: set[str] = set()
        self._names_to_ask: list[str] = []
        self._is_looked_at = self._is_listing = False
        self._epoch = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the segments that have rows of this data."""
        return self._catalog.num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether no write is pending."""
        return self._recorder.is_idle

    # Called by the windows' opener.

    def restart(self) -> None:
        """Drop the requests in flight."""
        self._names_to_ask, self._is_listing = [], False
        self._epoch = 0
        self._recorder.restart()
        if not self._is_looked_at:
            self._look(num=NAMES_PER_REQUEST)

    def is_ready(self, epoch: int, number: int) -> bool:
        """Whether window ``number`` of ``epoch`` may be opened. If not, it may be after the reply to a request.

        The first window waits until the first segments are listed. No window waits for more: rows of segments that are
        not listed yet are tokenized.
        """
        if not self._is_looked_at:
            return False

        if number == 0 and epoch > 0 and epoch != self._epoch:  # once per epoch, even if there is no slot yet
            self._epoch = epoch
            self._recorder.begin()
            self._look(num=0)
        return True

    def window(self, blocks: Sequence[Block]) -> WindowTokens:
        """The cache's part of a window of these blocks: it reads the cached ones, and stores the others."""
        found = self._catalog.find(blocks)
        room = self._recorder.room() if len(found) < len(blocks) else ""
        tokens = WindowTokens(self, blocks, found, room, self._room_bytes)
        if tokens.room:
            self._recorder.opened(tokens)
        return tokens

    # Called by a window.

    def refused(self, block: Block, item: CachedBlock, refusal: Refused) -> None:
        """A cached block could not be used, and was read from its file."""
        if refusal.kind in ("damaged", "gone"):
            self._refuse([item.segment])
        else:
            self._catalog.forget_block(block)
        if refusal.kind == "damaged":
            self._recorder.remove(item.segment)
            path = f"{self._folder.path}/{item.segment}"
            _log.warning("token_cache.refused", path=path, offset=block.start, reason=refusal.reason)

    def _refuse(self, names: Iterable[str]) -> None:
        names = [name for name in names if name not in self._refused]
        self._refused.update(names)
        self._catalog.forget(names)

    def read(self, num_rows: int) -> None:
        """Count rows that were read from the cache."""
        self.num_rows_read += num_rows

    def placed(self, slot: int, records: Indices, num_tokens: Int32, num_bytes: Int32) -> PlacedRows:
        """The rows whose records are at these offsets of the slot; ``num_tokens`` and ``num_bytes`` are theirs."""
        executor, rows = self._executor, CachedRows(records, num_tokens, num_bytes)
        return PlacedRows.of(executor.memory(slot), rows, partial(executor.slots.borrowers.add, slot))

    def fail(self, reason: str) -> None:
        """Stop writing: it has failed."""
        self._recorder.fail(reason)

    def complete(self, window: WindowTokens) -> None:
        """All rows of a window are answered."""
        self._recorder.complete(window)

    # Listing the segments. Workers do it, as there may be many.

    def _look(self, *, num: int) -> None:
        self._is_listing = True
        self._executor.submit(ListTokens(None, num), self._on_names)

    def _on_names(self, reply: Reply | Crashed) -> None:
        if isinstance(reply, TokensListed):
            seen = {listing.name for listing in reply.segments} | reply.faults.keys()
            known = {*self._catalog.names, *self._refused, *seen}
            self._take(reply)
            self._catalog.forget(set(self._catalog.names) - set(reply.names))
            self._names_to_ask = [name for name in reply.names if name not in known]
            self._ask()
        else:
            self._cannot_look(reply)
        self._is_looked_at = True

    def _ask(self) -> None:
        self._is_listing = bool(self._names_to_ask)
        if self._names_to_ask:
            names = self._names_to_ask[:NAMES_PER_REQUEST]
            del self._names_to_ask[:NAMES_PER_REQUEST]
            self._executor.submit(ListTokens(names), self._on_listed)

    def _on_listed(self, reply: Reply | Crashed) -> None:
        if isinstance(reply, TokensListed):
            self._take(reply)
            self._ask()
        else:
            self._cannot_look(reply)

    def _take(self, reply: TokensListed) -> None:
        for listing in reply.segments:
            self._catalog.take(listing)
        for name, reason in reply.faults.items():
            self._refuse([name])
            self._recorder.remove(name)
            _log.warning("token_cache.refused", path=f"{self._folder.path}/{name}", offset=0, reason=reason)

    def _cannot_look(self, reply: Reply | Crashed) -> None:
        reason = reply.reason if isinstance(reply, Crashed) else getattr(reply, "message", type(reply).__name__)
        self._is_listing = False
        _log.warning("token_cache.not_read", path=self._folder.path, reason=reason)

    # Called by the service.

    async def run(self) -> None:
        """Run the writes in a thread, until cancelled."""
        await self._recorder.run()

    async def finish(self) -> None:
        """Wait until all complete windows are stored."""
        await self._recorder.finish()

    def close(self) -> None:
        """Let another process write."""
        self._folder.close()
