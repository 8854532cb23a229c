"""Watches a simulated world for lost wake-ups: a state with work to do, and nothing pending that would have it done.

A hang is such a state that lasts; most are ended by a later event, and so are never seen from outside. Here each moment
is looked at in which all tasks wait, before the clock moves on.
"""
# ruff: noqa: SLF001 - it looks at private state

from __future__ import annotations

from collections import deque
from typing import Any

import anyio
import trio

from asyncdata.delivery.next_delivery import BadRowStop, deliver
from asyncdata.errors import AsyncDataError

REQUEST_S = 0.01


class SimulatedThreads:
    """In place of ``anyio.to_thread``: a job takes a random time of the mock clock.

    :ivar num_busy: jobs that have begun and not ended.
    """

    def __init__(self, chance: Any) -> None:
        self.num_busy = 0
        self._chance = chance

    async def run_sync(self, function: Any, *args: Any, **_: Any) -> Any:
        """The job is done when its time is over; also if it was abandoned before, but then no callback is called."""
        self.num_busy += 1
        try:
            await anyio.sleep(self._chance.expovariate(1 / REQUEST_S))
        except trio.Cancelled:
            trio.lowlevel.current_trio_token().run_sync_soon(_unheard, function, args)
            raise
        finally:
            self.num_busy -= 1
        return function(*args)


def _unheard(function: Any, args: tuple[Any, ...]) -> None:
    try:
        function(*args)
    except OSError:  # what it works on may be gone by now
        pass


class Watcher(trio.abc.Instrument):
    """Looks at each of its services whenever all tasks wait.

    :param is_busy: tells whether a worker or a thread has something to do, and so will be heard of.
    :param num_asked: tells how many requests there were.
    :ivar faults: what was found when it last looked.
    :ivar num_looks: how often it has looked.
    """

    def __init__(self, is_busy: Any, num_asked: Any) -> None:
        self.faults: list[str] = []
        self.num_looks = 0
        self._is_busy = is_busy
        self._num_asked = num_asked
        self._services: deque[Any] = deque()

    def watch(self, service: Any) -> None:
        self._services.append(service)

    def before_io_wait(self, timeout: float) -> None:
        """As trio says: no task runs."""
        statistics = trio.lowlevel.current_statistics()
        if self.faults or statistics.tasks_runnable or statistics.run_sync_soon_queue_size:
            return  # looking on after a fault would mend it

        for service in self._services:
            if service._call_soon is not None and not service._is_closed:
                self._look(service._read_ahead, service._coordinator)

    def _look(self, read_ahead: Any, coordinator: Any) -> None:
        self.num_looks += 1
        if not self._is_busy() and coordinator._requests and not _is_deliverable(coordinator):
            self._found("somebody waits, and nothing is under way")
        if coordinator._requests and _is_deliverable(coordinator):
            self._found("somebody waits for what is there")
        before = sent_by(read_ahead), self._num_asked()
        read_ahead.changed()
        after = sent_by(read_ahead), self._num_asked()
        if before != after:
            self._found(f"something could be sent, and was not looked for: {before} is {after} now")

    def _found(self, fault: str) -> None:
        self.faults.append(f"{trio.current_time() % 1e6:10.4f} {fault}")


def _is_deliverable(coordinator: Any) -> bool:
    """Whether the first request would be served if it were polled."""
    request, ledger, rules = coordinator._requests[0], coordinator.ledger, coordinator.rules
    items, num_groups = coordinator.channel.items(ledger.head), request.num_groups - len(request.chosen or ())
    bounds = {"samples_per_group": rules.samples_per_group, "last_epoch": rules.last_epoch(request.last_epoch)}
    try:
        found = deliver(items, ledger, num_groups, **bounds)
    except (BadRowStop, AsyncDataError):
        return True

    return found is not None


def sent_by(read_ahead: Any) -> tuple[Any, ...]:
    """All that a change which lets something be sent, or a coroutine go on, changes."""
    channel, calls = read_ahead._channel, read_ahead._calls
    place = *read_ahead._current, read_ahead._row, channel.num_produced, calls.changes.num_waiting
    return *place, [id(entry) for entry in channel._entries]
