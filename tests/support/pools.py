"""Pools of workers over rows whose tokens are their ids."""

import contextlib
from typing import Any

import psutil

from asyncdata.workers.pool import Pool
from asyncdata.workers.process_pool import Processes
from tests.support.executors import Client, until


def process_pool(num_workers: int, **knobs: Any) -> Pool:
    return Pool([Processes(num_workers, **knobs)], 1)


def fork_server() -> psutil.Process:
    (child,) = psutil.Process().children()
    return child


def events_of(events: Any, name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def said(events: Any) -> str:
    """What workers have written, as it was logged."""
    return "".join(event["text"] for event in events_of(events, "worker.output"))


def pids(executor: Any) -> list[int]:
    return [worker.pid for worker in executor.statistics().workers if worker.pid is not None]


def states(executor: Any) -> list[str]:
    return [worker.state for worker in executor.statistics().workers]


async def all_ready(executor: Any) -> None:
    await until(lambda: states(executor) == ["idle"] * executor.num_workers)


@contextlib.asynccontextmanager
async def pool(path: Any, function: Any, num_workers: int = 1, **knobs: Any) -> Any:
    """An executor with so many workers, which are ready, its client, and all rows read into a slot."""
    executor = process_pool(num_workers, **knobs)
    client = Client(executor, path, function)
    async with client.reading() as window:
        await all_ready(executor)
        yield executor, client, window
