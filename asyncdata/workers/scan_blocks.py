"""A worker's answer to a scan: the rows of some blocks, written into a slot block after block. No numpy."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from asyncdata.core.messages import Overflow, Scanned, Tokenize
from asyncdata.core.row_codes import NOT_IN_SLOT, TOO_LONG

if TYPE_CHECKING:
    from asyncdata.core.messages import Scan
    from asyncdata.sources.reader import BlockRows

__all__ = ("ScannedRows", "request_of_all")


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
        self._counts.append(len(starts))
        self._starts.extend(starts)
        self._lengths.extend(found.lengths)
        self._offsets.extend(found.offsets)
        self._blanks.append(found.num_blank)
        self.base += len(found.data)

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


def request_of_all(scan: Scan, scanned: Scanned) -> Tokenize:
    """The request to tokenize all rows that a scan has found, in their order."""
    starts, lengths, offsets = array("i", scanned.starts), array("i", scanned.lengths), array("i", scanned.offsets)
    overflow, first = list[Overflow](), 0
    for block, count in zip(scan.blocks, array("i", scanned.counts), strict=True):
        overflow += [
            Overflow(row, block.file_id, block.start + offsets[row])
            for row in range(first, first + count)
            if starts[row] == NOT_IN_SLOT and lengths[row] != TOO_LONG
        ]
        first += count
    return Tokenize(scan.slot, scanned.starts, scanned.lengths, overflow)
