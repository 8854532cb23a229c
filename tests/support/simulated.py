"""A loader without data: workers, channel and trainer as a handful of events, in a time of its own. For the autotuner.

What it leaves out is what tuning must not depend on: rows, windows, processes. What it has in: workers that need time
to start, that compete for CPUs, and whose chunks take uneven times; a channel in the order of D; a trainer.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.loader.autotune.policy import Autotuner, Change, Observation, TuningLimits
from asyncdata.prefetch.chunk_size import ChunkPacer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FREE = 1 << 40


class Step(NamedTuple):
    """What a trainer does: it asks for ``num_rows``, and then computes for ``seconds``."""

    num_rows: int
    seconds: float


def steps(num_rows: int, seconds: float) -> Iterator[Step]:
    """The same step, for ever."""
    while True:
        yield Step(num_rows, seconds)


def limits(**values: int) -> TuningLimits:
    """No limit but eight workers, except for what is given."""
    free = {"min_workers": 1, "max_workers": 8, "max_capacity": FREE}
    return TuningLimits(**{**free, "max_worker_bytes": FREE, "max_ready_bytes": FREE, **values})


class Chunk:
    """Rows on their way."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.is_done = False


class Worker:
    """Takes two chunks at a time, and works on the first."""

    def __init__(self, ready_at: float) -> None:
        self.ready_at = ready_at
        self.chunks: deque[Chunk] = deque()
        self.busy_since = 0.0


