"""The outcome memory of a loader: what ``report`` counts, what states keep, and which rows epochs exclude."""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import msgspec
import numpy as np

from asyncdata.core.errors import (
    ConfigError,
    InvalidGroupError,
    SnapshotError,
    SnapshotMismatchError,
    WorkerError,
    get_logger,
)
from asyncdata.core.threads import call_soon_in_this_loop, started_and_awaited
from asyncdata.core.types import Group, Position, Sample
from asyncdata.delivery.chunk import NO_IDS, Ids, in_repeats, row_ids
from asyncdata.delivery.ledger import grouped
from asyncdata.delivery.outcome_memory import MAX_SCORE, OutcomeMemory, OutcomeState, RowReport
from asyncdata.delivery.outcome_policy import Outcomes, OutcomeTable, PassRate, Policy, policy_of
from asyncdata.loader.exclusions import RowPlaces
from asyncdata.read_ahead.ranks import rank_answers

if TYPE_CHECKING:
    from asyncdata.delivery.outcome_policy import Bools
    from asyncdata.loader.config import LoaderConfig
    from asyncdata.sources.base import Blocks
    from asyncdata.telemetry.recorder import Recorder
    from asyncdata.telemetry.settings import NoRecorder

    News = list[tuple[str, int, Ids]]


_log = get_logger(__name__)
Memories = dict[str, OutcomeMemory]
"""By the key of the reward; empty: scores have no key."""


class _Message(msgspec.Struct, array_like=True):
    """What a rank sends.

    :ivar reports: of its own samples.
    :ivar decided: of each part and epoch that has begun since the last report, a digest of what that leaves out.
    :ivar error: why it reports nothing.
    """

    reports: list[RowReport] = []
    decided: list[list[Any]] = []
    error: str = ""


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
    """The memory of one source, and the policy. It changes only while the coordinator's lock is held.

    Several rewards are remembered each by itself, as if it were the only one.

    What an epoch excludes is decided by what was reported before the delivery of its first sample. The read-ahead needs
    it earlier, so it is decided then, and decided anew with each report until that delivery.

    :ivar memories: by the key of the reward; empty: scores have no key.
    :ivar fresh: by epoch, what was decided here since the last report that was counted, or may still change.
    :raises ConfigError: if the policy cannot be used.
    """

    def __init__(self, settings: Outcomes, files: Blocks) -> None:
        self._policy = policy_of(settings)
        self._places = RowPlaces(files)
        self.memories: Memories = {"": self._new_memory()}
        self.fresh: dict[int, Ids] = {}
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
        """Decide which rows ``epoch`` excludes, or decide it anew."""
        assert self._policy is not None, "without a policy each epoch has all rows"
        memory = self.of(self.key or "")
        told = _Told(self._policy)
        excluded = memory.decide(epoch, told)
        before, self.fresh[epoch] = self.fresh.get(epoch), excluded
        if before is None or not np.array_equal(before, excluded):
            known, number = len(memory.rows), len(excluded)
            self._log.info("outcomes.decided", epoch=epoch, num_known=known, num_excluded=number, **told.numbers)

    def decide_anew(self, place: Position) -> bool:
        """Decide again what the epochs exclude of which no sample was delivered; return whether that is another now.

        The others are decided for good.

        :param place: up to which the part is delivered.
        """
        early = {epoch: ids for epoch, ids in self.fresh.items() if Position(epoch) >= place and self.is_decided(epoch)}
        self.fresh = early.copy()
        for epoch in early:
            self.decide(epoch)
        return any(not np.array_equal(ids, self.fresh[epoch]) for epoch, ids in early.items())

    def excluded(self, epoch: int) -> Ids:
        """The ids of the rows that ``epoch`` excludes, ascending, in each listing of their file; none before that is
        decided.
        """
        found = (memory.excluded.get(epoch) for memory in self.memories.values())
        ids = next((ids for ids in found if ids is not None), NO_IDS)
        return in_repeats(ids, self._places.repeats()) if len(ids) else ids

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

    def saved(self, epoch: int, place: Position) -> OutcomeState:
        """The state of now.

        :param epoch: the first whose decisions a restart needs.
        :param place: up to which the part is delivered.
        """
        self.forget_decisions(epoch)
        early = [epoch for epoch in self.fresh if Position(epoch) >= place]
        texts = {key: base64.b64encode(memory.saved(early)).decode() for key, memory in self.memories.items()}
        return OutcomeState(memory=texts.pop(""), by_key=texts, **self._totals())

    def restored(self, saved: OutcomeState | None) -> Memories:
        """The memories of a state; None: of one without outcomes. Nothing changes.

        :raises SnapshotMismatchError: if the state does not have them (AD606).
        :raises SnapshotError: if they cannot be read (AD602).
        """
        memories = {"": self._new_memory()}
        if saved is None:
            return memories

        if saved.memory is None:
            raise SnapshotMismatchError(
                "AD606 the outcome memory of this snapshot is in a file, as Outcomes(path=...) of a development build "
                "stored it; scores are in each state now. Finish the run with that build; or pass "
                'allow_changed={"outcomes"}, to begin with an empty memory',
                {"outcomes": ("in a file", "in the state")},
            )

        for key, text in {"": saved.memory, **saved.by_key}.items():
            memories[key] = self._new_memory()
            memories[key].restore(_decoded(text))
        memory = memories[""]
        memory.num_repeated, memory.num_late = saved.num_repeated, saved.num_late
        memory.num_skipped = saved.num_skipped
        return memories

    def take(self, memories: Memories) -> None:
        """Continue with these memories."""
        self.memories = memories
        self.fresh.clear()

    def numbers(self) -> dict[str, Any]:
        """Numbers for :class:`~asyncdata.Statistics`."""
        totals = self._totals()
        rows = totals.pop("num_rows")
        return {"outcome_rows": rows} | {f"outcome_{name[4:]}_total": number for name, number in totals.items()}

    def _totals(self) -> dict[str, Any]:
        """Of all rewards together; the rows are of the reward that has the most."""
        memories = list(self.memories.values())
        names = ("num_scores", "num_repeated", "num_late", "num_skipped")
        rows = max(len(memory.rows) for memory in memories)
        return {"num_rows": rows, **{name: sum(getattr(memory, name) for memory in memories) for name in names}}

    def _new_memory(self) -> OutcomeMemory:
        epochs = getattr(self._policy, "epochs", 1)
        return OutcomeMemory(num_earlier=epochs - 1)


