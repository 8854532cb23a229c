"""The start of an actor: until its node has proven that it has what is needed, and its tokenize function is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from asyncdata.core import errors
from asyncdata.core.errors import WorkerError
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Failed, Ready
from asyncdata.workers.pool.lost_workers import Lost
from asyncdata.workers.ray.actor import Began
from asyncdata.workers.ray.cluster import is_lost
from asyncdata.workers.ray.health import what_is_missing
from asyncdata.workers.ray.node_proof import difference, node_name
from asyncdata.workers.ray.remote_worker import answer_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from asyncdata.core.messages import Job
    from asyncdata.workers.ray.remote_worker import RemoteWorkerState
    from asyncdata.workers.ray.settings import RayExecutor

__all__ = ("begin", "first_line")

_log = get_logger(__name__)
_FIRST_LOOK_S, _SLOW_START_S = 2.0, 30.0


async def begin(
    worker: RemoteWorkerState, job: Job, settings: RayExecutor, call_soon: Any, *, has_started: bool
) -> bool:
    """Wait until the actor has started. False: it is lost.

    :param has_started: whether an actor has before: then a failure may pass.
    :raises AsyncDataError: naming the node, and what it lacks.
    """
    future = await _started(worker, settings, call_soon)
    error = future.exception()
    if error is not None:
        worker.end(Lost("AD423", f"its actor could not start: {first_line(error)}"))
        if not is_lost(error) or "ModuleNotFoundError" in str(error):
            raise _not_startable(error)

        return False

    found = msgspec.msgpack.decode(future.result(), type=Began)
    if isinstance(found.ready, Ready):
        await _check_files(found, job)
        return True

    failed = found.ready if isinstance(found.ready, Failed) else Failed("WorkerError", found.ready.reason)
    if has_started and failed.kind == "WorkerError":
        worker.end(Lost("AD423", failed.message))
        return False

    kind = getattr(errors, failed.kind, WorkerError)
    raise kind(f"{failed.message}\n{found.ready.traceback}".rstrip())


async def _started(worker: RemoteWorkerState, settings: RayExecutor, call_soon: Any) -> Future[Any]:
    """The answer to ``begin``. While it does not come, the worker's state tells what it lacks."""
    ref, waited_s, pause_s = worker.process.handle.begin.remote(), 0.0, _FIRST_LOOK_S
    while True:
        with anyio.move_on_after(pause_s):
            return await answer_of(ref, call_soon)

        waited_s += pause_s
        pause_s = waited_s
        worker.lacks = await anyio.to_thread.run_sync(what_is_missing, settings, abandon_on_cancel=True)
        if waited_s >= _SLOW_START_S:
            _log.warning("ray.worker_waits", worker=worker.process.number, waited_s=waited_s, reason=worker.lacks)


async def _check_files(found: Began, job: Job) -> None:
    """Raise what a node sees otherwise, unless the file has changed here, too: then its readers report that."""
    jobs = job.parts or [job]
    for part, number, reason in found.faults:
        here = await anyio.to_thread.run_sync(difference, jobs[part].files[number], node_name())
        if not here:
            raise errors.SourceError(reason)


def first_line(error: BaseException) -> str:
    """What an error of Ray says first; the rest is for those who know Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else repr(error)


def _not_startable(error: BaseException) -> WorkerError:
    """An actor cannot start at all: without the package, or in an environment that cannot be made."""
    why = [line.strip() for line in str(error).splitlines() if "Error" in line] or [first_line(error)]
    way_out = (
        "asyncdata must be installed on every node in the version of the trainer, or be sent along: "
        "ray.init(runtime_env={...})"
        if "ModuleNotFoundError" in str(error)
        else "look at what RayExecutor(...) asks for: runtime_env, placement_group, label_selector"
    )
    return WorkerError(f"AD493 an actor cannot start on its node: {why[-1]}. {way_out}")
