"""Canaries: a few fixed rows that are tokenized at every start, to find changes that fingerprints miss."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncdata.core.errors import AsyncDataError, SnapshotMismatchError
from asyncdata.core.messages import Data, Scanned, Tokenized
from asyncdata.read_ahead.windows.block_windows import BlockWindow

if TYPE_CHECKING:
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.sources.base import Blocks

_MAX_BLOCKS = 8


class Canaries:
    """The first rows of some blocks, and the digests of their tokens. A stream has no blocks, so it has no canaries.

    :param max_blocks: the blocks that a slot holds.
    :ivar digests: one per row; empty until they are known.
    """

    def __init__(self, source: Blocks, calls: Calls, stride: int, max_blocks: int) -> None:
        self.digests: list[str] = []
        self._source, self._calls, self._stride = source, calls, stride
        self._num_blocks = min(_MAX_BLOCKS, max_blocks, source.num_blocks)

    async def make(self) -> None:
        """Tokenize the rows, unless that is done. If it fails, it is tried again at the next start."""
        if self._num_blocks > 0 and not self.digests:
            with suppress(AsyncDataError):
                self.digests = await self._tokenized()

    async def compare(self, expected: list[str]) -> None:
        """Tokenize the rows, unless their digests are known to be ``expected``.

        :raises SnapshotMismatchError: if they are others.
        :raises AsyncDataError: if the rows cannot be tokenized.
        """
        if self._num_blocks == 0 or not expected or expected == self.digests:
            return

        self.digests = await self._tokenized()
        if self.digests != expected:
            raise _mismatch(expected, self.digests)

    async def _tokenized(self) -> list[str]:
        """The digests of the rows' tokens."""
        slot = await self._calls.slot()
        try:
            num_blocks = self._source.num_blocks
            blocks = self._source.blocks(sorted({i * num_blocks // self._num_blocks for i in range(self._num_blocks)}))
            window = BlockWindow(self._source, blocks, slot, self._stride, partial(np.arange, dtype=np.int64))
            (scan,) = window.scans()
            found = await self._calls.ask(scan, Scanned)
            window.add(0, found)
            counts = np.frombuffer(found.counts, np.int32)
            firsts = (np.cumsum(counts) - counts)[counts > 0]
            if len(firsts) == 0:
                return []

            return _digests(len(firsts), await self._calls.ask(window.request_of(firsts), Tokenized))
        finally:
            self._calls.release(slot)


def _mismatch(expected: list[str], digests: list[str]) -> SnapshotMismatchError:
    num_different = sum(a != b for a, b in zip(digests, expected, strict=False))
    return SnapshotMismatchError(
        "AD603 the tokenize function gives other tokens than when the snapshot was taken: "
        f"{num_different or 'some'} of {len(expected)} fixed rows differ. Install the versions of that time, or "
        'continue with allow_changed={"tokenize_fn"}.',
        {"canaries": (expected, digests)},
    )


def _digests(num_rows: int, reply: Tokenized) -> list[str]:
    """A digest of each row's tokens; a row that yields no sample has the digest of no tokens."""
    kept = np.frombuffer(reply.kept, np.int32).tolist() if reply.kept else range(num_rows)
    ends = np.frombuffer(reply.token_ends, np.uint32).tolist()
    tokens: list[Data] = [b""] * num_rows
    for row, start, end in zip(kept, [0, *ends], ends, strict=False):
        tokens[row] = reply.tokens[4 * start : 4 * end]
    return [hashlib.blake2b(data, digest_size=8).hexdigest() for data in tokens]
