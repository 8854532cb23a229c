"""A loader without a face: its parts put together, its state taken and given back."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata import snapshot as snapshots
from asyncdata.buffer import first_in_first_out
from asyncdata.canaries import Canaries
from asyncdata.config import num_usable_cpus
from asyncdata.coordinator import Coordinator
from asyncdata.diagnostics import Statistics, explain_timeout
from asyncdata.errors import ConfigError, PrefetchTimeoutError, SnapshotError, SnapshotMismatchError
from asyncdata.executors.base import InlineExecutor
from asyncdata.executors.process import ProcessExecutor
from asyncdata.fingerprint import setting_of
from asyncdata.ledger import Counters, Lease, Ledger, Returned, lease_key
from asyncdata.log import get_logger
from asyncdata.order import Order, Shuffle
from asyncdata.producer import Producer
from asyncdata.quarantine import Quarantine
from asyncdata.request import DeliveryRules
from asyncdata.service import Service
from asyncdata.snapshot import Snapshot
from asyncdata.sources.base import Source
from asyncdata.sources.jsonl import JsonlSource
from asyncdata.tokenization.base import TokenizeFn, describe, fingerprints_of, resolve_path
from asyncdata.types import Position, Sample
from asyncdata.version import __version__
from asyncdata.window import SLACK_BYTES
from asyncdata.windows import BlockWindows
from asyncdata.wire import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from asyncdata.buffer import BufferFilter
    from asyncdata.config import LoaderConfig
    from asyncdata.executors.base import Executor

    Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

__all__ = ("Engine",)

_log = get_logger(__name__)
_MAX_WORKERS = 8


class Engine:
    """Everything behind a loader but the waiting.

    :raises ConfigError: for a setting that cannot work.
    :raises SourceError: for files that cannot be read.
    """

    def __init__(
        self,
        source: Source | Paths,
        tokenize_fn: TokenizeFn | Callable[..., Any] | str,
        buffer_filter: BufferFilter | str | None,
        config: LoaderConfig,
    ) -> None:
        self.config = config
        shuffle = config.shuffle if isinstance(config.shuffle, Shuffle) else Shuffle(enabled=config.shuffle)
        self._files = _described(source).open(shuffle.block_bytes)
        self._order = Order(shuffle, config.seed, self._files.num_blocks)
        function = resolve_path(tokenize_fn) if isinstance(tokenize_fn, str) else tokenize_fn
        self._function = function.resolve() if isinstance(function, TokenizeFn) else function
        self.coordinator = Coordinator(
            _rules(config), buffer_filter=_filter(buffer_filter), quarantine=Quarantine.of(config).add
        )
        job = Job(
            files=self._files.files,
            tokenize=None if config.num_workers == 0 else describe(self._function),
            max_row_bytes=self._files.max_row_bytes,
            block_bytes=shuffle.block_bytes,
            slack_bytes=SLACK_BYTES,
            reader=self._files.reader,
        )
        self._executor = self._make_executor()
        self.service = self._make_service(job)
        self._waits = (0, 0.0)
        self._waits_lock = threading.Lock()

    def _make_service(self, job: Job) -> Service:
        files, order, executor = self._files, self._order, self._executor
        producer = Producer(
            BlockWindows(files, order, executor, job.stride),
            Canaries(files, executor, job.stride, order.max_window_blocks),
            executor,
            self.coordinator,
            epochs=self.config.epochs,
        )
        slot_bytes = order.max_window_blocks * job.stride
        return Service(job, producer, executor, self.coordinator, slot_bytes=slot_bytes, backend=self.config.backend)

    def _make_executor(self) -> Executor:
        num_workers = self.config.num_workers
        if num_workers == 0:
            return InlineExecutor(self._function)

        return ProcessExecutor(num_workers or min(_MAX_WORKERS, num_usable_cpus()), self.config.row_timeout_s)

    def fingerprints(self) -> dict[str, Any]:
        """What the tokens depend on, each part by its digest. Reads a little of every file at the first call."""
        return {"data": self._files.fingerprint(), **fingerprints_of(self._function)}

    def snapshot(self) -> Snapshot:
        """The state of this moment."""
        ledger = self.coordinator.ledger
        position, counters, acked = ledger.restart_point()
        return Snapshot(
            library=__version__,
            position=msgspec.structs.astuple(position),
            counters=msgspec.to_builtins(counters),
            order=self._order.description(),
            fingerprints=self.fingerprints(),
            buffer=[item.record for item in ledger.buffer],
            leases=[item.record for item in ledger.leased_groups()],
            acked=[msgspec.structs.astuple(place) for place in sorted(acked)],
            journal=sorted(ledger.journal),
            canaries=list(self.service.canaries),
        )

    def restore(self, saved: Snapshot, allow_changed: Collection[str]) -> None:
        """Go on from ``saved``.

        :raises SnapshotMismatchError: if it belongs to other data or settings that ``allow_changed`` does not name.
        """
        present = self._order.description(), self.fingerprints()
        try:
            snapshots.check(saved, *present, allow_changed)
        except SnapshotMismatchError as error:
            _log.warning("snapshot.refused", differences=sorted(error.differences))
            raise

        changed = set(map(setting_of, snapshots.differences(saved, *present)))
        ledger = Ledger(
            position=Position(*saved.position),
            counters=msgspec.convert(saved.counters, Counters),
            buffer=tuple(self._returned(record) for record in (*saved.leases, *saved.buffer)),
            acked=frozenset(Position(*place) for place in saved.acked),
            journal=frozenset(saved.journal),
        )
        if changed & {"data", "seed", "order"}:
            ledger = _at_epoch(ledger, ledger.position.epoch + 1)  # its windows are cut otherwise now
        is_other_text = bool(changed - {"seed"})
        is_allowed = bool({"tokenizer", "template", "tokenize_fn"} & set(allow_changed))
        self.service.restart(lambda _: ledger, [] if is_other_text or is_allowed else saved.canaries)
        _log.info("snapshot.restored", position=str(ledger.position), num_buffered_groups=len(ledger.buffer))

    def _returned(self, record: list[dict[str, Any]]) -> Returned:
        size = self.config.n_samples_per_prompt
        if len(record) != size:
            raise ConfigError(
                f"the snapshot's buffer has groups of {len(record)} samples, and n_samples_per_prompt is {size}; serve "
                "them with the old setting first"
            )

        try:
            return Returned([Sample.from_dict(values) for values in record], record)
        except (TypeError, ValueError, KeyError) as error:
            raise SnapshotError(f"AD602 a group in the snapshot's buffer cannot be read: {error!r}") from error

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, unless that is the present one: a run resumed in its middle stays there."""
        if epoch == self.coordinator.ledger.position.epoch:
            return

        self.service.restart(lambda ledger: _at_epoch(ledger, epoch))

    def add_wait(self, seconds: float) -> None:
        """A call had to wait for data."""
        with self._waits_lock:
            self._waits = self._waits[0] + 1, self._waits[1] + seconds

    def statistics(self) -> Statistics:
        """What the loader has done and is doing."""
        ledger, channel, workers = self.coordinator.ledger, self.coordinator.channel, self._executor.statistics()
        return Statistics(
            **msgspec.structs.asdict(ledger.position),
            samples_total=ledger.counters.num_samples,
            groups_total=ledger.counters.num_groups,
            tokens_total=ledger.counters.num_tokens,
            dropped_total=dict(ledger.counters.drops),
            bad_rows_total=ledger.counters.num_bad_rows,
            buffered_groups=len(ledger.buffer),
            leased_requests=len(ledger.leases),
            ready_samples=channel.num_produced - ledger.taken,
            in_flight_rows=channel.num_rows_in_flight,
            capacity_samples=channel.capacity,
            ready_bytes=channel.num_ready_bytes,
            waits_total=self._waits[0],
            data_wait_seconds_total=self._waits[1],
            queued_requests=workers.num_queued,
            worker_restarts_total=workers.num_restarts,
            blank_lines_total=self.service.num_blank_lines,
            workers=workers.workers,
        )

    def timeout_error(self, waited_s: float, num_groups: int) -> PrefetchTimeoutError:
        """Why a call got nothing in time."""
        now = self.statistics()
        entry = self.coordinator.channel.oldest_in_flight
        oldest = entry.location() if entry is not None and entry.location is not None else None
        num_missing = max(0, num_groups - now.buffered_groups - now.ready_samples)
        message, diagnosis = explain_timeout(waited_s, num_missing, now, oldest, self.service.is_started)
        _log.warning("loader.timeout", waited_s=waited_s, stage=diagnosis["stage"])
        return PrefetchTimeoutError(message, diagnosis)