class LoaderOutcomes:
    """The memories of a loader: one for each part of a mixture, or one without a name.

    Several ranks count the reports of all, in one order. They take the same samples in a step, each its share. So all
    begin an epoch in the same step, with what it leaves out decided by the same scores; in their next reports they
    compare it.

    :param sources: by the names of the parts.
    :param world_size: ranks that report together, if there is more than one.
    :ivar parts: the memories, by the same names.
    :raises ConfigError: if the policy cannot be used.
    """

    def __init__(self, settings: Outcomes, sources: Mapping[str, Blocks], group_size: int, world_size: int = 1) -> None:
        self.parts = {name: PartOutcomes(settings, files) for name, files in sources.items()}
        self._exchange, self._world_size = settings.exchange if world_size > 1 else None, world_size
        self._group_size = group_size

    def gathered(self, recorder: Recorder | NoRecorder, items: Any, scores: Any, news: News) -> list[RowReport]:
        """What scores are reported; with several ranks, by all of them. Then every rank must call it.

        :param items: samples or groups.
        :param news: of :meth:`news`, which the ranks compare.
        :raises InvalidGroupError: if a report cannot be counted (AD482), or all lack a reward (AD484).
        :raises WorkerError: AD486, if another rank cannot report or be reached; nothing is counted then.
        :raises ConfigError: AD487, if another rank leaves out other rows.
        """
        if self._exchange is None:
            return self._own(recorder, items, scores)

        decided = [[name, epoch, blake2b(ids.tobytes(), digest_size=16).hexdigest()] for name, epoch, ids in news]
        try:
            message = _Message(self._own(recorder, items, scores), decided)
        except Exception as error:  # also a fault of what the trainer has given
            self._send(_Message(error=str(error) or repr(error)))  # the others wait for it
            raise

        messages = self._send(message)
        for rank, message in enumerate(messages):
            if message.error:
                raise WorkerError(f"AD486 rank {rank} cannot report its scores, and none was counted: {message.error}")

            if message.decided != decided:
                raise ConfigError(
                    f"AD487 since the last report, rank {rank} has left out other rows than this rank: their data, "
                    "policies or states differ, or one of them took samples while it reported"
                )

        return [report for message in messages for report in message.reports]

    def _own(self, recorder: Recorder | NoRecorder, items: Any, scores: Any) -> list[RowReport]:
        """This rank's reports."""
        reports = self.reports_of(items, scores)
        recorder.scored([(report.key, [score for _, score in report.scores]) for report in reports])
        return reports

    def _send(self, message: _Message) -> list[_Message]:
        assert self._exchange is not None, "there are several ranks"
        try:
            answers = self._exchange(msgspec.msgpack.encode(message))
        except Exception as error:  # whatever the trainer's library raises
            raise WorkerError(
                f"AD486 the other ranks cannot be reached with scores: {error!r}. Each rank must call report() equally "
                "often, with no samples if it has none"
            ) from error

        return rank_answers(answers, _Message, self._world_size, "Outcomes(exchange=...)")

    @property
    def has_decided(self) -> bool:
        """Whether a part has decided lately."""
        return any(part.fresh for part in self.parts.values())

    def news(self, places: Mapping[str, Position]) -> News:
        """What epochs of a part exclude, of those that have begun since the last report that was counted.

        :param places: up to which each part is delivered.
        """
        parts = [(name, part.fresh, places.get(name, Position())) for name, part in self.parts.items()]
        return [(name, n, fresh[n]) for name, fresh, place in parts for n in sorted(fresh) if Position(n) < place]

    def decide_anew(self, places: Mapping[str, Position]) -> bool:
        """See :meth:`PartOutcomes.decide_anew`; all parts are asked that have decided lately."""
        parts = [(part, places.get(name, Position())) for name, part in self.parts.items() if part.fresh]
        return sum(part.decide_anew(place) for part, place in parts) > 0

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

    def count(self, reports: Iterable[RowReport], attempts: int | None) -> int:
        """Count scores of rows; return how many were new. Scores of parts that are not there any more are left out.

        :param attempts: samples of a row in an epoch; None: as many as a group has.
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
        """Delivery of a single source goes to ``epoch``, whose rows are decided anew, as in later epochs."""
        self.parts[""].forget_decisions(0, epoch)

    def state(self, begins: Mapping[str, Position], places: Mapping[str, Position]) -> dict[str, OutcomeState]:
        """The states of all memories.

        :param begins: the position of each part at which a restart begins.
        :param places: up to which each part is delivered.
        """
        at, parts = Position(), self.parts.items()
        return {name: part.saved(begins.get(name, at).epoch, places.get(name, at)) for name, part in parts}

    def take(self, found: Mapping[str, Memories | None]) -> None:
        """Continue with these memories."""
        for name, memories in found.items():
            if memories is not None:
                self.parts[name].take(memories)

    def numbers(self) -> dict[str, Any]:
        """Numbers for :class:`~asyncdata.Statistics`: of all parts together."""
        total: Counter[str] = Counter()
        by_key: Counter[str] = Counter()
        for part in self.parts.values():
            total.update(part.numbers())
            by_key.update({key: memory.num_scores for key, memory in part.memories.items() if key})
        return {**total, "outcome_rewards_total": dict(by_key)}


def memory_of(
    state: OutcomeState | msgspec.UnsetType,
    changed: Collection[str],
    outcomes: PartOutcomes | None,
    allow_changed: Collection[str],
) -> Memories | None:
    """The memories to continue with; None if the loader has none.

    If the data or the order has changed, rows have other ids, and the memory is empty; this is logged.

    :param state: what the snapshot has.
    :param changed: what differs from the snapshot, and is allowed to.
    :raises SnapshotMismatchError: if the snapshot's outcomes are in a file, or the loader remembers none:
        its exclusions would end in the middle of an epoch. Not with "outcomes" in ``allow_changed``.
    """
    saved = state or None
    if outcomes is not None:
        if saved is not None and not set(changed) & {"data", "order"}:
            try:
                return outcomes.restored(saved)
            except SnapshotMismatchError as error:
                if "outcomes" not in allow_changed:
                    raise

                _log.warning("outcomes.forgotten", num_rows=saved.num_rows, reason=str(error))
        elif saved is not None:
            _log.warning("outcomes.forgotten", num_rows=saved.num_rows, reason=f"changed: {', '.join(sorted(changed))}")
        return outcomes.restored(None)

    if saved is not None and "outcomes" not in allow_changed:
        raise SnapshotMismatchError(
            f"AD603 this snapshot has outcomes of {saved.num_rows} rows, and this loader remembers none: give the same "
            'outcomes=Outcomes(...); or, to continue without them, pass allow_changed={"outcomes"}',
            {"outcomes": (f"{saved.num_rows} rows", "none")},
        )

    return None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
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


def reporting(report: Callable[[], int], before: Future[int] | None) -> Future[int]:
    """The result of a report that a thread makes, after one that was made before."""
    result: Future[int] = Future()

    def run() -> None:
        if before is not None:
            wait([before])
        try:
            result.set_result(report())
        except BaseException as error:  # for who waits
            result.set_exception(error)

    stuck = "AD486 the other ranks did not come to a report of scores: this process ends without it"
    started_and_awaited(run, "asyncdata-report", stuck)
    return result


async def settled(result: Future[int]) -> None:
    """Wait until it is there, or its error."""
    ready, call_soon = anyio.Event(), call_soon_in_this_loop()
    result.add_done_callback(lambda _: call_soon(ready.set))
    await ready.wait()
