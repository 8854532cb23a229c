"""How many workers, and how far to read ahead, found while the loader runs. Counters in, decisions out: no clock, no
thread, no machine in here.

The rule is short. While the trainer waits for data:

- if workers were idle before, as the channel was full, the trainer comes in bursts: read further ahead;
- if the workers have no pause, they are too few: take more, and look whether that has helped.

While it does not wait, nothing of that is done; after long enough, workers that are not needed are let go. Chunks that
the channel's capacity keeps too small are work for nothing, whoever waits: read further ahead. All of it stays
below the limits, and none of it can be seen in D. What tf.data's autotuner taught: an explicit budget for CPUs and for
memory, and no model of the pipeline that has to be right.
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
"""Of each worker in an interval: fewer say more about one chunk than about the trainer."""
_NUM_FIRST = 2
"""Replies of each worker before the first interval: what it was given at once. Meanwhile the channel fills."""
_MIN_INTERVAL_S = 0.5
"""A shorter one measures the scheduler. A worker that is new has loaded its tokenizer in about this time."""
_FIRST_WAIT_S = 1.0
"""What the first batch takes says nothing about the others, unless it takes long."""
_NUM_KEPT = 8
"""Intervals that are looked back on."""
_STARVED = 0.01
"""A trainer that waits for less of its time gains less by more workers than two measurements of it differ."""
_STARVED_BADLY = 0.1
"""Less is seen twice before something is done about it: the machine may have been busy with something else."""
_NO_PAUSE = 0.8
"""Workers busy for more of the time are the slow part: the rest is the way from one chunk to the next."""
_BUSY_AT_BEST = 0.9
"""How busy workers shall be that are added: a row does not take the same time as the one before."""
_BUSY_AT_LEAST = 0.7
"""Workers are let go if those left are busy for less of the time. Well below the line above, or it would not end."""
_MIN_GAIN = 0.25
"""Of what more workers should give. With less, it is something else that all of them wait for, such as CPUs."""
_CHUNK_S = 0.01
"""Work in a chunk; with less, its way to the worker and back, and the caches that it finds cold, cost too much of it.
CPU time a row of all processes, two workers and a tokenizer of 6 us a row: 15.2 us with chunks of 512 rows, 14.2 with
1024, and with more of those in the channel 13.8 (8 of them) and 12.8 (16)."""
_CHUNKS_AHEAD = 4
"""Of that size, for each worker."""
_NUM_QUIET = 16
"""Intervals without a wait before a worker is let go, and before more workers are tried again where they were of no
use. Doubled each time that it was wrong: there are no more mistakes than the logarithm of the run's length."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What may be chosen. Where least and most are the same, there is no choice.

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
    """What the loader has done up to a moment, and is doing.

    :ivar now_s: the moment.
    :ivar num_replies: requests that workers answered.
    :ivar num_rows: rows that they tokenized.
    :ivar starved_s: for how long calls have waited.
    :ivar full_s: for how long workers had nothing to do, as there was no room in the channel.
    :ivar busy_s: for how long workers had something to do, each for itself.
    :ivar work_s: for how long they say that they tokenized.
    :ivar num_workers: how many there are to be.
    :ivar num_ready_workers: how many have loaded the tokenize function.
    :ivar capacity: samples that the channel holds.
    :ivar has_delivered: whether the trainer has had anything yet.
    :ivar sample_bytes: memory that a sample takes; 0 if that is not known.
    :ivar worker_bytes: memory that a worker takes; 0 if that is not known.
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
    """There is nothing to be changed: the trainer is ``fed``, or the reason says what keeps it from being so."""

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
        """All of them as one; they have the same workers."""
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
        """The work in a row; 0 if that is not known."""
        return self.work_s / self.num_rows if self.num_rows else 0.0

    @property
    def rate(self) -> float:
        """Rows a second; requests, while there are no rows yet but an index of them is made."""
        return (self.num_rows or self.num_replies) / self.seconds


class _Trial(msgspec.Struct, frozen=True):
    """More workers are tried: what was before, and how often they were looked at in vain."""

    num_workers: int
    rate: float
    had_rows: bool
    num_failed: int = 0


class Autotuner:
    """Decides, at each observation. The decisions are taken to be carried out."""

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
        """Whether :meth:`step` would look at an observation of now; cheap, for after every reply."""
        start = self._start
        if start is None:
            return True

        num_new = num_replies - start.num_replies
        if not self._is_warm:
            return num_new >= _NUM_FIRST * num_workers

        return num_new >= _MIN_REPLIES * num_workers and now_s - start.now_s >= _MIN_INTERVAL_S

    def step(self, now: Observation) -> list[Change | Settled]:
        """What is to be done, now."""
        start = self._start
        if start is None or now.num_ready_workers < now.num_workers:
            self._start, self._is_warm = now, False  # what workers do while others start is no measure
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
        """The first interval is from now on, if the first batch is over, which nobody is to be judged by."""
        self._has_begun = self._has_begun or now.has_delivered or now.now_s - start.now_s >= _FIRST_WAIT_S
        if not self._has_begun:
            return []

        self._start, self._is_warm = now, True
        interval = _Interval.between(start, now)
        return self._deepen(now, interval) if interval.starved_s > _STARVED_BADLY * interval.seconds else []

    def _decide(self, now: Observation, interval: _Interval) -> list[Change | Settled]:
        if now.num_workers > self._affordable(now):
            self._most_workers = self._affordable(now)  # for good: what workers take does not become less
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
        """What lets every worker have chunks of enough work."""
        row_s = interval.row_s
        if row_s <= 0 or chunk_limit(now.capacity, now.num_workers) * row_s >= _CHUNK_S:
            return []

        rows = min(MAX_CHUNK_ROWS, math.ceil(_CHUNK_S / row_s))
        wanted = self._capacity_below(now, _CHUNKS_AHEAD * now.num_workers * rows)
        return self._change_capacity(now, wanted, "small_chunks") if wanted > now.capacity else []

    # The trainer waits.

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

        # While it waits it would work: then as many would be busy. But a measurement is not to be trusted too far.
        num_busy = interval.busy * now.num_workers / max(1e-9, 1 - interval.starved)
        wanted = max(now.num_workers + 1, min(2 * now.num_workers, math.ceil(num_busy / _BUSY_AT_BEST)))
        self._shrink_patience *= 2 if self._has_shrunk else 1
        self._has_shrunk = False
        self._trial = _Trial(now.num_workers, interval.rate, interval.num_rows > 0)
        return self._change_workers(now, min(wanted, most), "workers_busy")

    def _fail(self, now: Observation, trial: _Trial) -> list[Change | Settled]:
        """They are of no use, if that is seen twice: to take them back for a hiccup of the machine costs more."""
        if trial.num_failed == 0:
            self._trial = msgspec.structs.replace(trial, num_failed=1)
            return []

        self._next_trial = self._num_intervals + self._trial_patience
        self._trial_patience *= 2
        return self._change_workers(now, trial.num_workers, "no_gain")

    def _has_paid(self, trial: _Trial, interval: _Interval) -> bool:
        """Whether the trainer has what it wants now, or gets more by a fair part of what more workers should give."""
        if interval.starved <= _STARVED or trial.had_rows != (interval.num_rows > 0):
            self._trial_patience = _NUM_QUIET
            return True

        expected = interval.num_workers / trial.num_workers - 1
        return interval.rate / trial.rate - 1 >= _MIN_GAIN * expected

    def _capacity_below(self, now: Observation, wanted: int) -> int:
        """The present capacity, doubled until it is as much as ``wanted``, or all that is allowed."""
        limits, capacity = self._limits, now.capacity
        while capacity < wanted:
            after = min(2 * capacity, limits.max_capacity)
            if after == capacity or after * now.sample_bytes > limits.max_ready_bytes:
                break
            capacity = after
        return capacity

    def _affordable(self, now: Observation) -> int:
        """Workers that there is memory for."""
        fitting = self._limits.max_worker_bytes // now.worker_bytes if now.worker_bytes else self._most_workers
        return max(self._limits.min_workers, min(fitting, self._most_workers))

    # It does not.

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

    # Either way.

    def _change_workers(self, now: Observation, after: int, reason: Reason) -> list[Change | Settled]:
        self._kept.clear()  # measured with others
        self._start = None
        self._num_until_full = 0
        return self._changed(Change("num_workers", now.num_workers, after, reason))

    def _change_capacity(self, now: Observation, after: int, reason: Reason) -> list[Change | Settled]:
        self._kept.clear()  # what was asked for is done
        return self._changed(Change("capacity", now.capacity, after, reason))

    def _changed(self, change: Change) -> list[Change | Settled]:
        self._num_fed = self._num_starved = self._num_stuck = 0
        return [change]
