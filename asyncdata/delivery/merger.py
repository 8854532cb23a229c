"""Merges the ready samples of the parts of a mixture, in the order of its schedule. Values in, values out.

Only samples count for the schedule: rows that yield none come before the next sample of their part. All calls are made
in the service's thread, so there is no lock.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import msgspec
import numpy as np

from asyncdata.core.errors import AsyncDataError, NoSamplesError, by_reason, get_logger
from asyncdata.core.messages import EXCLUDED_REASON
from asyncdata.core.types import Position, SourceLocation, Tokens
from asyncdata.delivery.channel import Channel, Exclusions
from asyncdata.delivery.chunk import BadRow, Chunk, Drop, Note, sums_of
from asyncdata.delivery.items import Failure
from asyncdata.delivery.mixture import NOTHING, Counted, MergeRecord, MixtureState, PartCursor, end_code, end_of
from asyncdata.order.mixture import Leaf, Node, ScheduleCursor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncdata.delivery.bad_rows import BadRowPolicy
    from asyncdata.delivery.coordinator import Coordinator
    from asyncdata.delivery.ledger import DeliveryRules


_log = get_logger(__name__)
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Ready(NamedTuple):
    """A chunk of a part, and its samples that the epoch does not exclude.

    :ivar samples: their numbers in the chunk: int64 of shape (num_samples,); ``rows``: their rows there.
    :ivar num_tokens: of each sample.
    :ivar places: the epoch, window and row that follows each sample: int64 of shape (3, num_samples).
    """

    chunk: Chunk
    bad_rows: list[BadRow]
    samples: Numbers
    rows: Numbers
    num_tokens: Numbers
    places: Numbers

    @classmethod
    def of(cls, chunk: Chunk, bad_rows: list[BadRow]) -> Ready:
        """The samples of ``chunk``."""
        first = chunk.first
        samples = np.delete(np.arange(chunk.num_samples), chunk.excluded)
        rows = chunk.rows_of(0, chunk.num_samples)[samples].astype(np.int64)
        places = np.empty((3, len(rows)), np.int64)
        places[0], places[1], places[2] = first.epoch, first.window, first.row + rows + 1
        if chunk.ends_epoch and len(rows) and rows[-1] == chunk.num_rows - 1:
            places[:, -1] = first.epoch + 1, 0, 0
        return cls(chunk, bad_rows, samples, rows, chunk.lengths_of(0, chunk.num_samples)[samples], places)


class EpochEnd(NamedTuple):
    """The end of an epoch of a part, between its chunks, where the schedule has to know of it.

    :ivar is_empty: whether the epoch had no sample, as its rows are excluded.
    """

    epoch: int
    is_empty: bool = False


class Taken(NamedTuple):
    """Samples ``[start, stop)`` of a ready chunk, and the chunk's rows ``[first_row, stop_row)``."""

    ready: Ready
    start: int
    stop: int
    first_row: int
    stop_row: int


