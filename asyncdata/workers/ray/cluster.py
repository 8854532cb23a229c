"""Finds the Ray cluster that exists, and makes actors there."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.extras import missing_package
from asyncdata.workers.ray.actor import RemoteWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.workers.ray.settings import RayExecutor

__all__ = ("connect", "is_lost", "kill", "new_actors")

_VARIABLE, _TIMEOUT_S = "RAY_ADDRESS", 10.0

WATCH = "watch"
"""The concurrency group of what is asked of an actor while it works."""


_sent: list[Any] = []
"""The runtime environment that this process connected with, if it was a loader that did."""


def connect(settings: RayExecutor) -> None:
    """Connect this process to the cluster, unless it is connected to one.

    The connection stays open when a loader is closed, as other code may use it.

    :raises ConfigError: without ray, if no cluster is there, or for Ray Client.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_package("RayExecutor", "ray", error) from error

    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        raise ConfigError(
            "AD490 this process is connected by Ray Client (ray://), which passes every byte through one connection, "
            "and cannot be used: run the trainer on a node of the cluster, or as a job (`ray job submit`)"
        )

    if ray.is_initialized():
        return

    given = os.environ.get(_VARIABLE, "") if settings.address == "auto" else settings.address
    try:
        _refuse_if_none_listens(given)
        ray.init(address=settings.address, runtime_env=settings.runtime_env)
        _sent[:] = [settings.runtime_env]
    except (OSError, ValueError, RuntimeError) as error:
        where = f"{_VARIABLE}={given}" if given != settings.address and given else f"address={settings.address!r}"
        way_out = "name one that runs" if given else f"set {_VARIABLE}, or call ray.init() before"
        raise ConfigError(
            f"AD491 there is no Ray cluster at {where}: {error}. Start one (`ray start --head` here, and `ray start "
            f"--address=HOST:PORT` on the other nodes), or {way_out}; or leave executor=RayExecutor(...) out, and "
            "worker processes of this machine are used"
        ) from error


def _refuse_if_none_listens(address: str) -> None:
    """Ray itself would try for minutes, and then end this process."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        with suppress(TimeoutError), socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S):
            pass


def new_actors(settings: RayExecutor) -> Callable[[bytes], Any]:
    """A function that makes an actor with these terms. It returns at once; the actor starts when there is room.

    :raises ConfigError: for options that Ray refuses.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = settings.placement_group
    options: dict[str, Any] = {
        "num_cpus": settings.num_cpus,
        "max_restarts": 0,  # the pool replaces it, as every other worker
        "max_task_retries": 0,
        "max_concurrency": 1,
        "scheduling_strategy": "SPREAD" if group is None else PlacementGroupSchedulingStrategy(group),
    }
    for name in ("resources", "label_selector", "runtime_env"):
        value = getattr(settings, name)
        if value is not None and not (name == "runtime_env" and value in _sent):
            options[name] = value
    try:
        made = ray.remote(concurrency_groups={WATCH: 1})(RemoteWorker).options(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"AD497 Ray refuses these actors: {error} Folders of this machine are sent only when the process connects: "
            "call ray.init(runtime_env={...}) before, or let the first loader of the process connect"
        ) from error

    def new_actor(terms: bytes) -> Any:
        return made.remote(terms)

    return new_actor


def is_lost(error: BaseException) -> bool:
    """Whether an actor's answer is this because the actor, its node, or its answer was lost."""
    from ray import exceptions

    lost = (
        exceptions.RayActorError,
        exceptions.ObjectLostError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, lost)


def kill(actor: Any) -> None:
    """Kill the actor, whatever it does."""
    import ray

    try:
        ray.kill(actor, no_restart=True)
    except Exception:  # ray was shut down meanwhile, and all actors with it
        return
