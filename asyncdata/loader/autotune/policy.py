"""Finds the number of workers and the read-ahead while the loader runs. Counters in, decisions out: it uses no clock,
no thread and no system call.

The rule, while the trainer waits for data:

- if workers were idle before, because the channel was full, the trainer asks in bursts: read further ahead;
- if the workers are always busy, there are too few: add workers, and check whether that has helped.

While the trainer does not wait, nothing is added; after long enough, workers that are not needed are removed. If the
channel's capacity keeps chunks too small, their overhead is wasted work: read further ahead in any case. All of this
stays within the limits, and does not change D. As in tf.data's autotuner, the budgets for CPUs and memory are explicit;
unlike it, there is no model of the pipeline that has to be right.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Literal

import msgspec

from asyncdata.prefetch.chunk_size import MAX_CHUNK_ROWS, chunk_limit

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("Autotuner", "Change", "Limits", "Observation", "Settled")

Reason = Literal["workers_busy", "workers_idle", "no_gain", "max_memory_bytes", "no_room", "small_chunks"]
Rest = Literal["fed", "max_workers", "max_memory_bytes", "no_gain", "read_ahead", "reading"]

_MIN_REPLIES = 4
"""Replies of each worker in an interval: fewer would measure single chunks, not the trainer."""
_NUM_FIRST = 2
"""Replies of each worker before the first interval: its first requests, while the channel fills."""
_MIN_INTERVAL_S = 0.5
"""Seconds. A shorter interval measures the scheduler. A new worker loads its tokenizer in about this time."""
_FIRST_WAIT_S = 1.0
"""Seconds. The time of the first batch is start-up cost; it is measured only if it takes longer than this."""
_NUM_KEPT = 8
"""Number of recent intervals that are kept."""
_STARVED = 0.01
"""Share of the time. A trainer that waits less gains less from more workers than the noise of the measurement."""
_STARVED_BADLY = 0.1
"""Share of the time. A smaller share must be seen twice before it is acted on: the machine may have been busy."""
_NO_PAUSE = 0.8
"""Share of the time. Workers that are busier are the bottleneck: the rest is the time between chunks."""
_BUSY_AT_BEST = 0.9
"""Target share of busy time when workers are added. Below 1, as rows differ in their time."""
_BUSY_AT_LEAST = 0.7
"""Workers are removed if the others would be busy for less than this share. Well below the target, or the number of
workers would oscillate."""
_MIN_GAIN = 0.25
"""Share of the expected gain of more workers. With less gain, all workers wait for something else, such as CPUs."""
_CHUNK_S = 0.01
"""Seconds of work per chunk; with less, transport and cold CPU caches cost too much of it. CPU time per row of all
processes, two workers and a tokenizer of 6 us per row: 15.2 us with chunks of 512 rows, 14.2 with 1024, and with more
such chunks in the channel 13.8 (8 chunks) and 12.8 (16)."""
_CHUNKS_AHEAD = 4
"""Chunks of that size in the channel, per worker."""
_NUM_QUIET = 16
"""Intervals without a wait before a worker is removed, and before more workers are tried again after they did not help.
Doubled after each wrong decision, so the number of mistakes grows only with the logarithm of the run's length."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of what may be chosen. If the lower and the upper limit are equal, nothing is tuned.

    :ivar max_capacity: samples that the channel may hold.
    :ivar max_worker_bytes: memory of all workers together.
    :ivar max_ready_bytes: memory of what is read ahead.
    """

    min_workers: int
    max_workers: int
    max_capacity: int
    max_worker_bytes: int
    max_ready_bytes: int


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The counters and the state of the loader at one time. All times are in seconds, counters since the start.

    :ivar now_s: the time of the observation.
    :ivar num_replies: requests that workers answered.
    :ivar num_rows: rows that workers tokenized.
    :ivar starved_s: time for which calls waited.
    :ivar full_s: time for which workers were idle because the channel had no room.
    :ivar busy_s: time for which workers had a request, summed over the workers.
    :ivar work_s: time of tokenizing, as the workers report.
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
    starved_s: float
    full_s: float
    busy_s: float
    work_s: float
    num_workers: int
    num_ready_workers: int
    capacity: int
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


class _Interval(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between two observations.

    :ivar starved: the share of the time that the trainer waited.
    :ivar busy: the share of the time that a worker was busy.
    """

    seconds: float
    starved_s: float
    full_s: float
    busy_s: float
    work_s: float
    num_rows: int
    num_replies: int
    num_workers: int

    @classmethod
    def between(cls, then: Observation, now: Observation) -> _Interval:
        seconds = now.now_s - then.now_s
        return cls(
            seconds=seconds,
            starved_s=min(seconds, now.starved_s - then.starved_s),
            full_s=now.full_s - then.full_s,
            busy_s=now.busy_s - then.busy_s,
            work_s=now.work_s - then.work_s,
            num_rows=now.num_rows - then.num_rows,
            num_replies=now.num_replies - then.num_replies,
            num_workers=now.num_workers,
        )

    @classmethod
    def sum(cls, parts: Iterable[_Interval]) -> _Interval:
        """All intervals as one; they have the same number of workers."""
        rows = [msgspec.structs.astuple(part) for part in parts]
        names = cls.__struct_fields__
        totals = dict(zip(names, map(sum, zip(*rows, strict=True)), strict=True))
        return cls(**(totals | {"num_workers": rows[-1][names.index("num_workers")]}))

    @property
    def starved(self) -> float:
        return self.starved_s / self.seconds

    @property
    def busy(self) -> float:
        return min(1.0, self.busy_s / (self.seconds * self.num_workers))

    @property
    def row_s(self) -> float:
        """Seconds of work per row; 0 if that is not known."""
        return self.work_s / self.num_rows if self.num_rows else 0.0

    @property
    def rate(self) -> float:
        """Rows per second; requests per second while the row index is built and there are no rows yet."""
        return (self.num_rows or self.num_replies) / self.seconds