class ReadyAhead:
    """What all parts have ready together, before they are merged into the coordinator's channel."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.num_samples = self.num_bytes = 0
        self._coordinator = coordinator

    @property
    def bytes_left(self) -> int:
        """How many more bytes may be ready."""
        merged = self._coordinator.channel.num_ready_bytes
        return self._coordinator.rules.max_ready_bytes - merged - self.num_bytes


class PartQueue(Channel):
    """Ready chunks of one part, in the order of its own D.

    :param cursor: how far the part was delivered before the first chunk.
    :param ready: what all parts have together; it counts its own there.
    :ivar cursor: how far it is merged.
    :ivar error: the error that ends the part after its chunks.
    :ivar is_cut: whether the chunks end with a bad row that may not be passed over, so that no sample follows.
    :ivar num_taken: samples that were taken.
    """

    def __init__(
        self, leaf: Leaf, rules: DeliveryRules, cursor: PartCursor, ready: ReadyAhead, decisions: Exclusions | None
    ) -> None:
        super().__init__(rules, num_bad_rows=cursor.num_bad_rows, outcomes=decisions)
        self.leaf = leaf
        self.cursor = cursor
        self.error: AsyncDataError | None = None
        self.is_cut = False
        self.num_taken = 0
        self._all_ready = ready
        self._is_limited = leaf.epochs_left is not None
        self._ready: deque[Ready | EpochEnd] = deque()
        self._ends: deque[int] = deque()  # how many samples there were before each end in `_ready`
        self._num_empty = 0
        self._has_told = False
        self._sample = self._row = 0
        self._epoch_samples = cursor.epoch_samples
        self._epoch_drops: Counter[str] = Counter()
        if cursor.is_at_end and self._is_limited:
            self._append_end(EpochEnd(cursor.position.epoch - 1))

    @property
    def num_ready(self) -> int:
        """Samples that are not taken."""
        return self.num_produced - self.num_taken

    def room(self, taken: int) -> int:
        """Rows that may be entered now. A part without a ready sample has room whatever the others keep; but one whose
        epoch is empty waits for the schedule, as its next one may be empty, too.
        """
        if self.is_stopped or self._num_empty or (self.num_ready and self._all_ready.bytes_left <= 0):
            return 0

        return max(0, -self.excess(taken))

    def _append(self, content: Chunk | Failure | None) -> None:
        if self.is_stopped or content is None:
            return

        if isinstance(content, Failure):
            self._end_with(content.error)
            return

        ready = Ready.of(content, content.bad_rows(self._bad_rows, self._num_bad_rows))
        self._ready.append(ready)
        self.num_produced += len(ready.samples)
        self._all_ready.num_samples += len(ready.samples)
        self._all_ready.num_bytes += content.num_bytes
        self._num_bad_rows += len(ready.bad_rows)
        self.is_cut = self.is_stopped = any(bad.stops for bad in ready.bad_rows)
        self._epoch_samples += len(ready.samples)
        if not self._epoch_samples:
            self._epoch_drops.update({drop.reason: len(drop.rows) for drop in content.drops})
            self._epoch_drops.update(f"bad row {error.code}" for error in content.errors)
        if content.ends_epoch:
            self._end_epoch(content.first.epoch)

    def _end_epoch(self, epoch: int) -> None:
        is_empty = not self._epoch_samples
        sits_out = is_empty and self._epoch_drops[EXCLUDED_REASON] > 0
        if self._is_limited or sits_out:
            self._append_end(EpochEnd(epoch, is_empty=sits_out))
        num_rows, reasons = self._epoch_drops.total(), by_reason(self._epoch_drops)
        if is_empty and not sits_out:
            found = f"in epoch {epoch} of it {num_rows} rows were read, and 0 kept: {reasons}"
            self._end_with(NoSamplesError(f"AD401 {found}"))
        elif sits_out and not self._has_told:
            self._has_told = True
            _log.warning("mixture.part_sits_out", source=self.leaf.name, epoch=epoch, num_rows=num_rows)
        self._epoch_samples = 0
        self._epoch_drops.clear()

    def _append_end(self, end: EpochEnd) -> None:
        self._ready.append(end)
        self._ends.append(self.num_produced)
        self._num_empty += end.is_empty

    def _end_with(self, error: AsyncDataError) -> None:
        if isinstance(error, NoSamplesError):
            part, found = f"part {self.leaf.name!r} of the mixture", str(error).removeprefix("AD401 ")
            error = NoSamplesError(
                f"AD407 {part} has no sample: {found}; take the part out, or change what drops its rows"
            )
        self.error, self.is_stopped = error, True

    def available(self) -> int:
        """Samples that may be taken before the schedule has to know of the end of an epoch."""
        return (self._ends[0] if self._ends else self.num_produced) - self.num_taken

    @property
    def is_at_end(self) -> bool:
        """Whether no sample is left of an epoch, or before the cut, and the schedule has to know."""
        return (self.is_cut or len(self._ends) > 0) and bool(self._ready) and self.available() == 0

    @property
    def is_empty(self) -> bool:
        """Whether all rows are taken."""
        return not self._ready

    def lengths(self) -> Iterator[int]:
        """Tokens of each of the next samples, up to the end of an epoch, as far as they are ready."""
        start = self._sample
        for ready in self._ready:
            if isinstance(ready, EpochEnd):
                return

            yield from ready.num_tokens[start:].tolist()
            start = 0

    def take(self, number: int) -> Iterator[Taken]:
        """Take the next ``number`` available samples, with the rows before each that yielded none."""
        while number:
            ready = self._ready[0]
            assert not isinstance(ready, EpochEnd), "these samples are available"
            stop = min(len(ready.samples), self._sample + number)
            number -= stop - self._sample
            yield self._cut(ready, stop, ready.chunk.num_rows if number else int(ready.rows[stop - 1]) + 1)

    def take_rest(self) -> tuple[list[Taken], EpochEnd | None]:
        """Take the rows that are left of an epoch, or up to the cut, without a further sample; and the epoch's end."""
        taken: list[Taken] = []
        while self._ready:
            ready = self._ready[0]
            if isinstance(ready, EpochEnd):
                self._ready.popleft()
                self._ends.popleft()
                self._num_empty -= ready.is_empty
                return taken, ready

            taken.append(self._cut(ready, len(ready.samples), ready.chunk.num_rows))
        return taken, None

    def _cut(self, ready: Ready, stop: int, stop_row: int) -> Taken:
        taken = Taken(ready, self._sample, stop, self._row, stop_row)
        self.num_taken += stop - self._sample
        self._all_ready.num_samples -= stop - self._sample
        self._sample, self._row = stop, stop_row
        if stop_row == ready.chunk.num_rows:
            self._ready.popleft()
            self._all_ready.num_bytes -= ready.chunk.num_bytes
            self._sample = self._row = 0
        return taken


