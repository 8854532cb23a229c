"""Decides on the number of workers and the read-ahead while the loader runs. Counters in, decisions out: it uses no
clock, no thread and no system call.

The rule: while the trainer waits for data, add a worker, up to the limits; if that has not helped, remove it again.
There are two additions:

- If the channel was full shortly before the trainer waited, the trainer asks in bursts: read further ahead first.
- If the trainer has not waited for long, remove the workers that are not needed.

Reading further ahead always means four times as far. None of this changes D.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from asyncdata.prefetch.chunk_size import MAX_CHUNK_ROWS, chunk_limit

__all__ = ("Autotuner", "Change", "TuningLimits", "Observation", "Settled")

Reason = Literal["workers_busy", "workers_idle", "no_gain", "max_memory_bytes", "no_room", "small_chunks"]
Rest = Literal["fed", "max_workers", "max_memory_bytes", "no_gain", "read_ahead"]

_INTERVAL_S, _MIN_REPLIES = 0.5, 4
"""An interval has so many seconds, and so many replies of each worker: a shorter one measures single chunks."""
_FIRST_WAIT_S = 1.0
_STARVED = 0.01
"""Share of an interval that the trainer waits. It must be seen in two intervals in a row, as the machine may have been
busy; ten times as much is believed at once."""
_MIN_GAIN = 0.25
"""Share of the expected gain of more workers. With less, they wait for something else, such as CPUs or the disk."""
_MAX_BUSY = 0.7
"""Share of the time that the remaining workers may be busy when others are removed."""
_NUM_QUIET = 16
"""Intervals without a wait before workers are removed, and before one is tried again that did not help. Doubled after
each wrong decision, so the number of mistakes grows only with the logarithm of the run's length."""
_NUM_RECENT = 8
"""Intervals for which a full channel is remembered, and after which an unchanged state is reported as settled."""
_CHUNK_S = 0.01
"""Seconds of work per chunk; with less, transport and cold CPU caches cost too much of it. CPU time per row of all
processes, two workers and a tokenizer of 6 us per row: 15.2 us with chunks of 512 rows, 14.2 with 1024."""
_READ_AHEAD_FACTOR = 4


class TuningLimits(msgspec.Struct, frozen=True, kw_only=True):
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


class _Trial(msgspec.Struct, frozen=True):
    """A worker was added: the number of workers and the rows per second before, and whether it has failed once."""

    num_workers: int
    rate: float
    has_failed: bool = False


