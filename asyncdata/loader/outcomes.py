"""The outcome memory of a loader: what ``report`` counts, what states keep, and which rows epochs exclude."""

from __future__ import annotations

import base64
import binascii
import math
import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from asyncdata.core.errors import ConfigError, InvalidGroupError, SnapshotError, SnapshotMismatchError
from asyncdata.core.log import get_logger
from asyncdata.delivery.chunk import NO_IDS, row_ids
from asyncdata.delivery.ledger import grouped
from asyncdata.delivery.outcomes.file import Found, OutcomeFile
from asyncdata.delivery.outcomes.memory import BASE, MAX_SCORE, OutcomeMemory, OutcomeState, Record, RowReport
from asyncdata.delivery.outcomes.policy import PassRate, policy_of
from asyncdata.loader.row_places import RowPlaces

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from contextlib import AbstractContextManager

    from asyncdata.core.types import Group, Sample
    from asyncdata.delivery.chunk import Ids
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.outcomes.policy import Bools, Outcomes, OutcomeTable, Policy
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.loader.shared_outcomes import SharedOutcomes
    from asyncdata.sources.base import Blocks

__all__ = ("LoaderOutcomes", "PartOutcomes", "Restored", "check_outcomes", "memory_of")

_log = get_logger(__name__)
_MIN_FILE_BYTES = 64 << 20
_MAX_REWRITES = 8
"""A file is replaced when it is this many times as large as the memory in it, and has at least the bytes above."""


class Restored(NamedTuple):
    """The memory of each reward, and where their file continues."""

    memories: dict[str, OutcomeMemory]
    found: Found


class Due(NamedTuple):
    """A state, and what its file must have before.

    :ivar records: what is new, by the key of the reward.
    :ivar bases: the memories as one record each, with which the file begins anew; empty: ``records`` are appended.
    """

    memories: dict[str, OutcomeMemory]
    state: OutcomeState
    records: dict[str, list[Record]] = {}
    bases: list[Record] = []


class _Scored(NamedTuple):
    item: int
    sample: Any
    attempt: int
    score: float | None


def check_outcomes(config: LoaderConfig, *, is_packed: bool) -> None:
    """Whether outcomes can be remembered with the other settings.

    :raises ConfigError: if they cannot (AD480).
    """
    outcomes, is_divided = config.outcomes, config.ranks.world_size > 1
    if outcomes is None:
        return

    if is_packed:
        raise ConfigError("AD480 outcomes cannot be remembered with packs: leave out packing and length_grouping")

    if is_divided and outcomes.exchange is None:
        raise ConfigError(
            "AD480 outcomes cannot be remembered with Ranks(world_size=...), as each rank would exclude rows by "
            "its own scores: give Outcomes(exchange=...), or let one loader feed all ranks (dp_size=...)"
        )

    if is_divided and outcomes.path is not None:
        raise ConfigError(
            "AD480 outcomes of several ranks are in the state, the same of each: leave out Outcomes(path=...)"
        )


