"""A coordinator that shows what comes into the channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.callbacks import no_op
from asyncdata.delivery.channel import Failure
from asyncdata.delivery.coordinator import Coordinator

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.delivery.channel import Channel, Entry
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.merged_chunk import MergedChunk

__all__ = ("WatchedCoordinator",)


class WatchedCoordinator(Coordinator):
    """See :class:`~asyncdata.delivery.coordinator.Coordinator`.

    :ivar on_chunk: called with each chunk that comes into the current channel, before it can be delivered.
    :ivar on_restart: called before, and after, delivery continues elsewhere; with whether it is after.
    """

    on_chunk: Callable[[Channel, Chunk | MergedChunk], object] = staticmethod(no_op)
    on_restart: Callable[[bool], object] = staticmethod(no_op)

    def fill(self, channel: Channel, entry: Entry, content: Chunk | MergedChunk | Failure) -> None:
        """As in a coordinator."""
        if channel is self.channel and not isinstance(content, Failure):
            self.on_chunk(channel, content)
        super().fill(channel, entry, content)

    def restart(self, change: Callable[[Ledger], Ledger]) -> None:
        """As in a coordinator."""
        self.on_restart(False)
        super().restart(change)
        self.on_restart(True)
