"""What the autotuner is told of a loader, and that its decisions are carried out, logged, and do not change D."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from asyncdata import LoaderConfig
from asyncdata.delivery.ledger import Request
from asyncdata.loader import autotune as tuners
from asyncdata.loader import executors
from asyncdata.loader.autotune import Change, Observation, Settled, Tuner
from asyncdata.loader.executors import limits_of
from asyncdata.workers.base import ExecutorStatistics, WorkerState
from tests.support.still_loader import StillLoader

MIB = 1 << 20


class Tuned:
    """A still loader with a tuner, a clock that a test sets, and workers of which it says what they are.

    :ivar seen: what the autotuner was shown. It decides what a test says in ``decisions``, one thing at a time.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.seen: list[Observation] = []
        self.decisions: list[Change | Settled] = []
        autotuner = SimpleNamespace(is_due=lambda *_: True, step=self.step)
        monkeypatch.setattr(tuners, "Autotuner", lambda limits: autotuner)
        self.memory = Mock(side_effect=lambda pid: pid * 100)
        monkeypatch.setattr(tuners, "process_memory", self.memory)
        self.now, self.waited_s = 0.0, 0.0
        self.loader = StillLoader(path, **{"capacity": 64, "num_workers": 2, "block_bytes": 4096, **settings})
        self.workers = [WorkerState(state="busy", pid=7), WorkerState(state="idle", pid=8)]
        executor, coordinator, producer = self.loader.executor, self.loader.coordinator, self.loader.producer
        monkeypatch.setattr(executor, "statistics", lambda: ExecutorStatistics(workers=self.workers))
        limits = limits_of(LoaderConfig())
        self.tuner = Tuner(limits, executor, coordinator, producer, lambda: (1, self.waited_s), clock=lambda: self.now)
        self.loader.start()

    def step(self, now: Observation) -> Change | Settled | None:
        self.seen.append(now)
        return self.decisions.pop(0) if self.decisions else None

    def reply(self) -> Observation:
        """One more reply; what the autotuner is told then."""
        self.loader.work_on()
        return self.seen[-1]


@pytest.fixture
def tuned(jsonl_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tuned]]:
    made: list[Tuned] = []

    def make(num_rows: int = 1000, **settings: Any) -> Tuned:
        path = jsonl_file(({"id": number} for number in range(num_rows)), f"{len(made)}/rows.jsonl")
        made.append(Tuned(path, monkeypatch, **settings))
        return made[-1]

    yield make
    for one in made:
        one.loader.close()


def test_it_is_told_after_every_reply_what_was_done(tuned):
    one = tuned(row_s=0.5)
    one.now, one.waited_s, one.workers[0] = 3.0, 2.0, WorkerState(state="starting", pid=7)
    assert one.reply().num_ready_workers == 1
    one.workers[0] = WorkerState(state="busy", pid=7)
    one.loader.work_off()

    last = one.seen[-1]
    assert (last.now_s, last.starved_s, last.has_delivered) == (3.0, 2.0, False)
    assert last.num_replies == len(one.seen)
    assert last.num_rows >= one.loader.coordinator.channel.num_produced == 64
    assert last.work_s == last.num_rows / 2
    assert (last.num_workers, last.num_ready_workers, last.capacity) == (2, 2, 64)
    assert last.sample_bytes >= 4
    one.loader.ids(60)
    one.loader.work_off()
    assert one.seen[-1].has_delivered


def test_it_is_told_once_that_the_channel_was_full_and_a_worker_idle(tuned):
    one = tuned()
    one.loader.work_off()
    assert one.loader.producer.lacks_room
    assert one.seen[-1].was_full

    one.loader.coordinator.poll(Request(500))
    one.loader.producer.pump()
    num_seen = len(one.seen)
    while len(one.seen) == num_seen:
        one.loader.work_on()
    assert not one.seen[num_seen].was_full


@pytest.mark.thorough
def test_memory_of_the_largest_worker_is_looked_up_when_there_are_others_and_now_and_then(tuned):
    one = tuned(100_000, capacity=100)
    assert one.reply().worker_bytes == 800
    assert one.reply().worker_bytes == 800
    assert one.memory.call_count == 2

    one.workers = one.workers[:1]
    assert one.reply().worker_bytes == 700
    assert one.memory.call_count == 3

    while len(one.seen) < 40:
        one.loader.ids(5)
    assert one.memory.call_count == 4


