"""The engine of a loader: joins all its parts, and takes and restores its state."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from asyncdata.checkpoint.matching import check
from asyncdata.checkpoint.restore import epoch_to_begin, ledger_at_row, ledger_of
from asyncdata.checkpoint.snapshot import Snapshot
from asyncdata.core.checked_numbers import checked_timeout
from asyncdata.core.errors import ConfigError, PrefetchTimeoutError, SnapshotMismatchError
from asyncdata.core.log import get_logger
from asyncdata.core.types import Position
from asyncdata.core.version import __version__
from asyncdata.delivery.quarantine import Quarantine
from asyncdata.delivery.rollout_buffer import filter_of
from asyncdata.loader.autotune.tuner import Tuner, executor_of, is_tuned, limits_of
from asyncdata.loader.background_proof import Prover
from asyncdata.loader.cluster import check_cluster
from asyncdata.loader.delivery_rules import coordinator_class, delivery_rules
from asyncdata.loader.node_sharing import sharing_of
from asyncdata.loader.opening import OpenedSource, opened_source
from asyncdata.loader.outcomes import LoaderOutcomes, check_outcomes, memory_of, taking
from asyncdata.loader.packing_choice import PackingChoice
from asyncdata.loader.service import Service
from asyncdata.loader.statistics import (
    Statistics,
    describe_wait,
    explain_timeout,
    is_indexing,
    of_delivery,
    of_index,
    of_packs,
    of_sharing,
    of_stores,
    of_token_cache,
    waited_for,
)
from asyncdata.loader.waits import Waits
from asyncdata.prefetch.producer import Producer
from asyncdata.sources.file_warnings import warn_about_files
from asyncdata.sources.resolve import described
from asyncdata.tokenization.base import fingerprints_of
from asyncdata.tokenization.resolve import resolved

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.batching.packers.base import Packing
    from asyncdata.checkpoint.saved_mixture import StreamState
    from asyncdata.core.errors import BadRowError
    from asyncdata.core.file_refs import FileRefs
    from asyncdata.delivery.channel import Entry
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.outcomes.policy import Outcomes
    from asyncdata.delivery.outcomes.state import OutcomeState
    from asyncdata.delivery.rollout_buffer import BufferFilter
    from asyncdata.loader.batches.pack_batches import PackBatches
    from asyncdata.loader.batches.sample_batches import SampleBatches
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.mix import Mix
    from asyncdata.prefetch.mixture_producer import MixtureProducer
    from asyncdata.prefetch.row_index.row_index import RowIndex
    from asyncdata.sources.base import Blocks, Source
    from asyncdata.sources.resolve import Paths
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.workers.base import Executor
    from asyncdata.workers.pool.early_start import EarlyForkServer

__all__ = ("Engine",)

_log = get_logger(__name__)


class Engine:
    """All parts of a loader, without the calls that wait.

    :param collate_fn: makes a batch of a loop.
    :param early: a fork server that was started early; the engine owns it unless the constructor fails.
    :raises ConfigError: for a setting that cannot work.
    :raises SourceError: for files that cannot be read.
    """

    def __init__(
        self,
        source: Source | Paths | Mix,
        tokenize_fn: TokenizeFn | Callable[..., Any] | str,
        buffer_filter: BufferFilter | str | None,
        config: LoaderConfig,
        collate_fn: Callable[[list[Any]], Any],
        packing: Packing | None = None,
        length_grouping: LengthGrouping | None = None,
        early: EarlyForkServer | None = None,
    ) -> None:
        self.config = config
        choice = PackingChoice.of(config, packing, length_grouping, is_filtered=buffer_filter is not None)
        chosen_filter = filter_of(buffer_filter)
        self._function = (early.function if early is not None else None) or resolved(tokenize_fn)
        num_workers = config.num_workers or 1
        functions = self._functions() if config.executor is None or config.executor.local_workers else []
        self._provers = [Prover(function, lambda: self.service.reopen_soon(), num_workers) for function in functions]
        self._function_fingerprints: dict[str, str] | None = None
        quarantine = Quarantine.opened(config.bad_rows.path if config.bad_rows.policy == "quarantine" else None).add
        self._source = self._opened(source, choice, quarantine)
        check_cluster(config, self._source.job)
        limits = limits_of(config)
        self._executor = executor_of(config, limits, self._function, early, max(1, len(self._source.job.parts)))
        needs_all = choice.share is None and config.executor is None
        self._sharing = None
        if needs_all:
            self._sharing = sharing_of(config, self._source, self._executor, self._function, self.fingerprints)
        self._windows = self._source.windows(
            self._executor, restart_point=self._restart_position, on_ready=lambda: self._producer.pump()
        )
        self.batching = choice.batching(config, collate_fn, self._windows, self._functions())
        is_packed = self.batching.is_packed or bool(self.batching.loops_only)
        check_outcomes(config, is_packed=is_packed)
        self.outcomes: LoaderOutcomes | None = self._made_outcomes(config.outcomes) if config.outcomes else None
        self.coordinator = coordinator_class(config)(
            delivery_rules(config, is_packed=self.batching.is_packed),
            buffer_filter=chosen_filter,
            packs=self.batching.begin(),
            quarantine=quarantine,
            outcomes=None if self.outcomes is None else self.outcomes.exclusions,
            on_room=lambda: self.service.pump_soon(),
        )
        self._producer = self._made_producer()
        self.waits = Waits()
        self._tuner: Tuner | None = None
        if is_tuned(config):
            self._tuner = Tuner(limits, self._executor, self.coordinator, self._producer, lambda: self.waits.ended)
        self.service = self._make_service(early)
        self._restored_epoch, self._restored = 0, (0, 0)
        self._resumed: tuple[Position, int | None] = (Position(), None)
        self._log = _log.owned()

    def _functions(self) -> list[Any]:
        """The tokenize functions, each once."""
        return [self._function]

    def _opened(
        self, source: Source | Paths | Mix, choice: PackingChoice, quarantine: Callable[[BadRowError], object]
    ) -> OpenedSource:
        opened = opened_source(described(source), self.config, self._function, quarantine, choice.plan, choice.share)
        warn_about_files(opened.files)
        return opened

    def _made_outcomes(self, settings: Outcomes) -> Any:
        return LoaderOutcomes(settings, self._source.files, self.config.n_samples_per_prompt)

    def _made_producer(self) -> Producer | MixtureProducer:
        args = self._windows, self._source.canaries(self._executor), self._executor, self.coordinator
        return Producer(*args, epochs=self.config.epochs, sharing=self._sharing, num_files=len(self.files))

    def _make_service(self, early: EarlyForkServer | None) -> Service:
        return Service(
            self._source.job,
            self._windows,
            self._producer,
            self._executor,
            self.coordinator,
            slot_bytes=self._source.slot_bytes,
            event_loop=self.config.event_loop,
            early=early,
            sharing=self._sharing,
            index=self._source.index,
        )

    @property
    def executor(self) -> Executor:
        """What runs the workers' requests."""
        return self._executor

    @property
    def files(self) -> FileRefs:
        """The files of the source."""
        return self._source.files.files

    def start(self) -> None:
        """Begin to read ahead; do nothing if that has begun."""
        self.service.start()
        for prover in self._provers:
            prover.start()

    def close(self, reason: str) -> None:
        """Stop everything; calls end with LoaderClosedError, which has the ``reason``."""
        self.coordinator.close(reason)
        self.service.close()
        for prover in self._provers:
            prover.close()
        self._source.close()
        if self.outcomes is not None:
            self.outcomes.close()

    def fingerprints(self) -> dict[str, Any]:
        """Digests of all that the tokens depend on. The first call reads a little of every file."""
        if self._function_fingerprints is None:  # once: the workers have loaded it, even if its files change later
            self._function_fingerprints = fingerprints_of(self._function)
        return {"data": self._source.files.fingerprint(), **self._function_fingerprints}

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, or of the next pack if samples are packed."""
        return self.batching.epoch(self.coordinator.ledger)

    def batches(self, *, runs_on: bool) -> SampleBatches | PackBatches:
        """The batches of one loop.

        :param runs_on: False: the loop covers the current epoch, even if no samples are left of it.
        """
        return self.batching.batches(self.coordinator, runs_on=runs_on)

    def _restart_position(self) -> Position:
        return self.batching.restart_point(self.coordinator.ledger).position

    def _order(self) -> dict[str, Any]:
        """The settings that decide the order of delivery."""
        return self._source.order.description() | self.batching.description()

    def snapshot(self) -> Snapshot:
        """The current state."""
        return self._snapshot_of(*self._moment())  # read once: all in it is of the same instant

    def _snapshot_of(self, ledger: Ledger, outcomes: OutcomeState | msgspec.UnsetType) -> Snapshot:
        position, counters = self.batching.restart_point(ledger)
        rows_left = self._rows_left(position)
        return Snapshot(
            library=__version__,
            position=structs.astuple(position),
            counters=counters.saved(),
            order=self._order(),
            fingerprints=self.fingerprints(),
            buffer=[item.record for item in ledger.buffer],
            leases=[item.record for item in ledger.leased_groups()],
            acked=[structs.astuple(place) for place in sorted(ledger.restart_point()[2])],
            journal=sorted(ledger.journal),
            canaries=list(self.service.canaries),
            stream=self._stream_at(position),
            packing=self.batching.saved(ledger),
            outcomes=outcomes,
            rows_left=msgspec.UNSET if rows_left is None else rows_left,
        )

    def _moment(self) -> tuple[Ledger, OutcomeState | msgspec.UnsetType]:
        if self.outcomes is None:
            return self.coordinator.ledger, msgspec.UNSET

        return self.outcomes.state(self.coordinator)

    def _stream_at(self, position: Position) -> StreamState | msgspec.UnsetType:
        return self._windows.state_at(position) or msgspec.UNSET

    def _rows_left(self, position: Position) -> int | None:
        found = self._windows.rows_after(position)
        return self._resumed[1] if found is None and position == self._resumed[0] else found

    def restore(self, saved: Snapshot, allow_changed: Collection[str], *, same_rows: bool = False) -> bool:
        """Continue from ``saved``; return whether at the saved position, and not at an epoch's start.

        :raises SnapshotMismatchError: if it belongs to other data or settings that ``allow_changed`` does not name.
        """
        try:
            changed = check(saved, self._order(), self.fingerprints(), allow_changed, same_rows=same_rows)
            memory = memory_of(saved, changed, self.outcomes, allow_changed)
        except SnapshotMismatchError as error:
            _log.warning("snapshot.refused", differences=sorted(error.differences))
            raise

        ledger = self._ledger_of(saved)
        # With another data, seed or order, windows differ. With packing, any change gives other packs.
        keeps_place = not (changed & {"data", "seed", "order"} or (changed and saved.packing))
        if keeps_place:
            if saved.packing:
                ledger = self.batching.restored(ledger, saved.packing)
            self._windows.resume_at(ledger.position, saved.stream or None)
            self._resumed = ledger.position, None if saved.rows_left is msgspec.UNSET else saved.rows_left
        else:
            ledger = self.batching.at_epoch(ledger, epoch_to_begin(saved, ledger, changed))
        is_other_text = bool(changed - {"seed"})
        is_allowed = bool({"tokenizer", "template", "tokenize_fn"} & set(allow_changed))
        canaries = [] if is_other_text or is_allowed else saved.canaries
        self.service.restart(partial(taking, self.outcomes, memory, ledger), canaries)
        self._restored_epoch, self._restored = self.epoch, self._delivered()
        _log.info("snapshot.restored", position=str(ledger.position), num_buffered_groups=len(ledger.buffer))
        return keeps_place

    def _ledger_of(self, saved: Snapshot) -> Ledger:
        packs = self.coordinator.ledger.packs
        return ledger_of(saved, digest=self.config.digest, group_size=self.config.n_samples_per_prompt, packs=packs)

    def _delivered(self) -> tuple[int, int]:
        """Numbers of samples and packs delivered so far."""
        ledger = self.coordinator.ledger
        return ledger.counters.num_samples, self.batching.totals(ledger).num_packs

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, unless it is the current one: a run resumed in its middle stays there.

        :raises ConfigError: directly after a restore, for an epoch that had ended.
        """
        if epoch == self.epoch:
            return

        if epoch < self._restored_epoch and self._delivered() == self._restored:
            raise ConfigError(
                f"AD441 set_epoch({epoch}) directly after a restore into epoch {self._restored_epoch} would deliver "
                "rows a second time. A trainer that counts epochs of its own, as transformers' Trainer does with "
                "max_steps, needs StatefulDataLoader(..., follows_set_epoch=False); to begin anew, restore no state"
            )

        self.service.restart(partial(self._at_epoch, epoch))

    def _at_epoch(self, epoch: int, ledger: Ledger) -> Ledger:
        if self.outcomes is not None:
            self.outcomes.begin_at(epoch)
        return self.batching.at_epoch(ledger, epoch)

    def num_rows(self, timeout_s: float | None) -> int:
        """Rows of an epoch; waits until the row index is complete.

        :raises ConfigError: if the order has no index.
        """
        return self._index().rows_when_complete(checked_timeout(timeout_s))

    def _index(self) -> RowIndex:
        if self._source.index is None:
            raise ConfigError(
                'how many rows there are is known only to shuffle="full" or a RowShuffle: they make a row index'
            )

        return self._source.index

    def seek(self, epoch: int, row: int, group_index: int | None) -> None:
        """Go to row ``row`` of ``epoch``, in delivery order; the number of rows means the next epoch's start."""
        num_rows = self.num_rows(None)
        if epoch < 0 or not 0 <= row <= num_rows:
            raise ConfigError(f"there is no row {row} in epoch {epoch}: an epoch has {num_rows} rows")

        epoch, row = (epoch + 1, 0) if row == num_rows else (epoch, row)
        size = self.config.n_samples_per_prompt
        self.service.restart(lambda ledger: ledger_at_row(self._at_epoch(epoch, ledger), epoch, row, group_index, size))

    def statistics(self) -> Statistics:
        """Counters and the current state of the loader."""
        ledger, workers = self.coordinator.ledger, self._executor.statistics()
        num_waits, waited_s = self.waits.totals()
        return Statistics(
            **structs.asdict(ledger.position),
            **of_delivery(ledger, self.coordinator.channel),
            waits_total=num_waits,
            data_wait_seconds_total=waited_s,
            num_workers=self._executor.num_workers,
            autotune_changes_total=self._tuner.num_changes if self._tuner is not None else 0,
            queued_requests=workers.num_queued,
            worker_restarts_total=workers.num_restarts,
            tokenized_rows_total=self._producer.pacer.total_rows,
            **of_sharing(self._sharing),
            tokenize_seconds_total=self._producer.pacer.total_work_s,
            blank_lines_total=self.service.num_blank_lines,
            **of_index(self._source.index),
            read_seconds=self._windows.read_s,
            **of_stores(workers, self._blocks()),
            **of_token_cache(self._source.token_cache),
            **of_packs(self.batching.totals(ledger)),
            workers=workers.workers,
            **({} if self.outcomes is None else self.outcomes.statistics()),
        )

    def _blocks(self) -> list[Blocks]:
        return [self._source.files]

    def _oldest_in_flight(self) -> Entry | None:
        return self.coordinator.channel.oldest_in_flight

    def waits_for(self) -> str:
        """The stage that a call waits for now: one of ``asyncdata.telemetry.records.WAITED_FOR``."""
        if self._executor.is_busy and self._oldest_in_flight() is not None:
            return "tokenize"  # what `waited_for` says, too, but in a microsecond: all statistics take fifty

        return waited_for(self.statistics(), self.service.is_started, is_indexing=is_indexing(self._source.index))

    def describe_wait(self) -> str:
        """What a call waits for now, in a few words."""
        return describe_wait(self.statistics(), self.waits_for())

    def timeout_error(self, waited_s: float, num_groups: int) -> PrefetchTimeoutError:
        """The error of a call that got no data in time: what it waited for, and why."""
        now, entry = self.statistics(), self._oldest_in_flight()
        oldest = entry.location() if entry is not None and entry.location is not None else None
        missing = max(0, num_groups - now.buffered_groups - now.ready_samples)
        is_started, indexes = self.service.is_started, is_indexing(self._source.index)
        message, diagnosis = explain_timeout(waited_s, missing, now, oldest, is_started, is_indexing=indexes)
        self._log.warning("loader.timeout", waited_s=waited_s, stage=diagnosis["stage"])
        return PrefetchTimeoutError(message, diagnosis)
