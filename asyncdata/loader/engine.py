"""The engine of a loader: joins all its parts, and takes and restores its state."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from asyncdata.checkpoint.matching import check
from asyncdata.checkpoint.restore import epoch_to_begin, ledger_of
from asyncdata.checkpoint.snapshot import Snapshot
from asyncdata.core.errors import ConfigError, PrefetchTimeoutError, SnapshotMismatchError
from asyncdata.core.log import get_logger
from asyncdata.core.timeouts import checked_timeout
from asyncdata.core.types import Position
from asyncdata.core.version import __version__
from asyncdata.delivery.coordinator import Coordinator
from asyncdata.delivery.quarantine import Quarantine
from asyncdata.delivery.requests import DeliveryRules
from asyncdata.delivery.rollout_buffer import filter_of
from asyncdata.loader.autotune.tuner import Tuner, executor_of, is_tuned, limits_of
from asyncdata.loader.background_proof import Prover
from asyncdata.loader.opening import opened_source
from asyncdata.loader.packing_choice import PackingChoice
from asyncdata.loader.service import Service
from asyncdata.loader.statistics import Statistics, explain_timeout
from asyncdata.order.order import ROWS_PER_WINDOW
from asyncdata.prefetch.producer import Producer
from asyncdata.sources.file_warnings import warn_about_files
from asyncdata.sources.resolve import described
from asyncdata.tokenization.base import fingerprints_of
from asyncdata.tokenization.resolve import resolved

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.batching.packers.base import Packing
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.rollout_buffer import BufferFilter
    from asyncdata.loader.batches.pack_batches import PackBatches
    from asyncdata.loader.batches.sample_batches import SampleBatches
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.prefetch.row_index.row_index import RowIndex
    from asyncdata.sources.base import Source
    from asyncdata.sources.resolve import Paths
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.workers.pool.early_start import EarlyForkServer

__all__ = ("Engine",)

_log = get_logger(__name__)
_SHARED_WORK = (
    "with packing: plan_packs=True; without: shuffle=RowShuffle(only_kept=True); or one Cache(tokens=...) for all "
    "ranks, filled by one of them before"
)


class Engine:
    """All parts of a loader, without the calls that wait.

    :param collate_fn: makes a batch of a loop.
    :param early: a fork server that was started early; the engine owns it unless the constructor fails.
    :raises ConfigError: for a setting that cannot work.
    :raises SourceError: for files that cannot be read.
    """

    def __init__(
        self,
        source: Source | Paths,
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
        self._prover = Prover(self._function)
        self._function_fingerprints: dict[str, str] | None = None
        quarantine = Quarantine.opened(config.bad_rows.path if config.bad_rows.policy == "quarantine" else None).add
        self._source = opened_source(described(source), config, self._function, quarantine, choice.plan, choice.share)
        warn_about_files(self._source.files)
        if config.ranks.world_size > 1 and choice.share is None and not config.cache.tokens:
            _log.warning("loader.every_rank_tokenizes", world_size=config.ranks.world_size, remedy=_SHARED_WORK)
        limits = limits_of(config)
        self._executor = executor_of(config, limits, self._function, early)
        self._windows = self._source.windows(
            self._executor, restart_point=self._restart_position, on_ready=lambda: self._producer.pump()
        )
        self.batching = choice.batching(config, collate_fn, self._windows)
        self.coordinator = Coordinator(
            _rules(config, is_packed=self.batching.is_packed),
            buffer_filter=chosen_filter,
            packs=self.batching.begin(),
            quarantine=quarantine,
            on_room=lambda: self.service.pump_soon(),
        )
        canaries = self._source.canaries(self._executor)
        self._producer = Producer(self._windows, canaries, self._executor, self.coordinator, epochs=config.epochs)
        self._tuner: Tuner | None = None
        if is_tuned(config):
            self._tuner = Tuner(limits, self._executor, self.coordinator, self._producer, lambda: self._waits)
        self.service = self._make_service(early)
        self._restored_epoch, self._restored = 0, (0, 0)
        self._resumed: tuple[Position, int | None] = (Position(), None)
        self._waits = (0, 0.0)
        self._waits_lock = threading.Lock()

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
        )

    def start(self) -> None:
        """Begin to read ahead; do nothing if that has begun."""
        self.service.start()
        self._prover.start()

    def close(self, reason: str) -> None:
        """Stop everything; calls end with LoaderClosedError, which has the ``reason``."""
        self.coordinator.close(reason)
        self.service.close()
        self._prover.close()
        self._source.close()

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
        ledger = self.coordinator.ledger  # read once: all below is of the same instant
        position, counters = self.batching.restart_point(ledger)
        rows_left = self._rows_left(position)
        return Snapshot(
            library=__version__,
            position=structs.astuple(position),
            counters=msgspec.to_builtins(counters),
            order=self._order(),
            fingerprints=self.fingerprints(),
            buffer=[item.record for item in ledger.buffer],
            leases=[item.record for item in ledger.leased_groups()],
            acked=[structs.astuple(place) for place in sorted(ledger.restart_point()[2])],
            journal=sorted(ledger.journal),
            canaries=list(self.service.canaries),
            stream=self._windows.state_at(position) or msgspec.UNSET,
            packing=self.batching.saved(ledger),
            rows_left=msgspec.UNSET if rows_left is None else rows_left,
        )

    def _rows_left(self, position: Position) -> int | None:
        found = self._windows.rows_after(position)
        return self._resumed[1] if found is None and position == self._resumed[0] else found

    def restore(self, saved: Snapshot, allow_changed: Collection[str], *, same_rows: bool = False) -> bool:
        """Continue from ``saved``; return whether at the saved position, and not at an epoch's start.

        :raises SnapshotMismatchError: if it belongs to other data or settings that ``allow_changed`` does not name.
        """
        try:
            changed = check(saved, self._order(), self.fingerprints(), allow_changed, same_rows=same_rows)
        except SnapshotMismatchError as error:
            _log.warning("snapshot.refused", differences=sorted(error.differences))
            raise

        packs = self.coordinator.ledger.packs
        ledger = ledger_of(saved, digest=self.config.digest, group_size=self.config.n_samples_per_prompt, packs=packs)
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
        self.service.restart(lambda _: ledger, [] if is_other_text or is_allowed else saved.canaries)
        self._restored_epoch, self._restored = self.epoch, self._delivered()
        _log.info("snapshot.restored", position=str(ledger.position), num_buffered_groups=len(ledger.buffer))
        return keeps_place

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

        self.service.restart(lambda ledger: self.batching.at_epoch(ledger, epoch))

    def num_rows(self, timeout_s: float | None) -> int:
        """Rows of an epoch; waits until the row index is complete.

        :raises ConfigError: if the order has no index.
        """
        index, timeout_s = self._index(), checked_timeout(timeout_s)
        if not index.wait(timeout_s):
            raise PrefetchTimeoutError(
                f"the row index is not complete after {timeout_s:g} s: {index.num_found} rows are found so far", {}
            )

        if index.fault is not None:
            raise index.fault

        return index.num_rows

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
        self.service.restart(partial(self._sought, epoch, row, group_index))

    def _sought(self, epoch: int, row: int, group_index: int | None, ledger: Ledger) -> Ledger:
        before = self.batching.at_epoch(ledger, epoch)
        counters = structs.replace(before.counters, epoch_groups=row)
        if group_index is not None:
            num_samples = group_index * self.config.n_samples_per_prompt
            counters = structs.replace(counters, num_groups=group_index, num_samples=num_samples)
        place = Position(epoch, *divmod(row, ROWS_PER_WINDOW))
        return structs.replace(before, position=place, counters=counters)

    def add_wait(self, seconds: float) -> None:
        """Count a call that had to wait for data."""
        with self._waits_lock:
            self._waits = self._waits[0] + 1, self._waits[1] + seconds

    def statistics(self) -> Statistics:
        """Counters and the current state of the loader."""
        ledger, channel, workers = self.coordinator.ledger, self.coordinator.channel, self._executor.statistics()
        index, cache = self._source.index, self._source.token_cache
        packs = self.batching.totals(ledger)
        return Statistics(
            **structs.asdict(ledger.position),
            samples_total=ledger.counters.num_samples,
            groups_total=ledger.counters.num_groups,
            tokens_total=ledger.counters.num_tokens,
            dropped_total=dict(ledger.counters.drops),
            noted_total=dict(ledger.counters.notes),
            bad_rows_total=ledger.counters.num_bad_rows,
            buffered_groups=len(ledger.buffer),
            leased_requests=len(ledger.leases),
            ready_samples=channel.num_produced - ledger.taken,
            in_flight_rows=channel.num_rows_in_flight,
            capacity_samples=channel.capacity,
            ready_bytes=channel.num_ready_bytes,
            waits_total=self._waits[0],
            data_wait_seconds_total=self._waits[1],
            num_workers=self._executor.num_workers,
            autotune_changes_total=self._tuner.num_changes if self._tuner is not None else 0,
            queued_requests=workers.num_queued,
            worker_restarts_total=workers.num_restarts,
            blank_lines_total=self.service.num_blank_lines,
            indexed_rows=index.num_found if index is not None else 0,
            excluded_rows=dict(index.excluded) if index is not None else {},
            read_seconds=self._windows.read_s,
            cached_rows_total=cache.num_rows_read if cache is not None else 0,
            token_cache_bytes=cache.num_bytes if cache is not None else 0,
            packs_total=packs.num_packs,
            packed_tokens_total=packs.num_tokens,
            unpacked_samples_total=dict(packs.counts.samples),
            unpacked_tokens_total=dict(packs.counts.tokens),
            held_samples=packs.num_held,
            workers=workers.workers,
        )

    def timeout_error(self, waited_s: float, num_groups: int) -> PrefetchTimeoutError:
        """The error of a call that got no data in time: what it waited for, and why."""
        now = self.statistics()
        entry = self.coordinator.channel.oldest_in_flight
        oldest = entry.location() if entry is not None and entry.location is not None else None
        num_missing = max(0, num_groups - now.buffered_groups - now.ready_samples)
        index = self._source.index
        is_indexing = index is not None and not index.is_complete
        message, diagnosis = explain_timeout(
            waited_s, num_missing, now, oldest, self.service.is_started, is_indexing=is_indexing
        )
        _log.warning("loader.timeout", waited_s=waited_s, stage=diagnosis["stage"])
        return PrefetchTimeoutError(message, diagnosis)


def _rules(config: LoaderConfig, *, is_packed: bool) -> DeliveryRules:
    return DeliveryRules(
        capacity=config.capacity,
        max_ready_bytes=config.limits.max_ready_bytes,
        samples_per_group=config.n_samples_per_prompt,
        epochs=config.epochs,
        drop_last=config.drop_last and not is_packed,
        bad_row_stops=config.bad_rows.policy == "raise",
        max_bad_rows=config.bad_rows.max,
        commit_on_ack=config.commit == "on_ack",
        digest=config.digest,
        shows_rows=config.bad_rows.excerpts,
    )
