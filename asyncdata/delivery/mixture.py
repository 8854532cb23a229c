"""What was delivered of each part of a mixture: a value, and the record from which it follows at any row of a chunk.

A row of a mixture is a sample, or the end of an epoch of one of its parts, where the schedule takes notice of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.types import Position
from asyncdata.order.mixture import Node, NodeState, ScheduleCursor

Numbers = np.ndarray[Any, np.dtype[np.int64]]
NOTHING = np.empty(0, np.int64)


class PartCursor(msgspec.Struct, frozen=True):
    """How far a part was delivered.

    :ivar position: the first row of the part's own order that is not delivered.
    :ivar num_samples: its samples that were delivered; a group counts once.
    :ivar num_tokens: their tokens.
    :ivar epoch_samples: samples of its current epoch.
    :ivar is_at_end: whether the epoch before ``position`` has ended, and the schedule has not taken notice yet.
    :ivar drops: its rows that yielded no sample, by reason, bad rows included.
    :ivar num_bad_rows: its bad rows that were passed over.
    """

    position: Position = Position()
    num_samples: int = 0
    num_tokens: int = 0
    epoch_samples: int = 0
    is_at_end: bool = False
    drops: dict[str, int] = {}
    num_bad_rows: int = 0

    def after_epoch(self, epoch: int) -> PartCursor:
        """The cursor after the schedule has taken notice of the end of ``epoch``."""
        return msgspec.structs.replace(self, position=Position(epoch + 1), is_at_end=False, epoch_samples=0)


class MixtureState(msgspec.Struct, frozen=True):
    """How far a mixture was delivered.

    :ivar schedule: after ``choices``.
    :ivar parts: by name.
    :ivar choices: the rows that are read again before the schedule continues: see :func:`end_code`.
    """

    schedule: NodeState = NodeState()
    parts: dict[str, PartCursor] = {}
    choices: tuple[int, ...] = ()


def end_code(part: int, *, is_over: bool) -> int:
    """The end of an epoch of ``part`` (-1: of none), in a list of choices. A sample is the number of its part there.

    :param is_over: whether the epoch of the mixture ends, too.
    """
    return -1 - 2 * (part + 1) - is_over


def end_of(code: int) -> tuple[int, bool]:
    """The part and ``is_over`` of an :func:`end_code`."""
    part, is_over = divmod(-1 - code, 2)
    return part - 1, bool(is_over)


class Counted(NamedTuple):
    """Rows that yield no sample, and are counted in their part.

    :ivar rows: the row of the mixture that each precedes, counted from the chunk's first, in ascending order.
    """

    part: int
    reason: str
    rows: Any
    are_bad: bool = False


class MergeRecord:
    """From which parts the rows of a merged chunk come. It has no tokens, so it may live longer than the chunk.

    :param before: the state before the chunk's first row.
    :param schedule: the tree and the seed by which the rows were chosen; None: they were chosen before, and come again.
    :param leaves: the part of each sample: int64 of shape (num_samples,).
    :ivar num_tokens: of each sample, of the same shape.
    :ivar places: the epoch, window and row of its part that follows each sample: int64 of shape (3, num_samples).
    :ivar counted: rows that yield no sample.
    :ivar code: of the only row, if it is the end of a part's epoch; ``after``: the state after it.
    :ivar next: the record of the next chunk, once there is one.
    """

    def __init__(
        self,
        names: Sequence[str],
        before: MixtureState,
        schedule: tuple[Node, int] | None = None,
        leaves: Numbers = NOTHING,
    ) -> None:
        self.before = before
        self.code: int | None = None
        self.after: MixtureState | None = None
        self.next: MergeRecord | None = None
        self.num_tokens, self.places = np.zeros(len(leaves), np.int64), np.zeros((3, len(leaves)), np.int64)
        self.counted: list[Counted] = []
        self._names, self._schedule, self._leaves = names, schedule, leaves

    def point(self, row: int) -> MixturePoint:
        """The place before row ``row`` of the chunk."""
        return MixturePoint(self, row)

    def cut(self, row: int) -> MergeRecord:
        """Forget the rows from ``row`` on, which were not delivered and are merged anew; return the record after it."""
        if row == 0:
            return self

        self.next = MergeRecord((), self.state(row))
        self._leaves, self.num_tokens, self.places = self._leaves[:row], self.num_tokens[:row], self.places[:, :row]
        return self.next

    @property
    def codes(self) -> list[int]:
        """The choices that made the rows."""
        return self._leaves.tolist() if self.code is None else [self.code]

    def state(self, row: int) -> MixtureState:
        """The state before row ``row`` of the chunk."""
        if row == 0:
            return self.before

        if self.after is not None:
            return self.after

        parts = {name: self.cursor(number, row) for number, name in enumerate(self._names)}
        if self._schedule is None:
            return MixtureState(self.before.schedule, parts, self.before.choices[row:])

        cursor = ScheduleCursor(*self._schedule, self.before.schedule)
        cursor.took(self._leaves[:row], self.num_tokens[:row])
        return MixtureState(cursor.state(), parts)

    def cursor(self, part: int, row: int) -> PartCursor:
        """The cursor of a part before row ``row``."""
        cursor = self.before.parts[self._names[part]]
        here = np.flatnonzero(self._leaves[:row] == part)
        if len(here):
            epoch, window, own_row = self.places[:, here[-1]].tolist()
            in_epoch = (self.places[0, here] == epoch) & (self.places[2, here] > 0)
            before = cursor.epoch_samples if cursor.position.epoch == epoch else 0
            cursor = msgspec.structs.replace(
                cursor,
                position=Position(epoch, window, own_row),
                num_samples=cursor.num_samples + len(here),
                num_tokens=cursor.num_tokens + int(self.num_tokens[here].sum()),
                epoch_samples=before + int(np.count_nonzero(in_epoch)),
                is_at_end=own_row == 0,
            )
        for counted in self.counted:
            number = int(np.searchsorted(counted.rows, row))
            if counted.part == part and number:
                drops = {**cursor.drops, counted.reason: cursor.drops.get(counted.reason, 0) + number}
                num_bad_rows = cursor.num_bad_rows + number * counted.are_bad
                cursor = msgspec.structs.replace(cursor, drops=drops, num_bad_rows=num_bad_rows)
        return cursor


class MixturePoint(NamedTuple):
    """A place in a mixture: before row ``row`` of the chunk of ``record``. Its state is computed when needed."""

    record: MergeRecord
    row: int = 0

    @property
    def state(self) -> MixtureState:
        """The state at this place."""
        return self.record.state(self.row)

    def state_until(self, other: MixturePoint) -> MixtureState:
        """The state from which the rows up to a later place are read again, and the schedule continues there."""
        if self == other:
            return self.state

        record, row, choices = self.record, self.row, list[int]()
        while record is not other.record:
            choices += record.codes[row:]
            assert record.next is not None, "the other place is a later one"
            record, row = record.next, 0
        end = other.state
        return MixtureState(end.schedule, self.state.parts, (*choices, *record.codes[row : other.row], *end.choices))
