"""How long the pool waits before it tries again, and when it gives up."""

from __future__ import annotations

import anyio
import pytest

from asyncdata.workers.pool.deadlines import MAX_WAIT_S, Patience, pause


class Clock:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_permanent_failures_are_given_up_after_max_failures():
    patience = Patience(3, 30.0, Clock())

    assert [patience.failed(may_pass=False) for _ in range(3)] == [0.0, 0.05, None]
    assert patience.num_failures == 3


def test_transient_failures_are_not_given_up_before_the_time_limit():
    clock = Clock()
    patience = Patience(3, 30.0, clock)

    waits = [patience.failed(may_pass=True) for _ in range(20)]
    assert waits[:5] == [0.0, 0.05, 0.1, 0.2, 0.4]
    assert waits[-1] == MAX_WAIT_S
    assert waits == sorted(waits)
    clock.now += 29.9
    assert patience.failed(may_pass=True) == MAX_WAIT_S
    clock.now += 0.2
    assert patience.failed(may_pass=True) is None


def test_the_time_limit_alone_does_not_give_up():
    clock = Clock()
    patience = Patience(3, 30.0, clock)
    patience.failed(may_pass=True)
    clock.now += 1000
    assert patience.failed(may_pass=True) == 0.05


def test_a_success_resets_the_count():
    clock = Clock()
    patience = Patience(3, 30.0, clock)
    for _ in range(2):
        patience.failed(may_pass=False)
    patience.succeeded()
    clock.now += 1000

    assert patience.failed(may_pass=False) == 0.0
    assert patience.failed(may_pass=True) == 0.05
    assert patience.failed(may_pass=True) == 0.1, "the row is no older than its first failure"


def test_permanent_failures_count_between_transient_ones():
    patience = Patience(2, 30.0, Clock())
    patience.failed(may_pass=False)
    for _ in range(5):
        assert patience.failed(may_pass=True) is not None
    assert patience.failed(may_pass=False) is None


@pytest.mark.asyncio
async def test_other_tasks_run_during_a_pause():
    seen = []

    async def other() -> None:
        seen.append("other")

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        await pause(0)
        seen.append("pause")
    assert seen == ["other", "pause"]