class Simulation:
    """Runs a trainer against workers, and has the autotuner decide after each reply.

    :param trainer: its steps.
    :param row_s: work in a row, give or take ``noise``.
    :param chunk_s: what every chunk costs beside it.
    :param num_cpus: where more workers are busy than these, all are slower for it.
    :param start_s: until a new worker is ready.
    :ivar changes: what was decided.
    :ivar settled: the reasons for which nothing was to be decided any more.
    """

    def __init__(
        self,
        trainer: Iterator[Step],
        *,
        row_s: float = 0.001,
        chunk_s: float = 0.0003,
        noise: float = 0.1,
        num_cpus: int = 8,
        start_s: float = 0.3,
        sample_bytes: int = 1000,
        worker_bytes: int = 100,
        seed: int = 0,
        allowed: TuningLimits | None = None,
    ) -> None:
        allowed = allowed or limits()
        self.row_s, self.chunk_s, self.noise = row_s, chunk_s, noise
        self.num_cpus, self.start_s = num_cpus, start_s
        self.sample_bytes, self.worker_bytes = sample_bytes, worker_bytes
        self.trainer = trainer
        self.changes: list[Change] = []
        self.settled: list[str] = []
        self.capacity = min(1000, allowed.max_capacity)
        self.now = 0.0
        self.num_delivered = 0
        self.max_workers = 0
        self._tuner = Autotuner(allowed)
        self._workers = [Worker(0.0) for _ in range(allowed.min_workers)]
        self._retired: list[Worker] = []
        self._pacer = ChunkPacer(self.capacity, self.num_workers)
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._num_events = 0
        self._in_order: deque[Chunk] = deque()
        self._num_ready = self._num_in_flight = self._num_wanted = 0
        self._waits_since = self._counted_until = 0.0
        self._waited_s = self._work_s = 0.0
        self._is_full = self._was_full = False
        self._num_replies = self._num_rows = 0
        self._after(0.0, self._ask)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def run(self, seconds: float) -> float:
        """So much time passes; the share of it that the trainer waited."""
        before, until = self._starved_s(), self.now + seconds
        while self._events and self._events[0][0] <= until:
            time, _, event = heapq.heappop(self._events)
            self._pass_time(time)
            event()
        self._pass_time(until)
        return (self._starved_s() - before) / seconds

    def _after(self, seconds: float, event: Callable[[], object]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now + seconds, self._num_events, event))

    def _pass_time(self, now: float) -> None:
        self.now = now

    # The trainer.

    def _ask(self) -> None:
        step = next(self.trainer)
        self._num_wanted, self._waits_since = step.num_rows, self.now
        self._serve = lambda: self._give(step)
        self._serve()
        self._pump()

    def _give(self, step: Step) -> None:
        if self._num_wanted and self._num_ready >= step.num_rows:
            self._waited_s += self.now - self._waits_since
            self._num_wanted = 0
            self._num_ready -= step.num_rows
            self.num_delivered += step.num_rows
            self._after(step.seconds, self._ask)

    def _starved_s(self) -> float:
        return self._waited_s + (self.now - self._waits_since if self._num_wanted else 0.0)

    # The producer and the workers.

    def _pump(self) -> None:
        self._is_full = False
        while able := [worker for worker in self._workers if self.now >= worker.ready_at and len(worker.chunks) < 2]:
            num_rows = self._pacer.num_rows
            room = max(self.capacity, self._num_wanted) - self._num_in_flight - self._num_ready
            is_awaited = self._num_wanted and not self._num_in_flight
            if room <= 0 or (room < (num_rows + 1) // 2 and not is_awaited):
                self._is_full = any(not worker.chunks for worker in able)
                self._was_full |= self._is_full
                return

            num_rows = min(num_rows, room)
            chunk, worker = Chunk(num_rows), min(able, key=lambda worker: len(worker.chunks))
            self._in_order.append(chunk)
            self._num_in_flight += num_rows
            worker.chunks.append(chunk)
            if len(worker.chunks) == 1:
                self._work(worker)

    def _work(self, worker: Worker) -> None:
        num_busy = sum(bool(other.chunks) for other in (*self._workers, *self._retired))
        slower = max(1.0, num_busy / self.num_cpus) * self._random.uniform(1 - self.noise, 1 + self.noise)
        work_s = worker.chunks[0].num_rows * self.row_s * slower
        self._after(work_s + self.chunk_s * slower, lambda: self._reply(worker, work_s))

    def _reply(self, worker: Worker, work_s: float) -> None:
        chunk = worker.chunks.popleft()
        if worker.chunks:
            self._work(worker)
        chunk.is_done = True
        self._num_replies += 1
        self._num_rows += chunk.num_rows
        self._work_s += work_s
        self._pacer.learn(chunk.num_rows, work_s)
        while self._in_order and self._in_order[0].is_done:
            num_rows = self._in_order.popleft().num_rows
            self._num_in_flight -= num_rows
            self._num_ready += num_rows
        self._serve()
        self._pump()
        self._tune()

    def _tune(self) -> None:
        if not self._tuner.is_due(self.now, self._num_replies, self.num_workers):
            return

        decision = self._tuner.step(self._observation())
        if isinstance(decision, Change):
            self._change(decision)
        elif decision is not None:
            self.settled.append(decision.reason)

    def _observation(self) -> Observation:
        was_full, self._was_full = self._was_full, self._is_full
        return Observation(
            now_s=self.now,
            num_replies=self._num_replies,
            num_rows=self._num_rows,
            starved_s=self._starved_s(),
            was_full=was_full,
            work_s=self._work_s,
            num_workers=self.num_workers,
            num_ready_workers=sum(worker.ready_at <= self.now for worker in self._workers),
            capacity=self.capacity,
            has_delivered=self.num_delivered > 0,
            sample_bytes=self.sample_bytes,
            worker_bytes=self.worker_bytes,
        )

    def _change(self, change: Change) -> None:
        self.changes.append(change)
        if change.what == "capacity":
            assert change.before == self.capacity
            self.capacity = change.after
        else:
            assert change.before == self.num_workers
            while self.num_workers < change.after:
                self._workers.append(Worker(self.now + self.start_s))
                self._after(self.start_s, self._pump)
            self._retired += self._workers[change.after :]
            del self._workers[change.after :]
            self.max_workers = max(self.max_workers, self.num_workers)
        self._pacer.resize(self.capacity, self.num_workers)
        self._pump()
