"""Pools of workers over rows whose tokens are their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

from tests.support.executors import until

if TYPE_CHECKING:
    from asyncdata.workers.pool.process_pool import ProcessExecutor


def fork_server() -> psutil.Process:
    """The only child of this process."""
    (child,) = psutil.Process().children()
    return child


def events_of(events: Any, name: str) -> list[dict[str, Any]]:
    """The log events of that name."""
    return [event for event in events if event["event"] == name]


def pids(executor: ProcessExecutor) -> list[int]:
    return [worker.pid for worker in executor.statistics().workers if worker.pid is not None]


def states(executor: ProcessExecutor) -> list[str]:
    return [worker.state for worker in executor.statistics().workers]


async def all_ready(executor: ProcessExecutor) -> None:
    await until(lambda: states(executor) == ["idle"] * executor.num_workers)
