"""Pools of workers over rows whose tokens are their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.executors import until

if TYPE_CHECKING:
    from asyncdata.workers.pool.process_pool import ProcessExecutor


def pids(executor: ProcessExecutor) -> list[int]:
    return [worker.pid for worker in executor.statistics().workers if worker.pid is not None]


def states(executor: ProcessExecutor) -> list[str]:
    return [worker.state for worker in executor.statistics().workers]


async def all_ready(executor: ProcessExecutor) -> None:
    await until(lambda: states(executor) == ["idle"] * executor.num_workers)
