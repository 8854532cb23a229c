"""The rank of this process, and the number of ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

from asyncdata.core.errors import ConfigError
from asyncdata.loader.config import Ranks

__all__ = ("ranks",)


def ranks(
    group: Any = None,
    *,
    gradient_accumulation: int = 1,
    round_up: bool | None = None,
    share_node: bool | int | None = None,
) -> Ranks:
    """``Ranks(rank=..., world_size=...)`` of this process, for ``DataLoader(..., ranks=ranks())``.

    From torch.distributed, if it is initialised; otherwise from Ray Train, in one of its workers; otherwise from
    ``RANK`` and ``WORLD_SIZE``, which ``torchrun`` and others set; otherwise this is the only process.

    :param group: the process group of data parallelism, if ranks of tensor, pipeline or context parallelism must
        get the same data: ``mesh["dp"].get_group()``. None: every process is a separate rank.
    :param gradient_accumulation: see :class:`~asyncdata.Ranks`, also for ``round_up`` and ``share_node``.
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

    return Ranks(
        rank=rank,
        world_size=world_size,
        gradient_accumulation=gradient_accumulation,
        round_up=round_up,
        share_node=share_node,
    )


def _initialised() -> Any:
    """torch.distributed, if it is initialised, for which it must be imported; otherwise None."""
    distributed = sys.modules.get("torch.distributed")
    is_there = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if is_there else None


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