class _Told:
    """A policy, and on which side of its limits it left rows out: ``num_low`` and ``num_high``, of a ``PassRate``."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.numbers: dict[str, int] = {}

    def __call__(self, outcomes: OutcomeTable, epoch: int) -> Bools:
        if not isinstance(self._policy, PassRate):
            return self._policy(outcomes, epoch)

        low, high = self._policy.sides(outcomes, epoch)
        self.numbers = {"num_low": int(low.sum()), "num_high": int(high.sum())}
        return low | high


class PartOutcomes:
    """The memory of one source, its file, and the policy. It changes only while the coordinator's lock is held.

    Several rewards are remembered each by itself, as if it were the only one.

    :ivar memories: by the key of the reward; empty: scores have no key.
    :raises ConfigError: if the file or the policy cannot be used.
    """

    def __init__(self, settings: Outcomes, files: Blocks) -> None:
        self._policy = policy_of(settings)
        self._places = RowPlaces(files)
        self._file = None if settings.path is None else OutcomeFile(settings.path)
        self.memories = {"": self._new_memory()}
        self._news: set[int] = set()
        self._log = _log.owned()

    def of(self, key: str) -> OutcomeMemory:
        """The memory of a reward."""
        if key not in self.memories:
            self.memories = {**self.memories, key: self._new_memory()}  # one assignment, as others may read it now
        return self.memories[key]

    # Exclusions.

    @property
    def key(self) -> str | None:
        """The reward that the policy reads; empty: scores without a key. None: there is no policy."""
        return None if self._policy is None else getattr(self._policy, "key", None) or ""

    @property
    def exclusions(self) -> PartOutcomes | None:
        """What decides which rows an epoch excludes; None if each epoch has all rows."""
        return None if self._policy is None else self

    def is_decided(self, epoch: int) -> bool:
        """Whether it is decided which rows ``epoch`` excludes."""
        return any(epoch in memory.excluded for memory in self.memories.values())

    def decide(self, epoch: int) -> None:
        """Decide which rows ``epoch`` excludes."""
        assert self._policy is not None, "without a policy each epoch has all rows"
        memory = self.of(self.key or "")
        told = _Told(self._policy)
        excluded = self.excluded(epoch) if self.is_decided(epoch) else memory.decide(epoch, told)
        self._news.add(epoch)
        known = len(memory.rows)
        self._log.info("outcomes.decided", epoch=epoch, num_known=known, num_excluded=len(excluded), **told.numbers)

    def excluded(self, epoch: int) -> Ids:
        """The ids of the rows that ``epoch`` excludes, ascending; none before that is decided."""
        found = (memory.excluded.get(epoch) for memory in self.memories.values())
        return next((ids for ids in found if ids is not None), NO_IDS)

    def news(self) -> dict[int, Ids]:
        """What the epochs exclude that were decided since the last call."""
        news = {epoch: self.excluded(epoch) for epoch in sorted(self._news) if self.is_decided(epoch)}
        self._news.clear()
        return news

    def forget_decisions(self, first: int, stop: int | None = None) -> None:
        """Keep the decisions of the epochs ``[first, stop)`` only."""
        for memory in self.memories.values():
            memory.forget_decisions(first, stop)

    def row_id(self, sample: Sample) -> int:
        """The id of a sample's row."""
        source = sample.source
        files = () if source is None else self._places.files(source.path)
        if source is None or not files:
            where = "of no file" if source is None else f"of {source.path}, which is not a file of this loader"
            raise InvalidGroupError(f"AD482 {sample!r} is {where}; report samples to the loader that delivered them")

        return int(row_ids(files[-1], self._places.offset(source.byte_offset, source.row_number)))

    # States.

    def due(self, epoch: int) -> Due:
        """What a state has, and its file does not.

        :param epoch: the first whose decisions a restart needs.
        """
        self.forget_decisions(epoch)
        memories = self.memories
        decided = sorted(epoch for memory in memories.values() for epoch in memory.excluded)
        state = OutcomeState(decided=decided, **self._totals())
        if self._file is None:
            texts = {key: base64.b64encode(memory.base().payload).decode() for key, memory in memories.items()}
            return Due(memories, msgspec.structs.replace(state, memory=texts.pop(""), by_key=texts))

        limit = max(_MIN_FILE_BYTES, _MAX_REWRITES * sum(memory.rows.num_bytes for memory in memories.values()))
        is_grown = self._file.num_bytes > limit
        bases = [memory.base().of(key) for key, memory in memories.items()] if is_grown else []
        return Due(memories, state, {key: list(memory.pending) for key, memory in memories.items()}, bases)

    def written(self, due: Due, lock: AbstractContextManager[Any]) -> OutcomeState:
        """The state, after the file has what is due.

        :param lock: the coordinator's, which is not held now.
        :raises SnapshotError: if the file cannot be written.
        """
        if self._file is None:
            return due.state

        if due.bases:
            self._file.replace(*due.bases)
        else:
            self._file.append(record.of(key) for key, records in due.records.items() for record in records)
        with lock:
            for key, records in due.records.items():
                due.memories[key].written(records)
        return msgspec.structs.replace(due.state, num_bytes=self._file.num_bytes, digest=self._file.digest)

    def find(self, saved: OutcomeState | None) -> Restored:
        """The memory of a state; None: of one without outcomes. Nothing changes.

        :raises SnapshotMismatchError: if the file does not have it.
        :raises SnapshotError: if it cannot be read.
        """
        memory, found = self._new_memory(), Found(None, b"", [])
        memories = {"": memory}
        if saved is None:
            return Restored(memories, found)

        if saved.memory is not None:
            for key, text in {"": saved.memory, **saved.by_key}.items():
                memories[key] = one = memories.get(key) or self._new_memory()
                one.apply(_record_in(text))
                if self._file is not None:
                    one.pending.append(one.base())
        elif self._file is None and saved.num_bytes:
            raise SnapshotMismatchError(
                "AD606 the outcome memory of this snapshot is in a file: give Outcomes(path=...) with its name; or "
                'pass allow_changed={"outcomes"}, to begin with an empty memory',
                {"outcomes": (f"{saved.num_bytes} bytes of a file", "no file")},
            )
        elif self._file is not None:
            found = self._file.find(saved.num_bytes, saved.digest)
            for key, record in map(Record.opened, found.records):
                memories[key] = memories.get(key) or self._new_memory()
                memories[key].apply(record)
        memory.num_repeated, memory.num_late = saved.num_repeated, saved.num_late
        memory.num_skipped = saved.num_skipped
        for one in memories.values():
            one.excluded = {epoch: ids for epoch, ids in one.excluded.items() if epoch in saved.decided}
        return Restored(memories, found)

    def take(self, restored: Restored) -> None:
        """Continue with this memory."""
        self.memories = restored.memories
        self._news.clear()
        if self._file is not None:
            self._file.continue_after(restored.found.path, restored.found.data)

    def numbers(self) -> dict[str, Any]:
        """Numbers for :class:`~asyncdata.Statistics`."""
        totals = self._totals()
        rows = totals.pop("num_rows")
        return {"outcome_rows": rows} | {f"outcome_{name[4:]}_total": number for name, number in totals.items()}

    def _totals(self) -> dict[str, Any]:
        """Of all rewards together; the rows are those of the reward that has the most."""
        memories = list(self.memories.values())
        names = ("num_scores", "num_repeated", "num_late", "num_skipped")
        rows = max(len(memory.rows) for memory in memories)
        return {"num_rows": rows, **{name: sum(getattr(memory, name) for memory in memories) for name in names}}

    def _new_memory(self) -> OutcomeMemory:
        epochs = getattr(self._policy, "epochs", 1)
        return OutcomeMemory(keeps_records=self._file is not None, num_earlier=epochs - 1)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class LoaderOutcomes:
    """The memories of a loader: one for each part of a mixture, or one without a name.

    A part's file is ``path.<name of the part>``.

    :param sources: by the names of the parts.
    :param world_size: ranks that report together, if there is more than one.
    :ivar parts: the memories, by the same names.
    :raises ConfigError: if a file or the policy cannot be used.
    """

    def __init__(self, settings: Outcomes, sources: Mapping[str, Blocks], group_size: int, world_size: int = 1) -> None:
        self.parts: dict[str, PartOutcomes] = {}
        self._shared: SharedOutcomes | None = None
        if world_size > 1:
            from asyncdata.loader.shared_outcomes import SharedOutcomes

            self._shared = SharedOutcomes(settings.exchange, world_size, self._news, self.count)
        self._group_size = group_size
        self._saving = threading.Lock()
        for name, files in sources.items():
            path = f"{settings.path}.{name}" if name and settings.path is not None else settings.path
            self.parts[name] = PartOutcomes(msgspec.structs.replace(settings, path=path), files)

    def report(self, own: Callable[[], list[RowReport]], lock: AbstractContextManager[Any]) -> int:
        """Count scores, with several ranks those of all; return how many were new.

        :param own: makes this loader's reports.
        :param lock: the coordinator's, which is not held now, as delivery needs it.
        :raises InvalidGroupError: if a report cannot be counted (AD482), or all lack a reward (AD484).
        :raises WorkerError, ConfigError: as :meth:`~asyncdata.loader.shared_outcomes.SharedOutcomes.report` says.
        """
        if self._shared is not None:
            return self._shared.report(own, lock)

        reports = own()
        with lock:
            return self.count(reports)

    def _news(self) -> list[tuple[tuple[str, int], Ids]]:
        """What each epoch of a part excludes, of those that were decided since the last call."""
        return [((name, epoch), ids) for name, part in self.parts.items() for epoch, ids in part.news().items()]

    def reports_of(self, items: Iterable[Sample] | Iterable[Group], scores: Any) -> list[RowReport]:
        """The scores of each row.

        :raises InvalidGroupError: if one of them cannot be counted.
        """
        reports: list[RowReport] = []
        groups = grouped(items, "report")
        for key, column in _by_key(groups, scores).items():
            row, of_row = None, list[tuple[int, float | None]]()
            for item, sample, attempt, score in _scored(groups, column, self._group_size, key):
                if row != (row := (item, sample.position)):  # the samples of a group are of one row
                    epoch, row_id, *part = self.key_of(sample)
                    of_row = []
                    reports.append(RowReport(row_id, epoch, of_row, "".join(part), key))
                of_row.append((attempt, score))
        return reports

    def _refuse_other_keys(self, keys: set[str]) -> None:
        """Refuse reports without the reward that the policy reads, as long as that has no score.

        :raises InvalidGroupError: AD484.
        """
        parts = self.parts.values()
        wanted = next(iter(parts)).key
        if wanted is None or not keys or wanted in keys:
            return

        if any(part.memories[wanted].num_scores for part in parts if wanted in part.memories):
            return

        names = ", ".join(repr(key) if key else "one without a key" for key in sorted(keys))
        policy = f"key={wanted!r}" if wanted else "without a key"
        raise InvalidGroupError(
            f"AD484 report() was given the rewards {names}, and the policy reads scores {policy}, of which "
            "there are none yet: report that reward, too, or let the policy read another, PassRate(key=...)"
        )

    def key_of(self, sample: Sample) -> list[Any]:
        """The epoch and the id of a sample's row, and in a mixture its part: it can be reported in another process."""
        if "" in self.parts:
            return [sample.position.epoch if sample.position is not None else 0, self.parts[""].row_id(sample)]

        name = sample.source_name or ""
        if sample.source_epoch is None or name not in self.parts:
            raise InvalidGroupError(
                f"AD482 {sample!r} is of {name!r}, which is no part of this mixture; report samples to the loader that "
                "delivered them"
            )

        return [sample.source_epoch, self.parts[name].row_id(sample), name]

    def count(self, reports: Iterable[RowReport], attempts: int | None = None) -> int:
        """Count scores of rows; return how many were new. Those of parts that are not there any more are left out.

        :param attempts: samples of a row in an epoch; None: those of a group.
        :raises InvalidGroupError: if they lack the reward that the policy reads (AD484); none is counted.
        """
        found: dict[tuple[str, str], list[RowReport]] = {}
        for report in reports:
            if report.source in self.parts:
                found.setdefault((report.source, report.key), []).append(report)
        self._refuse_other_keys({key for _, key in found})
        size = attempts or self._group_size
        return sum(self.parts[name].of(key).report(some, size) for (name, key), some in found.items())

    def begin_at(self, epoch: int) -> None:
        """Delivery of a single source goes to ``epoch``, whose rows are decided anew, as those of later epochs."""
        self.parts[""].forget_decisions(0, epoch)

    def state(
        self, coordinator: Coordinator, epochs_of: Callable[[Ledger], Mapping[str, int]]
    ) -> tuple[Ledger, dict[str, OutcomeState]]:
        """The ledger, and the states of all memories at the same instant. What is new is in their files then.

        :param epochs_of: the epoch of each part at which a restart begins.
        :raises SnapshotError: if a file cannot be written.
        """
        with self._saving:
            with coordinator.lock:
                ledger = coordinator.ledger
                epochs = epochs_of(ledger)
                due = {name: part.due(epochs.get(name, 0)) for name, part in self.parts.items()}
            return ledger, {name: part.written(due[name], coordinator.lock) for name, part in self.parts.items()}

    def take(self, found: Mapping[str, Restored | None]) -> None:
        """Continue with these memories."""
        for name, restored in found.items():
            if restored is not None:
                self.parts[name].take(restored)

    def numbers(self) -> dict[str, Any]:
        """Numbers for :class:`~asyncdata.Statistics`: of all parts together."""
        total: Counter[str] = Counter()
        by_key: Counter[str] = Counter()
        for part in self.parts.values():
            total.update(part.numbers())
            by_key.update({key: memory.num_scores for key, memory in part.memories.items() if key})
        return {**total, "outcome_rewards_total": dict(by_key)}

    def close(self) -> None:
        """Close the files."""
        for part in self.parts.values():
            part.close()


