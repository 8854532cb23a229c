"""Serves requests: first from the rollout buffer, then from the stream, with one commit for both.

Nothing here waits: a request that cannot be served yet is queued, with a function that wakes its caller. One lock
guards all state. The caller's thread delivers; the service's thread fills the channel.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.errors import BadRowError, EndOfData, LoaderClosedError, TooManyBadRowsError
from asyncdata.core.threads import no_op
from asyncdata.core.types import Group, Position, Sample, SampleRange
from asyncdata.delivery.channel import Channel, Entry, Exclusions, Media
from asyncdata.delivery.chunk import Chunk
from asyncdata.delivery.items import Bell, Failure
from asyncdata.delivery.ledger import DeliveryRules, GroupFile, Ledger, Request, Returned, State, not_tracked
from asyncdata.delivery.next_delivery import BadRowStop, Delivery, advanced, deliver, dropped, upcoming
from asyncdata.delivery.rollout_buffer import Chooser, first_in_first_out, validate_groups, without

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncdata.core.messages import RowError, Tokenized
    from asyncdata.delivery.bad_rows import BadRowPolicy
    from asyncdata.delivery.ledger import IsOf
    from asyncdata.delivery.media_queue import Wanted
    from asyncdata.delivery.rollout_buffer import BufferFilter

    FilesOf = Callable[[Iterable[Group]], Iterable[GroupFile] | None]

_structs = msgspec.structs
_NOTHING = Ledger()


class Coordinator:
    """Owns the ledger, the channel and the queue of requests.

    :param ledger: before the first sample.
    :param outcomes: decides which rows an epoch excludes; None: no rows.
    :param media: makes a channel's queue of what waits for its media; None: samples have none.
    :param bell: rung when a delivery has made the room in the channel that :meth:`reserve` did not find.
    :ivar lock: held while anything here changes.
    :ivar failed: deliveries to roll back: the request, if there was one, and the samples of :meth:`take_ready`. On an
        exception the caller appends to it, which is atomic under the GIL, and calls :meth:`settle`.
    """

    def __init__(
        self,
        rules: DeliveryRules,
        ledger: Ledger = _NOTHING,
        *,
        buffer_filter: BufferFilter = first_in_first_out,
        outcomes: Exclusions | None = None,
        media: Media | None = None,
        bell: Bell | None = None,
    ) -> None:
        self.rules = rules
        self._state = State(ledger)
        self._bell, self._outcomes, self._media = bell or Bell(), outcomes, media
        self.failed: deque[tuple[Request | None, list[Sample] | None]] = deque()
        self.channel = self._new_channel()
        self._chooser, self._is_over_budget = Chooser(buffer_filter), False
        self._lock = self.lock = threading.RLock()
        self._requests: deque[Request] = deque()
        self._held: dict[Request, None] = {}  # requests that wait for the trainer, in no queue
        self._closed, self._wants_request = "", False
        self._wanted_room, self._room_from = 0, 0  # before so many samples are taken, the wanted room cannot be there

    @property
    def ledger(self) -> Ledger:
        """What was delivered so far."""
        if self.failed:
            self.settle()
        state = self._state
        ledger, run, num_taken = state.ledger, state.run, state.num_taken
        if run is None or num_taken == 0:
            return ledger

        return advanced(ledger, run, num_taken, self.rules.samples_per_group)

    @property
    def num_ready(self) -> int:
        """Samples of the stream that a call would get without waiting."""
        return self.channel.num_produced - self._num_taken

    @property
    def _num_taken(self) -> int:
        return self._state.ledger.taken + self._state.num_taken

    # The caller's side.

    def take_ready(self, num_groups: int, last_epoch: int | None = None) -> list[Sample] | None:
        """The fast path of :meth:`poll`, if the request ends within the current run of samples; otherwise None."""
        before = after = self._state
        ledger, run, num_taken = before.ledger, before.run, before.num_taken
        is_plain = ledger.rollouts is None and not self.rules.commit_on_ack and not ledger.buffer
        if run is None or not is_plain or self._requests or self._closed or self.failed:
            return None

        try:
            with self._lock:
                start = run.start + ledger.offset + num_taken
                stop = start + num_groups
                if self._state is not before or stop >= run.stop:
                    return None

                if last_epoch is not None and run.chunk.first.epoch > last_epoch:
                    return None

                counters, size = ledger.counters, self.rules.samples_per_group
                index, group_index = counters.num_samples + num_taken * size, counters.num_groups + num_taken
                samples = (taken := SampleRange(run.chunk, start, stop, index, group_index, size)).samples()
                if self.channel.media is not None:
                    self.channel.media.attach(taken, samples)
                after = State(ledger, run, num_taken + num_groups)
                self._state = after  # the commit: one assignment, so that an interrupt comes before or after it
                if self._wanted_room and ledger.taken + after.num_taken >= self._room_from:
                    self._offer_room(self._wanted_room)
            return samples
        except BaseException:
            if after is not before and self._state is after:
                self._state = before
            raise

    def poll(self, request: Request) -> list[Sample] | None:
        """The samples of the requested groups, group after group, which are now delivered; None: not ready yet.

        Requests are served in the order in which they were first polled. A request for packs is served, but its samples
        are delivered only by :meth:`commit`.

        :raises EndOfData: if fewer are left; under ``drop_last=False`` they are in the error, and count as delivered.
        :raises BadRowError: if the next row is bad and ``bad_row_stops``; at every call, as the row is not passed over.
        :raises AsyncDataError: any other error that ends the stream here.
        """
        with self._lock:
            self._chooser.refuse_calls()
            self.settle()
            if self._closed:
                raise LoaderClosedError(self._closed)

            if request.may_be_held and self._hold(request):
                return None

            may_overtake = request.takes_finished and self.channel.media is None
            if self._requests and self._requests[0] is not request and not may_overtake:
                if request not in self._requests:
                    self._requests.append(request)
                return None

            samples = self._serve(request)
            if samples is not None:
                self._leave(request)
            elif not (request.may_be_held and self._hold(request)):
                self._queue(request)
            return samples

    def _hold(self, request: Request) -> bool:
        """Whether a request waits for the trainer now. Then it is in no queue, until :meth:`_release`."""
        request.held = request.held_by(self.ledger, self.rules)
        if request.held:
            request.chosen = None
            self._leave(request)
            self._held[request] = None
        return bool(request.held)

    def _release(self) -> None:
        """After a change, wake the requests that do not wait for the trainer any more."""
        for request in list(self._held):
            if self._closed or not request.held_by(self.ledger, self.rules):
                del self._held[request]
                request.held = ""
                request.wake()

    def _choose_again(self) -> None:
        """After the buffer has changed. Requests may have chosen what is gone, or wait for what is there now."""
        for request in self._requests:
            request.chosen, request.ready_at = None, 0.0
            request.wake()
        self._release()

    def settle(self) -> None:
        """Roll back the deliveries in ``failed``.

        If an interrupt stops this, the next call of any method that reads the state completes it.
        """
        with self._lock:
            while self.failed:
                request, samples = self.failed[0]
                if request is not None:
                    self.withdraw(request)
                elif samples:
                    self._state = self._state.without(samples, self.rules.samples_per_group)
                self.failed.popleft()

    def withdraw(self, request: Request) -> None:
        """Drop the request of a caller that stopped waiting. Roll back a delivery that it cannot have received."""
        with self._lock:
            if request.commit is not None:
                before, after = request.commit
                if self._state is after and self.channel.remembers(before.ledger.head):
                    self._state = before
            self._leave(request)
            self._held.pop(request, None)
            self._release()

    def commit(self, request: Request, packs: object) -> bool:
        """Commit what a request for packs was served, together with the progress of packing after it.

        Return False, and commit nothing, if the state has changed since it was served.
        """
        with self._lock:
            self.settle()
            if request.served is None or self._state is not request.served[0]:
                return False

            self._commit(request, _structs.replace(request.served[1], packs=packs))
            return True

    def shorten(self, request: Request, num_groups: int) -> None:
        """Of what a request for packs was served, take only the first groups; the others come again."""
        with self._lock:
            if request.served is not None and self._state is request.served[0]:
                delivery = self._deliver(self.ledger, num_groups, request.last_epoch)
                assert delivery is not None, "they were ready"
                request.served, request.passed = (self._state, delivery.ledger), delivery.passed

    def ahead(self, num_samples: int, last_epoch: int) -> list[Sample]:
        """At most so many samples that are ready, and may be packed next."""
        with self._lock:
            ledger = self.ledger
            ranges = upcoming(self.channel.items(ledger.head), ledger, num_samples, 1, last_epoch, is_all=True)
            return [sample for one in ranges or () for sample in self._samples(one)]

    def _serve(self, request: Request) -> list[Sample] | None:
        if request.is_peek:
            return self._peek(request.num_groups)

        chosen = self._chosen(request)
        if chosen is None or not self._are_loaded(request):
            return None

        ledger = self.ledger
        last_epoch = self.rules.last_epoch(request.last_epoch)
        number, least = 0 if request.takes_finished else request.num_groups - len(chosen), request.num_missing
        delivery = self._deliver(ledger, number, last_epoch, at_least=least, may_be_fewer=request.may_be_fewer)
        if delivery is None:
            return None

        if delivery.is_last and request.may_be_held and ledger.num_out:  # what is out may be given back
            request.passed = delivery.passed
            self._commit(request, delivery.ledger)
            return None

        return self._delivered(request, chosen, delivery, is_end=last_epoch != request.last_epoch)

    def _delivered(self, request: Request, chosen: list[Returned], delivery: Delivery, *, is_end: bool) -> list[Sample]:
        """The samples of a delivery, which is committed.

        :param is_end: whether the delivery is the data's last one, if it is the last of its epoch.
        """
        ledger = self.ledger
        if delivery.is_last and self.rules.drop_last:
            delivery, chosen = dropped(delivery), []
            request.chosen = chosen
        samples = [sample for item in chosen for sample in item.group]
        for sample_range in delivery.ranges:
            samples += self._samples(sample_range)
        after = delivery.ledger
        if chosen:
            after = _structs.replace(after, buffer=without(after.buffer, chosen))
        if ledger.rollouts is not None:
            ledger.rollouts.stamp(samples)
        if self._is_tracked and samples:
            after = after.with_lease(ledger, chosen, samples, self.rules.samples_per_group)
        request.served, request.passed = (self._state, after), delivery.passed
        if not request.is_for_packs:
            self._commit(request, after)
            if request.takes_finished:
                self._choose_again()
        if delivery.is_last and is_end:
            request.commit = None  # the groups are in the error: delivered
            size = self.rules.samples_per_group
            groups = [samples[i : i + size] for i in range(0, len(samples), size)]
            raise EndOfData(
                f"AD402 end of data after {self.rules.epochs} epochs; {len(groups)} of {request.num_groups} "
                "groups were left",
                groups,
            )

        return samples

    def _peek(self, num_groups: int) -> list[Sample] | None:
        ledger, size, last_epoch = self.ledger, self.rules.samples_per_group, self.rules.last_epoch(None)
        ranges = upcoming(self.channel.items(ledger.head), ledger, num_groups, size, last_epoch, self._has_all_decided)
        return None if ranges is None else [sample for one in ranges for sample in one.samples()[::size]]

    def _chosen(self, request: Request) -> list[Returned] | None:
        """The groups of the buffer that a request is served; None while their media are loaded."""
        if request.chosen is None:
            request.chosen = request.choose(buffer, self._chooser.choose) if (buffer := self.ledger.buffer) else []
        if self.channel.media is None:
            return request.chosen

        is_ready, failed = self.channel.media.restore(request.chosen)
        if failed is None:
            return request.chosen if is_ready else None

        self._drop_returned(*failed)
        request.chosen = None
        return self._chosen(request)

    def _are_loaded(self, request: Request) -> bool:
        """Whether the packs that a request waits for have their media; its next packs' are loaded, too.

        :raises AsyncDataError: the error for which they never will have.
        """
        media = self.channel.media
        if media is None or request.packed is None:
            return True

        is_loaded = media.load(*request.packed)
        if self.channel.failure is not None and not is_loaded:
            raise self.channel.failure

        self._bell.ring()
        return is_loaded

    def give_media(self, samples: Iterable[Sample], num_passed: int) -> Any:
        """Copies of packed samples with their media; see :meth:`~asyncdata.delivery.media_queue.MediaQueue.give`."""
        with self._lock:
            assert self.channel.media is not None, "the packs have media"
            return self.channel.media.give(samples, num_passed)

    def _drop_returned(self, item: Returned, policy: BadRowPolicy, error: BadRowError) -> None:
        """Drop a group of the buffer whose media cannot be loaded again."""
        if policy.is_raised:
            raise error

        policy.pass_over(error)
        ledger, number = self.ledger, self.ledger.counters.num_bad_rows + 1
        counters = _structs.replace(ledger.counters.dropping(f"bad row {error.code}", 1), num_bad_rows=number)
        self._state = State(_structs.replace(ledger, counters=counters, buffer=without(ledger.buffer, [item])))

    def _samples(self, sample_range: SampleRange) -> list[Sample]:
        samples = sample_range.samples()
        if self.channel.media is not None:
            self.channel.media.attach(sample_range, samples)
        return samples

    def _deliver(self, ledger: Ledger, num_groups: int, last_epoch: int | None, **limits: Any) -> Delivery | None:
        take = partial(deliver, samples_per_group=self.rules.samples_per_group, last_epoch=last_epoch)
        try:
            found = take(self.channel.items(ledger.head), ledger, num_groups, **limits)
            if found is not None and not found.is_last and found.num_groups < num_groups:
                # As if no more had been asked for, or bad rows after the last one were counted, and again on resume.
                return take(self.channel.items(ledger.head), ledger, found.num_groups)
            return found
        except BadRowStop as stop:
            raise self._stopped_by(stop) from None

    def _stopped_by(self, stop: BadRowStop) -> BadRowError | TooManyBadRowsError:
        """The error of a delivery that a bad row has stopped. Every call fails from now on."""
        policy = stop.bad.policy
        if not policy.is_raised and not self._is_over_budget:  # the rows are told once
            for bad in (*stop.passed, stop.bad):
                bad.policy.pass_over(bad.to_error())
            self._is_over_budget = True
        return policy.stop_error(stop.bad.to_error())

    def _commit(self, request: Request, ledger: Ledger) -> None:
        for bad in request.passed:
            bad.policy.pass_over(bad.to_error())
        after = State(ledger, self.channel.run(ledger.head))
        request.commit = (self._state, after)
        self._state = after  # the commit, as in take_ready
        self._offer_room(self._wanted_room)
        self._release()

    def _offer_room(self, num_rows: int) -> None:
        """Ring the bell, if :meth:`reserve` found no room and there is room for ``num_rows`` rows now."""
        if self._wanted_room and self.channel.room(self._num_taken) >= num_rows:
            self._bell.ring()
            self._wanted_room = 0  # after the call: if that is interrupted, it is repeated

    def _queue(self, request: Request) -> None:
        request.ready_at = 0.0
        if not self._requests:
            self._requests.append(request)
            self.channel.demanded_at = time.monotonic()
        self.channel.demand = request.num_missing
        self._offer_room(1)
        if self._wants_request or self.channel.media is not None:
            self._bell.ring()
            self._wants_request = False  # after the call, as above

    def _leave(self, request: Request) -> None:
        if request not in self._requests:
            return

        was_first = self._requests[0] is request
        self._requests.remove(request)
        if was_first:
            self.channel.demand = 0
            if self._requests:
                self._requests[0].wake()

    # Groups that the trainer gives back or acknowledges.

    def add_groups(self, groups: Any, is_of: IsOf = no_op, files_of: FilesOf = no_op) -> int:
        """Append groups to the buffer, all or none; return their number. Groups of excluded rows are dropped.

        :param is_of: whether a group is of one of these rows.
        :param files_of: the files that groups are of.
        :raises InvalidGroupError: if one of them cannot be kept.
        """
        with self._lock:
            self._chooser.refuse_calls()
            if self._closed:
                raise LoaderClosedError(self._closed)

            returned = validate_groups(groups, self.rules.samples_per_group, self.ledger.buffer)
            ledger = self.ledger.with_returned(returned, is_of)
            files = ledger.group_files.union(files_of(item.group for item in returned) or ())
            self._state = State(self.judged(_structs.replace(ledger, group_files=files)))
            self._choose_again()
            return len(returned)

    def acknowledge(self, keys: Iterable[int] | None) -> None:
        """Mark groups (None: all) as done, by their ``lease_key``: they are not served again after a restart."""
        with self._lock:
            self._chooser.refuse_calls()
            self._state = State(self.ledger.acknowledged(keys))
            self._release()

    @property
    def _is_tracked(self) -> bool:
        rollouts = self._state.ledger.rollouts
        return self.rules.commit_on_ack or (rollouts is not None and rollouts.tracked)

    def set_rollouts(self, rollouts: Any) -> None:
        """Groups are tracked from now on, or the policy has another version."""
        with self._lock:
            self._chooser.refuse_calls()
            self._state = State(self.judged(_structs.replace(self.ledger, rollouts=rollouts)))
            self._choose_again()

    def judged(self, ledger: Ledger) -> Ledger:
        """The ledger after its groups that are too old were reset or dropped. The lock is held."""
        return ledger if ledger.rollouts is None else self._chooser.calling(ledger.rollouts.judged, ledger)

    def end_groups(self, call: str, keys: Iterable[int], reason: str | None = None) -> int:
        """Tracked groups are over; return how many were out. See :meth:`~asyncdata.delivery.ledger.Ledger.ended`.

        :raises ConfigError: AD437, if groups are not tracked, or were trained and not out.
        """
        with self._lock:
            self._chooser.refuse_calls()
            if not self._is_tracked:
                raise not_tracked("track")

            before = self.ledger
            after = before.ended(call, keys, reason)
            self._state = State(after)
            self._release()
            return before.num_out - after.num_out

    def exclude(self, change: Callable[[Ledger], Ledger]) -> None:
        """Replace the ledger by ``change(ledger)``, which has the same place in D: the read-ahead stays."""
        with self._lock:
            self._chooser.refuse_calls()
            self._state = State(change(self.ledger))

    # The service's side.

    def restart(self, change: Callable[[Ledger], Ledger]) -> None:
        """Replace the ledger by ``change(ledger)``. The read-ahead is dropped; requests keep waiting."""
        with self._lock:
            self._chooser.refuse_calls()
            self._state = State(_structs.replace(change(self.ledger), head=0, offset=0, taken=0))
            self.channel, self._wanted_room, self._wants_request = self._new_channel(), 0, False
            self._choose_again()

    def _new_channel(self) -> Channel:
        ledger = self.ledger
        channel = Channel(
            self.rules,
            num_bad_rows=ledger.counters.num_bad_rows,
            epoch_groups=ledger.counters.epoch_groups,
            acked=ledger.acked,
            outcomes=self._outcomes,
        )
        channel.media = None if self._media is None else self._media.queue(channel)
        return channel

    def restart_position(self) -> Position:
        """The first position that a restart would need now."""
        return self.ledger.needed().position

    def reserve(self, channel: Channel, max_rows: int, min_rows: int) -> Entry | None:
        """A place in ``channel`` for at most ``max_rows`` rows; None if there is no room for ``min_rows``.

        After None, the bell is rung as soon as there is room.
        """
        with self._lock:
            if channel is not self.channel or channel.is_stopped:
                return None

            room = channel.room(self._num_taken)
            if room < min_rows and not (room and self._is_starving()):
                self._wanted_room = min_rows
                self._room_from = self._num_taken + channel.excess(self._num_taken) + min_rows
                return None

            return channel.enter(min(max_rows, room))

    def _is_starving(self) -> bool:
        """Whether a request waits for more than is ready while no row is in flight: then any room is enough."""
        is_short = self.num_ready < self.channel.demand
        return bool(self._requests) and is_short and self.channel.num_rows_in_flight == 0

    def is_awaited(self, channel: Channel) -> bool:
        """Whether a call takes more than was read; if not, the bell is rung once one does."""
        with self._lock:
            takes = channel is self.channel and bool(self._requests) and not self._requests[0].is_peek
            is_awaited = takes and not channel.num_waiting and not self._has_enough()
            self._wants_request = not is_awaited
            self._wake_ready()  # a call that only looks gets what there is
            return is_awaited

    @property
    def _has_all_decided(self) -> bool:
        """Whether all is ready up to an epoch of which is not decided what it excludes."""
        return self._wants_request and not self.channel.num_waiting

    def fill(self, channel: Channel, entry: Entry, content: Chunk | Failure) -> None:
        """Set the content of ``entry``."""
        with self._lock:
            channel.fill(entry, content)
            if channel is self.channel:
                self._wake_ready()

    def next_media(self, channel: Channel) -> Wanted | None:
        """The next sample whose media are to be loaded now; None: there is none, or no room for it."""
        with self._lock:
            queue = channel.media if channel is self.channel and channel.is_begun else None
            return None if queue is None else queue.next(self._num_taken, channel.demand)

    def put_media(self, channel: Channel, wanted: Wanted, found: Tokenized | RowError) -> None:
        """The media of a sample are loaded, or cannot be."""
        with self._lock:
            if channel is self.channel and channel.media is not None:
                channel.media.put(wanted, found)
                self._wake_ready()

    def fail(self, channel: Channel, failure: Failure, *, overtakes: bool = False) -> None:
        """Deliver everything that is entered, and then the failure; with ``overtakes`` only what is ready."""
        with self._lock:
            channel.fail(failure.error, overtakes=overtakes)
            if channel is self.channel:
                self._wake_ready()

    def _wake_ready(self) -> None:
        """Wake the requests that can be served from now on, in their order."""
        self.settle()
        num_before = 0
        for request in self._requests:
            if not self._has_enough(request, num_before):
                return

            num_before += request.num_missing
            if not request.ready_at:
                request.ready_at = time.monotonic()
                request.wake()

    def _has_enough(self, request: Request | None = None, num_before: int = 0) -> bool:
        """Whether a request can be served after so many groups of those before it; None: the first one."""
        first, channel = request or self._requests[0], self.channel
        if channel.media is not None and channel.media.needed:
            return channel.is_stopped

        last_epoch = self.rules.last_epoch(first.last_epoch)
        is_enough = self.num_ready - num_before >= first.num_missing
        ended_epoch = max(channel.ended_epoch, self._state.ledger.position.epoch - 1)  # it may begin at the end
        is_end = channel.is_stopped or (last_epoch is not None and ended_epoch >= last_epoch)
        return is_enough or is_end or (first.is_peek and self._has_all_decided)

    def close(self, reason: str) -> None:
        """End every request, waiting or future, with LoaderClosedError."""
        with self._lock:
            self._closed = self._closed or reason
            for request in self._requests:
                request.wake()
            self._release()
