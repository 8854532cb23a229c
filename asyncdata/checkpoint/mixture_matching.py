"""Whether a snapshot was taken of the same mixture: its settings, and each of its parts by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.checkpoint.matching import check
from asyncdata.checkpoint.snapshot import EarlierMixture
from asyncdata.core.errors import SnapshotMismatchError
from asyncdata.core.log import get_logger
from asyncdata.core.types import Position
from asyncdata.delivery.mixture import MixtureState, PartCursor
from asyncdata.order.earlier_mixtures import Earlier, adapted, node_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from asyncdata.checkpoint.snapshot import SavedMixture, SavedPart, Snapshot, StreamState
    from asyncdata.order.mixture_tree import Node

__all__ = ("MixtureMatch",)

_log = get_logger(__name__)
_NAME_END = "\n"
_OTHER_TEXT = {"data", "order", "tokenizer", "template", "tokenize_fn"}


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
        saved = self._mixture.settings
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

        if self._saved.packing and self._mixture.at is None:
            raise SnapshotMismatchError(
                "AD603 this snapshot has samples that wait to be packed, and does not say by which schedule they come: "
                f"an earlier version has written it, and the mixture has changed:\n{lines}\nGive back its settings.",
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

    def part(self, name: str) -> tuple[Snapshot, set[str]]:
        """The snapshot with the outcome memory of a part, and what has changed of the part."""
        saved = self._known.get(name)
        outcomes = msgspec.UNSET if saved is None else saved.outcomes
        return msgspec.structs.replace(self._saved, outcomes=outcomes), self._changed.get(name, set())

    def state(self, node: Node) -> MixtureState:
        """Where each part continues. A part with other rows begins its next epoch; a new one begins at its start."""
        schedule, earlier = self._mixture.schedule, self._earlier(node)
        if self._is_other_mix and not earlier:
            schedule = adapted(schedule, node)
        return MixtureState(schedule, {leaf.name: self._cursor(leaf.name) for leaf in node.leaves()}, earlier)

    def earlier(self) -> list[EarlierMixture]:
        """The settings by which samples are read again that waited to be packed."""
        mixture = self._mixture
        until = max([mixture.at or 0, *(old.until for old in mixture.earlier)])
        if not self._is_other_mix or until <= mixture.schedule.at:
            return mixture.earlier

        return [*mixture.earlier, EarlierMixture(settings=mixture.settings, until=until)]

    def _earlier(self, node: Node) -> tuple[Earlier, ...]:
        """The schedules of the samples that are read again."""
        numbers = {leaf.name: leaf.number for leaf in node.leaves()}
        try:
            return tuple(Earlier(node_of(old.settings, numbers), old.until) for old in self.earlier())
        except KeyError as error:
            raise SnapshotMismatchError(
                f"AD603 this snapshot has samples of part {error} that wait to be packed, and the mixture has no such "
                "part now. Give it back; with weight 0, it has no further samples",
                {f"mixture.{error.args[0]}": (True, None)},
            ) from None

    def _cursor(self, name: str) -> PartCursor:
        saved = self._known.get(name)
        if saved is None:
            return PartCursor()

        cursor = saved.cursor
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
        """The digests of canaries that must be the same: those of parts whose text may not have changed."""
        is_allowed = bool({"tokenizer", "template", "tokenize_fn"} & set(self._allow))
        other = {name for name, changed in self._changed.items() if changed & _OTHER_TEXT}
        return [] if is_allowed else [text for text in digests if text.partition(_NAME_END)[0] not in other]


def _short(value: Any) -> str:
    return "(none)" if value is None else str(value)
