"""A process of torch: its rank, whether it is a worker, and a loader's state as torch's checkpoints take it."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.loader.config import Ranks

_KEY = "asyncdata"
_HEAD_BYTES = 512
"""Of a message: its size, and so much of it that most fit."""


def ranks(group: Any = None, **settings: Any) -> Ranks:
    """``Ranks(rank=..., world_size=...)`` of this process, for ``DataLoader(..., ranks=ranks())``.

    From torch.distributed, if it is initialised; otherwise from Ray Train, in one of its workers; otherwise from
    ``RANK`` and ``WORLD_SIZE``, which ``torchrun`` and others set; otherwise this is the only process.

    :param group: the process group of data parallelism, if ranks of tensor, pipeline or context parallelism must
        get the same data: ``mesh["dp"].get_group()``. None: every process is a separate rank, unless accelerate has a
        ``ParallelismConfig`` by now: processes of its tensor or context parallelism are one rank.
    :param settings: the others of :class:`~asyncdata.Ranks`, such as ``gradient_accumulation`` and ``exchange``.
    :raises ConfigError: if there is a group and no torch.distributed, or the process is not in it, or the two
        variables are not both whole numbers.
    """
    distributed = _initialised()
    if distributed is not None:
        rank, world_size = distributed.get_rank(group), distributed.get_world_size(group)
        if rank < 0:
            raise ConfigError("this process is not in the process group that ranks() was given")

    elif group is not None:
        raise ConfigError("ranks() was given a process group, and torch.distributed is not initialised")
    else:
        rank, world_size = _of_ray_train() or _of_environment(os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))

    size = 1 if group is not None else _processes_of_a_rank()
    return Ranks(rank=rank // size, world_size=world_size // size, **settings)


def exchange(group: Any = None, *, timeout_s: float = 1800.0) -> Callable[[bytes], list[bytes]]:
    """``Ranks(exchange=...)`` over torch.distributed, with a gloo group of its own. All ranks must call it, in the
    same order; each loader needs one of its own.

    :param group: the process group of data parallelism, as in :func:`ranks`.
    :param timeout_s: seconds after which a call ends with torch's error, if a rank does not take part: more than the
        longest pause of the training, such as an evaluation.
    :raises ConfigError: if torch.distributed is not initialised.
    """
    distributed = _initialised()
    if distributed is None:
        raise ConfigError("exchange() needs torch.distributed: call init_process_group() before")

    members = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    own = distributed.new_group(members, timedelta(seconds=timeout_s), "gloo", use_local_synchronization=True)

    works: list[Any] = []
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(works))  # kept to the very end of the process
    return partial(_all_gather, distributed, own, members, works)


def _all_gather(distributed: Any, group: Any, members: Sequence[int], works: list[Any], data: bytes) -> list[bytes]:
    """What each rank sends. Most calls have one short message a rank: these go with their sizes, in one collective.

    Of longer ones, ``all_gather_object`` would send every rank's at the size of the longest. If few are long, each is
    broadcast by itself.

    :param works: the collectives of the last call. A thread of gloo would otherwise be the last to release one, for
        which it needs the GIL; it would abort a process that is ending.
    """
    import torch

    works.clear()

    def wait(work: Any) -> None:
        works.append(work)
        work.wait()

    def tensor(content: bytes, size: int) -> Any:
        return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)

    def gathered(content: bytes, size: int) -> list[bytes]:
        found = [torch.empty(size, dtype=torch.uint8) for _ in members]
        wait(distributed.all_gather(found, tensor(content, size), group=group, async_op=True))
        contents = [each.numpy().tobytes() for each in found]
        for each in found:
            each.set_()  # it needs no memory any more
        return contents

    heads = gathered(len(data).to_bytes(8, "little") + data[: _HEAD_BYTES - 8], _HEAD_BYTES)
    sizes = [int.from_bytes(head[:8], "little") for head in heads]
    found = [head[8 : 8 + size] for head, size in zip(heads, sizes, strict=True)]
    long = [number for number, size in enumerate(sizes) if size > _HEAD_BYTES - 8]
    if 2 * sum(sizes) > len(members) * max(sizes) and long:
        whole = gathered(data, max(sizes))
        return [content[:size] for content, size in zip(whole, sizes, strict=True)]

    own = members.index(distributed.get_rank())
    for number in long:
        content = tensor(data if number == own else b"", sizes[number])
        wait(distributed.broadcast(content, members[number], group=group, async_op=True))
        found[number] = content.numpy().tobytes()
    return found


def _initialised() -> Any:
    """torch.distributed, if it is initialised, for which it must be imported; otherwise None."""
    distributed = sys.modules.get("torch.distributed")
    is_there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_there else None


def _processes_of_a_rank() -> int:
    """How many successive processes accelerate gives the same data: those of tensor and context parallelism."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return 1

    config = getattr(state.AcceleratorState(), "parallelism_config", None)
    return 1 if config is None else int(config.tp_size * config.cp_size)


def _of_ray_train() -> tuple[int, int] | None:
    """Of a worker of Ray Train, for which it must be imported; otherwise None."""
    train = sys.modules.get("ray.train")
    if train is None:
        return None

    try:
        context = train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
    except RuntimeError:  # this process is not one of its workers
        return None

    return None if rank is None or world_size is None else (int(rank), int(world_size))


def _of_environment(rank: str | None, world_size: str | None) -> tuple[int, int]:
    if rank is None and world_size is None:
        return 0, 1

    try:
        return int(rank or ""), int(world_size or "")
    except ValueError:
        raise ConfigError(
            f"the environment has RANK={rank!r} and WORLD_SIZE={world_size!r}: set both to whole numbers, or neither"
        ) from None


def refuse_in_torch_worker() -> None:
    """Each worker of torch would have its own loader, and deliver the same samples.

    :raises ConfigError: in a worker process of torch.
    """
    workers = sys.modules.get("torch.utils.data")
    found = None if workers is None else workers.get_worker_info()
    if found is not None:
        raise ConfigError(
            f"this dataset is read in one of torch's {found.num_workers} workers, and each would deliver the same "
            "batches: pass num_workers=0 to torch's DataLoader. asyncdata has workers of its own: pass num_workers= to "
            "the dataset"
        )


def refuse_async(loader: Any, what: str) -> None:
    """An ``AsyncDataLoader`` gives nothing without ``await``.

    :raises ConfigError: for one.
    """
    if hasattr(loader, "get_samples") and not hasattr(loader, "__iter__"):
        raise ConfigError(f"{what} takes a DataLoader, not an {type(loader).__name__}, which gives nothing at once")


def to_torch_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """``{"asyncdata": text}``, of a loader's state dict.

    A distributed checkpoint loads only keys that the target object has, and a fresh loader's state lacks keys that it
    may have later. So there is always one key.
    """
    return {_KEY: json.dumps(state)}


def from_torch_state(state: Mapping[str, Any]) -> Any:
    """The inverse of :func:`to_torch_state`. Other values are returned unchanged: they may be a loader's state dict.

    :raises SnapshotError: if the text is not JSON.
    """
    if not isinstance(state, dict) or list(state) != [_KEY]:
        return state

    try:
        return json.loads(state[_KEY])
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"AD602 this state_dict cannot be loaded: its text is damaged: {error}") from error