def test_a_decision_is_carried_out_and_logged(tuned):
    one = tuned()
    changes = [Change("num_workers", 2, 5, "workers_busy"), Change("capacity", 64, 256, "no_room")]
    one.decisions = [Settled("fed"), *changes]
    with capture_logs() as logs:
        for _ in range(3):
            one.reply()

    assert one.loader.executor.num_workers == 5
    assert (one.loader.coordinator.rules.capacity, one.loader.coordinator.channel.capacity) == (256, 256)
    assert one.tuner.num_changes == 2
    level = {"log_level": "info", "event": "autotune.changed"}
    assert logs == [
        {"log_level": "info", "event": "autotune.settled", "reason": "fed", "num_workers": 2, "capacity": 64},
        {**level, "what": "num_workers", "before": 2, "after": 5, "reason": "workers_busy"},
        {**level, "what": "capacity", "before": 64, "after": 256, "reason": "no_room"},
    ]


def test_more_room_is_used_at_once_and_less_lets_what_is_ready_be_used_up_first(tuned):
    one = tuned(10_000, block_bytes=1 << 17)
    one.loader.work_off()
    assert one.loader.coordinator.channel.num_produced == 64

    one.loader.tune(2, 1000)
    one.loader.work_off()
    assert one.loader.coordinator.channel.num_produced == 1000

    one.loader.tune(1, 10)
    assert one.loader.ids(995) == list(range(995))
    one.loader.work_off()
    assert 995 + 5 < one.loader.coordinator.channel.num_produced <= 995 + 10


def test_tuned_values_are_kept_after_a_restart(tuned):
    one = tuned()
    one.loader.tune(3, 200)
    one.loader.restore(one.loader.snapshot())
    one.loader.work_off()

    assert one.loader.coordinator.channel.capacity == 200
    assert one.loader.coordinator.channel.num_produced > 190


@pytest.mark.thorough
def test_chunks_follow_the_channel_and_the_workers(tuned):
    one = tuned(10_000, block_bytes=1 << 17)
    found = []
    for num_workers, capacity in ((2, 4000), (4, 800)):
        one.loader.tune(num_workers, capacity)
        one.loader.executor.num_rows_asked.clear()
        one.loader.ids(4000)
        one.loader.work_off()
        found.append(max(one.loader.executor.num_rows_asked))

    assert found[0] == 1000
    assert 50 <= found[1] <= 100


LIMITS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "by default all CPUs, and half of the free memory": (
        {},
        {"min_workers": 1, "max_workers": 12, "max_worker_bytes": (500 - 64) * MIB, "max_ready_bytes": 64 * MIB},
    ),
    "numbers that are given are kept": (
        {"num_workers": 3, "limits": {"max_workers": 9}, "buffer_size": 10, "dp_size": 8},
        {"min_workers": 3, "max_workers": 3, "max_capacity": 80},
    ),
    "and so are limits": (
        {"limits": {"max_workers": 5, "max_memory_bytes": 100 * MIB, "max_ready_bytes": 40 * MIB}},
        {"max_workers": 5, "max_worker_bytes": 60 * MIB, "max_ready_bytes": 40 * MIB},
    ),
    "zero workers are one thread": ({"num_workers": 0}, {"min_workers": 1, "max_workers": 1}),
    "it begins within the limits": ({"limits": {"max_workers": 1}}, {"min_workers": 1}),
}


@pytest.mark.parametrize(("settings", "wanted"), LIMITS.values(), ids=LIMITS)
def test_what_it_may_do_follows_from_the_settings_and_the_machine(monkeypatch, settings, wanted):
    monkeypatch.setattr(executors, "num_usable_cpus", lambda: 12)
    monkeypatch.setattr(executors, "available_memory", lambda: 1000 * MIB)
    limits = limits_of(LoaderConfig.of(settings))

    assert {name: getattr(limits, name) for name in wanted} == wanted
    assert limits.max_capacity >= LoaderConfig.of(settings).capacity
