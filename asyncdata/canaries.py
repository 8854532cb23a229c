"""Canaries: a few fixed rows, tokenized anew at every start. They find what fingerprints miss."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncdata.errors import AsyncDataError, SnapshotMismatchError
from asyncdata.window import Window
from asyncdata.wire import Scanned, Tokenized

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.executors.base import Crashed, Executor
    from asyncdata.sources.base import FileBlocks
    from asyncdata.wire import Reply

__all__ = ("Canaries",)

_NUM_CANARIES = 8


class Canaries:
    """The first rows of eight blocks, and the digests of their tokens.

    :ivar digests: one per row; empty until they are known.
    :ivar is_blocking: whether a snapshot's digests are still to be compared, so that nothing may be delivered.
    """

    def __init__(self, source: FileBlocks, executor: Executor, stride: int) -> None:
        self.digests: list[str] = []
        self.is_blocking = False
        self._source = source
        self._executor = executor
        self._stride = stride
        self._is_asked = False
        self._expected: list[str] = []
        self._on_same: Callable[[], object] = bool
        self._on_other: Callable[[AsyncDataError], object] = bool

    def restart(
        self,
        expected: list[str] | None,
        on_same: Callable[[], object],
        on_other: Callable[[AsyncDataError], object],
    ) -> None:
        """Compare with ``expected`` before anything is delivered; without it, look when there is time."""
        self._is_asked = False
        self._expected = expected or []
        self._on_same, self._on_other = on_same, on_other
        self.is_blocking = bool(self._expected)
        if self.is_blocking:
            self.make()

    def make(self) -> None:
        """Have the rows tokenized, unless that is done or under way."""
        if self._is_asked or (self.digests and not self.is_blocking):
            return

        slot = self._executor.slots.hold()
        if slot is None:
            return

        self._is_asked = True
        num_blocks = self._source.num_blocks
        ids = sorted({i * num_blocks // _NUM_CANARIES for i in range(_NUM_CANARIES)})
        window = Window(self._source, self._source.blocks(ids), slot, self._stride, partial(np.arange, dtype=np.int64))
        for scan in window.scans():
            self._executor.submit(scan, partial(self._on_scanned, window))

    def _on_scanned(self, window: Window, reply: Reply | Crashed) -> None:
        if isinstance(reply, Scanned) and window.add(0, reply):
            counts = np.frombuffer(reply.counts, np.int32)
            firsts = (np.cumsum(counts) - counts)[counts > 0]
            if len(firsts):
                self._executor.submit(window.request_of(firsts), partial(self._on_tokenized, len(firsts)))
        self._executor.slots.release(window.slot)
        if not isinstance(reply, Scanned) or window.num_rows == 0:
            self._compare([])

    def _on_tokenized(self, num_rows: int, reply: Reply | Crashed) -> None:
        self._compare(_digests(num_rows, reply) if isinstance(reply, Tokenized) else [])

    def _compare(self, digests: list[str]) -> None:
        self.digests = digests
        was_blocking, self.is_blocking = self.is_blocking, False
        if not was_blocking:
            return

        if digests != self._expected:
            self._on_other(
                SnapshotMismatchError(
                    "AD603 the tokenize function gives other tokens than when the snapshot was written: "
                    f"{sum(a != b for a, b in zip(digests, self._expected, strict=False))} of {len(self._expected)} "
                    "fixed rows differ. Install the versions of then, or pass allow_changed={'tokenize_fn'} to go on.",
                    {"canaries": (self._expected, digests)},
                )
            )
        self._on_same()


def _digests(num_rows: int, reply: Tokenized) -> list[str]:
    """A digest of each row's tokens; a row that yields no sample has the digest of none."""
    kept = np.frombuffer(reply.kept, np.int32).tolist() if reply.kept else range(num_rows)
    ends = np.frombuffer(reply.token_ends, np.uint32).tolist()
    tokens = [b""] * num_rows
    for row, start, end in zip(kept, [0, *ends], ends, strict=False):
        tokens[row] = reply.tokens[4 * start : 4 * end]
    return [hashlib.blake2b(data, digest_size=8).hexdigest() for data in tokens]