def memory_of(
    state: OutcomeState | msgspec.UnsetType,
    changed: Collection[str],
    outcomes: PartOutcomes | None,
    allow_changed: Collection[str],
) -> Restored | None:
    """The memory to continue with; None if the loader has none.

    If the data or the order has changed, rows have other ids, and the memory is empty; this is logged.

    :param state: what the snapshot has.
    :param changed: what differs from the snapshot, and is allowed to.
    :raises SnapshotMismatchError: if the snapshot has outcomes and they are not there, or the loader remembers none:
        its exclusions would end in the middle of an epoch. Not with "outcomes" in ``allow_changed``.
    """
    saved = state or None
    if outcomes is not None:
        if saved is not None and not set(changed) & {"data", "order"}:
            try:
                return outcomes.find(saved)
            except SnapshotMismatchError as error:
                if "outcomes" not in allow_changed:
                    raise

                _log.warning("outcomes.forgotten", num_rows=saved.num_rows, reason=str(error))
        elif saved is not None:
            _log.warning("outcomes.forgotten", num_rows=saved.num_rows, reason=f"changed: {', '.join(sorted(changed))}")
        return outcomes.find(None)

    if saved is not None and "outcomes" not in allow_changed:
        raise SnapshotMismatchError(
            f"AD603 this snapshot has outcomes of {saved.num_rows} rows, and this loader remembers none: give the same "
            'outcomes=Outcomes(...); or, to continue without them, pass allow_changed={"outcomes"}',
            {"outcomes": (f"{saved.num_rows} rows", "none")},
        )

    return None