def _described(source: Source | Paths) -> Source:
    # In this order: a Path has an open(), as a Source has.
    if isinstance(source, str | os.PathLike):
        return JsonlSource(os.fspath(source))

    if isinstance(source, list | tuple):
        return JsonlSource([os.fspath(path) for path in source])

    if not isinstance(source, Source):
        raise ConfigError(f"a source is a path, a list of paths, or a JsonlSource; got {type(source).__name__}")

    return source


def _filter(buffer_filter: BufferFilter | str | None) -> BufferFilter:
    if buffer_filter is None:
        return first_in_first_out

    found: BufferFilter = resolve_path(buffer_filter) if isinstance(buffer_filter, str) else buffer_filter
    if not callable(found):
        raise ConfigError(f"buffer_filter must be a function of (buffer, num_groups), got {type(found).__name__}")

    return found


def _rules(config: LoaderConfig) -> DeliveryRules:
    return DeliveryRules(
        capacity=config.capacity,
        max_ready_bytes=config.max_ready_bytes,
        samples_per_group=config.n_samples_per_prompt,
        epochs=config.epochs,
        drop_last=config.drop_last,
        bad_row_stops=config.on_bad_row == "raise",
        max_bad_rows=config.max_bad_rows,
        commit_on_ack=config.commit == "on_ack",
    )


def _at_epoch(ledger: Ledger, epoch: int) -> Ledger:
    """The ledger at the start of ``epoch``; only groups from the buffer are still leased."""
    position = Position(epoch, 0, 0)
    counters = msgspec.structs.replace(ledger.counters, epoch_groups=0, epoch_drops={})
    leased = tuple((lease_key(item.group), item) for item in ledger.leased_groups())
    return msgspec.structs.replace(
        ledger,
        position=position,
        counters=counters,
        leases=(Lease(position, counters, leased),) if leased else (),
        acked=frozenset(),
    )
