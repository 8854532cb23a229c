"""What was delivered of each part of a mixture: a value, and the record from which it follows at any row of a chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.types import Position
from asyncdata.order.mixture import NodeState, ScheduleCursor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.order.mixture_tree import Node

__all__ = ("MergeRecord", "MixturePoint", "MixtureState", "PartCursor", "PartRows", "Piece", "advanced", "plus")

Numbers = np.ndarray[Any, np.dtype[np.int64]]


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


class MixtureState(msgspec.Struct, frozen=True):
    """How far a mixture was delivered.

    :ivar parts: by name.
    :ivar earlier: schedules that hold before the present one: of :class:`~asyncdata.order.earlier_mixtures.Earlier`.
    """

    schedule: NodeState = NodeState()
    parts: dict[str, PartCursor] = {}
    earlier: tuple[Any, ...] = ()  # msgspec does not decode a tree of two kinds of nodes


class MixturePoint(NamedTuple):
    """A place in a mixture: before row ``row`` of the chunk of ``record``. Its state is computed when needed."""

    record: MergeRecord | MixtureState
    row: int = 0

    def state(self) -> MixtureState:
        """The state at this place."""
        return self.record.state(self.row) if isinstance(self.record, MergeRecord) else self.record


class Piece(NamedTuple):
    """Consecutive rows of a part's chunk, and their samples.

    :ivar first: the position of the first row.
    :ivar ends_epoch: whether the epoch ends with the last row.
    """

    first: Position
    num_rows: int
    num_samples: int
    ends_epoch: bool


class PartRows(NamedTuple):
    """Rows of a merged chunk that are counted in their part: drops, and bad rows that were passed over.

    :ivar rows: of the merged chunk, in ascending order.
    """

    part: int
    reason: str
    rows: Numbers
    are_bad: bool = False


class MergeRecord:
    """From which parts the rows of a merged chunk come. It has no tokens, so it may live longer than the chunk.

    :param before: the state before the chunk's first row.
    :param leaves: the part of each sample: int64 of shape (num_samples,).
    :param rows: the row of each sample in the merged chunk: int64 of shape (num_samples,).
    :param num_tokens: int64 of shape (num_samples,).
    :param tail: the part of the rows after the last sample.
    :ivar after: the state after its last row, if that is not what its rows say: at the end of a part's epoch.
    """

    def __init__(
        self,
        schedule: tuple[Node, int],
        names: Sequence[str],
        before: MixtureState,
        leaves: Numbers,
        rows: Numbers,
        num_tokens: Numbers,
        pieces: dict[int, list[Piece]],
        counted: list[PartRows],
        *,
        num_rows: int,
        tail: int = -1,
    ) -> None:
        self.after: MixtureState | None = None
        self.num_rows = num_rows
        self._schedule = schedule
        self._names = names
        self.before = before
        self._leaves, self._rows, self._num_tokens = leaves, rows, num_tokens
        self._pieces = pieces
        self._counted = counted
        self._tail = tail

    def state(self, row: int) -> MixtureState:
        """The state before row ``row`` of the chunk."""
        if row == self.num_rows and self.after is not None:
            return self.after

        number = int(np.searchsorted(self._rows, row))
        cursor = ScheduleCursor(*self._schedule, self.before.schedule)
        cursor.took(self._leaves[:number], self._num_tokens[:number])
        parts = {**self.before.parts}
        for part in self._pieces:
            parts[self._names[part]] = self._cursor(part, number, row)
        return MixtureState(cursor.state(), parts, self.before.earlier)

    def _cursor(self, part: int, number: int, row: int) -> PartCursor:
        """The part's cursor after the first ``number`` samples, before row ``row``."""
        before = self.before.parts[self._names[part]]
        here = self._leaves[:number] == part
        widths = np.diff(self._rows[:number], prepend=-1)[here]
        num_rows, start = int(widths.sum()), int(self._rows[number - 1]) + 1 if number else 0
        if (self._tail if number == len(self._leaves) else self._leaves[number]) == part:
            num_rows += row - start
        cursor = advanced(before, self._pieces[part], num_rows, int(here.sum()))
        num_tokens = before.num_tokens + int(self._num_tokens[:number][here].sum())
        cursor = msgspec.structs.replace(cursor, num_tokens=num_tokens)
        for counted in self._counted:
            if counted.part == part:
                cursor = plus(cursor, counted, int(np.searchsorted(counted.rows, row)))
        return cursor


def plus(cursor: PartCursor, counted: PartRows, number: int) -> PartCursor:
    """The cursor after ``number`` of the rows that are counted under a reason."""
    if not number:
        return cursor

    drops = {**cursor.drops, counted.reason: cursor.drops.get(counted.reason, 0) + number}
    num_bad_rows = cursor.num_bad_rows + (number if counted.are_bad else 0)
    return msgspec.structs.replace(cursor, drops=drops, num_bad_rows=num_bad_rows)


def advanced(cursor: PartCursor, pieces: list[Piece], num_rows: int, num_samples: int) -> PartCursor:
    """The cursor after ``num_rows`` rows of ``pieces`` with ``num_samples`` samples; tokens and drops stay."""
    if not num_rows:
        return cursor

    total, epoch_samples, position, is_at_end = num_samples, cursor.epoch_samples, cursor.position, False
    for piece in pieces:
        taken = min(piece.num_rows, num_rows)
        samples = min(piece.num_samples, num_samples)
        num_rows, num_samples = num_rows - taken, num_samples - samples
        epoch_samples += samples
        first = piece.first
        position = Position(first.epoch, first.window, first.row + taken)
        is_at_end = piece.ends_epoch and taken == piece.num_rows
        if is_at_end:
            position, epoch_samples = Position(first.epoch + 1), 0
        if not num_rows:
            break

    return msgspec.structs.replace(
        cursor,
        position=position,
        num_samples=cursor.num_samples + total,
        epoch_samples=epoch_samples,
        is_at_end=is_at_end,
    )
