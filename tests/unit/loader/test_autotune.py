"""A worker is added while the trainer waits for tokens, up to the limits; none is ever removed."""

from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import LoaderConfig
from asyncdata.loader import autotune as tuners
from tests.support.inner import change
from tests.support.parts import TuningLimits, WorkerState, limits_of

MIB = 1 << 20


class Tuned:
    """A tuner, workers of 100 bytes each, and a trainer: all that is seen of it is how long it has waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, starts: bool = False, **limits: int) -> None:
        self.now_s = self.waited_s = 0.0
        self.num_workers, self.stage, self.has_delivered, self.starts = 1, "tokenize", True, starts
        self.after_reply = ""
        self.resizes = self.num_answered = 0
        change(monkeypatch, memory_of_a_worker=lambda pid: 100)
        allowed = TuningLimits(**{"min_workers": 1, "max_workers": 8, "max_worker_bytes": 1 << 40, **limits})
        every: Any = self  # its pool, its read-ahead, and its engine with all parts
        self.is_done: bool | None = None
        self.tuner = tuners.Tuner(allowed, every, every, every, clock=lambda: self.now_s)
        self.waits = self.coordinator = self.ledger = self.counters = self

    num_groups = property(lambda self: int(self.has_delivered))
    totals = property(lambda self: lambda: (0, self.waited_s))
    waits_for = property(lambda self: lambda: self.stage)

    def set_num_workers(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def statistics(self) -> Any:
        states = ["idle"] * (self.num_workers - self.starts) + ["starting"] * self.starts
        return SimpleNamespace(workers=[WorkerState(state=state, pid=7) for state in states])

    def resize(self) -> None:
        self.resizes += 1

    def run(self, seconds: float, starved: float = 0.0, replies: int = 100) -> int:
        """So much time passes, of which the trainer waits a share; the workers that there are then."""
        for _ in range(replies):
            self.now_s += seconds / replies
            self.waited_s += starved * seconds / replies
            self.on_submit()
            self.stage, asked = self.after_reply or self.stage, self.stage
            self.num_answered += 1
            self.is_done = self.is_done or self.tuner.look()
            self.stage = asked
        return self.num_workers


def test_while_the_trainer_waits_workers_are_added_up_to_the_limit_which_is_told_once(monkeypatch):
    tuned = Tuned(monkeypatch, max_workers=3)
    with capture_logs() as logs:
        assert tuned.run(60, starved=0.5, replies=1000) == 3
    told = [{name: value for name, value in log.items() if name != "log_level"} for log in logs]
    assert told == [
        {"event": "autotune.changed", "before": 1, "after": 2},
        {"event": "autotune.changed", "before": 2, "after": 3},
        {"event": "autotune.limited", "limit": "max_workers", "num_workers": 3},
    ]
    assert (tuned.resizes, tuned.is_done) == (2, True)
    assert tuned.run(3600) == 3, "none is removed"


@pytest.mark.parametrize(("max_worker_bytes", "number"), [(450, 4), (400, 4), (399, 3), (1, 1)])
def test_the_memory_of_the_workers_is_a_limit(monkeypatch, max_worker_bytes, number):
    tuned = Tuned(monkeypatch, max_worker_bytes=max_worker_bytes)
    with capture_logs() as logs:
        assert tuned.run(60, starved=0.5, replies=2000) == number
    assert logs[-1]["limit"] == "max_memory_bytes"


def test_a_trainer_that_does_not_wait_or_waits_for_something_else_gets_no_more(monkeypatch):
    assert Tuned(monkeypatch).run(100, starved=0.005) == 1
    for stage in ("start", "read", "index"):
        tuned = Tuned(monkeypatch)
        tuned.stage = stage
        assert tuned.run(100, starved=1.0) == 1


LIMITS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "by default all CPUs, and half of the free memory": (
        {},
        {"min_workers": 1, "max_workers": 12, "max_worker_bytes": (500 - 64) * MIB},
    ),
    "numbers that are given are kept": (
        {"num_workers": 3, "limits": {"max_workers": 9}},
        {"min_workers": 3, "max_workers": 3},
    ),
    "and so are limits": (
        {"limits": {"max_workers": 5, "max_memory_bytes": 100 * MIB, "max_ready_bytes": 40 * MIB}},
        {"max_workers": 5, "max_worker_bytes": 60 * MIB},
    ),
    "zero workers are one thread": ({"num_workers": 0}, {"min_workers": 1, "max_workers": 1}),
    "it begins within the limits": ({"limits": {"max_workers": 1}}, {"min_workers": 1}),
}


@pytest.mark.parametrize(("settings", "wanted"), LIMITS.values(), ids=LIMITS)
def test_what_it_may_do_follows_from_the_settings_and_the_machine(monkeypatch, settings, wanted):
    change(monkeypatch, cpus_of_a_loader=lambda: 12)
    change(monkeypatch, free_memory_of_a_loader=lambda: 1000 * MIB)
    limits = limits_of(LoaderConfig.of(settings))

    assert {name: getattr(limits, name) for name in wanted} == wanted
