"""Runs the autotuner in the service's thread: shows it the loader after replies, and carries out its decisions."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from asyncdata.core.log import get_logger
from asyncdata.loader.autotune.policy import Autotuner, Change, Observation, TuningLimits
from asyncdata.workers.inline import InlineExecutor
from asyncdata.workers.machine import available_memory, num_usable_cpus, process_memory
from asyncdata.workers.pool.process_pool import ProcessExecutor
from asyncdata.workers.traced import TracedInlineExecutor, TracedProcessExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.loader.autotune.policy import Settled
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.prefetch.mixture_producer import MixtureProducer
    from asyncdata.prefetch.producer import Producer
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.workers.base import Executor
    from asyncdata.workers.pool.early_start import EarlyForkServer

__all__ = ("FIRST_WORKERS", "Tuner", "executor_of", "is_tuned", "limits_of")

FIRST_WORKERS = 1
"""The first number of workers, if it is tuned. A second worker would load its tokenizer while the trainer starts, and
delay the first batch; if it is needed, it is added soon."""
_log = get_logger(__name__)
_STEPS_PER_LOOK = 32
"""Steps between two measurements of the workers' memory, for which the kernel has to walk all their pages."""


def limits_of(config: LoaderConfig) -> TuningLimits:
    """The limits of the autotuner under a configuration."""
    given = config.limits
    least, most, memory = FIRST_WORKERS, 0, given.max_ready_bytes
    if config.executor is not None:
        least, most = config.executor.first_workers, config.executor.max_workers
        memory = given.max_memory_bytes or available_memory() // 2
    elif config.num_workers is None:
        most = given.max_workers or num_usable_cpus()
        memory = given.max_memory_bytes or available_memory() // 2
    else:
        least = most = max(1, config.num_workers)  # 0 is one thread
    return TuningLimits(
        min_workers=least,
        max_workers=most,
        # A sample takes at least one byte, so max_ready_bytes bounds the number of samples.
        max_capacity=max(config.capacity, given.max_ready_bytes) if config.buffer_size is None else config.capacity,
        max_worker_bytes=max(0, memory - given.max_ready_bytes),
        max_ready_bytes=given.max_ready_bytes,
    )


def is_tuned(config: LoaderConfig) -> bool:
    """Whether there is anything to tune: the number of workers or the read-ahead is not given."""
    return config.num_workers is None or config.buffer_size is None


def executor_of(
    config: LoaderConfig,
    limits: TuningLimits,
    function: TokenizeFn | Callable[..., Any],
    early: EarlyForkServer | None = None,
    num_parts: int = 1,
) -> Executor:
    """The executor of the configuration.

    :param early: the workers' fork server, if it was started early.
    :param num_parts: parts of the mixture that it serves.
    """
    is_traced = config.telemetry.trace is not None
    if config.num_workers == 0:
        return (TracedInlineExecutor if is_traced else InlineExecutor)(function, num_parts)

    given, cluster = config.limits, config.executor
    process_pool = TracedProcessExecutor if is_traced else ProcessExecutor

    def processes(num_workers: int, max_workers: int) -> ProcessExecutor:
        memory = given.max_bytes_per_worker
        return process_pool(num_workers, given.row_timeout_s, max_workers, early, memory, num_parts)

    if cluster is None:
        return processes(limits.min_workers, limits.max_workers)

    from asyncdata.workers.ray.executor import ClusterExecutor

    num_local = cluster.local_workers
    local = processes(num_local, num_local) if num_local else None
    return ClusterExecutor(cluster, row_timeout_s=given.row_timeout_s, local=local, num_parts=num_parts)


