"""Serves requests: the buffer first, then the stream, and one commit for both.

Nothing here waits: a request that cannot be served yet is queued, with a function that wakes its caller. One lock
guards everything. The caller's thread delivers; the service's thread fills the channel.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING

import msgspec

from asyncdata.buffer import choose, first_in_first_out, validate_groups, without
from asyncdata.channel import Channel, Failure
from asyncdata.delivery import BadRowStop, Delivery, deliver
from asyncdata.errors import BadRowError, EndOfData, LoaderClosedError
from asyncdata.ledger import Lease, Ledger, Returned, lease_key
from asyncdata.types import Position, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from asyncdata.buffer import BufferFilter
    from asyncdata.channel import Bad, Entry
    from asyncdata.columns import Chunk

__all__ = ("Coordinator", "DeliveryRules", "Request")

_structs = msgspec.structs


class DeliveryRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a delivery obeys; each field is a knob of the loader."""

    capacity: int
    max_ready_bytes: int
    samples_per_group: int = 1
    epochs: int | None = None
    drop_last: bool = False
    bad_row_stops: bool = True
    max_bad_rows: int | None = None
    commit_on_ack: bool = False


class Request:
    """A caller's wish for ``num_groups`` groups, kept while it waits.

    :param last_epoch: do not go beyond this epoch; fewer groups may come then.
    :ivar wake: called, from any thread, when it is worth polling again.
    :ivar chosen: what the buffer filter chose; it stays in the buffer until the request is served.
    """

    __slots__ = ("chosen", "commit", "last_epoch", "num_groups", "wake")

    def __init__(self, num_groups: int, last_epoch: int | None = None) -> None:
        self.num_groups = num_groups
        self.last_epoch = last_epoch
        self.wake: Callable[[], object] = bool
        self.chosen: list[Returned] | None = None
        self.commit: tuple[Ledger, Ledger] | None = None