_BYTES_PER_SAMPLE = 64


class Merger:
    """Merges from one position on; a restart makes a new one.

    :param queues: of the parts, by the number of their leaf; ``ready``: what they have together.
    :param last: the record before the first row that is merged.
    :param position: that row.
    :ivar blocked: the part whose next sample was missing at the last :meth:`merge`; -1 if none was.
    :ivar taken: the parts of which the last chunk has rows.
    """

    def __init__(
        self,
        node: Node,
        seed: int,
        queues: Sequence[PartQueue],
        ready: ReadyAhead,
        last: MergeRecord,
        position: Position,
        *,
        with_token_sums: bool = False,
    ) -> None:
        state = last.before
        self.position = position
        self.blocked = -1
        self.taken: list[int] = []
        self._queues, self._ready = queues, ready
        self._names = [queue.leaf.name for queue in queues]
        self._cursors = {queue.leaf.name: queue.cursor for queue in queues}  # replaced, never changed
        self._before: MixtureState | None = None  # known since the last merge, which gave nothing
        self._schedule = node, seed
        self._cursor = ScheduleCursor(node, seed, state.schedule)
        self._choices = state.choices
        self._last = last
        self._with_token_sums = with_token_sums

    def merge(self, max_samples: int) -> MergedChunk | None:
        """The next samples, as many as are ready, or the end of a part's epoch; None if the next sample is missing."""
        before, self._before = self._before or self._state(), None
        leaves, is_end = self._chosen(max_samples)
        if len(leaves):
            return self._samples(before, leaves)

        if is_end or (self.blocked >= 0 and self._queues[self.blocked].is_at_end):
            return self._end(before)

        self._before = before
        return None

    @property
    def is_blocked(self) -> bool:
        """Whether the next sample is still missing since the last :meth:`merge`, and nothing else can be done."""
        return self.blocked >= 0 and self._queues[self.blocked].is_empty

    def awaited(self, within: int) -> set[int]:
        """The parts that may have one of the next ``within`` samples."""
        return self._cursor.awaited(within).union(code for code in self._choices if code >= 0)

    def next_parts(self, number: int) -> list[int]:
        """The parts of about the next ``number`` samples, in the order in which they are needed."""
        again = [code for code in self._choices[:number] if code >= 0]
        return list(dict.fromkeys(again + self._cursor.expected(number - len(again))))

    def _state(self) -> MixtureState:
        return MixtureState(self._cursor.state(), self._cursors, self._choices)

    # What is next: the parts of samples, or none where no part has a weight.

    def _chosen(self, max_samples: int) -> tuple[Numbers, bool]:
        """The parts of the samples that can be taken now; and, if there are none, whether an end comes instead."""
        if not (self._choices or self._cursor.node.is_by_rows):
            return self._chosen_by_tokens(max_samples)

        wanted = 0 if self._choices else min(max_samples, self._ready.num_samples + 1)
        leaves = self._cursor.plan(wanted) if wanted else np.array(self._choices[:max_samples], np.int64)
        ends = np.flatnonzero(leaves < 0)
        number = self._num_there(leaves[: ends[0]] if len(ends) else leaves)
        self.blocked = -1
        if number == len(leaves):
            return leaves, number < wanted

        code, leaves = int(leaves[number]), leaves[:number]
        part = code if code >= 0 else end_of(code)[0]
        is_end = code < 0 and (part < 0 or self._is_end_known(part, leaves))
        self.blocked = -1 if is_end else part
        return leaves, is_end

    def _is_end_known(self, part: int, leaves: Numbers) -> bool:
        """Whether an end that comes again is there, after these samples.

        If the part has a sample there now, its data have changed, and the end is passed over.
        """
        queue = self._queues[part]
        return queue.is_at_end or queue.available() > int((leaves == part).sum())

    def _num_there(self, leaves: Numbers) -> int:
        """How many of the next samples are ready, up to the first that is not."""
        order = np.argsort(leaves, kind="stable")
        parts, starts, counts = np.unique(leaves[order], return_index=True, return_counts=True)
        available = np.array([self._queues[part].available() for part in parts.tolist()], np.int64)
        nth_of_part = np.arange(len(leaves)) - np.repeat(starts, counts)
        missing = order[nth_of_part >= np.repeat(available, counts)]
        return int(missing.min(initial=len(leaves)))

    def _chosen_by_tokens(self, max_samples: int) -> tuple[Numbers, bool]:
        """The same where the schedule depends on the lengths of samples; the cursor moves on."""
        lengths = [queue.lengths() for queue in self._queues]
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

    # What becomes of it.

    def _samples(self, before: MixtureState, leaves: Numbers) -> MergedChunk:
        """The chunk of these parts' next samples."""
        chunk = MergedChunk(MergeRecord(self._names, before, None if self._choices else self._schedule, leaves))
        self.taken = np.flatnonzero(np.bincount(leaves)).tolist()
        for part in self.taken:
            places = np.flatnonzero(leaves == part)
            chunk.add(part, places, self._queues[part].take(len(places)))
        if self._choices:
            self._choices = self._choices[len(leaves) :]
        elif self._cursor.node.is_by_rows:
            self._cursor.took(leaves, chunk.record.num_tokens)
        cursors = {self._names[part]: chunk.record.cursor(part, len(leaves)) for part in self.taken}
        self._cursors = self._cursors | cursors
        return self._placed(chunk, len(leaves), ends_epoch=False)

    def _end(self, before: MixtureState) -> MergedChunk:
        """The chunk of the rows that are left of a part's epoch. The mixture's epoch may end with it."""
        is_again = bool(self._choices) and self._choices[0] < 0
        part, is_over = end_of(self._choices[0]) if is_again else (self.blocked, False)
        record, end = MergeRecord(self._names, before), None
        chunk = MergedChunk(record)
        self.taken = [part] if part >= 0 else []
        if part >= 0 and self._queues[part].is_at_end:
            takes, end = self._queues[part].take_rest()
            chunk.add(part, NOTHING, takes)
        if part >= 0:
            cursor = record.cursor(part, 1)
            cursor = cursor if end is None else cursor.after_epoch(end.epoch)
            self._cursors = self._cursors | {self._names[part]: cursor}
        if is_again:
            self._choices = self._choices[1:]
        elif not self._choices:
            if part < 0:
                is_over = self._cursor.settle()
            elif end is not None:
                is_over = self._cursor.epoch_ended(part, is_empty=end.is_empty)
            if is_over:
                self._cursor.begin_epoch()
        self.blocked = -1  # the next sample may be of another part now
        record.code, record.after = end_code(part, is_over=is_over), self._state()
        return self._placed(chunk, 1, ends_epoch=is_over)

    def _placed(self, chunk: MergedChunk, num_rows: int, *, ends_epoch: bool) -> MergedChunk:
        """The chunk, which is complete, at its place in the order."""
        place = self.position
        self.position = Position(place.epoch + 1) if ends_epoch else Position(place.epoch, 0, place.row + num_rows)
        self._last.next = self._last = chunk.record
        chunk.place(place, num_rows, ends_epoch=ends_epoch, with_token_sums=self._with_token_sums)
        return chunk


