"""A worker's answer to a scan with cached blocks. Their rows are added many blocks at a time, by numpy."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.row_codes import cached_start
from asyncdata.prefetch.token_cache.segment.gather import row_facts
from asyncdata.workers.scan_blocks import ScannedRows

if TYPE_CHECKING:
    from asyncdata.core.messages import Scanned
    from asyncdata.sources.reader import BlockRows

__all__ = ("CachedBlockRows", "CachedScan")


class CachedBlockRows(NamedTuple):
    """The rows of a cached block in the slot.

    :ivar first: the offset of the first record in the slot.
    """

    first: int
    num_rows: int
    record_words: int
    num_blank: int


class CachedScan(ScannedRows):
    """Collects the reply; see :class:`~asyncdata.workers.scan_blocks.ScannedRows`."""

    def __init__(self, slot: memoryview, base: int) -> None:
        super().__init__(slot, base)
        self._words = np.frombuffer(slot[: len(slot) // 4 * 4], np.int32)
        self._num_tokens, self._num_bytes = array("i"), array("i")
        self._waiting: list[CachedBlockRows] = []

    def add(self, found: BlockRows) -> None:
        """Copy the text of a block that is not cached into the slot."""
        self._add_waiting()
        super().add(found)
        nothing = bytes(4 * len(found.starts))
        self._num_tokens.frombytes(nothing)
        self._num_bytes.frombytes(nothing)

    def add_cached(self, found: CachedBlockRows, num_bytes: int) -> None:
        """Add a cached block that is already in the slot, where it takes ``num_bytes``."""
        if self._waiting and self._waiting[0].record_words != found.record_words:
            self._add_waiting()
        self._waiting.append(found)
        self.base += num_bytes

    def _add_waiting(self) -> None:
        if not self._waiting:
            return

        firsts, counts, (record_words, *_), blanks = map(np.array, zip(*self._waiting, strict=True))
        self._waiting.clear()
        stops = np.cumsum(counts)
        records = np.arange(stops[-1]) - np.repeat(stops - counts, counts)
        records = np.repeat(firsts, counts) + 4 * int(record_words) * records
        facts = row_facts(self._words, records >> 2, int(record_words))
        self._counts.frombytes(counts.astype(np.int32).tobytes())
        self._blanks.frombytes(blanks.astype(np.int32).tobytes())
        self._starts.frombytes(cached_start(records).astype(np.int32).tobytes())
        self._offsets.frombytes(facts.offsets.tobytes())
        self._lengths.frombytes(facts.lengths.tobytes())
        self._num_tokens.frombytes(facts.num_tokens.tobytes())
        self._num_bytes.frombytes(facts.num_bytes.tobytes())

    def reply(self) -> Scanned:
        """The reply for all blocks."""
        self._add_waiting()
        sizes = {"num_tokens": self._num_tokens.tobytes(), "num_bytes": self._num_bytes.tobytes()}
        return msgspec.structs.replace(super().reply(), **sizes)
