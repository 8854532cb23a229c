"""Workers on the nodes of a Ray cluster that exists: actors, as one more kind of workers of the pool.

Here is what users write. ``executor`` finds the cluster and has the actors, as the pool sees them; ``actor`` is what
runs on the node, makes requests that need no shared memory, and finds out whether a node sees the same data and
functions. ray is imported only when a cluster is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

Positive = Annotated[int, msgspec.Meta(ge=1)]
AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0)]
Bundle = Annotated[int, msgspec.Meta(ge=-1)]
Amounts = Annotated[dict[str, float], msgspec.Meta(description="a dict of numbers")]
Labels = Annotated[dict[str, str], msgspec.Meta(description="a dict of text")]
Environment = Annotated[dict[str, Any], msgspec.Meta(description="a dict")]
Group = Annotated[Any, msgspec.Meta(description="a placement group or None")]


class RayExecutor(Description, frozen=True, kw_only=True):
    """Workers on the nodes of a Ray cluster. They change only the time: D is the same.

    Each is an actor that reads, scans and tokenizes blocks of the files itself, so that no text passes through the
    trainer's process. Needs ``pip install ".[ray]"`` in a clone.

    :ivar address: of the cluster, as ``ray.init`` takes it, if this process is not connected yet. ``"auto"``: that of
        ``RAY_ADDRESS``, or the one that runs on this machine. Ray Client (``ray://``) is refused.
    :ivar num_workers: actors. With ``local_workers``, they are added one by one while the trainer waits for data.
    :ivar num_cpus: CPUs that each actor reserves. 0: none, for a cluster whose CPUs the trainer has reserved.
    :ivar resources: custom resources that each actor reserves.
    :ivar label_selector: labels of the nodes on which actors may run.
    :ivar placement_group: the placement group of the actors, such as the trainer's
        (``ray.util.get_current_placement_group()``); without one they are spread over the nodes.
    :ivar placement_group_bundle: the number of the bundle of that group which they use; -1: any.
    :ivar local_workers: worker processes of this machine, which get work first.
    :ivar runtime_env: the runtime environment of the actors, for nodes that cannot import the tokenize function. With
        folders of this machine, as in ``{"working_dir": "."}``, only if this process is not connected to Ray yet.
    :raises ConfigError: for a value of the wrong type or out of range.
    """

    address: str = "auto"
    num_workers: Positive = 2
    num_cpus: Share = 1.0
    resources: Amounts | None = None
    label_selector: Labels | None = None
    placement_group: Group = None
    placement_group_bundle: Bundle = -1
    local_workers: AtLeast0 = 0
    runtime_env: Environment | None = None

    @property
    def first_workers(self) -> int:
        """Workers at the start."""
        return self.local_workers or self.num_workers

    @property
    def max_workers(self) -> int:
        """Workers at most."""
        return self.local_workers + self.num_workers

    def check(self) -> None:
        """Whether the address can be used."""
        if self.address.startswith("ray://"):
            raise ConfigError(
                f"AD490 RayExecutor(address={self.address!r}) is Ray Client, which passes every byte through one "
                "connection, and cannot be used: run the trainer on a node of the cluster, or as a job "
                "(`ray job submit`), and leave address out"
            )


def local_workers_of(executor: object) -> object:
    """The ``local_workers`` of an executor, which may be a dict that was not checked yet."""
    return executor.get("local_workers", 0) if isinstance(executor, Mapping) else getattr(executor, "local_workers", 0)
