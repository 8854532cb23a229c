"""The whole loader in one thread, on trio, in a time of its own; what happens when follows from a seed alone.

Source, order, windows, read-ahead, coordinator, service, face and engine are the real ones, and so is what workers do.
Not real are their processes, all threads, and the clock: each request takes a random time of a mock clock, workers die
in the middle of it, and trio takes the tasks that are ready in a random order. Whenever all of them wait, the state is
searched for work that should have been done (:mod:`tests.faults.support.liveness`).

What the trainers in it do is in ``tests.faults.support.simulated_sources``.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import anyio
import anyio.to_thread
import msgspec
import trio.testing

from asyncdata import AsyncDataLoader
from asyncdata.core.messages import Tokenized
from asyncdata.loader.service import Service
from asyncdata.tokenization.base import open_tokenize_fn
from asyncdata.workers.base import MAX_LOSSES, NUM_SLOTS, Crashed, ExecutorStatistics, Slots, WorkerState
from asyncdata.workers.changes import Changes, Promise
from asyncdata.workers.request_handler import Handler
from tests.faults.support.liveness import SimulatedThreads, Watcher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncdata.core.messages import Job, Reply, Request

__all__ = (
    "POISON",
    "REQUEST_S",
    "STALLED_S",
    "Outcome",
    "SimulatedLoader",
    "WorkerKilled",
    "World",
    "run_and_tell",
    "run_seeded",
)

POISON = 13
REQUEST_S = 0.01
"""Of the mock clock: what a request takes in the mean."""
STALLED_S = 1e6
"""Of the mock clock: who waits so long waits for ever."""


class WorkerKilled(Exception):  # noqa: N818 - it stands for a signal
    """What a tokenize function raises in place of bringing down its worker."""


class Call(Promise["Reply | Crashed"]):
    def __init__(self, request_id: int, request: Request, generation: int) -> None:
        self.request_id, self.request, self.generation = request_id, request, generation


class SimulatedExecutor:
    """Workers that take random times and die at random, in one thread; in the place of a Pool."""

    answers_with_samples = False

    def __init__(self, chance: random.Random, num_workers: int, trace: list[str]) -> None:
        self.function: Any = None
        self.num_asked = 0
        self.num_workers = num_workers
        self.changes = Changes()
        self.slots = Slots(NUM_SLOTS, self.changes)
        self._chance = chance
        self._trace = trace
        self._queue: deque[Call] = deque()
        self._num_busy = 0
        self._generation = 0
        self._memory: list[memoryview] = []
        self._wake = anyio.Event()

    def prepare(self, slot_bytes: int) -> None:
        self._memory = [memoryview(bytearray(slot_bytes)) for _ in range(NUM_SLOTS)]

    def memory(self, slot: int) -> memoryview:
        return self._memory[slot]

    async def run(self, job: Job) -> None:
        handler = Handler(job, self._memory, open_tokenize_fn(self.function))
        try:
            async with anyio.create_task_group() as group:
                while True:
                    while self._queue and self._num_busy < self.num_workers:
                        self._num_busy += 1
                        group.start_soon(self._work, handler, self._queue.popleft())
                    await self._wake.wait()
                    self._wake = anyio.Event()
        finally:
            handler.close()

    async def _work(self, handler: Handler, asked: Call) -> None:
        reads_first = self._chance.random() < 0.5
        reply = self._answer(handler, asked) if reads_first else None
        await anyio.sleep(self._chance.expovariate(1 / REQUEST_S))
        while self._chance.random() < 0.1:  # it died, and another one does it again
            self._trace.append("a worker dies")
            reply = None
            await anyio.sleep(self._chance.expovariate(1 / REQUEST_S))
        self._num_busy -= 1
        self._wake.set()
        self._reply(asked, self._answer(handler, asked) if reply is None else reply)

    def _answer(self, handler: Handler, asked: Call) -> Reply | Crashed:
        reply = handler(asked.request)
        if not isinstance(reply, Tokenized):
            return reply

        killers = [error.row for error in reply.errors if WorkerKilled.__name__ in error.reason]
        if killers:
            is_known = self._chance.random() < 0.5
            return Crashed("AD423", "its worker died", killers[0] if is_known else None)

        return msgspec.structs.replace(reply, busy_s=self._chance.expovariate(1 / REQUEST_S))

    def _reply(self, asked: Call, reply: Reply | Crashed) -> None:
        is_wanted = asked.generation == self._generation
        self._trace.append(f"{type(reply).__name__}{'' if is_wanted else ', not wanted'}")
        if not isinstance(reply, Crashed):
            self.slots.done(asked.request.slot)
        if is_wanted:
            asked.keep(reply)
        if isinstance(reply, Crashed):
            self.slots.done(asked.request.slot)
        self.changes()

    def submit(self, request: Request, max_losses: int = MAX_LOSSES) -> Call:
        self.num_asked += 1
        self.slots.use(request.slot)
        call = Call(self.num_asked, request, self._generation)
        self._queue.append(call)
        self._wake.set()
        return call

    def row_of(self, request_id: int) -> int:
        """Its rows are done all at once."""
        return 0

    def forget(self) -> None:
        # Those who work write into their slots all the same.
        self._generation += 1
        while self._queue:
            self.slots.done(self._queue.popleft().request.slot)

    def set_num_workers(self, num_workers: int) -> None:
        self.num_workers = max(self.num_workers, num_workers)
        self._wake.set()
        self.changes()

    @property
    def is_busy(self) -> bool:
        """Whether anything that was asked is not answered."""
        return bool(self._queue) or self._num_busy > 0

    @property
    def num_wanted(self) -> int:
        return 2 * self.num_workers - len(self._queue) - self._num_busy

    def statistics(self) -> ExecutorStatistics:
        states = ["busy"] * self._num_busy + ["idle"] * (self.num_workers - self._num_busy)
        return ExecutorStatistics(workers=[WorkerState(state=state) for state in states], num_queued=len(self._queue))


class SimulatedService(Service):
    """Runs in a task of the simulation."""

    def __init__(self, group: trio.Nursery, watcher: Watcher, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._group = group
        watcher.watch(self)

    def _running_thread(self) -> Any:
        self._executor.prepare(self._slot_bytes)
        self._group.start_soon(self._main)
        return SimpleNamespace(join=lambda _: None, is_alive=lambda: False)  # the simulation waits, and ends it


class SimulatedLoader(AsyncDataLoader):
    """Closed at once: the way over a thread takes a time that no seed knows."""

    def close(self) -> None:
        """Stop."""
        self._close("the simulation has closed it")

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Outcome(list[str]):
    """What happened in a schedule, each with the time of the mock clock; and how much of it.

    :ivar num_given_up: calls that were cancelled or timed out.
    """

    num_samples = num_given_up = num_restores = 0

    def append(self, line: str) -> None:
        super().append(f"{trio.current_time() % 1e6:10.4f} {line}")


class World(NamedTuple):
    """All that a schedule is made of; everything that is random follows from ``chance``."""

    chance: random.Random
    executor: SimulatedExecutor
    group: trio.Nursery
    trace: Outcome
    watcher: Watcher

    def loader(self, source: Any, function: Callable[[dict[str, Any]], Any], **knobs: Any) -> SimulatedLoader:
        self.executor.function = function
        knobs = {"bad_rows": "skip", **knobs}
        with (
            patch("asyncdata.loader.engine.Service", partial(SimulatedService, self.group, self.watcher)),
            patch("asyncdata.loader.engine.executor_of", lambda *_: self.executor),
            patch("asyncdata.loader.base.EarlyForkServer.for_workers", lambda _: None),
        ):
            return SimulatedLoader(source, tokenize_fn=function, num_workers=1, **knobs)


async def _run(act: Callable[[World], Awaitable[None]], chance: random.Random, trace: Outcome) -> None:
    executor = SimulatedExecutor(chance, chance.choice([1, 2, 4]), trace)
    threads = SimulatedThreads(chance)
    watcher = Watcher(lambda: executor.is_busy or threads.num_busy > 0, lambda: executor.num_asked)
    trio.lowlevel.add_instrument(watcher)
    try:
        with patch.object(anyio.to_thread, "run_sync", threads.run_sync):
            async with trio.open_nursery() as group:
                await act(World(chance, executor, group, trace, watcher))
    finally:
        trio.lowlevel.remove_instrument(watcher)
        assert not watcher.faults, watcher.faults
    assert watcher.num_looks or not trace.num_samples, "lost wake-ups were never looked for"


def run_seeded(act: Callable[[World], Awaitable[None]], seed: int, trace: Outcome) -> None:
    """Run ``act`` in the world of ``seed``: the same every time. When it ends, its loaders must be closed."""
    scheduler = importlib.import_module("trio._core._run")
    with (
        patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", new=True),
        patch.object(scheduler, "_r", random.Random(seed)),
    ):
        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(_run, act, random.Random(seed), trace, clock=clock)


def run_and_tell(simulate: Callable[[Outcome], object]) -> None:
    """For a program: run a schedule, and print what has happened, also if it fails."""
    outcome = Outcome()
    try:
        simulate(outcome)
    finally:
        sys.stdout.write("\n".join(outcome) + "\n")
