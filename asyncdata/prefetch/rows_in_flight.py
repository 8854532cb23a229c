"""Rows that are being tokenized: their place in the order, and the request for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asyncdata.core.messages import Tokenize, Tokenized
from asyncdata.core.row_codes import EXCLUDED_REASON, is_elsewhere
from asyncdata.delivery.chunk import Chunk
from asyncdata.delivery.outcomes.memory import is_excluded
from asyncdata.delivery.outcomes.rows import row_ids
from asyncdata.prefetch.windows.base import ChunkOrigin, leaving_out

if TYPE_CHECKING:
    from asyncdata.core.types import Position
    from asyncdata.delivery.channel import Channel, Entry
    from asyncdata.prefetch.windows.base import OpenWindow

__all__ = ("NOTHING", "RowsInFlight", "num_elsewhere")

NOTHING = Tokenized(tokens=b"", token_ends=b"", kept=b"", columns={}, drops={}, errors=[], busy_s=0.0)
"""The reply for rows that need no work."""


class RowsInFlight:
    """Rows ``[first, first + entry.num_rows)`` of a window.

    :ivar claim: by which the other ranks of the node wait for the reply; empty if none does.
    """

    __slots__ = ("channel", "claim", "ends_epoch", "entry", "position", "window")

    def __init__(
        self, channel: Channel, entry: Entry, window: OpenWindow, position: Position, ends_epoch: bool
    ) -> None:
        self.channel = channel
        self.entry = entry
        self.window = window
        self.position = position
        self.ends_epoch = ends_epoch
        self.claim = ""

    @property
    def name(self) -> str:
        """What tells these rows from all others of the same job."""
        place, num_rows, window = self.position, self.entry.num_rows, self.window
        ends = (*window.key(place.row), *window.key(place.row + num_rows - 1))
        return "-".join(map(str, (place.epoch, place.window, place.row, num_rows, *ends)))

    def request(self) -> Tokenize | Tokenized:
        """The request to tokenize them, without those that the epoch excludes; the reply if it excludes all."""
        first, num_rows = self.position.row, self.entry.num_rows
        request = self.window.request(first, first + num_rows)
        excluded = self.channel.excluded(self.position.epoch)
        if not len(excluded) or self.window.is_recorded:
            return request

        is_out = is_excluded(row_ids(*self.window.keys(first, first + num_rows)), excluded)
        if not is_out.all():
            return leaving_out(request, is_out)

        rows = np.arange(num_rows, dtype=np.int32).tobytes()
        return msgspec.structs.replace(NOTHING, drops={EXCLUDED_REASON: rows})

    def chunk(self, reply: Tokenized) -> Chunk:
        """The chunk of these rows, with the samples of the reply."""
        origin = ChunkOrigin(self.window, self.position.row)
        return Chunk(reply, self.position, self.entry.num_rows, origin, ends_epoch=self.ends_epoch)


def num_elsewhere(reply: Tokenized) -> int:
    """The rows of a reply that other ranks tokenize."""
    return int(np.count_nonzero(is_elsewhere(np.frombuffer(reply.expected, np.int32))))