class Tuner:
    """Observes the loader, and adapts the number of workers and the capacity. It does not change D.

    It takes the producer's place as the observer of the executor, and calls the producer itself.

    :param waits: returns how many calls had to wait, and for how many seconds in all.
    :ivar num_changes: decisions that were carried out.
    """

    def __init__(
        self,
        limits: TuningLimits,
        executor: Executor,
        coordinator: Coordinator,
        producer: Producer | MixtureProducer,
        waits: Callable[[], tuple[int, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_changes = 0
        self._autotuner = Autotuner(limits)
        self._executor = executor
        self._coordinator = coordinator
        self._producer = producer
        self._waits = waits
        self._awaited: tuple[int, float] | None = None
        self._clock = clock
        self._num_groups = coordinator.ledger.counters.num_groups
        self._num_replies = 0
        self._was_full = self._is_active = False
        self._sample_bytes = math.inf
        self._worker_bytes = 0
        self._looked_at: list[int] = []
        self._num_steps = 0
        executor.watch(self._on_change)

    def _on_change(self) -> None:
        """Called after every reply, and after other changes, which are few: they are counted as replies."""
        is_nested, self._is_active = self._is_active, True
        try:
            self._producer.pump()
            if not is_nested:  # sending, or a change, may report further changes
                self._tune()
        finally:
            self._is_active = is_nested

    def _tune(self) -> None:
        producer, executor = self._producer, self._executor
        now_s = self._clock()
        self._num_replies += 1
        self._was_full |= producer.lacks_room and executor.num_wanted > executor.num_workers  # a worker is idle
        self._look_who_waits(now_s)
        if self._autotuner.is_due(now_s, self._num_replies, executor.num_workers):
            decision = self._autotuner.step(self._observe(now_s))
            self._was_full = False
            if decision is not None:
                self._carry_out(decision)

    def _observe(self, now_s: float) -> Observation:
        executor, coordinator, pacer = self._executor, self._coordinator, self._producer.pacer
        workers = executor.statistics().workers
        pids = [worker.pid for worker in workers if worker.pid is not None and worker.state != "starting"]
        return Observation(
            now_s=now_s,
            num_replies=self._num_replies,
            num_rows=pacer.total_rows,
            work_s=pacer.total_work_s,
            starved_s=self._waits()[1] + (now_s - self._awaited[1] if self._awaited is not None else 0.0),
            was_full=self._was_full,
            num_workers=executor.num_workers,
            num_ready_workers=sum(worker.state != "starting" for worker in workers),
            capacity=coordinator.rules.capacity,
            has_delivered=coordinator.ledger.counters.num_groups != self._num_groups,
            sample_bytes=self._memory_of_samples(),
            worker_bytes=self._memory_of(pids),
        )

    def _look_who_waits(self, now_s: float) -> None:
        """Note when a wait was first seen, at a reply; it may have begun a little earlier."""
        num_waits = self._waits()[0]
        if self._coordinator.channel.demand <= 0:
            self._awaited = None
        elif self._awaited is None or self._awaited[0] != num_waits:
            self._awaited = num_waits, now_s

    def _memory_of_samples(self) -> float:
        """Bytes of a sample; 0 if that is not known. The smallest mean: a chunk counts until its last sample goes."""
        channel = self._coordinator.channel
        num_ready = channel.num_produced - self._coordinator.ledger.taken
        if num_ready > 0 and channel.num_ready_bytes > 0:
            self._sample_bytes = min(self._sample_bytes, channel.num_ready_bytes / num_ready)
        return self._sample_bytes if self._sample_bytes < math.inf else 0.0

    def _memory_of(self, pids: list[int]) -> int:
        """Bytes of the largest of the workers."""
        self._num_steps += 1
        if pids != self._looked_at or self._num_steps % _STEPS_PER_LOOK == 0:
            self._looked_at = pids
            self._worker_bytes = max(map(process_memory, pids), default=0)
        return self._worker_bytes

    def _carry_out(self, decision: Change | Settled) -> None:
        executor, coordinator = self._executor, self._coordinator
        if not isinstance(decision, Change):
            num_workers, capacity = executor.num_workers, coordinator.rules.capacity
            _log.info("autotune.settled", reason=decision.reason, num_workers=num_workers, capacity=capacity)
            return

        if decision.what == "num_workers":
            executor.set_num_workers(decision.after)
        else:
            coordinator.set_capacity(decision.after)
        self.num_changes += 1
        self._producer.resize()
        what, before, after = decision.what, decision.before, decision.after
        _log.info("autotune.changed", what=what, before=before, after=after, reason=decision.reason)
