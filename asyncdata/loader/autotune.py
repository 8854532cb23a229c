"""Adds a worker while the trainer waits for tokens, up to the CPUs and the memory limit; never removes one.

In the service's thread, after changes. None of it changes D.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from asyncdata.core.errors import get_logger
from asyncdata.core.threads import no_op
from asyncdata.workers.machine import process_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.loader.opening import TuningLimits
    from asyncdata.loader.waits import Waits
    from asyncdata.read_ahead.mixture import MixtureReadAhead
    from asyncdata.read_ahead.source import ReadAhead
    from asyncdata.workers.pool import Pool

_log = get_logger(__name__)

_INTERVAL_S, _MIN_REPLIES = 0.5, 4
"""An interval has so many seconds, and so many replies of each worker: a shorter one measures single chunks."""
_FIRST_WAIT_S = 1.0
"""The first batch is start-up cost, unless it takes longer than that."""
_STARVED = 0.01
"""Share of an interval that the trainer waits. It must be seen in two intervals in a row, as the machine may have been
busy; ten times as much is believed at once."""
_BY_WORKERS = ("tokenize", "media")


class Waiting(Protocol):
    """The loader's engine: it knows for how long calls have waited, and for what."""

    coordinator: Coordinator
    waits: Waits

    def waits_for(self) -> str: ...


class Tuner:
    """Measures how long the trainer waits."""

    def __init__(
        self,
        limits: TuningLimits,
        executor: Pool,
        read_ahead: ReadAhead | MixtureReadAhead,
        engine: Waiting,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._executor, self._read_ahead, self._clock = limits, executor, read_ahead, clock
        self._engine = engine
        self._first_s: float | None = None
        self._start_s = self._waited_s = 0.0  # of the interval
        self._num_answered = self._num_starved = 0
        self._has_begun, self._is_starting = False, True
        self._stage = ""  # that a call waited for when workers were last asked for something
        executor.on_submit = self._see_stage

    async def run(self) -> None:
        """Look after each change, until a limit forbids one more worker, or cancelled."""
        await self._executor.changes.until(self.look)
        self._executor.on_submit = no_op

    def _see_stage(self) -> None:
        # A look after a reply would find the only worker idle: the next window is requested a moment later.
        self._stage = self._engine.waits_for()

    def look(self) -> bool | None:
        """Add a worker, if it is time to; return True if there will never be another."""
        now_s = self._clock()
        if not self._has_begun or self._is_starting:
            self._first_s = now_s if self._first_s is None else self._first_s
            has_delivered = self._engine.coordinator.ledger.counters.num_groups > 0
            self._has_begun = self._has_begun or has_delivered or now_s - self._first_s >= _FIRST_WAIT_S
            self._is_starting = any(worker.state == "starting" for worker in self._executor.statistics().workers)
            self._begin_interval(now_s)
            return None

        seconds, num_replies = now_s - self._start_s, self._executor.num_answered - self._num_answered
        if seconds < _INTERVAL_S or num_replies < _MIN_REPLIES * self._executor.num_workers:
            return None

        starved = (self._engine.waits.totals()[1] - self._waited_s) / seconds
        self._begin_interval(now_s)
        is_starved = starved > _STARVED and self._stage in _BY_WORKERS
        self._num_starved = self._num_starved + 1 if is_starved else 0
        is_sure = self._num_starved > 1 or (is_starved and starved > 10 * _STARVED)
        return self._add() if is_sure else None

    def _begin_interval(self, now_s: float) -> None:
        self._start_s, self._waited_s = now_s, self._engine.waits.totals()[1]
        self._num_answered = self._executor.num_answered

    def _add(self) -> bool | None:
        """Add a worker, unless a limit forbids it."""
        number = self._executor.num_workers
        if limit := self._limit():
            _log.info("autotune.limited", limit=limit, num_workers=number)
            return True

        self._is_starting, self._num_starved = True, 0
        self._executor.set_num_workers(number + 1)
        self._read_ahead.resize()
        _log.info("autotune.changed", before=number, after=number + 1)
        return None

    def _limit(self) -> str:
        """What forbids one more worker; empty: nothing."""
        number, workers = self._executor.num_workers, self._executor.statistics().workers
        if number >= self._limits.max_workers:
            return "max_workers"

        largest = max((process_memory(worker.pid) for worker in workers if worker.pid is not None), default=0)
        return "max_memory_bytes" if (number + 1) * largest > self._limits.max_worker_bytes else ""