class _Trial(msgspec.Struct, frozen=True):
    """More workers are being tried: the values before, and how often they did not help."""

    num_workers: int
    rate: float
    had_rows: bool
    num_failed: int = 0


class Autotuner:
    """Decides at each observation. The caller must carry out its decisions."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._start: Observation | None = None
        self._is_warm = self._has_begun = False
        self._kept: deque[_Interval] = deque(maxlen=_NUM_KEPT)
        self._most_workers = limits.max_workers
        self._trial: _Trial | None = None
        self._num_intervals = 0
        self._num_fed = self._num_starved = self._num_stuck = 0
        self._num_until_full = 0
        self._has_shrunk = False
        self._shrink_patience = self._trial_patience = _NUM_QUIET
        self._next_trial = 0
        self._settled_at: tuple[int, int] | None = None

    def is_due(self, now_s: float, num_replies: int, num_workers: int) -> bool:
        """Whether :meth:`step` would use an observation now. Cheap: called after every reply."""
        start = self._start
        if start is None:
            return True

        num_new = num_replies - start.num_replies
        if not self._is_warm:
            return num_new >= _NUM_FIRST * num_workers

        return num_new >= _MIN_REPLIES * num_workers and now_s - start.now_s >= _MIN_INTERVAL_S

    def step(self, now: Observation) -> list[Change | Settled]:
        """The decisions for this observation."""
        start = self._start
        if start is None or now.num_ready_workers < now.num_workers:
            self._start, self._is_warm = now, False  # do not measure while workers are starting
            return []

        if not self.is_due(now.now_s, now.num_replies, now.num_workers):
            return []

        if not self._is_warm or not self._has_begun:
            return self._begin(start, now)

        self._start = now
        interval = _Interval.between(start, now)
        self._kept.append(interval)
        self._num_intervals += 1
        return self._decide(now, interval)

    def _begin(self, start: Observation, now: Observation) -> list[Change | Settled]:
        """Start measuring after the first batch; its latency is start-up cost."""
        self._has_begun = self._has_begun or now.has_delivered or now.now_s - start.now_s >= _FIRST_WAIT_S
        if not self._has_begun:
            return []

        self._start, self._is_warm = now, True
        interval = _Interval.between(start, now)
        return self._deepen(now, interval) if interval.starved_s > _STARVED_BADLY * interval.seconds else []

    def _decide(self, now: Observation, interval: _Interval) -> list[Change | Settled]:
        if now.num_workers > self._affordable(now):
            self._most_workers = self._affordable(now)  # permanent: the memory of workers does not shrink
            return self._change_workers(now, self._most_workers, "max_memory_bytes")

        if deeper := self._deepen(now, interval):
            return deeper

        trial, self._trial = self._trial, None
        if trial is not None and not self._has_paid(trial, interval):
            return self._fail(now, trial)

        if self._num_until_full:
            self._num_until_full = 0 if interval.full_s > 0 else self._num_until_full - 1
            if self._num_until_full:
                return []

        if _Interval.sum(self._kept).starved <= _STARVED:
            return self._rest(now)

        self._num_fed = 0
        self._num_starved = self._num_starved + 1 if interval.starved > _STARVED else 0
        is_certain = interval.starved > _STARVED_BADLY or self._num_starved > 1
        return self._help(now, interval) if is_certain else []

    def _deepen(self, now: Observation, interval: _Interval) -> list[Change | Settled]:
        """Read further ahead if the capacity keeps chunks too small."""
        row_s = interval.row_s
        if row_s <= 0 or chunk_limit(now.capacity, now.num_workers) * row_s >= _CHUNK_S:
            return []

        rows = min(MAX_CHUNK_ROWS, math.ceil(_CHUNK_S / row_s))
        wanted = self._capacity_below(now, _CHUNKS_AHEAD * now.num_workers * rows)
        return self._change_capacity(now, wanted, "small_chunks") if wanted > now.capacity else []

    # While the trainer waits.

    def _help(self, now: Observation, interval: _Interval) -> list[Change | Settled]:
        recent = _Interval.sum(self._kept)
        comes_in_bursts = recent.full_s > 0 and recent.busy < _NO_PAUSE
        wanted = self._capacity_below(now, 2 * now.capacity) if comes_in_bursts else now.capacity
        if wanted > now.capacity:
            self._num_until_full = _NUM_KEPT
            return self._change_capacity(now, wanted, "no_room")

        if interval.busy >= _NO_PAUSE:
            return self._add_workers(now, interval)

        return self._stuck(now, "read_ahead" if comes_in_bursts else "reading")

    def _add_workers(self, now: Observation, interval: _Interval) -> list[Change | Settled]:
        most = self._affordable(now)
        if now.num_workers >= most:
            return self._stuck(now, "max_workers" if most == self._limits.max_workers else "max_memory_bytes")

        if self._num_intervals < self._next_trial:
            return self._stuck(now, "no_gain")

        # The workers needed if the trainer never waited; but at most twice as many as now, as measurements are noisy.
        num_busy = interval.busy * now.num_workers / max(1e-9, 1 - interval.starved)
        wanted = max(now.num_workers + 1, min(2 * now.num_workers, math.ceil(num_busy / _BUSY_AT_BEST)))
        self._shrink_patience *= 2 if self._has_shrunk else 1
        self._has_shrunk = False
        self._trial = _Trial(now.num_workers, interval.rate, interval.num_rows > 0)
        return self._change_workers(now, min(wanted, most), "workers_busy")

    def _fail(self, now: Observation, trial: _Trial) -> list[Change | Settled]:
        """Remove the added workers if they did not help in two intervals: one may be a hiccup of the machine."""
        if trial.num_failed == 0:
            self._trial = msgspec.structs.replace(trial, num_failed=1)
            return []

        self._next_trial = self._num_intervals + self._trial_patience
        self._trial_patience *= 2
        return self._change_workers(now, trial.num_workers, "no_gain")

    def _has_paid(self, trial: _Trial, interval: _Interval) -> bool:
        """Whether the trainer waits no more, or gets more rows by at least ``_MIN_GAIN`` of what was expected."""
        if interval.starved <= _STARVED or trial.had_rows != (interval.num_rows > 0):
            self._trial_patience = _NUM_QUIET
            return True

        expected = interval.num_workers / trial.num_workers - 1
        return interval.rate / trial.rate - 1 >= _MIN_GAIN * expected

    def _capacity_below(self, now: Observation, wanted: int) -> int:
        """The current capacity, doubled until it reaches ``wanted`` or the limits."""
        limits, capacity = self._limits, now.capacity
        while capacity < wanted:
            after = min(2 * capacity, limits.max_capacity)
            if after == capacity or after * now.sample_bytes > limits.max_ready_bytes:
                break
            capacity = after
        return capacity

    def _affordable(self, now: Observation) -> int:
        """The number of workers that fit into memory."""
        fitting = self._limits.max_worker_bytes // now.worker_bytes if now.worker_bytes else self._most_workers
        return max(self._limits.min_workers, min(fitting, self._most_workers))

    # While the trainer does not wait.

    def _rest(self, now: Observation) -> list[Change | Settled]:
        self._num_fed += 1
        self._num_starved = self._num_stuck = 0
        if self._num_fed >= self._shrink_patience and len(self._kept) == _NUM_KEPT:
            recent = _Interval.sum(self._kept)
            needed = max(self._limits.min_workers, math.ceil(recent.busy * now.num_workers / _BUSY_AT_LEAST))
            if needed < now.num_workers:
                self._has_shrunk = True
                return self._change_workers(now, needed, "workers_idle")

        return self._settle(now, "fed") if self._num_fed >= _NUM_KEPT else []

    def _stuck(self, now: Observation, reason: Rest) -> list[Change | Settled]:
        self._num_stuck += 1
        return self._settle(now, reason) if self._num_stuck >= _NUM_KEPT else []

    def _settle(self, now: Observation, reason: Rest) -> list[Change | Settled]:
        before, self._settled_at = self._settled_at, (now.num_workers, now.capacity)
        return [] if before == self._settled_at else [Settled(reason)]

    # Changes.

    def _change_workers(self, now: Observation, after: int, reason: Reason) -> list[Change | Settled]:
        self._kept.clear()  # measured with another number of workers
        self._start = None
        self._num_until_full = 0
        return self._changed(Change("num_workers", now.num_workers, after, reason))

    def _change_capacity(self, now: Observation, after: int, reason: Reason) -> list[Change | Settled]:
        self._kept.clear()  # measured with another capacity
        return self._changed(Change("capacity", now.capacity, after, reason))

    def _changed(self, change: Change) -> list[Change | Settled]:
        self._num_fed = self._num_starved = self._num_stuck = 0
        return [change]