class Autotuner:
    """Decides at each observation. The caller must carry out its decisions."""

    def __init__(self, limits: TuningLimits) -> None:
        self._limits = limits
        self._max_workers = limits.max_workers
        self._first_s: float | None = None
        self._has_begun = False
        self._start: Observation | None = None  # of the interval
        self._trial: _Trial | None = None
        self._num_intervals = self._num_fed = self._num_starved = self._num_unfilled = 0
        self._num_since_full = _NUM_RECENT
        self._has_shrunk = False
        self._shrink_patience = self._trial_patience = _NUM_QUIET
        self._next_trial = 0
        self._rest: tuple[Rest, int] = ("fed", 0)
        self._settled_at: tuple[int, int] | None = None

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
        elif self.is_due(now.now_s, now.num_replies, now.num_workers):
            self._start = now
            self._num_intervals += 1
            decision = self._decide(now, start)
            if isinstance(decision, Change):
                self._start = None
                self._num_fed = self._num_starved = 0
                self._rest = ("fed", 0)
            return decision
        return None

    def _decide(self, now: Observation, start: Observation) -> Change | Settled | None:
        seconds, num_rows, work_s = now.now_s - start.now_s, now.num_rows - start.num_rows, now.work_s - start.work_s
        rate, starved = num_rows / seconds, (now.starved_s - start.starved_s) / seconds
        self._num_since_full = 0 if now.was_full else self._num_since_full + 1
        self._num_starved = self._num_starved + 1 if starved > _STARVED else 0
        if now.num_workers > self._affordable(now):
            self._max_workers = self._affordable(now)  # permanent: the memory of workers does not shrink
            return self._set_workers(now, self._max_workers, "max_memory_bytes")

        if num_rows and chunk_limit(now.capacity, now.num_workers) * work_s < _CHUNK_S * num_rows:
            # MAX_CHUNK_ROWS is the limit of chunks: a larger capacity would not make them larger.
            if chunk_limit(now.capacity, now.num_workers) < MAX_CHUNK_ROWS and (deeper := self._deeper(now)):
                return self._set_capacity(now, deeper, "small_chunks")

        if self._trial is not None and not self._has_helped(now, rate):
            return self._take_back(now, self._trial)

        if starved <= _STARVED:
            return self._shrink(now, work_s / seconds)

        self._num_fed = 0
        return self._help(now, rate) if self._num_starved > 1 or starved > 10 * _STARVED else None

    # While the trainer waits.

    def _help(self, now: Observation, rate: float) -> Change | Settled | None:
        self._num_unfilled = 0 if now.was_full else max(0, self._num_unfilled - 1)
        if self._num_unfilled:  # the channel has been enlarged: wait until it was full once
            return None

        comes_in_bursts = self._num_since_full < _NUM_RECENT
        if comes_in_bursts and (deeper := self._deeper(now)):
            self._num_unfilled, self._num_since_full = _NUM_RECENT, _NUM_RECENT
            return self._set_capacity(now, deeper, "no_room")

        most = self._affordable(now)
        if now.num_workers >= most:
            limit: Rest = "max_workers" if most == self._limits.max_workers else "max_memory_bytes"
            return self._settle(now, "read_ahead" if comes_in_bursts else limit)

        if self._num_intervals < self._next_trial:
            return self._settle(now, "no_gain")

        self._shrink_patience *= 2 if self._has_shrunk else 1
        self._has_shrunk = False
        self._trial = _Trial(now.num_workers, rate) if rate else None
        return self._set_workers(now, min(now.num_workers + 1 + now.num_workers // 8, most), "workers_busy")

    def _has_helped(self, now: Observation, rate: float) -> bool:
        trial, self._trial = self._trial, None
        if trial is None or self._num_starved == 0:
            self._trial_patience = _NUM_QUIET
            return True

        if rate / trial.rate - 1 >= _MIN_GAIN * (now.num_workers / trial.num_workers - 1):
            return True

        self._trial = trial
        return False

    def _take_back(self, now: Observation, trial: _Trial) -> Change | None:
        """Remove the added worker if it did not help in two intervals: one may be a hiccup of the machine."""
        if not trial.has_failed:
            self._trial = msgspec.structs.replace(trial, has_failed=True)
            return None

        self._trial = None
        self._next_trial = self._num_intervals + self._trial_patience
        self._trial_patience *= 2
        if now.num_workers <= trial.num_workers:  # an idle worker was removed meanwhile
            return None

        return self._set_workers(now, trial.num_workers, "no_gain")

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

    # While the trainer does not wait.

    def _shrink(self, now: Observation, num_busy: float) -> Change | Settled | None:
        self._num_fed += 1
        needed = max(self._limits.min_workers, math.ceil(num_busy / _MAX_BUSY))
        if self._num_fed >= self._shrink_patience and needed < now.num_workers:
            self._has_shrunk = True
            return self._set_workers(now, needed, "workers_idle")

        return self._settle(now, "fed")

    def _settle(self, now: Observation, reason: Rest) -> Settled | None:
        """Report once that nothing changes, after it has been so for some intervals."""
        number = self._rest[1] + 1 if self._rest[0] == reason else 1
        self._rest = (reason, number)
        is_new = number >= _NUM_RECENT and self._settled_at != (now.num_workers, now.capacity)
        self._settled_at = (now.num_workers, now.capacity) if is_new else self._settled_at
        return Settled(reason) if is_new else None

    # Changes.

    def _set_workers(self, now: Observation, after: int, reason: Reason) -> Change:
        return Change("num_workers", now.num_workers, after, reason)

    def _set_capacity(self, now: Observation, after: int, reason: Reason) -> Change:
        return Change("capacity", now.capacity, after, reason)
