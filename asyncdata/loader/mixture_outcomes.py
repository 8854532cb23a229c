"""The outcome memory of a mixture: one for each part, and which rows the passes of its replays have."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import InvalidGroupError
from asyncdata.core.log import get_logger
from asyncdata.delivery.outcomes.memory import RowReport
from asyncdata.delivery.outcomes.replay import in_order
from asyncdata.delivery.outcomes.rows import NO_IDS
from asyncdata.loader.outcomes import LoaderOutcomes, Restored, row_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncdata.core.types import Group, Sample
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.mixture import MixtureState
    from asyncdata.delivery.outcomes.policy import Ids, Outcomes, PassRate
    from asyncdata.delivery.outcomes.state import OutcomeState
    from asyncdata.delivery.part_decisions import PartDecisions
    from asyncdata.sources.base import Blocks

__all__ = ("MixtureOutcomes", "RememberedPart")

_log = get_logger(__name__)


class RememberedPart(NamedTuple):
    """A part, as far as its memory depends on it.

    :ivar replay: of a replay, the name of the part whose rows come again, and the range of their scores.
    """

    name: str
    files: Blocks
    replay: tuple[str, PassRate] | None


class _Epochs:
    """The epochs of a part; see :class:`~asyncdata.delivery.part_decisions.PartDecisions`."""

    def __init__(self, outcomes: LoaderOutcomes) -> None:
        self._outcomes = outcomes

    def is_decided(self, epoch: int) -> bool:
        return epoch in self._outcomes.memory.excluded

    def decide(self, epoch: int) -> bool:
        self._outcomes.decide(epoch)
        return True

    def excluded(self, epoch: int) -> Ids:
        return self._outcomes.excluded(epoch)


class _Passes:
    """The passes of a replay, as the same.

    :param of: the memory of the part whose rows come again.
    :ivar epoch: returns the current epoch of that part.
    :ivar on_decided: called when a pass has rows.
    """

    def __init__(self, name: str, of: LoaderOutcomes, where: PassRate, seed: int) -> None:
        self.of = of
        self.epoch: Callable[[], int] = int
        self.on_decided: Callable[[], object] = no_op
        self._name = name
        self._where = where
        self._seed = seed
        self._log = _log.owned()

    def is_decided(self, epoch: int) -> bool:
        return self._chosen(epoch) is not None

    def decide(self, epoch: int) -> bool:
        if not self.of.memory.decide_pass(self._name, epoch, self.epoch(), self._where):
            return False

        chosen = self._chosen(epoch)
        self._log.info("replay.decided", part=self._name, number=epoch, num_rows=0 if chosen is None else len(chosen))
        self.on_decided()
        return True

    def excluded(self, _: int) -> Ids:
        return NO_IDS

    def ids_of(self, number: int) -> Ids | None:
        """The rows of a pass in its order; None if they are not decided yet."""
        chosen = self._chosen(number)
        return None if chosen is None else in_order(chosen, seed=self._seed, name=self._name, number=number)

    def report_of(self, report: RowReport, attempts: int) -> RowReport:
        """The report as one of the part's own: in the epoch in which the pass began, after the row's other attempts."""
        passes = self.of.memory.passes.get(self._name)
        epoch, number = (0, 0) if passes is None else passes.place_of(report.epoch)
        scores = [(number * attempts + attempt, score) for attempt, score in report.scores]
        return RowReport(report.row_id, epoch, scores, report.source, is_replay=True)

    def _chosen(self, number: int) -> Ids | None:
        passes = self.of.memory.passes.get(self._name)
        return None if passes is None else passes.chosen.get(number)


class MixtureOutcomes:
    """The memories of all parts. Each has a file of its own, ``path.<name of the part>``.

    See :class:`~asyncdata.loader.outcomes.LoaderOutcomes`, which each of them is.

    :raises ConfigError: if a file or the policy cannot be used.
    """

    exclusions: None = None

    def __init__(self, settings: Outcomes, parts: list[RememberedPart], group_size: int, seed: int) -> None:
        self.parts: dict[str, LoaderOutcomes] = {}
        self._passes: dict[str, _Passes] = {}
        self._group_size = group_size
        self._saving = threading.Lock()
        for part in parts:
            if part.replay is None:
                path = None if settings.path is None else f"{settings.path}.{part.name}"
                own = msgspec.structs.replace(settings, path=path)
                self.parts[part.name] = LoaderOutcomes(own, part.files, group_size)
        for part in parts:
            if part.replay is not None:
                of, where = part.replay
                self._passes[part.name] = _Passes(part.name, self.parts[of], where, seed)

    def decisions(self, name: str) -> PartDecisions | None:
        """What decides the epochs of a part; None if all have all rows."""
        if name in self._passes:
            return self._passes[name]

        return _Epochs(self.parts[name]) if self.parts[name].has_policy else None

    def passes(self, name: str) -> _Passes:
        """The passes of a replay."""
        return self._passes[name]

    # Reports.

    def reports_of(self, items: Iterable[Sample] | Iterable[Group], scores: Sequence[Any] | None) -> list[RowReport]:
        """The scores of each row.

        :raises InvalidGroupError: if one of them cannot be counted.
        """
        return row_reports(items, scores, self._group_size, self.key_of)

    def key_of(self, sample: Sample) -> list[Any]:
        """The epoch of a sample's part, the id of its row, and the part."""
        name = sample.source_name or ""
        if sample.source_epoch is None or (name not in self.parts and name not in self._passes):
            raise InvalidGroupError(
                f"AD482 {sample!r} is of {name!r}, which is no part of this mixture; report samples to the loader that "
                "delivered them"
            )

        return [sample.source_epoch, self._memory_of(name).row_id(sample), name]

    def _memory_of(self, name: str) -> LoaderOutcomes:
        return self._passes[name].of if name in self._passes else self.parts[name]

    def count(self, reports: Iterable[RowReport], attempts: int | None = None) -> int:
        """Count scores of rows; return how many were new. Those of parts that are not there any more are left out."""
        size, num_new = attempts or self._group_size, 0
        for report in reports:
            if report.source in self._passes:
                passes = self._passes[report.source]
                num_new += passes.of.count([passes.report_of(report, size)], size)
            elif report.source in self.parts:
                num_new += self.parts[report.source].count([report], size)
        return num_new

    # States.

    def state(
        self, coordinator: Coordinator, state_of: Callable[[Ledger], MixtureState]
    ) -> tuple[Ledger, dict[str, OutcomeState]]:
        """The ledger, and the states of all memories at the same instant.

        :raises SnapshotError: if a file cannot be written.
        """
        with self._saving:
            with coordinator.lock:
                ledger = coordinator.ledger
                cursors = state_of(ledger).parts
                epochs = {name: cursor.position.epoch for name, cursor in cursors.items()}
                due = {}
                for name, part in self.parts.items():
                    passes = {
                        replay: epochs.get(replay, 0) for replay, found in self._passes.items() if found.of is part
                    }
                    due[name] = part.due(epochs.get(name, 0), passes)
            return ledger, {name: part.written(due[name], coordinator) for name, part in self.parts.items()}

    def take(self, found: dict[str, Restored | None]) -> None:
        """Continue with these memories."""
        for name, restored in found.items():
            if restored is not None:
                self.parts[name].take(restored)

    def statistics(self) -> dict[str, Any]:
        """Numbers for :class:`~asyncdata.Statistics`: of all parts together."""
        total: dict[str, Any] = {}
        for part in self.parts.values():
            for name, number in part.statistics().items():
                total[name] = total.get(name, 0) + number
        return total

    def close(self) -> None:
        """Close the files."""
        for part in self.parts.values():
            part.close()