def _within(rows: Any, start: int, stop: int) -> Any:
    return rows[rows.searchsorted(start) : rows.searchsorted(stop)]


class MergedChunk(Chunk):
    """Rows of a mixture, which refers to the parts' own chunks. Every row is a sample, or there is none."""

    record: MergeRecord
    __slots__ = ("_bad_rows", "_chunk_of", "_chunks", "_origins", "_sample_of", "record")

    def __init__(self, record: MergeRecord) -> None:
        self.record, self.source = record, ""
        self.num_samples = len(record.num_tokens)
        self.drops, self.notes, self.excluded, self.served = [], [], NOTHING, NOTHING
        self._origins = np.zeros((2, self.num_samples), np.int64)
        self._chunks: list[Chunk] = []
        self._bad_rows: list[tuple[int, BadRow]] = []

    def add(self, part: int, places: Numbers, takes: Iterable[Taken]) -> None:
        """Add what is taken of a part, whose samples have these places in the chunk. What follows them comes last."""
        record = self.record
        places = np.append(places, self.num_samples)
        for ready, start, stop, first_row, stop_row in takes:
            number = stop - start
            here = places[:number]
            self._origins[0, here], self._origins[1, here] = len(self._chunks), ready.samples[start:stop]
            record.num_tokens[here], record.places[:, here] = ready.num_tokens[start:stop], ready.places[:, start:stop]
            next_sample = ready.rows[start:stop].searchsorted
            if len(ready.chunk.served):
                self.served = np.append(self.served, here[np.isin(ready.samples[start:stop], ready.chunk.served)])
            for drop in ready.chunk.drops:
                own = _within(drop.rows, first_row, stop_row)
                if len(own):
                    rows = places[next_sample(own)]
                    self.drops.append(Drop(drop.reason, rows.astype(np.int32), len(self._chunks), own))
                    record.counted.append(Counted(part, drop.reason, rows))
            for note in ready.chunk.notes:
                own = _within(note.rows, first_row, stop_row)
                if len(own):
                    self.notes.append(Note(note.name, places[next_sample(own)].astype(np.int32)))
            for bad in ready.bad_rows:
                if first_row <= bad.error.row < stop_row:
                    row = int(places[next_sample(bad.error.row)])
                    self._bad_rows.append((row, bad))
                    record.counted.append(Counted(part, f"bad row {bad.error.code}", [row], are_bad=True))
            self._chunks.append(ready.chunk)
            places = places[number:]

    def place(self, first: Position, num_rows: int, *, ends_epoch: bool, with_token_sums: bool) -> None:
        """All parts are added: set the chunk's place in the order."""
        self.first, self.num_rows, self.ends_epoch = first, num_rows, ends_epoch
        self._bad_rows.sort(key=lambda item: item[0])
        self._chunk_of, self._sample_of = self._origins.tolist()
        self.errors = [msgspec.structs.replace(bad.error, row=row) for row, bad in self._bad_rows]
        ends = np.cumsum(self.record.num_tokens, dtype=np.uint32)
        self.num_bytes = 4 * int(self.record.num_tokens.sum()) + _BYTES_PER_SAMPLE * self.num_samples
        self._kept, self._expected, self._token_ends = None, None, ends.data
        sums = [crc32(self.tokens_of(n).tobytes()) for n in range(self.num_samples)] if with_token_sums else None
        place = msgspec.structs.astuple(first)
        self.sums = sums_of(place, ends, token_sums=None if sums is None else np.array(sums, np.uint32))

    def tokens_of(self, sample: int) -> Tokens:
        return self._chunks[self._chunk_of[sample]].tokens_of(self._sample_of[sample])

    def value(self, column: str, sample: int) -> Any:
        return self._chunks[self._chunk_of[sample]].value(column, self._sample_of[sample])

    def arrays(self, sample: int) -> dict[str, Any]:
        return self._chunks[self._chunk_of[sample]].arrays(self._sample_of[sample])

    def location(self, sample: int) -> SourceLocation:
        return self._chunks[self._chunk_of[sample]].location(self._sample_of[sample])

    def own(self, sample: int) -> tuple[Chunk, int]:
        return self._chunks[self._chunk_of[sample]], self._sample_of[sample]

    def own_error(self, number: int) -> tuple[Chunk, int]:
        _, bad = self._bad_rows[number]
        return bad.chunk, bad.error.row

    def own_drop(self, drop: Drop) -> tuple[Chunk, Any]:
        return self._chunks[drop.part], drop.own_rows

    def bad_rows(self, policy: BadRowPolicy, num_passed: int) -> list[BadRow]:
        return [bad for _, bad in self._bad_rows]
