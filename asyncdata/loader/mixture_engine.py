"""The engine of a loader over a mixture: its parts, and what a snapshot keeps of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from msgspec import structs

from asyncdata.checkpoint.saved_mixture import MixtureMatch, SavedMixture, SavedPart
from asyncdata.core.errors import AsyncDataError, ConfigError, SourceError
from asyncdata.core.identity import FileRefs, ObjectRefs, joined
from asyncdata.core.messages import Job
from asyncdata.delivery.mixture import MergeRecord, MixturePoint, MixtureState, PartCursor
from asyncdata.loader.engine import Engine, Matched
from asyncdata.loader.opening import opened_part
from asyncdata.loader.statistics import SourceStatistics, Statistics
from asyncdata.order.mixture import has_end, targets_of
from asyncdata.read_ahead.mixture import MixtureReadAhead, PartCalls
from asyncdata.tokenization.base import describe

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncdata.checkpoint.snapshot import Snapshot
    from asyncdata.core.types import Position
    from asyncdata.delivery.ledger import Ledger, RestartPoint
    from asyncdata.delivery.outcome_memory import OutcomeState
    from asyncdata.loader.mix import Mix, NamedPart
    from asyncdata.loader.opened_source import OpenedPart
    from asyncdata.loader.packing_choice import PackingChoice
    from asyncdata.tokenization.part_functions import PartFunctions

_ALIGNMENT = 64


class MixtureEngine(Engine):
    """See :class:`~asyncdata.loader.engine.Engine`. Order, canaries and windows are each part's own.

    :raises SourceError: for files that cannot be read; the message names the part.
    """

    _function: PartFunctions
    _read_ahead: MixtureReadAhead

    def _opened(self, source: Mix, choice: PackingChoice) -> list[OpenedPart]:
        if choice.plan is not None:
            raise ConfigError(
                "AD471 the packs of a mixture cannot be planned, as which samples it has is not known before they are "
                "read: leave out plan_packs=True and XTuner's packs and order; SoftPacking and HardPacking need no plan"
            )

        self._parked: dict[str, SavedPart] = {}
        parts: list[OpenedPart] = []
        try:
            for leaf, function in zip(source.leaves(), self._function.functions, strict=True):
                calls = PartCalls(self.executor, len(parts))
                parts.append(self._opened_part(leaf, function, calls))
                if parts[-1].growth is not None:
                    raise ConfigError(f"AD471 part {leaf.name!r} grows, and a part of a mixture cannot: leave it out")

            sizes = {part.name: sum(file.num_bytes for file in part.files.files) for part in parts}
            self._node = source.node(sizes)
            self._check_end()
        except BaseException:
            for part in parts:
                part.close()
            raise

        self.mix_by, self._may_change = self._node.by, source.on_mix_change == "apply"
        return parts

    def _opened_part(self, leaf: NamedPart, function: Any, calls: PartCalls) -> OpenedPart:
        config = leaf.part.config(self.config, leaf.name)
        # The parts have one exchange, which divides their windows; each rank makes their row indexes by itself.
        alone = structs.replace(config, ranks=structs.replace(config.ranks, exchange=None))
        try:
            return opened_part(leaf.name, leaf.part.source, alone, function, calls)
        except (SourceError, ConfigError) as error:
            raise of_part(error, leaf.name) from error

    def _check_end(self) -> None:
        if self.config.epochs is not None and not has_end(self._node):
            raise ConfigError(
                f"AD470 epochs={self.config.epochs}, but no epoch of this mixture ends, as its parts repeat: give one "
                'of them when_done="stop", or all "leave"; or leave epochs out'
            )

    def _layout(self) -> tuple[Job, int, None]:
        jobs = [part.job for part in self.parts]
        job = Job(
            files=[],
            tokenize=None if self.config.num_workers == 0 else describe(self._function),
            max_row_bytes=max(job.max_row_bytes for job in jobs),
            block_bytes=0,
            slack_bytes=0,
            parts=[structs.replace(job, tokenize=None) for job in jobs],
        )
        most = max(part.slot_bytes for part in self.parts)
        return job, -(-most // _ALIGNMENT) * _ALIGNMENT, None

    def _start_of_mixture(self) -> MixturePoint:
        return MixturePoint(MergeRecord((), MixtureState()))

    def _made_read_ahead(self) -> MixtureReadAhead:
        supplies = [part.supply(self._decisions(part.name)) for part in self.parts]
        args = self._node, self.config.seed, supplies, self._calls, self.coordinator
        return MixtureReadAhead(*args, epochs=self.config.epochs)

    @property
    def files(self) -> FileRefs:
        """The files of all parts."""
        parts = [part.files.files for part in self.parts]
        packed = [part for part in parts if isinstance(part, ObjectRefs)]
        return joined(packed) if len(packed) == len(parts) else [file for part in parts for file in part]

    # State.

    def places_of(self, point: Ledger | RestartPoint) -> dict[str, Position]:
        state: MixtureState = point.counters.mixture.state
        return {name: cursor.position for name, cursor in state.parts.items()}

    def _saved(self, ledger: Ledger, point: RestartPoint, outcomes: dict[str, OutcomeState]) -> dict[str, Any]:
        state: MixtureState = point.counters.mixture.state_until(ledger.counters.mixture)
        parts = {}
        for part in self.parts:
            cursor = state.parts.get(part.name, PartCursor())
            parts[part.name] = SavedPart(
                cursor=cursor,
                order=part.order.description(),
                fingerprints=part.fingerprints(),
                stream=part.windows.state_at(cursor.position) or msgspec.UNSET,
                outcomes=outcomes.get(part.name, msgspec.UNSET),
            )
        mixture = SavedMixture(
            settings=self._node.description(),
            schedule=state.schedule,
            parts=parts,
            parked=self._parked,
            leaves=list(parts) if state.choices else [],
            choices=list(state.choices),
        )
        return {"order": self.batching.description(), "mixture": mixture}

    def _matched(self, saved: Snapshot, allow_changed: Collection[str], *, same_rows: bool) -> Matched:
        """What a snapshot of the same mixture says. Each part is checked by itself, and continues where it was.

        :raises SnapshotMismatchError: if the mixture has changed, unless ``on_mix_change="apply"``; or if a part
            belongs to other data or settings that ``allow_changed`` does not name.
        """
        match = MixtureMatch(saved, allow_changed, same_rows=same_rows)
        match.check_batching(self.batching.description())
        match.check_settings(self._node.description(), may_change=self._may_change)
        memories = {}
        for part in self.parts:
            match.check_part(part.name, part.order.description(), part.fingerprints())
        for part in self.parts:
            memories[part.name] = self._memory_of(part.name, *match.outcomes(part.name), allow_changed)
        state = match.state(self._node)
        files = {part.name: part.files.files for part in self.parts if part.name not in match.other_data}
        ledger = self._ledger_of(saved, files)
        counters = structs.replace(ledger.counters, mixture=MixturePoint(MergeRecord((), state)))
        ledger = structs.replace(ledger, counters=counters)
        if saved.packing:
            ledger = self.batching.restored(ledger, saved.packing)
        for part in self.parts:
            part.windows.resume_at(state.parts[part.name].position, match.stream(part.name))
        self._parked = match.parked([part.name for part in self.parts])
        return Matched(ledger, match.canaries(saved.canaries), memories)

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

    def statistics(self) -> Statistics:
        """As in an engine of one source, and :attr:`~asyncdata.Statistics.by_source`."""
        state, waits = self.coordinator.ledger.counters.mixture.state, self._read_ahead.waits()
        size = self.config.n_samples_per_prompt
        targets = targets_of(self._node, state.schedule)
        by_source = {}
        for part in self.parts:
            cursor, memory = state.parts.get(part.name, PartCursor()), self._memory(part.name)
            by_source[part.name] = SourceStatistics(
                samples=cursor.num_samples * size,
                tokens=cursor.num_tokens,
                epoch=cursor.position.epoch - (1 if cursor.is_at_end else 0),
                dropped=dict(cursor.drops),
                wait=waits[part.name],
                target=targets[part.name],
                **({} if memory is None else memory.numbers()),
            )
        return structs.replace(super().statistics(), by_source=by_source)


def of_part(error: AsyncDataError, name: str) -> AsyncDataError:
    """The error, with the name of the part in front of its message."""
    code, _, rest = str(error).partition(" ")
    has_code = code.startswith("AD") and code[2:].isdigit()
    text = f"{code} part {name!r} of the mixture: {rest}" if has_code else f"part {name!r} of the mixture: {error}"
    return type(error)(text)