def _record_in(text: str) -> Record:
    try:
        return Record(BASE, base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error) as error:
        raise SnapshotError(f"AD602 the outcome memory in the snapshot cannot be read: {error}") from error


def _by_key(groups: Sequence[Group], scores: Any) -> dict[str, Any]:
    """The scores of each reward by its key; empty: scores without a key."""
    if scores is None and any(isinstance(sample.reward, Mapping) for group in groups for sample in group):
        rewards = [[_rewards(sample) for sample in group] for group in groups]
        keys = dict.fromkeys(key for group in rewards for reward in group for key in reward)
        scores = {key: [[reward.get(key) for reward in group] for group in rewards] for key in keys}
    if not isinstance(scores, Mapping):
        return {"": scores}

    if not scores or not all(isinstance(key, str) and key for key in scores):
        raise InvalidGroupError(f"AD482 the keys of several rewards are names, got {list(scores)!r}")

    return dict(scores)


def _rewards(sample: Sample) -> Mapping[str, Any]:
    if sample.reward is None or isinstance(sample.reward, Mapping):
        return sample.reward or {}

    raise InvalidGroupError(f"AD482 {sample!r} has the reward {sample.reward!r}, and others a dict of several rewards")


def _scored(items: Sequence[Group], scores: Sequence[Any] | None, group_size: int, key: str) -> Iterable[_Scored]:
    """Every sample with its attempt and its score, of the reward ``key``."""
    try:
        given = [None] * len(items) if scores is None else list(scores)
    except TypeError:
        raise InvalidGroupError(f"AD482 report() was given {scores!r} as scores; it takes one for each group") from None

    if len(given) != len(items):
        raise InvalidGroupError(f"AD482 report() was given {len(items)} samples or groups, and {len(given)} scores")

    for place, (samples, score) in enumerate(zip(items, given, strict=True)):
        is_reward = score is None and not key  # its samples have their own, all of them
        values = [sample.reward for sample in samples] if is_reward else _values(samples, score)
        for number, (sample, value) in enumerate(zip(samples, values, strict=True)):
            if sample.position is None:
                raise InvalidGroupError(f"AD482 {sample!r} was not made by a loader: its row is not known")

            attempt = number if sample.index is None else sample.index % group_size
            is_skipped = value is None and not is_reward
            yield _Scored(place, sample, attempt, None if is_skipped else _score(sample, value))


def _values(samples: list[Any], score: Any) -> list[Any]:
    """A score for each sample: its own, or the same for all."""
    if not hasattr(score, "__len__") or getattr(score, "ndim", 1) == 0:  # numpy's and torch's numbers have one, too
        return [score] * len(samples)

    values = list(score)
    if len(values) != len(samples):
        raise InvalidGroupError(f"AD482 a group of {len(samples)} samples was reported with {len(values)} scores")

    return values


def _score(sample: Sample, value: Any) -> float:
    try:
        score = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not abs(score) <= MAX_SCORE:
        raise InvalidGroupError(f"AD482 the score of {sample!r} must be a finite number, got {value!r}")

    return score