class Coordinator:
    """Owns the ledger, the channel and the queue of requests.

    :param quarantine: called with each bad row that is passed over, before the delivery that passes it is committed.
    :ivar on_room: called when a delivery made the room in the channel that :meth:`reserve` did not find.
    """

    def __init__(
        self,
        rules: DeliveryRules,
        *,
        buffer_filter: BufferFilter = first_in_first_out,
        quarantine: Callable[[BadRowError], object] = bool,
    ) -> None:
        self.rules = rules
        self.ledger = Ledger()
        self.on_room: Callable[[], object] = bool
        self.channel = self._new_channel()
        self._filter = buffer_filter
        self._quarantine = quarantine
        self._lock = threading.RLock()
        self._requests: deque[Request] = deque()
        self._closed = ""
        self._wanted_room = 0

    # The caller's side.

    def poll(self, request: Request) -> list[Sample] | None:
        """The samples of the groups asked for, group after group, committed; None while they are not ready.

        Requests are served in the order in which they were first polled.

        :raises EndOfData: if fewer are left; under ``drop_last=False`` they are in the error, and delivered.
        :raises BadRowError: if the next row is bad and ``bad_row_stops``; at every call, for nothing is passed.
        :raises AsyncDataError: whatever else stops the stream here.
        """
        with self._lock:
            if self._closed:
                raise LoaderClosedError(self._closed)

            if self._requests and self._requests[0] is not request:
                if request not in self._requests:
                    self._requests.append(request)
                return None

            samples = self._serve(request)
            if samples is None:
                self._queue(request)
            elif self._requests:
                self._leave(request)
            return samples

    def withdraw(self, request: Request) -> None:
        """The caller is gone, whatever the reason. A delivery that it cannot have received is taken back."""
        with self._lock:
            before, after = request.commit or (None, None)
            if before is not None and after is self.ledger and self.channel.remembers(before.head):
                self.ledger = before
            self._leave(request)

    def _serve(self, request: Request) -> list[Sample] | None:
        ledger = self.ledger
        if request.chosen is None:
            request.chosen = choose(ledger.buffer, request.num_groups, self._filter)
        last_epoch = self._last_epoch(request)
        delivery = self._deliver(request.num_groups - len(request.chosen), last_epoch)
        if delivery is None:
            return None

        if delivery.is_last and self.rules.drop_last:
            delivery, request.chosen = _dropped(delivery), []
        samples = [sample for item in request.chosen for sample in item.group]
        self._make_samples(delivery, samples)
        after = delivery.ledger
        if request.chosen or self.rules.commit_on_ack:
            after = self._settled(after, request.chosen, samples)
        self._commit(request, after)
        if delivery.is_last and last_epoch != request.last_epoch:
            request.commit = None  # the groups are in the error: delivered
            size = self.rules.samples_per_group
            groups = [samples[i : i + size] for i in range(0, len(samples), size)]
            raise EndOfData(
                f"AD402 end of data after {self.rules.epochs} epochs; {len(groups)} of {request.num_groups} "
                "groups were left",
                groups,
            )

        return samples

    def _last_epoch(self, request: Request) -> int | None:
        epochs = self.rules.epochs
        if epochs is None or (request.last_epoch is not None and request.last_epoch < epochs):
            return request.last_epoch

        return epochs - 1

    def _deliver(self, num_groups: int, last_epoch: int | None) -> Delivery | None:
        try:
            delivery = deliver(
                self.channel.segments(self.ledger.head),
                self.ledger,
                num_groups,
                samples_per_group=self.rules.samples_per_group,
                last_epoch=last_epoch,
                bad_row_stops=self.rules.bad_row_stops,
                max_bad_rows=self.rules.max_bad_rows,
            )
        except BadRowStop as stop:
            raise _bad_row_error(stop.bad) from None

        if delivery is not None:
            for bad in delivery.passed:
                self._quarantine(_bad_row_error(bad))
        return delivery

    def _make_samples(self, delivery: Delivery, samples: list[Sample]) -> None:
        """The hot line of the library: one C call makes a batch; tokens and text stay packed until they are touched."""
        size = self.rules.samples_per_group
        counters = self.ledger.counters
        for chunk, start, stop, group in delivery.pieces:
            index = counters.num_samples + (group - counters.num_groups) * size
            num_groups = stop - start
            if size == 1:
                rows, groups = range(start, stop), range(group, group + num_groups)
                samples.extend(map(Sample, repeat(chunk), rows, range(index, index + num_groups), groups))
                continue

            for number in range(num_groups):
                first = index + number * size
                row, indices = repeat(start + number), range(first, first + size)
                samples.extend(map(Sample, repeat(chunk), row, indices, repeat(group + number)))

    def _settled(self, after: Ledger, chosen: list[Returned], samples: list[Sample]) -> Ledger:
        """The ledger without the groups served from the buffer, and with a lease on all that was served."""
        buffer = without(after.buffer, chosen)
        if not (self.rules.commit_on_ack and samples):
            return _structs.replace(after, buffer=buffer)

        size = self.rules.samples_per_group
        leased: dict[int, Position | Returned] = {lease_key(item.group): item for item in chosen}
        for sample in samples[len(chosen) * size :: size]:
            if sample.position is not None:
                leased[lease_key([sample])] = sample.position
        lease = Lease(self.ledger.position, self.ledger.counters, leased)
        return _structs.replace(after, buffer=buffer, leases=(*after.leases, lease))

    def _commit(self, request: Request, after: Ledger) -> None:
        request.commit = (self.ledger, after)
        self.ledger = after  # the commit: one assignment, which an interrupt finds done or not done
        if self._wanted_room and self.channel.room(after.taken) >= self._wanted_room:
            self._wanted_room = 0
            self.on_room()

    def _queue(self, request: Request) -> None:
        if not self._requests:
            self._requests.append(request)
        self.channel.demand = request.num_groups - len(request.chosen or ())
        if self._wanted_room and self.channel.room(self.ledger.taken):
            self._wanted_room = 0
            self.on_room()

    def _leave(self, request: Request) -> None:
        if request in self._requests:
            was_first = self._requests[0] is request
            self._requests.remove(request)
            self.channel.demand = 0
            if was_first and self._requests:
                self._requests[0].wake()

    # The trainer gives back and acknowledges.

    def add_groups(self, groups: Any) -> int:
        """Append groups to the buffer, all or none; the number of them.

        :raises InvalidGroupError: if one of them cannot be kept.
        """
        with self._lock:
            if self._closed:
                raise LoaderClosedError(self._closed)

            returned = validate_groups(groups, self.rules.samples_per_group, self.ledger.buffer)
            self.ledger = self.ledger.with_returned(returned)
            return len(returned)

    def acknowledge(self, keys: Iterable[int] | None) -> None:
        """Groups (None: all) need not be served again."""
        with self._lock:
            self.ledger = self.ledger.acknowledged(keys)

    # The service's side.

    def restart(self, change: Callable[[Ledger], Ledger]) -> None:
        """Go on from what ``change`` makes of the ledger: what was read ahead is dropped, requests wait for the
        rest.
        """
        with self._lock:
            self.ledger = _structs.replace(change(self.ledger), head=0, offset=0, taken=0)
            self.channel = self._new_channel()
            self._wanted_room = 0
            for request in self._requests:
                request.chosen = None
                request.wake()

    def _new_channel(self) -> Channel:
        return Channel(
            capacity=self.rules.capacity,
            max_bytes=self.rules.max_ready_bytes,
            bad_row_stops=self.rules.bad_row_stops,
            epoch_groups=self.ledger.counters.epoch_groups,
            acked=self.ledger.acked,
        )

    def reserve(self, channel: Channel, max_rows: int, min_rows: int) -> Entry | None:
        """A place in ``channel`` for at most ``max_rows`` rows; None where there is no room for ``min_rows``.

        After None, ``on_room`` is called once there is.
        """
        with self._lock:
            if channel is not self.channel:
                return None

            room = channel.room(self.ledger.taken)
            if room < min_rows and not (room and self._is_starving()):
                self._wanted_room = min_rows
                return None

            return channel.enter(min(max_rows, room))

    def _is_starving(self) -> bool:
        """Somebody waits and nothing is on its way: any room will do."""
        return bool(self._requests) and self.channel.num_rows_in_flight == 0

    def shorten(self, channel: Channel, entry: Entry, num_rows: int) -> None:
        """``entry``, the last one reserved, takes only ``num_rows`` rows."""
        with self._lock:
            channel.shorten(entry, num_rows)

    def split(self, channel: Channel, entry: Entry, num_rows: int) -> Entry:
        """Cut ``entry`` after ``num_rows`` rows; the rest is returned."""
        with self._lock:
            return channel.split(entry, num_rows)

    def fill(self, channel: Channel, entry: Entry, content: Chunk | Failure) -> None:
        """The rows of ``entry`` are done."""
        with self._lock:
            channel.fill(entry, content)
            if channel is self.channel:
                self._wake_first()

    def fail(self, channel: Channel, failure: Failure) -> None:
        """Deliver everything in the order before ``failure``, and then the failure."""
        with self._lock:
            channel.fail(failure.error)
            if channel is self.channel:
                self._wake_first()

    def _wake_first(self) -> None:
        if not self._requests:
            return

        first, channel = self._requests[0], self.channel
        last_epoch = self._last_epoch(first)
        is_enough = channel.num_produced - self.ledger.taken >= first.num_groups - len(first.chosen or ())
        if is_enough or channel.is_stopped or (last_epoch is not None and channel.ended_epoch >= last_epoch):
            first.wake()

    def close(self, reason: str) -> None:
        """Every request, waiting or to come, ends in LoaderClosedError."""
        with self._lock:
            self._closed = self._closed or reason
            for request in self._requests:
                request.wake()


def _dropped(delivery: Delivery) -> Delivery:
    """The delivery with its samples dropped: a short last batch under ``drop_last``."""
    counters, number = delivery.ledger.counters, delivery.num_groups
    if number:
        drops = {**counters.drops, "drop_last": counters.drops.get("drop_last", 0) + number}
        counters = _structs.replace(counters, drops=drops)
    return delivery._replace(pieces=[], num_groups=0, ledger=_structs.replace(delivery.ledger, counters=counters))


def _bad_row_error(bad: Bad) -> BadRowError:
    place, error = bad.chunk.row_location(bad.error.row), bad.error
    return BadRowError(
        error.code,
        error.reason,
        path=place.path,
        line=place.line_number(),
        byte_offset=place.byte_offset,
        excerpt=error.excerpt,
        traceback=error.traceback,
    )
