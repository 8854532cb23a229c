"""Merges the ready samples of the parts of a mixture, in the order of its schedule. Values in, values out.

Only samples count for the schedule: rows that yield none come before the next sample of their part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import NoSamplesError
from asyncdata.core.types import Position
from asyncdata.delivery.chunk import Drop, Note
from asyncdata.delivery.merged_chunk import MergedChunk, MergedRows
from asyncdata.delivery.mixture import MergeRecord, MixtureState, PartRows, advanced, plus
from asyncdata.order.earlier_mixtures import schedule_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.messages import RowError
    from asyncdata.delivery.bad_row_policy import BadRowPolicy
    from asyncdata.delivery.part_queue import PartQueue, Taken
    from asyncdata.order.earlier_mixtures import Earlier
    from asyncdata.order.mixture import NodeState
    from asyncdata.order.mixture_tree import Node

__all__ = ("Merger",)

Numbers = np.ndarray[Any, np.dtype[np.int64]]
_NOTHING = np.empty(0, np.int64)


class Merger:
    """Merges from one position on; a restart makes a new one.

    :param queues: of the parts, by the number of their leaf.
    :param position: the first row that is not merged.
    :param earlier: schedules that hold before that of ``node``.
    :ivar blocked: the part whose next sample is missing; -1 if none is.
    """

    def __init__(
        self,
        node: Node,
        seed: int,
        queues: Sequence[PartQueue],
        schedule: NodeState,
        position: Position,
        *,
        earlier: tuple[Earlier, ...] = (),
        with_token_sums: bool = False,
    ) -> None:
        self.position = position
        self.blocked = -1
        self._queues = queues
        self._names = [queue.leaf.name for queue in queues]
        self._node, self._seed, self._earlier = node, seed, earlier
        self._go_to(schedule)
        self._with_token_sums = with_token_sums
        self._last: MergeRecord | None = None

    @property
    def is_undecided(self) -> bool:
        """Whether the next sample waits for a decision: which rows the epoch of its part has."""
        return self.blocked >= 0 and self._queues[self.blocked].undecided is not None

    def _go_to(self, state: NodeState) -> None:
        """Continue from a state, with the schedule that holds there."""
        self._cursor, self._until = schedule_at(self._earlier, self._node, self._seed, state)
        self._schedule = self._cursor.node, self._seed
        self._is_by_rows = self._cursor.node.is_by_rows

    def decide(self) -> None:
        """Decide which rows the epoch of the next sample has. If a replay has none, the others take its share for a
        while.

        :raises NoSamplesError: if there is no other part that could.
        """
        queue = self._queues[self.blocked]
        if queue.decide():
            return

        if not self._cursor.sit_out(self.blocked):
            raise NoSamplesError(
                f"AD473 the replay {queue.leaf.name!r} has no row yet, and no other part has a weight here: report "
                "scores first, or give another part a weight"
            )

        queue.num_passed_over += 1
        if self._last is not None:
            self._last.after = self._state()
        self.blocked = -1

    def merge(self, max_samples: int) -> MergedChunk | None:
        """The next samples, as many as are ready; None if not even the next one is."""
        if self._until is not None:
            max_samples = min(max_samples, self._until - self._cursor.at)
        schedule = self._cursor.state() if not self._is_by_rows else None  # it moves on while samples are chosen
        leaves, is_dry = self._next_rows(max_samples) if self._is_by_rows else self._next_by_tokens(max_samples)
        ended = self._ended()
        if not len(leaves) and ended is None and not is_dry:
            return None

        before = self._state(schedule)
        parts = _Parts(self._queues, leaves, ended)
        if self._is_by_rows:
            self._cursor.took(leaves, parts.num_tokens)
        record = parts.record(self._schedule, self._names, before)
        is_over = False
        if ended is not None:
            if not ended.is_cut:
                is_over = self._cursor.epoch_ended(ended.leaf.number)
                ended.end_epoch(parts.ended_epoch)
        elif is_dry:
            is_over = self._cursor.settle()
        if is_over:
            self._cursor.begin_epoch()
        if is_dry or ended is not None:
            record.after = self._state()
            self.blocked = -1  # the next sample may be of another part now
        if self._cursor.at == self._until:
            self._go_to(self._cursor.state())
        chunk = parts.chunk(self.position, record, ends_epoch=is_over, with_token_sums=self._with_token_sums)
        place, self._last = self.position, record
        self.position = Position(place.epoch + 1) if is_over else Position(place.epoch, 0, place.row + chunk.num_rows)
        return chunk

    def _ended(self) -> PartQueue | None:
        """The part whose sample is missing, if there is none to wait for: at an epoch's end, or before a bad row."""
        queue = self._queues[self.blocked] if self.blocked >= 0 else None
        return queue if queue is not None and (queue.is_at_end or (queue.is_cut and not queue.is_empty)) else None

    @property
    def is_stuck(self) -> bool:
        """Whether the next sample is still missing since the last :meth:`merge`, and nothing else can be done."""
        if self.blocked < 0:
            return False

        queue = self._queues[self.blocked]
        return queue.is_empty and not queue.is_at_end and queue.error is None

    def awaited(self, within: int) -> set[int]:
        """The parts that may have one of the next ``within`` samples."""
        return self._cursor.awaited(within)

    def _state(self, schedule: NodeState | None = None) -> MixtureState:
        cursors = {queue.leaf.name: queue.cursor for queue in self._queues}
        return MixtureState(schedule or self._cursor.state(), cursors, self._earlier)

    def _next_rows(self, max_samples: int) -> tuple[Numbers, bool]:
        """The parts of the samples that can be taken now; and whether no part has a weight after them."""
        available = [queue.available() for queue in self._queues]
        wanted = min(max_samples, sum(available) + 1)
        leaves = self._cursor.plan(wanted)
        number = len(leaves)
        missing = np.flatnonzero(leaves < 0)
        if len(missing):
            number = int(missing[0])
        for part in np.flatnonzero(np.bincount(leaves[:number], minlength=len(available)) > available).tolist():
            number = min(number, int(np.flatnonzero(leaves == part)[available[part]]))
        is_over = number == len(leaves) < wanted or (number < len(leaves) and leaves[number] < 0)
        self.blocked = int(leaves[number]) if number < len(leaves) else -1
        return leaves[:number], is_over

    def _next_by_tokens(self, max_samples: int) -> tuple[Numbers, bool]:
        """The same where the schedule depends on the lengths of samples; the cursor moves on."""
        lengths = [iter(queue.lengths(min(queue.available(), max_samples))) for queue in self._queues]
        leaves: list[int] = []
        self.blocked = -1
        while len(leaves) < max_samples:
            leaf = self._cursor.pick()
            if leaf < 0:
                return np.array(leaves, np.int64), True

            length = next(lengths[leaf], None)
            if length is None:
                self.blocked = leaf
                break

            self._cursor.took_one(leaf, length)
            leaves.append(leaf)
        return np.array(leaves, np.int64), False


