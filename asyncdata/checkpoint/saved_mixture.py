"""What a snapshot keeps of a mixture, and whether it was taken of the same one: each part is checked by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from asyncdata.checkpoint.restore import check
from asyncdata.checkpoint.snapshot import Snapshot, StreamState
from asyncdata.core.errors import SnapshotError, SnapshotMismatchError, get_logger
from asyncdata.core.types import Position
from asyncdata.delivery.mixture import MixtureState, PartCursor, end_code, end_of
from asyncdata.delivery.outcome_memory import OutcomeState
from asyncdata.order.mixture import Node, NodeState, adapted

_log = get_logger(__name__)
_NAME_END = "\n"
_OTHER_TEXT = {"data", "order", "tokenizer", "template", "tokenize_fn"}


class SavedPart(msgspec.Struct, frozen=True, kw_only=True):
    """How far one part of a mixture was delivered, and what it must agree with.

    :ivar outcomes: what was reported of its rows, or where that is stored; unset where nothing is remembered.
    """

    cursor: PartCursor
    order: dict[str, Any] = {}
    fingerprints: dict[str, Any] = {}
    stream: StreamState | msgspec.UnsetType = msgspec.UNSET
    outcomes: OutcomeState | msgspec.UnsetType = msgspec.UNSET


class SavedMixture(msgspec.Struct, frozen=True, kw_only=True):
    """How far a mixture was delivered.

    :ivar settings: weights and all else that decides its schedule.
    :ivar schedule: after ``choices``.
    :ivar choices: rows that were taken, and wait to be packed or acknowledged: they are read again, as they were. Each
        is the place of its part in ``leaves``, or below 0 for the end of an epoch; see
        :func:`~asyncdata.delivery.mixture.end_code`.
    :ivar parked: parts of earlier runs that the mixture does not have now; they continue if they come back.
    """

    settings: dict[str, Any]
    schedule: NodeState
    parts: dict[str, SavedPart]
    parked: dict[str, SavedPart] = {}
    leaves: list[str] = []
    choices: list[int] = []


class MixtureMatch:
    """A snapshot of a mixture, compared with what there is now.

    :raises SnapshotMismatchError: if it was taken of a single source.
    """

    def __init__(self, saved: Snapshot, allow_changed: Collection[str], *, same_rows: bool) -> None:
        if saved.mixture is msgspec.UNSET:
            raise SnapshotMismatchError(
                "AD603 this snapshot was taken of a single source, and this loader has a mixture: give back the source",
                {"mixture": (None, True)},
            )

        self._saved = saved
        self._mixture: SavedMixture = saved.mixture
        self._known = {**self._mixture.parked, **self._mixture.parts}
        self._allow = allow_changed
        self._same_rows = same_rows
        self._is_other_mix = False
        self._changed: dict[str, set[str]] = {}

    def check_batching(self, order: Mapping[str, Any]) -> None:
        """Whether samples are packed in the same way.

        :raises SnapshotMismatchError: if they are not.
        """
        check(self._saved, order, {}, self._allow)

    def check_settings(self, settings: Mapping[str, Any], *, may_change: bool) -> None:
        """Whether the schedule is the same.

        :raises SnapshotMismatchError: if it is not, unless it ``may_change``.
        """
        saved, settings = _with_shares(self._mixture.settings), _with_shares(settings)
        names = sorted(saved.keys() | settings.keys())
        found = {name: (saved.get(name), settings.get(name)) for name in names if saved.get(name) != settings.get(name)}
        self._is_other_mix = bool(found)
        if not found:
            return

        lines = "\n".join(f"  {name}: saved {_short(old)}, present {_short(new)}" for name, (old, new) in found.items())
        changes = {f"mixture.{name}": pair for name, pair in found.items()}
        if not may_change:
            raise SnapshotMismatchError(
                f"AD603 this snapshot was taken of another mixture:\n{lines}\nGive back its settings; or continue with "
                'the new ones by Mix(on_mix_change="apply").',
                changes,
            )

        _log.warning("mixture.changed", changes=sorted(found))

    def check_part(self, name: str, order: Mapping[str, Any], fingerprints: Mapping[str, Any]) -> None:
        """Whether a part is the same; nothing for a new one.

        :raises SnapshotMismatchError: if it is not; the message names the part.
        """
        saved = self._known.get(name)
        if saved is None:
            return

        view = msgspec.structs.replace(self._saved, order=saved.order, fingerprints=saved.fingerprints)
        try:
            self._changed[name] = check(view, order, fingerprints, self._allow, same_rows=self._same_rows)
        except SnapshotMismatchError as error:
            differences = {f"{name}.{what}": pair for what, pair in error.differences.items()}
            message = str(error).removeprefix("AD603 ")
            raise SnapshotMismatchError(f"AD603 part {name!r} of the mixture: {message}", differences) from None

    @property
    def other_data(self) -> list[str]:
        """The parts that have other data now."""
        return [name for name, changed in self._changed.items() if "data" in changed]

    def outcomes(self, name: str) -> tuple[OutcomeState | msgspec.UnsetType, set[str]]:
        """What a snapshot has of the outcome memory of a part, and what has changed of the part."""
        saved = self._known.get(name)
        return msgspec.UNSET if saved is None else saved.outcomes, self._changed.get(name, set())

    def state(self, node: Node) -> MixtureState:
        """Where each part continues. A part with other rows begins its next epoch; a new one begins at its start."""
        schedule = adapted(self._mixture.schedule, node) if self._is_other_mix else self._mixture.schedule
        return MixtureState(
            schedule, {leaf.name: self._cursor(leaf.name) for leaf in node.leaves()}, self._choices(node)
        )

    def _choices(self, node: Node) -> tuple[int, ...]:
        """The rows that are read again, by the present numbers of their parts."""
        numbers = {leaf.name: leaf.number for leaf in node.leaves()}
        names, choices = self._mixture.leaves, list[int]()
        try:
            for code in self._mixture.choices:
                part, is_over = (code, False) if code >= 0 else end_of(code)
                number = numbers[names[part]] if part >= 0 else part
                choices.append(number if code >= 0 else end_code(number, is_over=is_over))
        except KeyError as error:
            raise SnapshotMismatchError(
                f"AD603 this snapshot has samples of part {error} that wait to be packed, and the mixture has no such "
                "part now. Give it back; with weight 0, it has no further samples",
                {f"mixture.{error.args[0]}": (True, None)},
            ) from None
        except IndexError:
            raise SnapshotError("AD602 the snapshot's mixture cannot be read: its choices are of no part") from None

        return tuple(choices)

    def _cursor(self, name: str) -> PartCursor:
        saved = self._known.get(name)
        if saved is None:
            return PartCursor()

        cursor: PartCursor = saved.cursor
        if not self._changed[name] & {"data", "seed", "order"} or cursor.position == Position(cursor.position.epoch):
            return cursor

        _log.warning(
            "snapshot.rows_left_out",
            part=name,
            epoch=cursor.position.epoch,
            changed=sorted(self._changed[name]),
            num_delivered=cursor.epoch_samples,
            num_left_out=None,
        )
        position = Position(cursor.position.epoch + 1)
        return msgspec.structs.replace(cursor, position=position, epoch_samples=0, is_at_end=False)

    def stream(self, name: str) -> StreamState | None:
        """Where to begin to read a part that is read from front to back."""
        saved = self._known.get(name)
        if saved is None or self._changed[name] & {"data", "seed", "order"}:
            return None

        return saved.stream or None

    def parked(self, present: Collection[str]) -> dict[str, SavedPart]:
        """The parts that the mixture does not have now."""
        return {name: part for name, part in self._known.items() if name not in present}

    def canaries(self, digests: list[str]) -> list[str]:
        """The digests of canaries that must be the same, of parts whose text may not have changed."""
        is_allowed = bool({"tokenizer", "template", "tokenize_fn"} & set(self._allow))
        other = {name for name, changed in self._changed.items() if changed & _OTHER_TEXT}
        return [] if is_allowed else [text for text in digests if text.partition(_NAME_END)[0] not in other]


def _with_shares(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the share of each weight among those beside it: weights 1:5 and 2:10 are the same."""
    found, totals = dict(settings), Counter[tuple[str, str]]()
    weights = [(key, *key.rpartition(".weight")[::2]) for key, value in settings.items() if isinstance(value, int)]
    beside = {key: (name.rpartition(".")[0], stage) for key, name, stage in weights if name and stage[:1] != "."}
    for key, group in beside.items():
        totals[group] += settings[key]
    return found | {key: settings[key] / (totals[group] or 1) for key, group in beside.items()}


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{100 * value:.6g} %"

    return "(none)" if value is None else str(value)
