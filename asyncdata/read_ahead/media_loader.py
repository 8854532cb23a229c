"""Asks workers for the media of the samples that are delivered next."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING

from asyncdata.core.messages import NO_SLOT, NOT_IN_SLOT, Overflow, RowError, Tokenize, Tokenized
from asyncdata.delivery.items import Failure
from asyncdata.read_ahead.calls import SENT
from asyncdata.workers.base import Crashed, error_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdata.core.messages import Reply
    from asyncdata.delivery.channel import Channel
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.media_queue import Wanted
    from asyncdata.read_ahead.calls import Calls


class MediaLoader:
    """Loads media, one sample a request, so that a picture that kills its worker is known.

    :param parts: the number of each part of a mixture, by its name; a single source has none.
    """

    def __init__(self, calls: Calls, coordinator: Coordinator, parts: Mapping[str, int]) -> None:
        self._calls, self._coordinator, self._parts = calls, coordinator, parts

    async def run(self) -> None:
        """Ask for what there is room for, and workers, until cancelled."""
        await self._calls.turn(self._ask)

    def _ask(self) -> object:
        channel = self._coordinator.channel
        wanted = self._coordinator.next_media(channel)
        if wanted is None:
            return None

        ref = wanted.ref
        request = Tokenize(
            NO_SLOT,
            array("i", [NOT_IN_SLOT]).tobytes(),
            array("i", [ref.num_bytes]).tobytes(),
            [] if ref.row else [Overflow(0, ref.file_id, ref.offset)],
            part=self._parts[ref.part],
            is_load=True,
            rows=[ref.row] if ref.row else [],
        )
        self._calls.submit(request, partial(self._on_reply, channel, wanted), max_losses=2)
        return SENT

    def _on_reply(self, channel: Channel, wanted: Wanted, reply: Reply | Crashed) -> None:
        if isinstance(reply, Crashed):
            self._coordinator.put_media(channel, wanted, RowError(0, reply.code, reply.reason))
        elif isinstance(reply, Tokenized):
            self._coordinator.put_media(channel, wanted, reply)
        else:
            self._coordinator.fail(channel, Failure(error_of(reply)), overtakes=True)
