"""A loader without data: workers, channel and trainer as a handful of events, in a time of its own. For the autotuner.

What it leaves out is what tuning must not depend on: rows, windows, processes. What it has in: workers that need time
to start, and whose chunks take uneven times; a channel in the order of D; a trainer.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.loader.autotune import Autotuner, Change, Observation
from asyncdata.loader.executors import TuningLimits
from asyncdata.prefetch.producer import ChunkPacer

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


@dataclass
class Chunk:
    num_rows: int
    is_done: bool = False


@dataclass
class Worker:
    """Takes two chunks at a time, and works on the first."""

    ready_at: float
    chunks: deque[Chunk] = field(default_factory=deque)


@dataclass
class Simulation:
    """Runs a trainer against workers, and has the autotuner decide after each reply.

    :param trainer: its steps.
    :param row_s: work in a row, give or take ``noise``.
    :param chunk_s: what every chunk costs beside it.
    :param start_s: until a new worker is ready.
    :ivar changes: what was decided.
    :ivar settled: the reasons for which nothing was to be decided any more.
    """

    trainer: Iterator[Step]
    row_s: float = 0.001
    chunk_s: float = 0.0003
    noise: float = 0.1
    start_s: float = 0.3
    sample_bytes: int = 1000
    worker_bytes: int = 100
    seed: int = 0
    allowed: TuningLimits = field(default_factory=limits)

    def __post_init__(self) -> None:
        self.changes: list[Change] = []
        self.settled: list[str] = []
        self.capacity = min(1000, self.allowed.max_capacity)
        self.now = 0.0
        self.num_delivered = self.max_workers = 0
        self._tuner = Autotuner(self.allowed)
        self._workers = [Worker(0.0) for _ in range(self.allowed.min_workers)]
        self._pacer = ChunkPacer(self.capacity, self.num_workers)
        self._random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._num_events = 0
        self._in_order: deque[Chunk] = deque()
        self._wanted = Step(0, 0.0)
        self._num_ready = self._num_in_flight = self._num_replies = self._num_rows = 0
        self._waits_since = self._waited_s = self._work_s = 0.0
        self._is_full = self._was_full = False
        self._after(0.0, self._ask)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def run(self, seconds: float) -> float:
        """So much time passes; the share of it that the trainer waited."""
        before, until = self._starved_s(), self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until
        return (self._starved_s() - before) / seconds

    def _after(self, seconds: float, event: Callable[[], object]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now + seconds, self._num_events, event))

    # The trainer.

    def _ask(self) -> None:
        self._wanted, self._waits_since = next(self.trainer), self.now
        self._serve()
        self._pump()

    def _serve(self) -> None:
        num_rows, seconds = self._wanted
        if num_rows and self._num_ready >= num_rows:
            self._waited_s += self.now - self._waits_since
            self._wanted = Step(0, 0.0)
            self._num_ready -= num_rows
            self.num_delivered += num_rows
            self._after(seconds, self._ask)

    def _starved_s(self) -> float:
        return self._waited_s + (self.now - self._waits_since if self._wanted.num_rows else 0.0)

    # The producer and the workers.

    def _pump(self) -> None:
        self._is_full = False
        while able := [worker for worker in self._workers if self.now >= worker.ready_at and len(worker.chunks) < 2]:
            num_rows = self._pacer.num_rows
            room = max(self.capacity, self._wanted.num_rows) - self._num_in_flight - self._num_ready
            is_awaited = self._wanted.num_rows and not self._num_in_flight
            if room <= 0 or (room < (num_rows + 1) // 2 and not is_awaited):
                self._is_full = any(not worker.chunks for worker in able)
                self._was_full |= self._is_full
                return

            chunk, worker = Chunk(min(num_rows, room)), min(able, key=lambda worker: len(worker.chunks))
            self._in_order.append(chunk)
            self._num_in_flight += chunk.num_rows
            worker.chunks.append(chunk)
            if len(worker.chunks) == 1:
                self._work(worker)

    def _work(self, worker: Worker) -> None:
        slower = self._random.uniform(1 - self.noise, 1 + self.noise)
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
        if self._tuner.is_due(self.now, self._num_replies, self.num_workers):
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
            del self._workers[change.after :]
            self.max_workers = max(self.max_workers, self.num_workers)
        self._pacer.resize(self.capacity, self.num_workers)
        self._pump()
