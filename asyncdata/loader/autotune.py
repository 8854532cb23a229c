"""Decides on the number of workers and the read-ahead while the loader runs. None of it changes D.

The rule, of :class:`Autotuner`: while the trainer waits for data, there are too few workers, so one is added, up to the
limits; if the channel was full shortly before, the trainer asks in bursts, and the loader reads further ahead first.
When the trainer has not waited for long, workers that are not needed are removed.

:class:`Tuner` shows it the loader after replies, in the service's thread, and carries out its decisions.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from asyncdata.core.log import get_logger
from asyncdata.prefetch.producer import MAX_CHUNK_ROWS, chunk_limit
from asyncdata.workers.machine import process_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.loader.executors import TuningLimits
    from asyncdata.prefetch.mixture_producer import MixtureProducer
    from asyncdata.prefetch.producer import Producer
    from asyncdata.workers.pool.pool import Pool

__all__ = ("Autotuner", "Change", "Observation", "Settled", "Tuner")

_log = get_logger(__name__)

Reason = Literal["workers_busy", "workers_idle", "max_memory_bytes", "no_room", "small_chunks"]
Rest = Literal["fed", "max_workers", "max_memory_bytes", "read_ahead"]

_INTERVAL_S, _MIN_REPLIES = 0.5, 4
"""An interval has so many seconds, and so many replies of each worker: a shorter one measures single chunks."""
_FIRST_WAIT_S = 1.0
_STARVED = 0.01
"""Share of an interval that the trainer waits. It must be seen in two intervals in a row, as the machine may have been
busy; ten times as much is believed at once."""
_MAX_BUSY = 0.7
"""Share of the time that the remaining workers may be busy when others are removed."""
_NUM_QUIET = 16
"""Intervals without a wait before workers are removed. Doubled after each removal that was too early, so the number of
mistakes grows only with the logarithm of the run's length."""
_NUM_RECENT = 8
"""Intervals for which a full channel is remembered, and after which an unchanged state is reported as settled."""
_CHUNK_S = 0.01
"""Seconds of work per chunk; with less, transport and cold CPU caches cost too much of it. CPU time per row of all
processes, two workers and a tokenizer of 6 us per row: 15.2 us with chunks of 512 rows, 14.2 with 1024."""
_READ_AHEAD_FACTOR = 4
_STEPS_PER_LOOK = 32
"""Steps between two measurements of the workers' memory, for which the kernel has to walk all their pages."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The counters and the state of the loader at one time. All times are in seconds, counters since the start.

    :ivar now_s: the time of the observation.
    :ivar num_replies: requests that workers answered.
    :ivar num_rows: rows that workers tokenized.
    :ivar work_s: time of tokenizing them, as the workers report.
    :ivar starved_s: time for which calls waited.
    :ivar was_full: whether the channel had no room for a chunk at any time since the last observation.
    :ivar num_workers: the target number of workers.
    :ivar num_ready_workers: workers that have loaded the tokenize function.
    :ivar capacity: samples that the channel holds.
    :ivar has_delivered: whether the trainer has got any sample yet.
    :ivar sample_bytes: memory of a sample; 0 if that is not known.
    :ivar worker_bytes: memory of a worker; 0 if that is not known.
    """

    now_s: float
    num_replies: int
    num_rows: int
    work_s: float
    starved_s: float
    num_workers: int
    num_ready_workers: int
    capacity: int
    was_full: bool = False
    has_delivered: bool = True
    sample_bytes: float = 0.0
    worker_bytes: int = 0


class Change(msgspec.Struct, frozen=True):
    """A decision.

    :ivar what: ``num_workers`` or ``capacity``.
    """

    what: Literal["num_workers", "capacity"]
    before: int
    after: int
    reason: Reason


class Settled(msgspec.Struct, frozen=True):
    """Nothing is to be changed: the trainer is ``fed``, or ``reason`` says what limits it."""

    reason: Rest


