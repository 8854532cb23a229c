"""Canaries: a few fixed rows that are tokenized at every start, to find changes that fingerprints miss."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import SnapshotMismatchError
from asyncdata.core.messages import Scanned, Tokenized
from asyncdata.prefetch.windows.block_windows import BlockWindow
from asyncdata.workers.base import Crashed, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.errors import AsyncDataError
    from asyncdata.core.messages import Data, Reply
    from asyncdata.sources.base import Blocks
    from asyncdata.workers.base import Executor

__all__ = ("Canaries",)

_MAX_BLOCKS = 8


class Canaries:
    """The first rows of some blocks, and the digests of their tokens. A stream has no blocks, so it has no canaries.

    :param max_blocks: the blocks that a slot holds.
    :ivar digests: one per row; empty until they are known.
    :ivar is_blocking: whether a snapshot's digests are not compared yet, so that nothing may be delivered.
    """

    def __init__(self, source: Blocks, executor: Executor, stride: int, max_blocks: int) -> None:
        self.digests: list[str] = []
        self.is_blocking = False
        self._source = source
        self._executor = executor
        self._stride = stride
        self._num_blocks = min(_MAX_BLOCKS, max_blocks, source.num_blocks)
        self._slot: int | None = None
        self._is_over = False
        self._expected: list[str] = []
        self._on_mismatch: Callable[[AsyncDataError], object] = no_op

    def restart(self, expected: list[str] | None, on_mismatch: Callable[[AsyncDataError], object]) -> None:
        """Drop pending requests. With ``expected``, block delivery until :meth:`make` has found the same digests."""
        self._release()
        self._is_over = False
        self._expected = expected or []
        self._on_mismatch = on_mismatch
        self.is_blocking = self._num_blocks > 0 and bool(self._expected) and self._expected != self.digests

    def make(self) -> None:
        """Tokenize the rows, unless that is done, in progress or has failed, or no slot is free."""
        is_over = self._num_blocks == 0 or self._is_over
        if self._slot is not None or is_over or (self.digests and not self.is_blocking):
            return

        self._slot = self._executor.slots.hold()
        if self._slot is None:
            return

        num_blocks = self._source.num_blocks
        ids = sorted({i * num_blocks // self._num_blocks for i in range(self._num_blocks)})
        blocks = self._source.blocks(ids)
        window = BlockWindow(self._source, blocks, self._slot, self._stride, partial(np.arange, dtype=np.int64))
        for scan in window.scans():
            self._executor.submit(scan, partial(self._on_scanned, window))

    def _on_scanned(self, window: BlockWindow, reply: Reply | Crashed) -> None:
        if not isinstance(reply, Scanned):
            self._give_up(reply)
            return

        window.add(0, reply)
        counts = np.frombuffer(reply.counts, np.int32)
        firsts = (np.cumsum(counts) - counts)[counts > 0]
        if len(firsts) == 0:
            self._compare([])
            return

        self._executor.submit(window.request_of(firsts), partial(self._on_tokenized, len(firsts)))

    def _on_tokenized(self, num_rows: int, reply: Reply | Crashed) -> None:
        if isinstance(reply, Tokenized):
            self._compare(_digests(num_rows, reply))
        else:
            self._give_up(reply)

    def _give_up(self, reply: Reply | Crashed) -> None:
        """The rows could not be tokenized. If a snapshot's digests are to be compared, delivery fails."""
        self._is_over = True
        if self.is_blocking:
            self._on_mismatch(error_of(reply))
        self._release()

    def _compare(self, digests: list[str]) -> None:
        self.digests, self._is_over = digests, True
        if self.is_blocking and digests != self._expected:
            self._on_mismatch(_mismatch(self._expected, digests))
        self.is_blocking = False
        self._release()

    def _release(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._executor.slots.release(slot)


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