class _Part(NamedTuple):
    """What is taken of one part.

    :ivar places: its samples' numbers in the merged chunk.
    :ivar ends: rows of the part up to and with each sample, from the first row that is taken.
    :ivar numbers: the number of each of ``takes`` among the chunks.
    """

    queue: PartQueue
    takes: list[Taken]
    numbers: list[int]
    places: Numbers
    ends: Numbers


class _Parts:
    """The samples of a merged chunk, part by part, and then together."""

    def __init__(self, queues: Sequence[PartQueue], leaves: Numbers, ended: PartQueue | None) -> None:
        self._leaves = leaves
        self.num_tokens = np.zeros(len(leaves), np.int64)
        self.ended_epoch = -1
        self._chunk_of, self._sample_of = np.zeros_like(self.num_tokens), np.zeros_like(self.num_tokens)
        self._widths = np.ones_like(self.num_tokens)
        self._chunks: list[Any] = []
        self._chunk_names: list[str] = []
        self._tail = -1 if ended is None else ended.leaf.number
        self._parts: list[_Part] = []
        for number in np.flatnonzero(np.bincount(leaves, minlength=len(queues))).tolist():
            self._take(queues[number], np.flatnonzero(leaves == number))
        num_tail = 0
        if ended is not None:
            num_tail = self._take_rest(ended)
        self.rows = np.cumsum(self._widths) - 1
        self._num_samples_rows = int(self.rows[-1]) + 1 if len(leaves) else 0
        self.num_rows = self._num_samples_rows + num_tail
        self._drops: list[Drop] = []
        self._notes: list[Note] = []
        self._errors: list[tuple[RowError, int, int]] = []
        self._policies: dict[int, BadRowPolicy] = {}
        self._counted: list[PartRows] = []
        for part in self._parts:
            self._count(part)
            self._move(part)

    def _take(self, queue: PartQueue, places: Numbers) -> None:
        takes = queue.take(len(places))
        numbers = self._add(takes, queue)
        if len(takes) == 1 and takes[0].stop_row - takes[0].first_row == len(places):  # every row is a sample
            self._place(places, numbers[0], takes[0])
            self._parts.append(_Part(queue, takes, numbers, places, np.arange(1, len(places) + 1)))
            return

        widths: list[Numbers] = []
        num_before, start = 0, 0
        for chunk, taken in zip(numbers, takes, strict=True):
            number = taken.stop - taken.start
            if number:
                rows = taken.chunk.rows_of(taken.start, taken.stop)
                width = np.diff(rows, prepend=taken.first_row - 1 - num_before)
                num_before = taken.stop_row - int(rows[-1]) - 1
                self._place(places[start : start + number], chunk, taken)
                widths.append(width)
                start += number
            else:
                num_before += taken.stop_row - taken.first_row
        ends = np.cumsum(np.concatenate(widths))
        self._widths[places] = np.diff(ends, prepend=0)
        self._parts.append(_Part(queue, takes, numbers, places, ends))

    def _place(self, places: Numbers, chunk: int, taken: Taken) -> None:
        self._chunk_of[places] = chunk
        self._sample_of[places] = np.arange(taken.start, taken.stop)
        self.num_tokens[places] = taken.chunk.lengths_of(taken.start, taken.stop)

    def _take_rest(self, queue: PartQueue) -> int:
        """Take the rows of the part after its last sample of an epoch; return their number."""
        takes = queue.take_rest()
        if takes:  # samples may have taken all rows before a cut
            self.ended_epoch = takes[-1].chunk.first.epoch
        numbers = self._add(takes, queue)
        found = [index for index, part in enumerate(self._parts) if part.queue is queue]
        if found:
            part = self._parts[found[0]]
            part = part._replace(takes=[*part.takes, *takes], numbers=[*part.numbers, *numbers])
            self._parts[found[0]] = part
        else:
            self._parts.append(_Part(queue, takes, numbers, _NOTHING, _NOTHING))
        return sum(taken.stop_row - taken.first_row for taken in takes)

    def _add(self, takes: list[Taken], queue: PartQueue) -> list[int]:
        start = len(self._chunks)
        self._chunks += [taken.chunk for taken in takes]
        self._chunk_names += [queue.leaf.name] * len(takes)
        return list(range(start, len(self._chunks)))

    def _count(self, part: _Part) -> None:
        """The rows that yield no sample, and notes, as rows of the merged chunk."""
        number, first, num_bad = part.queue.leaf.number, 0, part.queue.cursor.num_bad_rows
        for index, taken in zip(part.numbers, part.takes, strict=True):
            chunk, start, stop = taken.chunk, taken.first_row, taken.stop_row
            for drop in chunk.drops:
                own = _within(drop.rows, start, stop)
                rows = self._merged(part, own - start + first)
                if len(rows):
                    self._drops.append(Drop(drop.reason, rows.astype(np.int32), index, own))
                    self._counted.append(PartRows(number, drop.reason, rows))
            for note in chunk.notes:
                rows = self._merged(part, _within(note.rows, start, stop) - start + first)
                if len(rows):
                    self._notes.append(Note(note.name, rows.astype(np.int32)))
            for error in chunk.errors:
                if start <= error.row < stop:
                    rows = self._merged(part, np.array([error.row - start + first]))
                    row = int(rows[0])
                    self._errors.append((msgspec.structs.replace(error, row=row), index, error.row))
                    self._policies[row] = part.queue.rules.policy(num_bad)
                    self._counted.append(PartRows(number, f"bad row {error.code}", rows, are_bad=True))
                    num_bad += 1
            first += stop - start

    def _merged(self, part: _Part, rows: Numbers) -> Numbers:
        """The part's rows, counted from the first that is taken, as rows of the merged chunk."""
        sample = np.searchsorted(part.ends, rows, side="right")
        is_tail = sample == len(part.ends)
        tail_start = int(part.ends[-1]) if len(part.ends) else 0
        merged = self._num_samples_rows + rows - tail_start
        before = ~is_tail
        places = sample[before]
        merged[before] = self.rows[part.places[places]] - (part.ends[places] - 1 - rows[before])
        return merged

    def _move(self, part: _Part) -> None:
        """Move the part's cursor past what is taken."""
        queue = part.queue
        num_rows = sum(taken.stop_row - taken.first_row for taken in part.takes)
        cursor = advanced(queue.cursor, [taken.piece() for taken in part.takes], num_rows, len(part.places))
        num_tokens = cursor.num_tokens + int(self.num_tokens[part.places].sum())
        cursor = msgspec.structs.replace(cursor, num_tokens=num_tokens)
        for counted in self._counted:
            if counted.part == queue.leaf.number:
                cursor = plus(cursor, counted, len(counted.rows))
        queue.cursor = cursor

    def record(self, schedule: tuple[Node, int], names: Sequence[str], before: MixtureState) -> MergeRecord:
        """From which parts the rows come."""
        pieces = {part.queue.leaf.number: [taken.piece() for taken in part.takes] for part in self._parts}
        return MergeRecord(
            schedule,
            names,
            before,
            self._leaves,
            self.rows,
            self.num_tokens,
            pieces,
            self._counted,
            num_rows=self.num_rows,
            tail=self._tail,
        )

    def chunk(self, first: Position, record: MergeRecord, *, ends_epoch: bool, with_token_sums: bool) -> MergedChunk:
        """The merged chunk."""
        merged = MergedRows(
            chunks=self._chunks,
            names=self._chunk_names,
            chunk_of=self._chunk_of,
            sample_of=self._sample_of,
            rows=self.rows,
            num_tokens=self.num_tokens,
            num_rows=self.num_rows,
            drops=self._drops,
            notes=self._notes,
            errors=sorted(self._errors, key=lambda error: error[0].row),
        )
        return MergedChunk(
            merged, first, record, self._policies, ends_epoch=ends_epoch, with_token_sums=with_token_sums
        )


def _within(rows: Any, start: int, stop: int) -> Numbers:
    found: Numbers = rows[rows.searchsorted(start) : rows.searchsorted(stop)].astype(np.int64)
    return found