class Autotuner:
    """Counters in, decisions out, without a clock, a thread and a system call. The caller must carry out decisions."""

    def __init__(self, limits: TuningLimits) -> None:
        self._limits = limits
        self._max_workers = limits.max_workers
        self._first_s: float | None = None
        self._has_begun = False
        self._start: Observation | None = None  # of the interval
        self._num_fed = self._num_starved = self._num_unfilled = 0
        self._num_since_full = _NUM_RECENT
        self._has_shrunk = False
        self._patience = _NUM_QUIET
        self._num_unchanged = 0

    def is_due(self, now_s: float, num_replies: int, num_workers: int) -> bool:
        """Whether :meth:`step` would use an observation now. Cheap: called after every reply."""
        start = self._start
        if start is None:
            return True

        return now_s - start.now_s >= _INTERVAL_S and num_replies - start.num_replies >= _MIN_REPLIES * num_workers

    def step(self, now: Observation) -> Change | Settled | None:
        """The decision for this observation, if there is one."""
        start = self._start
        if self._first_s is None:
            self._first_s = now.now_s
        if start is None or not self._has_begun or now.num_ready_workers < now.num_workers:
            # The first batch is start-up cost, unless it takes long. Nothing is measured while workers start.
            self._has_begun = self._has_begun or now.has_delivered or now.now_s - self._first_s >= _FIRST_WAIT_S
            self._start = now
            return None

        if not self.is_due(now.now_s, now.num_replies, now.num_workers):
            return None

        self._start = now
        decision = self._decide(now, start)
        if isinstance(decision, Change):
            self._start = None
            self._num_fed = self._num_starved = self._num_unchanged = 0
            return decision

        self._num_unchanged += decision is not None
        return Settled(decision) if decision is not None and self._num_unchanged == _NUM_RECENT else None

    def _decide(self, now: Observation, start: Observation) -> Change | Rest | None:
        """A change, or why none is needed; None: it is not known yet."""
        seconds, num_rows, work_s = now.now_s - start.now_s, now.num_rows - start.num_rows, now.work_s - start.work_s
        starved = (now.starved_s - start.starved_s) / seconds
        self._num_since_full = 0 if now.was_full else self._num_since_full + 1
        most = self._affordable(now)
        if now.num_workers > most:
            self._max_workers = most  # permanent: the memory of workers does not shrink
            return Change("num_workers", now.num_workers, most, "max_memory_bytes")

        # MAX_CHUNK_ROWS is the limit of chunks: a larger capacity would not make them larger.
        chunk_rows = chunk_limit(now.capacity, now.num_workers)
        is_small = chunk_rows < MAX_CHUNK_ROWS and chunk_rows * work_s < _CHUNK_S * num_rows
        if is_small and (deeper := self._deeper(now)):
            return Change("capacity", now.capacity, deeper, "small_chunks")

        if starved <= _STARVED:
            self._num_starved = 0
            return self._shrunk(now, math.ceil(work_s / seconds / _MAX_BUSY))

        self._num_fed = 0
        self._num_starved += 1
        return self._grown(now, most) if self._num_starved > 1 or starved > 10 * _STARVED else None

    def _grown(self, now: Observation, most: int) -> Change | Rest | None:
        """The trainer waits."""
        self._num_unfilled = 0 if now.was_full else max(0, self._num_unfilled - 1)
        if self._num_unfilled:  # the channel has been enlarged: wait until it was full once
            return None

        comes_in_bursts = self._num_since_full < _NUM_RECENT
        if comes_in_bursts and (deeper := self._deeper(now)):
            self._num_unfilled, self._num_since_full = _NUM_RECENT, _NUM_RECENT
            return Change("capacity", now.capacity, deeper, "no_room")

        if now.num_workers >= most:
            limit: Rest = "max_workers" if most == self._limits.max_workers else "max_memory_bytes"
            return "read_ahead" if comes_in_bursts else limit

        self._patience *= 2 if self._has_shrunk else 1
        self._has_shrunk = False
        more = min(now.num_workers + 1 + now.num_workers // 8, most)
        return Change("num_workers", now.num_workers, more, "workers_busy")

    def _shrunk(self, now: Observation, num_busy: int) -> Change | Rest:
        """The trainer does not wait."""
        self._num_fed += 1
        needed = max(self._limits.min_workers, num_busy)
        if self._num_fed < self._patience or needed >= now.num_workers:
            return "fed"

        self._has_shrunk = True
        return Change("num_workers", now.num_workers, needed, "workers_idle")

    def _deeper(self, now: Observation) -> int:
        """The next larger capacity; 0 if the limits do not allow one."""
        after = min(_READ_AHEAD_FACTOR * now.capacity, self._limits.max_capacity)
        if now.sample_bytes:
            after = min(after, int(self._limits.max_ready_bytes / now.sample_bytes))
        return after if after > now.capacity else 0

    def _affordable(self, now: Observation) -> int:
        """The number of workers that fit into memory."""
        fitting = self._limits.max_worker_bytes // now.worker_bytes if now.worker_bytes else self._max_workers
        return max(self._limits.min_workers, min(fitting, self._max_workers))


class Tuner:
    """Observes the loader, and adapts the number of workers and the capacity. It does not change D.

    It takes the producer's place as the observer of the executor, and calls the producer itself.

    :param waits: returns how many calls have waited, those that wait now included, and for how many seconds in all.
    :ivar num_changes: decisions that were carried out.
    """

    def __init__(
        self,
        limits: TuningLimits,
        executor: Pool,
        coordinator: Coordinator,
        producer: Producer | MixtureProducer,
        waits: Callable[[], tuple[int, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_changes = 0
        self._autotuner = Autotuner(limits)
        self._executor = executor
        self._coordinator = coordinator
        self._producer = producer
        self._waits = waits
        self._clock = clock
        self._num_groups = coordinator.ledger.counters.num_groups
        self._num_replies = 0
        self._was_full = self._is_active = False
        self._sample_bytes = math.inf
        self._worker_bytes = 0
        self._looked_at: list[int] = []
        self._num_steps = 0
        executor.watch(self._on_change)

    def _on_change(self) -> None:
        """Called after every reply, and after other changes, which are few: they are counted as replies."""
        is_nested, self._is_active = self._is_active, True
        try:
            self._producer.pump()
            if not is_nested:  # sending, or a change, may report further changes
                self._tune()
        finally:
            self._is_active = is_nested

    def _tune(self) -> None:
        producer, executor = self._producer, self._executor
        now_s = self._clock()
        self._num_replies += 1
        self._was_full |= producer.lacks_room and executor.num_wanted > executor.num_workers  # a worker is idle
        if self._autotuner.is_due(now_s, self._num_replies, executor.num_workers):
            decision = self._autotuner.step(self._observe(now_s))
            self._was_full = False
            if decision is not None:
                self._carry_out(decision)

    def _observe(self, now_s: float) -> Observation:
        executor, coordinator, numbers = self._executor, self._coordinator, self._producer.numbers()
        workers = executor.statistics().workers
        pids = [worker.pid for worker in workers if worker.pid is not None and worker.state != "starting"]
        return Observation(
            now_s=now_s,
            num_replies=self._num_replies,
            num_rows=numbers["tokenized_rows_total"],
            work_s=numbers["tokenize_seconds_total"],
            starved_s=self._waits()[1],
            was_full=self._was_full,
            num_workers=executor.num_workers,
            num_ready_workers=sum(worker.state != "starting" for worker in workers),
            capacity=coordinator.rules.capacity,
            has_delivered=coordinator.ledger.counters.num_groups != self._num_groups,
            sample_bytes=self._memory_of_samples(),
            worker_bytes=self._memory_of(pids),
        )

    def _memory_of_samples(self) -> float:
        """Bytes of a sample; 0 if that is not known. The smallest mean: a chunk counts until its last sample goes."""
        channel = self._coordinator.channel
        num_ready = channel.num_produced - self._coordinator.ledger.taken
        if num_ready > 0 and channel.num_ready_bytes > 0:
            self._sample_bytes = min(self._sample_bytes, channel.num_ready_bytes / num_ready)
        return self._sample_bytes if self._sample_bytes < math.inf else 0.0

    def _memory_of(self, pids: list[int]) -> int:
        """Bytes of the largest of the workers."""
        self._num_steps += 1
        if pids != self._looked_at or self._num_steps % _STEPS_PER_LOOK == 0:
            self._looked_at = pids
            self._worker_bytes = max(map(process_memory, pids), default=0)
        return self._worker_bytes

    def _carry_out(self, decision: Change | Settled) -> None:
        executor, coordinator = self._executor, self._coordinator
        if not isinstance(decision, Change):
            num_workers, capacity = executor.num_workers, coordinator.rules.capacity
            _log.info("autotune.settled", reason=decision.reason, num_workers=num_workers, capacity=capacity)
            return

        if decision.what == "num_workers":
            executor.set_num_workers(decision.after)
        else:
            coordinator.set_capacity(decision.after)
        self.num_changes += 1
        self._producer.resize()
        what, before, after, reason = msgspec.structs.astuple(decision)
        _log.info("autotune.changed", what=what, before=before, after=after, reason=reason)
