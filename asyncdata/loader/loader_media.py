"""The media of a loader: their columns, their limit and their numbers, and what asks workers for them."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdata.core.columns import declared_columns
from asyncdata.core.messages import NO_SLOT, NOT_IN_SLOT, Overflow, Reply, RowError, Tokenize, Tokenized
from asyncdata.delivery.items import Bell, Failure
from asyncdata.delivery.media_queue import MediaBudget, MediaQueue, Wanted
from asyncdata.workers.base import Crashed, error_of
from asyncdata.workers.changes import SENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.delivery.channel import Channel
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.loader.opened_source import OpenedPart
    from asyncdata.read_ahead.calls import Calls


class LoaderMedia:
    """Media that are loaded before samples are delivered.

    :param is_planned: whether packs are planned, or there are none; otherwise they are made of samples as they come.
    :param bell: rung, in any thread, when media are freed.
    """

    def __init__(self, parts: Sequence[OpenedPart], max_bytes: int, bell: Bell, *, is_planned: bool) -> None:
        self.budget = MediaBudget(max_bytes, bell)
        self._is_planned = is_planned
        self._columns = {column.name: column for part in parts for column in declared_columns(part.opening.function)}
        self._policies = {part.name: part.opening.bad_rows for part in parts}
        self._numbers = {part.name: number for number, part in enumerate(parts)}

    def count(self, batch: Any) -> None:
        """Count the media in a batch as long as they are held."""
        self.budget.count(batch, {name for name, one in self._columns.items() if one.phase == "load"})

    def queue(self, channel: Channel) -> MediaQueue:
        """What waits in a channel."""
        return MediaQueue(self.budget, self._columns, self._policies, channel, for_packs=not self._is_planned)

    def numbers(self, channel: Channel) -> dict[str, Any]:
        """Numbers for :class:`~asyncdata.Statistics`."""
        return {
            "media_waiting_samples": 0 if channel.media is None else channel.media.num_lacking,
            "media_held_bytes": self.budget.held,
            "media_loaded_total": self.budget.num_loaded,
            "media_bytes_total": self.budget.num_bytes,
            "media_load_seconds_total": self.budget.load_s,
            "media_failed_total": self.budget.num_failed,
        }

    async def load(self, calls: Calls, coordinator: Coordinator) -> None:
        """Ask for what there is room for, and workers, until cancelled: one sample a request, so that a picture that
        kills its worker is known.
        """
        await calls.turn(partial(self._ask, calls, coordinator))

    def _ask(self, calls: Calls, coordinator: Coordinator) -> object:
        channel = coordinator.channel
        wanted = coordinator.next_media(channel)
        if wanted is None:
            return None

        ref = wanted.ref
        request = Tokenize(
            NO_SLOT,
            array("i", [NOT_IN_SLOT]).tobytes(),
            array("i", [ref.num_bytes]).tobytes(),
            [] if ref.row else [Overflow(0, ref.file_id, ref.offset)],
            part=self._numbers[ref.part],
            is_load=True,
            rows=[ref.row] if ref.row else [],
        )
        calls.submit(request, max_losses=2).then(partial(_loaded, coordinator, channel, wanted))
        return SENT


def _loaded(coordinator: Coordinator, channel: Channel, wanted: Wanted, reply: Reply | Crashed) -> None:
    if isinstance(reply, Crashed):
        coordinator.put_media(channel, wanted, RowError(0, reply.code, reply.reason))
    elif isinstance(reply, Tokenized):
        coordinator.put_media(channel, wanted, reply)
    else:
        coordinator.fail(channel, Failure(error_of(reply)), overtakes=True)
