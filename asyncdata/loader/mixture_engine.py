"""The engine of a loader over a mixture: its parts, and what a snapshot keeps of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec import structs

from asyncdata.checkpoint.mixture_matching import MixtureMatch
from asyncdata.checkpoint.snapshot import EarlierMixture, SavedMixture, SavedPart
from asyncdata.core.errors import ConfigError
from asyncdata.core.file_refs import ObjectRefs, joined
from asyncdata.core.log import get_logger
from asyncdata.delivery.mixture import MixturePoint, MixtureState, PartCursor
from asyncdata.loader.engine import Engine
from asyncdata.loader.mix import Mix
from asyncdata.loader.mixture_outcomes import MixtureOutcomes, RememberedPart
from asyncdata.loader.opened_mixture import OpenedMixture
from asyncdata.loader.outcomes import memory_of
from asyncdata.loader.statistics import SourceStatistics
from asyncdata.order.mixture import targets_of
from asyncdata.order.mixture_tree import has_end

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asyncdata.checkpoint.snapshot import Snapshot
    from asyncdata.core.errors import BadRowError
    from asyncdata.core.file_refs import FileRefs
    from asyncdata.core.types import Position
    from asyncdata.delivery.channel import Entry
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.outcomes.policy import Outcomes
    from asyncdata.delivery.outcomes.state import OutcomeState
    from asyncdata.loader.opened_mixture import OpenedPart
    from asyncdata.loader.outcomes import Restored
    from asyncdata.loader.packing_choice import PackingChoice
    from asyncdata.loader.statistics import Statistics
    from asyncdata.prefetch.mixture_producer import MixtureProducer
    from asyncdata.sources.base import Blocks, Source
    from asyncdata.sources.resolve import Paths
    from asyncdata.tokenization.part_functions import PartFunctions

__all__ = ("MixtureEngine", "engine_class")

_log = get_logger(__name__)


def engine_class(source: Source | Paths | Mix) -> type[Engine]:
    """The engine for a source."""
    return MixtureEngine if isinstance(source, Mix) else Engine


class MixtureEngine(Engine):
    """See :class:`~asyncdata.loader.engine.Engine`."""

    # An engine of one source uses more of these, in methods that are overridden here.
    _source: OpenedMixture  # type: ignore[assignment]
    _producer: MixtureProducer
    _function: PartFunctions
    outcomes: MixtureOutcomes | None  # type: ignore[assignment]

    def _functions(self) -> list[Any]:
        return list({id(function): function for function in self._function.functions}.values())

    def _opened(  # type: ignore[override]
        self, source: Any, choice: PackingChoice, quarantine: Callable[[BadRowError], object]
    ) -> OpenedMixture:
        assert isinstance(source, Mix)
        if choice.plan is not None:
            raise ConfigError(
                "AD471 the packs of a mixture cannot be planned, as which samples it has is not known before they are "
                "read: leave out plan_packs=True and XTuner's packs and order; SoftPacking and HardPacking need no plan"
            )

        if self.config.outcomes is None and any(leaf.replay is not None for leaf in source.leaves()):
            raise ConfigError(
                "AD472 this mixture has a Replay, which chooses rows by their scores, and the loader remembers none: "
                "give it outcomes=Outcomes(...)"
            )

        self._parked: dict[str, SavedPart] = {}
        self._earlier: list[EarlierMixture] = []
        self._part_fingerprints: dict[str, dict[str, Any]] = {}
        opened = OpenedMixture(source, self.config, self._function)
        for part in opened.parts:
            part.find_restart = self._restart_of
        if self.config.epochs is not None and not has_end(opened.node):
            opened.close()
            raise ConfigError(
                f"AD470 epochs={self.config.epochs}, but no epoch of this mixture ends, as its parts repeat: give one "
                'of them when_done="stop", or all "leave"; or leave epochs out'
            )

        return opened

    def _made_outcomes(self, settings: Outcomes) -> MixtureOutcomes:
        parts = [RememberedPart(part.name, part.source.files, part.replay) for part in self._source.parts]
        return MixtureOutcomes(settings, parts, self.config.n_samples_per_prompt, self.config.seed)

    def _made_producer(self) -> MixtureProducer:
        return self._source.producer(self._executor, self.coordinator, self.config, self.outcomes)

    @property
    def files(self) -> FileRefs:
        """The files of all parts."""
        parts = [part.source.files.files for part in self._source.parts]
        packed = [part for part in parts if isinstance(part, ObjectRefs)]
        return joined(packed) if len(packed) == len(parts) else [file for part in parts for file in part]

    def fingerprints(self) -> dict[str, Any]:
        """Nothing: each part has fingerprints of its own."""
        return {}

    def _order(self) -> dict[str, Any]:
        return {"mixture": sorted(part.name for part in self._source.parts), **self.batching.description()}

    def _state_of(self, ledger: Ledger) -> MixtureState:
        point = self.batching.restart_point(ledger).counters.mixture
        return point.state() if point is not None else MixtureState()

    def _restart_of(self, name: str) -> Position:
        return self._state_of(self.coordinator.ledger).parts.get(name, PartCursor()).position

    @property
    def parts(self) -> list[OpenedPart]:
        """The parts, open."""
        return self._source.parts

    @property
    def mix_by(self) -> str:
        """What the targets are shares of: ``rows`` or ``tokens``."""
        return self._source.node.by

    # State

    def snapshot(self) -> Snapshot:
        """The current state."""
        if self.outcomes is None:
            return self._saved_at(self.coordinator.ledger, {})

        return self._saved_at(*self.outcomes.state(self.coordinator, self._state_of))

    def _saved_at(self, ledger: Ledger, outcomes: dict[str, OutcomeState]) -> Snapshot:
        state, now = self._state_of(ledger), ledger.counters.mixture
        saved = SavedMixture(
            settings=self._settings(),
            schedule=state.schedule,
            parts={
                part.name: self._saved(part, state, outcomes.get(part.name, msgspec.UNSET))
                for part in self._source.parts
            },
            parked=self._parked,
            at=now.state().schedule.at if now is not None else 0,
            earlier=[old for old in self._earlier if old.until >= state.schedule.at],
        )
        snapshot = self._snapshot_of(ledger, msgspec.UNSET)
        return structs.replace(snapshot, order=self.batching.description(), mixture=saved)

    def _stream_at(self, position: Position) -> msgspec.UnsetType:
        return msgspec.UNSET

    def _rows_left(self, position: Position) -> None:
        return None

    def _settings(self) -> dict[str, Any]:
        return self._source.mix.description(self._source.node)

    def _saved(self, part: OpenedPart, state: MixtureState, outcomes: OutcomeState | msgspec.UnsetType) -> SavedPart:
        assert part.windows is not None
        cursor = state.parts.get(part.name, PartCursor())
        return SavedPart(
            cursor=cursor,
            order=part.order(),
            fingerprints=self._fingerprints_of(part),
            stream=part.windows.state_at(cursor.position) or msgspec.UNSET,
            outcomes=outcomes,
        )

    def _fingerprints_of(self, part: OpenedPart) -> dict[str, Any]:
        if part.name not in self._part_fingerprints:
            number = self._source.parts.index(part)
            self._part_fingerprints[part.name] = self._function.fingerprints_of(number)
        return {"data": part.source.files.fingerprint(), **self._part_fingerprints[part.name]}

    def restore(self, saved: Snapshot, allow_changed: Collection[str], *, same_rows: bool = False) -> bool:
        """As in an engine of one source. Each part is checked by itself, and continues where it was.

        :raises SnapshotMismatchError: if the mixture has changed, unless ``on_mix_change="apply"``; or if a part
            belongs to other data or settings that ``allow_changed`` does not name.
        """
        match = MixtureMatch(saved, allow_changed, same_rows=same_rows)
        match.check_batching(self.batching.description())
        match.check_settings(self._settings(), may_change=self._source.mix.on_mix_change == "apply")
        for part in self._source.parts:
            match.check_part(part.name, part.order(), self._fingerprints_of(part))
        memories = self._memories(match, allow_changed)
        state = match.state(self._source.node)
        ledger = self._ledger_of(saved)
        point = MixturePoint(state)
        ledger = structs.replace(ledger, counters=structs.replace(ledger.counters, mixture=point))
        if saved.packing:
            ledger = self.batching.restored(ledger, saved.packing)
        for part in self._source.parts:
            assert part.windows is not None
            part.windows.resume_at(state.parts[part.name].position, match.stream(part.name))
        self._earlier = match.earlier()
        self._parked = match.parked([part.name for part in self._source.parts])
        self.service.restart(partial(self._taking, memories, ledger), match.canaries(saved.canaries))
        self._restored_epoch, self._restored = self.epoch, self._delivered()
        _log.info("snapshot.restored", position=str(ledger.position), num_buffered_groups=len(ledger.buffer))
        return True

    def _memories(self, match: MixtureMatch, allow_changed: Collection[str]) -> dict[str, Restored | None]:
        """What each part remembers of its rows. A replay has no memory of its own."""
        found = {}
        for part in self._source.parts:
            if part.replay is None:
                own = None if self.outcomes is None else self.outcomes.parts[part.name]
                saved, changed = match.part(part.name)
                found[part.name] = memory_of(saved, changed, own, allow_changed)
        return found

    def _taking(self, memories: dict[str, Restored | None], ledger: Ledger, _: Ledger) -> Ledger:
        if self.outcomes is not None:
            self.outcomes.take(memories)
        return ledger

    def set_epoch(self, epoch: int) -> None:
        """Nothing if it is the current epoch.

        :raises ConfigError: for another one: an epoch begins where the parts are at the end of the one before.
        """
        if epoch != self.epoch:
            raise ConfigError(
                f"AD471 set_epoch({epoch}): the mixture is in epoch {self.epoch}. Its epochs begin where its parts are "
                "at the end of the one before, so none can be skipped or repeated; restore a snapshot instead"
            )

    def _index(self) -> NoReturn:
        raise ConfigError(
            "AD471 a mixture has no row index, so the number of its rows is not known, and no row can be looked for"
        )

    # Diagnostics

    def _oldest_in_flight(self) -> Entry | None:
        return self._producer.oldest_in_flight

    def statistics(self) -> Statistics:
        """As in an engine of one source, and :attr:`~asyncdata.Statistics.by_source`."""
        ledger = self.coordinator.ledger
        point = ledger.counters.mixture
        state, waits = point.state() if point is not None else MixtureState(), self._producer.waits()
        size, passed_over = self.config.n_samples_per_prompt, self._producer.times_passed_over()
        memories = {} if self.outcomes is None else self.outcomes.parts
        targets = targets_of(self._source.node, state.schedule)
        by_source = {}
        for part in self._source.parts:
            cursor = state.parts.get(part.name, PartCursor())
            by_source[part.name] = SourceStatistics(
                samples=cursor.num_samples * size,
                tokens=cursor.num_tokens,
                epoch=cursor.position.epoch - (1 if cursor.is_at_end else 0),
                dropped=dict(cursor.drops),
                wait=waits[part.name],
                target=targets[part.name],
                passed_over=passed_over[part.name],
                **(memories[part.name].statistics() if part.name in memories else {}),
            )
        in_flight_rows = self._producer.num_in_flight
        return structs.replace(super().statistics(), by_source=by_source, in_flight_rows=in_flight_rows)

    def _blocks(self) -> list[Blocks]:
        return [part.source.files for part in self._source.parts]
