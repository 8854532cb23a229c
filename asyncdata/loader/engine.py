"""The engine of a loader: joins all its parts, and takes and restores its state."""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import structs

from asyncdata.checkpoint.restore import check, epoch_to_begin, ledger_at_row, ledger_of
from asyncdata.checkpoint.snapshot import Snapshot
from asyncdata.core import __version__
from asyncdata.core.errors import ConfigError, PrefetchTimeoutError, SnapshotMismatchError, get_logger
from asyncdata.core.settings import checked_timeout
from asyncdata.core.threads import at_exit, end_all, identity, watch_end
from asyncdata.core.types import Group, Position
from asyncdata.delivery.channel import Exclusions
from asyncdata.delivery.chunk import StreamDigest
from asyncdata.delivery.coordinator import Coordinator
from asyncdata.delivery.items import Bell
from asyncdata.delivery.ledger import Counters, Ledger, Request, RestartPoint, RowKey, is_key_of
from asyncdata.delivery.rollout_buffer import filter_of
from asyncdata.loader.background_proof import provers_of
from asyncdata.loader.opening import TuningLimits, connect_cluster, executor_of, limits_of, opened_part
from asyncdata.loader.packing_choice import PackingChoice
from asyncdata.loader.sample_batches import Making
from asyncdata.loader.service import Service
from asyncdata.loader.statistics import HELD, Statistics, explain_timeout, lacking, numbers_of
from asyncdata.loader.waits import Waits
from asyncdata.read_ahead.calls import Calls
from asyncdata.read_ahead.source import ReadAhead
from asyncdata.tokenization.base import TokenizeFn, has_media, resolved

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Coroutine, Iterable, Mapping

    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.batching.xtuner_packing import LoaderPacking
    from asyncdata.core.identity import FileRefs
    from asyncdata.core.messages import Job
    from asyncdata.delivery.outcome_memory import OutcomeState, RowReport
    from asyncdata.delivery.rollout_buffer import BufferFilter
    from asyncdata.loader.autotune import Tuner
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.loader_media import LoaderMedia
    from asyncdata.loader.mix import Mix
    from asyncdata.loader.opened_source import OpenedPart
    from asyncdata.loader.outcomes import LoaderOutcomes, Memories, PartOutcomes
    from asyncdata.read_ahead.mixture import MixtureReadAhead
    from asyncdata.read_ahead.ranks import SharedScans
    from asyncdata.read_ahead.row_index import RowIndex
    from asyncdata.sources.base import Source
    from asyncdata.sources.growing import Listing
    from asyncdata.sources.resolve import Paths
    from asyncdata.telemetry.recorder import Recorder
    from asyncdata.telemetry.settings import NoRecorder
    from asyncdata.workers.popen import EarlyForkServer

_log = get_logger(__name__)
_REMEDY = "Ranks(exchange=...), by which the ranks divide the rows; or a fast tokenizer, with which it costs little"


class Matched(NamedTuple):
    """What a snapshot says, of a source that is the same as far as it must be.

    :ivar canaries: the digests that the present ones must agree with.
    :ivar memories: what is remembered of the rows of each part.
    :ivar keeps_place: whether the run continues at the saved position, and not at an epoch's start.
    :ivar growth: what epochs of a source that grows cover.
    """

    ledger: Ledger
    canaries: list[str]
    memories: dict[str, Memories | None]
    keeps_place: bool = True
    growth: dict[int, Listing] | None = None


