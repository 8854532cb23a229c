"""The executor that a configuration asks for, what it cannot do, and the limits within which its workers are tuned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import is_loaded_instance
from asyncdata.workers.machine import available_memory, num_usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.messages import Job
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.tokenization.part_functions import PartFunctions
    from asyncdata.workers.pool import Pool
    from asyncdata.workers.popen import EarlyForkServer

_COPIES = "asyncdata.sources.spool:SpoolReader"
_FIRST_WORKERS = 1
"""The first number of workers, if it is tuned. A second worker would load its tokenizer while the trainer starts, and
delay the first batch; if it is needed, it is added soon."""


def connect_cluster(executor: Pool, config: LoaderConfig, job: Job) -> None:
    """Connect with the cluster, if the configuration has one.

    :raises ConfigError: AD496, for what needs a disk of this machine; or if there is no cluster.
    """
    if config.executor is None:
        return

    check_cluster(config, job)
    from asyncdata.workers.ray.executor import ClusterExecutor

    assert isinstance(executor, ClusterExecutor)
    executor.actors.connect()


def check_cluster(config: LoaderConfig, job: Job) -> None:
    """Refuse what needs a disk of this machine.

    :raises ConfigError: AD496.
    """
    if config.executor is None:
        return

    if any(one.reader.path == _COPIES for one in (job, *job.parts)):
        raise ConfigError(
            "AD496 single rows of this source are read from copies on the disk of this machine, which other nodes do "
            "not see: use shuffle=True, which reads whole blocks; or JSONL files, whose rows need no copies; or leave "
            "executor out"
        )


class TuningLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers there are at first, and how many there may be.

    :ivar max_worker_bytes: memory of all workers together.
    """

    min_workers: int
    max_workers: int
    max_worker_bytes: int


def limits_of(config: LoaderConfig) -> TuningLimits:
    """The workers that a configuration allows."""
    given, memory = config.limits, config.limits.max_ready_bytes
    if config.executor is not None:
        least, most = config.executor.first_workers, config.executor.max_workers
    elif config.num_workers is None:
        least, most = _FIRST_WORKERS, given.max_workers or num_usable_cpus()
    else:
        least = most = max(1, config.num_workers)  # 0 is one thread
    if config.num_workers is None:
        memory = given.max_memory_bytes or available_memory() // 2
    return TuningLimits(
        min_workers=least,
        max_workers=most,
        max_worker_bytes=max(0, memory - given.max_ready_bytes),
    )


def executor_of(
    config: LoaderConfig,
    limits: TuningLimits,
    function: TokenizeFn | Callable[..., Any],
    early: EarlyForkServer | None = None,
) -> Pool:
    """The executor of the configuration.

    :param early: the workers' fork server, if it was started early.
    """
    given, cluster = config.limits, config.executor
    is_mixture = is_loaded_instance(function, "asyncdata.tokenization.part_functions:PartFunctions")
    num_parts = len(cast("PartFunctions", function).functions) if is_mixture else 1
    if config.num_workers == 0:
        from asyncdata.workers.inline import InlineExecutor

        return InlineExecutor(function, num_parts)

    from asyncdata.workers.pool import Pool
    from asyncdata.workers.process_pool import Processes

    def processes(least: int, most: int) -> Processes:
        return Processes(least, given.row_timeout_s, most, early, given.max_bytes_per_worker)

    if cluster is None:
        return Pool([processes(limits.min_workers, limits.max_workers)], num_parts)

    from asyncdata.workers.ray.executor import ClusterExecutor

    num_local = cluster.local_workers
    local = processes(num_local, num_local) if num_local else None
    return ClusterExecutor(cluster, row_timeout_s=given.row_timeout_s, local=local, num_parts=num_parts)
