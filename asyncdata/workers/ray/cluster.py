"""The Ray cluster that exists: finds it, makes actors there, and tells whether it is lost or has no room."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread

from asyncdata.core.errors import ConfigError, WorkerError
from asyncdata.core.imports import missing_package
from asyncdata.workers.pool.worker import pause
from asyncdata.workers.ray.actor import RemoteWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.workers.ray.settings import RayExecutor

_VARIABLE, _TIMEOUT_S = "RAY_ADDRESS", 10.0
_AGAIN_S = 1.0
_HEAD_TRIES = 20
"""A head with fault tolerance starts again. Ray waits for it for a minute, and then ends this process."""

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

    :raises ConfigError: for options that cannot be; also by the function, for what the placement group cannot hold.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Strategy

    group = settings.placement_group
    if group is None and settings.placement_group_bundle >= 0:
        raise ConfigError(
            f"AD497 RayExecutor(placement_group_bundle={settings.placement_group_bundle}) is of no placement group: "
            "pass placement_group=..., such as ray.util.get_current_placement_group()"
        )

    options: dict[str, Any] = {
        "num_cpus": settings.num_cpus,
        "max_restarts": 0,  # the pool replaces it, as every other worker
        "max_task_retries": 0,
        "max_concurrency": 1,
        "scheduling_strategy": "SPREAD" if group is None else Strategy(group, settings.placement_group_bundle),
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
        try:
            return made.remote(terms)
        except ValueError as error:
            raise ConfigError(
                f"AD497 Ray refuses these actors: {error} See num_cpus, resources and placement_group_bundle of "
                "RayExecutor(...)"
            ) from error

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


async def run_until_lost() -> None:
    """Hold a connection to Ray's process on this node, and one to the cluster's head, until one of them has ended.

    When a process ends, the system closes its connections and refuses new ones. It accepts them for a process that is
    busy or stopped, so a slow cluster is not a lost one.

    :raises WorkerError: when one has ended.
    """
    import ray

    context = ray.get_runtime_context()
    head, here = context.gcs_address, context.get_node_id()
    async with anyio.create_task_group() as group:
        group.start_soon(_run_until_refused, f"its head (GCS) at {head}", head, _HEAD_TRIES)
        nodes = await anyio.to_thread.run_sync(ray.nodes, abandon_on_cancel=True)
        node = next(one for one in nodes if one["NodeID"] == here)
        address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        group.start_soon(_run_until_refused, f"its process on this node (raylet) at {address}", address, 1)


async def _run_until_refused(who: str, address: str, max_tries: int) -> None:
    host, _, port = address.rpartition(":")
    num_refused = 0
    while num_refused < max_tries:
        try:
            async with await anyio.connect_tcp(host.strip("[]"), int(port)) as stream:
                num_refused = 0
                async for _ in stream:  # until it is closed at the other end
                    pass
        except (OSError, anyio.BrokenResourceError) as error:
            num_refused += isinstance(error.__cause__, ConnectionRefusedError)
        await pause(_AGAIN_S if num_refused < max_tries else 0.0)
    raise WorkerError(
        f"AD498 the Ray cluster is lost: {who} has ended. No row is lost: start the cluster again, and resume from the "
        "last state. Ray also ends this process, when it next needs what has ended"
    )


class Room(NamedTuple):
    """What actors lack that have no process yet.

    :ivar is_full: whether less is free than one of them needs.
    """

    is_full: bool
    text: str


def room_for(settings: RayExecutor, num_workers: int, num_waiting: int) -> Room:
    """What actors lack that have no process yet.

    :param num_workers: how many there should be.
    :param num_waiting: how many have none.
    """
    import ray

    free, total = ray.available_resources(), ray.cluster_resources()
    group, number = settings.placement_group, settings.placement_group_bundle
    suffix = "" if group is None else f"_group_{group.id.hex()}" if number < 0 else f"_group_{number}_{group.id.hex()}"
    needs = {"CPU": settings.num_cpus, **(settings.resources or {})}
    amounts = [f"{free.get(one + suffix, 0):g} of {total.get(one + suffix, 0):g} {one}" for one in needs]
    needed = ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
    bound = [name for name in ("label_selector", "runtime_env") if getattr(settings, name)]
    also = f", and {', '.join(bound)} must fit" if bound else ""
    is_full = any(free.get(name + suffix, 0) < amount for name, amount in needs.items())
    where = "the Ray cluster" if group is None else "the placement group"
    return Room(
        is_full,
        f"{where} {'has no room' if is_full else 'has not started all actors'}: {num_workers} actors wanted, "
        f"{num_workers - num_waiting} started, {', '.join(amounts)} free; each needs {needed} on one node{also}",
    )