class Engine:
    """All parts of a loader, without the calls that wait.

    :ivar executor: runs the workers' requests.
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
        packing: LoaderPacking | None = None,
        length_grouping: LengthGrouping | None = None,
        early: EarlyForkServer | None = None,
    ) -> None:
        self.config = config
        choice = PackingChoice.of(config, packing, length_grouping, is_filtered=buffer_filter is not None)
        chosen_filter = filter_of(buffer_filter)
        self._function = (early.function if early is not None else None) or resolved(tokenize_fn)
        limits = limits_of(config)
        self.executor = executor_of(config, limits, self._function, early)
        self._calls = Calls(self.executor)
        self.parts = self._opened(source, choice)
        job, slot_bytes, self._row_index = self._layout()
        if config.executor is not None:
            connect_cluster(self.executor, job)
        self._scans = self._shared_scans()
        is_divided = choice.share is not None or self._scans is not None
        if config.ranks.world_size > 1 and config.executor is None and not is_divided:
            _log.warning("loader.every_rank_tokenizes", world_size=config.ranks.world_size, remedy=_REMEDY)
        functions = list({id(part.opening.function): part.opening.function for part in self.parts}.values())
        bell = Bell()
        self._media = self._made_media(functions, bell, is_planned=choice.is_in_order)
        self.batching = choice.batching(Making(config, self.parts, collate_fn, choice.packs_samples, self._media))
        self.outcomes = self._checked_outcomes(is_packed=self.batching.is_packed)
        first = Ledger(counters=Counters(digest=StreamDigest(config.digest), mixture=self._start_of_mixture()))
        self.coordinator = _coordinator_class(config)(
            config.delivery_rules(self.parts[0].opening.bad_rows, packs=self.batching.is_packed),
            structs.replace(first, packs=self.batching.begin(first)),
            buffer_filter=chosen_filter,
            outcomes=self._decisions(""),
            media=self._media,
            bell=bell,
        )
        self._read_ahead = self._made_read_ahead()
        self.waits = Waits()
        self._tuner = self._made_tuner(limits) if limits.max_workers > limits.min_workers else None
        self.service = Service(
            job,
            self._read_ahead,
            self._coroutines(),
            self.executor,
            self.coordinator,
            bell,
            slot_bytes=slot_bytes,
            event_loop=config.event_loop,
            early=early,
            index=self._row_index,
        )
        tokenizes_here = config.executor is None or config.executor.local_workers
        self._provers = provers_of(functions if tokenizes_here else [], self.service)
        self._restored_epoch, self._restored = 0, (0, 0)
        self._resumed: tuple[Position, int | None] = (Position(), None)
        self._log = _log.owned()

    # What differs in the engine of a mixture.

    mix_by = ""
    """Of a mixture, what its targets are shares of: ``rows`` or ``tokens``."""

    def _opened(self, source: Any, choice: PackingChoice) -> list[OpenedPart]:
        return [opened_part("", source, self.config, self._function, self._calls, choice.plan, choice.share)]

    def _layout(self) -> tuple[Job, int, RowIndex | None]:
        """The workers' job, the memory of a slot, and the row index, if there is one."""
        (part,) = self.parts
        return part.job, part.slot_bytes, part.index

    def _coroutines(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What runs as long as the service."""
        windows = [part.windows for part in self.parts]
        found = [one.run for one in (self._scans, self._tuner, *windows) if one is not None]
        if self._media is not None:
            found.append(partial(self._media.load, self._calls, self.coordinator))
        return found

    def _start_of_mixture(self) -> Any:
        return None

    def _made_read_ahead(self) -> ReadAhead | MixtureReadAhead:
        return ReadAhead(self.parts[0].supply(self._decisions("")), self.coordinator, epochs=self.config.epochs)

    def _made_media(self, functions: list[Any], bell: Bell, *, is_planned: bool) -> LoaderMedia | None:
        if not any(map(has_media, functions)):
            return None

        from asyncdata.loader.loader_media import LoaderMedia

        return LoaderMedia(self.parts, self.config.limits.max_media_bytes, bell, is_planned=is_planned)

    @property
    def files(self) -> FileRefs:
        """The files of the source."""
        return self.parts[0].files.files

    def _shared_scans(self) -> SharedScans | None:
        """What ranks with an exchange divide; None: nothing, or the row index, which is divided as it is made."""
        if self.config.ranks.exchange is None or self.config.ranks.world_size == 1 or self._row_index is not None:
            return None

        from asyncdata.loader.opened_rows import shared_scans

        return shared_scans(self.config, self.parts)

    def _checked_outcomes(self, *, is_packed: bool) -> LoaderOutcomes | None:
        if self.config.outcomes is None:
            return None

        from asyncdata.loader.outcomes import LoaderOutcomes, check_outcomes

        check_outcomes(self.config, is_packed=is_packed)
        sources = {part.name: part.files for part in self.parts}
        group_size, world_size = self.config.n_samples_per_prompt, self.config.ranks.world_size
        return LoaderOutcomes(self.config.outcomes, sources, group_size, world_size)

    def _memory(self, part: str) -> PartOutcomes | None:
        """What is remembered of the rows of a part; None if nothing is."""
        return None if self.outcomes is None else self.outcomes.parts.get(part)

    def _decisions(self, part: str) -> Exclusions | None:
        """Which rows of a part are left out by their outcomes."""
        memory = self._memory(part)
        return None if memory is None else memory.exclusions

    def start(self) -> None:
        """Begin to read ahead; do nothing if that has begun."""
        _open_at_exit.add(self)
        watch_end()
        self.service.start()
        for prover in self._provers:
            prover.start()

    def close(self, reason: str = "") -> None:
        """Stop everything; calls end with LoaderClosedError, which has the ``reason``; without it, with the process."""
        _open_at_exit.discard(self)
        if reason:
            self.coordinator.close(reason)
        self.service.close()
        for prover in self._provers:
            prover.close()
        for part in self.parts:
            part.close()
        if self._scans is not None:
            self._scans.leave()

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, or of the next pack if samples are packed."""
        return self.batching.epoch(self.coordinator.ledger)

    def snapshot(self) -> Snapshot:
        """The current state."""
        outcomes: dict[str, OutcomeState] = {}
        with self.coordinator.lock:
            ledger = self.coordinator.ledger.settled()  # read once: all of it is of one instant
            point = ledger.needed()
            if self.outcomes is not None:
                outcomes = self.outcomes.state(self.places_of(point), self.places_of(ledger))
        return Snapshot(
            library=__version__,
            position=structs.astuple(point.position),
            counters=point.counters.saved(),
            buffer=[item.record for item in ledger.buffer],
            leases=[item.record for item in ledger.leased_groups()],
            group_files=sorted(ledger.group_files) if ledger.buffer or ledger.leases else msgspec.UNSET,
            acked=[structs.astuple(place) for place in ledger.acked_from(point.position)],
            journal=sorted(ledger.journal),
            excluded=sorted(ledger.excluded) or msgspec.UNSET,
            **self._to_come_again(ledger),
            canaries=list(self.service.canaries),
            packing=self.batching.saved(ledger),
            group_drops=ledger.group_drops or msgspec.UNSET,
            rollouts=msgspec.UNSET if ledger.rollouts is None else ledger.rollouts.saved(),
            **self._saved(ledger, point, outcomes),
        )

    def _to_come_again(self, ledger: Ledger) -> dict[str, Any]:
        """What a snapshot keeps so that groups of the stream that come again keep their numbers."""
        if ledger.reached({}).num_groups == (ledger.leases or [ledger])[0].counters.num_groups:
            return {}

        served = ledger.reached(self.places_of(ledger))
        late = [(*key, *structs.astuple(place)) for key, place in sorted(ledger.excluded.items()) if place > Position()]
        return {"served": served, "excluded_late": late or msgspec.UNSET}

    def places_of(self, point: Ledger | RestartPoint) -> dict[str, Position]:
        """The first row of each part that is not delivered there."""
        return {"": point.position}

    def _order(self) -> dict[str, Any]:
        """The settings that decide the order of delivery."""
        return self.parts[0].order.description() | self.batching.description()

    def _saved(self, ledger: Ledger, point: RestartPoint, outcomes: dict[str, OutcomeState]) -> dict[str, Any]:
        """What a snapshot keeps of the source.

        :param point: where a restart begins to read.
        """
        (part,), position = self.parts, point.position
        rows_left = part.windows.rows_after(position)
        if rows_left is None and position == self._resumed[0]:
            rows_left = self._resumed[1]
        growth = part.growth
        return {
            "growth": msgspec.UNSET if growth is None else growth.saved(position.epoch),  # before the fingerprints
            "order": self._order(),
            "fingerprints": part.fingerprints(),
            "stream": part.windows.state_at(position) or msgspec.UNSET,
            "outcomes": outcomes.get("", msgspec.UNSET),
            "rows_left": msgspec.UNSET if rows_left is None else rows_left,
        }

    def restore(self, saved: Snapshot, allow_changed: Collection[str], *, same_rows: bool = False) -> bool:
        """Continue from ``saved``; return whether at the saved position, and not at an epoch's start.

        :raises SnapshotMismatchError: if it belongs to other data or settings that ``allow_changed`` does not name.
        """
        try:
            match = self._matched(saved, allow_changed, same_rows=same_rows)
        except SnapshotMismatchError as error:
            _log.warning("snapshot.refused", differences=sorted(error.differences))
            raise

        self.service.restart(partial(self._taking, match), match.canaries)
        self._restored_epoch, self._restored = self.epoch, self._delivered()
        position, buffer = match.ledger.position, match.ledger.buffer
        _log.info("snapshot.restored", position=str(position), num_buffered_groups=len(buffer))
        return match.keeps_place

    def _matched(self, saved: Snapshot, allow_changed: Collection[str], *, same_rows: bool) -> Matched:
        """What a snapshot of the same source says: of the same kind of rows, in the same order."""
        (part,) = self.parts
        fingerprints, growth = part.fingerprints(), part.growth
        grown = growth.matched(saved.growth) if growth is not None and saved.growth else None
        if growth is not None and grown is not None:
            fingerprints["data"] = growth.fingerprint(grown)
        changed = check(saved, self._order(), fingerprints, allow_changed, same_rows=same_rows)
        memory = self._memory_of("", saved.outcomes, changed, allow_changed)
        refs = part.files.files if grown is None else grown[max(grown)].refs
        ledger = self._ledger_of(saved, {} if "data" in changed else {"": refs})
        # With another data, seed or order, windows differ. With packing, any change gives other packs.
        keeps_place = not (changed & {"data", "seed", "order"} or (changed and saved.packing))
        if keeps_place:
            if saved.packing:
                ledger = self.batching.restored(ledger, saved.packing)
            part.windows.resume_at(ledger.position, saved.stream or None)
            self._resumed = ledger.position, None if saved.rows_left is msgspec.UNSET else saved.rows_left
        else:
            ledger = self.batching.at_epoch(ledger, epoch_to_begin(saved, ledger, changed))
        is_other_text = bool(changed - {"seed"})
        is_allowed = bool({"tokenizer", "template", "tokenize_fn"} & set(allow_changed))
        return Matched(ledger, [] if is_other_text or is_allowed else saved.canaries, {"": memory}, keeps_place, grown)

    def _memory_of(
        self,
        part: str,
        saved: OutcomeState | msgspec.UnsetType,
        changed: Collection[str],
        allow_changed: Collection[str],
    ) -> Memories | None:
        """The outcome memory of a part with which to continue; None if it has none."""
        memory = self._memory(part)
        if memory is None and not saved:
            return None

        from asyncdata.loader.outcomes import memory_of

        return memory_of(saved, changed, memory, allow_changed)

    def _taking(self, match: Matched, _: Ledger) -> Ledger:
        """The ledger of a snapshot; memories and growth take what it has. The coordinator's lock is held."""
        ledger = self.coordinator.judged(match.ledger)  # what was out waits in the buffer now, and may be too old
        if self.outcomes is not None:
            self.outcomes.take(match.memories)
        growth = self.parts[0].growth
        if growth is not None and match.growth is not None:
            growth.take(match.growth)
        return ledger

    def _ledger_of(self, saved: Snapshot, files: Mapping[str, FileRefs]) -> Ledger:
        """The ledger of a snapshot.

        :param files: of each part that has the same data, as it covers them after the restart; of the others, it is not
            known which rows were excluded.
        """
        size, now = self.config.n_samples_per_prompt, self.coordinator.ledger
        ledger = ledger_of(saved, now, digest=self.config.digest, group_size=size, files=files)
        if not ledger.excluded:
            return ledger

        others = [part.name for part in self.parts if part.name not in files]
        excluded = ledger.excluded.items()
        known = {key: place for key, place in excluded if not any(is_key_of(part, key) for part in others)}
        if num_forgotten := len(excluded) - len(known):
            _log.warning("snapshot.exclusions_forgotten", num_rows=num_forgotten)
        from asyncdata.loader.exclusions import RowKeys

        return ledger.without(known, RowKeys(self.parts, files).is_of)

    def is_of(self, group: Group, rows: Container[RowKey]) -> bool:
        """Whether a group is of one of these rows."""
        return bool(rows) and self.batching.row_keys.is_of(group, rows)

    def exclude(self, rows: Iterable[Any]) -> int:
        """Continue without these rows; return how many are excluded now.

        :raises ConfigError: AD485, if one of them is no row of this loader; nothing has changed then.
        """
        parts = self.batching.row_keys(rows)

        def change(ledger: Ledger) -> Ledger:
            places = ledger.reached(self.places_of(ledger)).positions
            new = {key: places.get(name, Position()) for key, name in parts.items()}
            return ledger.without(new | ledger.excluded, self.is_of)

        (self.coordinator.exclude if self.coordinator.rules.leaves_gaps else self.service.restart)(change)
        num_rows = len(self.coordinator.ledger.excluded)
        _log.info("loader.excluded", num_rows=num_rows)
        return num_rows

    def _delivered(self) -> tuple[int, int]:
        """Numbers of samples and packs delivered so far."""
        ledger = self.coordinator.ledger
        return ledger.counters.num_samples, self.batching.totals(ledger).num_packs

    def report(self, recorder: Recorder | NoRecorder, items: Any, scores: Any) -> int:
        """Count scores, with several ranks of all of them; see :meth:`LoaderOutcomes.gathered`."""
        assert self.outcomes is not None, "the loader remembers scores"
        with self.coordinator.lock:
            news = self.outcomes.news(self._places())
        return self.count(self.outcomes.gathered(recorder, items, scores, news))

    def count(self, reports: Iterable[RowReport], attempts: int | None = None) -> int:
        """Count scores; see :meth:`LoaderOutcomes.count`. If later epochs have other rows now, they are read again."""
        assert self.outcomes is not None, "the loader remembers scores"
        with self.service.lock, self.coordinator.lock:
            number = self.outcomes.count(reports, attempts)
            if self.outcomes.decide_anew(self._places()):
                self.service.restart(identity)
            return number

    def _places(self) -> dict[str, Position]:
        """How far each part is delivered, if one has decided lately; most reports come when none has."""
        is_known = self.outcomes is not None and self.outcomes.has_decided
        return self.places_of(self.coordinator.ledger) if is_known else {}

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``, unless it is the current one: a run resumed in its middle stays there.

        :raises ConfigError: directly after a restore, for an epoch that had ended; or if it is not known any more what
            the epoch covered (AD311).
        """
        if epoch == self.epoch:
            return

        if epoch < self._restored_epoch and self._delivered() == self._restored:
            raise ConfigError(
                f"AD441 set_epoch({epoch}) directly after a restore into epoch {self._restored_epoch} would deliver "
                "rows a second time. A trainer that counts epochs of its own, as transformers' Trainer does with "
                "max_steps, needs StatefulDataLoader(..., follows_set_epoch=False); to begin anew, restore no state"
            )

        if (growth := self.parts[0].growth) is not None:
            growth.check_known(epoch)
        self.service.restart(partial(self._at_epoch, epoch))

    def _at_epoch(self, epoch: int, ledger: Ledger) -> Ledger:
        if self.outcomes is not None:
            self.outcomes.begin_at(epoch)
        return self.batching.at_epoch(ledger.settled(), epoch)

    def num_rows(self, timeout_s: float | None) -> int:
        """Rows of an epoch; waits until the row index is complete.

        :raises ConfigError: if the order has no index.
        """
        return self._index().rows_when_complete(checked_timeout(timeout_s))

    def _index(self) -> RowIndex:
        if self._row_index is None:
            raise ConfigError(
                'how many rows there are is known only to shuffle="full" or a RowShuffle: they make a row index'
            )

        return self._row_index

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
        ledger, index = self.coordinator.ledger, self._row_index
        num_waits, waited_s = self.waits.totals()
        numbers = numbers_of(
            ledger,
            self.coordinator.channel,
            self.executor.statistics(),
            [part.files for part in self.parts],
            self.batching.totals(ledger),
        )
        return Statistics(
            **structs.asdict(ledger.position),
            **numbers | self._read_ahead.numbers(),
            unread_keys=self._read_ahead.unread_keys,
            waits_total=num_waits,
            data_wait_seconds_total=waited_s,
            loop_held_seconds_total=self.waits.held_s,
            num_workers=self.executor.num_workers,
            indexed_rows=0 if index is None else index.num_found,
            excluded_rows={} if index is None else dict(index.excluded),
            read_seconds=max(part.windows.read_s for part in self.parts),
            **({} if self.outcomes is None else self.outcomes.numbers()),
            **({} if self._media is None else self._media.numbers(self.coordinator.channel)),
        )

    def _made_tuner(self, limits: TuningLimits) -> Tuner:
        """It adds workers while the trainer waits for them."""
        from asyncdata.loader.autotune import Tuner

        return Tuner(limits, self.executor, self._read_ahead, self)

    def waits_for(self) -> str:
        """The stage that a call waits for now: ``start``, ``index``, ``read``, ``tokenize`` or ``media``."""
        media = self.coordinator.channel.media
        if media is not None and media.num_lacking and self.executor.is_busy:
            return "media"

        is_tokenizing = self.executor.answers_with_samples or self._read_ahead.oldest_in_flight is not None
        if self.executor.is_busy and is_tokenizing:
            return "tokenize"  # what `lacking` says, too, but in a microsecond: all statistics take fifty

        stage, *_ = self._lacking(self.statistics())
        return "read" if stage == "filter" else stage

    def _lacking(self, now: Statistics) -> tuple[str, str, str]:
        index = self._row_index
        return lacking(now, self.service.is_started, is_indexing=index is not None and not index.is_complete)

    def describe_wait(self, request: Request | None = None) -> str:
        """What a call waits for now, in a few words."""
        if request is None or not request.ready_at:
            return self._lacking(self.statistics())[1]

        held_s = time.monotonic() - request.ready_at
        return f"the samples are ready, and your code has held the event loop for {held_s:.1f} s"

    def timeout_error(self, waited_s: float, num_groups: int) -> PrefetchTimeoutError:
        """The error of a call that got no data in time: what it waited for, and why."""
        now, entry = self.statistics(), self._read_ahead.oldest_in_flight
        oldest = entry.location(self.executor.row_of(entry.request_id)) if entry and entry.location else None
        missing = max(0, num_groups - now.buffered_groups - now.ready_samples)
        lack = self._lacking(now) if missing or now.media_waiting_samples else HELD
        message, diagnosis, (workers, row, knob) = explain_timeout(waited_s, missing, now, oldest, lack)
        self._log.warning(
            "loader.timeout", waited_s=waited_s, stage=lack[0], missing=missing, workers=workers, row=row, setting=knob
        )
        return PrefetchTimeoutError(message, diagnosis)


_open_at_exit: weakref.WeakSet[Engine] = weakref.WeakSet()


def _close_all() -> None:
    for engine in list(_open_at_exit):
        if engine.service.is_here:
            engine.close()
    end_all()


at_exit(_close_all)


def _coordinator_class(config: LoaderConfig) -> type[Coordinator]:
    """The coordinator of a loader: one that can be watched, if it is recorded."""
    if not config.telemetry.is_on:
        return Coordinator

    from asyncdata.telemetry.recorder import WatchedCoordinator

    return WatchedCoordinator
