"""Whether the cluster is still there, and whether it has room for an actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from asyncdata.core.errors import WorkerError
from asyncdata.workers.pool.deadlines import pause

if TYPE_CHECKING:
    from asyncdata.workers.ray.settings import RayExecutor

__all__ = ("run_until_lost", "what_is_missing")

_AGAIN_S = 1.0
_HEAD_TRIES = 20
"""A head with fault tolerance starts again. Ray waits for it for a minute, and then ends this process."""


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


def what_is_missing(settings: RayExecutor) -> str:
    """What an actor lacks that has not started yet."""
    import ray

    free, all_nodes = ray.available_resources(), ray.cluster_resources()
    needs = {"CPU": settings.num_cpus, **(settings.resources or {})}
    amounts = [f"{name} {free.get(name, 0):g} of {all_nodes.get(name, 0):g}" for name in needs]
    needed = ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
    bound = [name for name in ("label_selector", "placement_group", "runtime_env") if getattr(settings, name)]
    also = f", and {', '.join(bound)} must fit" if bound else ""
    return (
        f"the Ray cluster has not started an actor yet. It needs {needed} on one node{also}; free on all nodes are "
        f"{', '.join(amounts)}"
    )
