"""A worker's answer to a scan: the rows of some blocks, written into a slot block after block. No numpy."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from asyncdata.core.messages import Scanned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.sources.reader import BlockRows

__all__ = ("ScannedRows",)


class ScannedRows:
    """Collects the reply to a scan.

    :ivar base: where in the slot the next block goes.
    """

    def __init__(self, slot: memoryview, base: int) -> None:
        self.base = base
        self._slot = slot
        self._counts, self._blanks = array("i"), array("i")
        self._starts, self._lengths, self._offsets = array("i"), array("i"), array("i")

    def add(self, found: BlockRows) -> None:
        """Copy the block's text into the slot."""
        base = self.base
        self._slot[base : base + len(found.data)] = found.data
        starts = [base + start if start >= 0 else -1 for start in found.starts]
        self.add_at(starts, found.lengths, found.offsets, found.num_blank, len(found.data))

    def add_at(
        self, starts: Sequence[int], lengths: Sequence[int], offsets: Sequence[int], num_blank: int, num_bytes: int
    ) -> None:
        """Add a block whose rows are already in the slot, where they take ``num_bytes``."""
        self._counts.append(len(starts))
        self._starts.extend(starts)
        self._lengths.extend(lengths)
        self._offsets.extend(offsets)
        self._blanks.append(num_blank)
        self.base += num_bytes

    def reply(self) -> Scanned:
        """The reply for all blocks."""
        return Scanned(
            counts=self._counts.tobytes(),
            starts=self._starts.tobytes(),
            lengths=self._lengths.tobytes(),
            offsets=self._offsets.tobytes(),
            num_blank=sum(self._blanks),
            blanks=self._blanks.tobytes(),
        )
