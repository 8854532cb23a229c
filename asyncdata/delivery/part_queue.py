"""Ready chunks of one part of a mixture, which the schedule has not taken yet."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.callbacks import no_op
from asyncdata.core.errors import NoSamplesError, by_reason
from asyncdata.core.types import Position
from asyncdata.delivery.bad_row_policy import BadRowPolicy
from asyncdata.delivery.mixture import PartCursor, Piece
from asyncdata.delivery.remaining_chunk import without

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.errors import AsyncDataError, BadRowError
    from asyncdata.delivery.chunk import Chunk
    from asyncdata.delivery.part_decisions import PartDecisions
    from asyncdata.delivery.remaining_chunk import AnyChunk
    from asyncdata.order.mixture_tree import Leaf

__all__ = ("BadRowRules", "PartQueue", "Taken")


class BadRowRules(NamedTuple):
    """What a part does with its bad rows; see :class:`~asyncdata.BadRows`."""

    is_raised: bool = True
    max: int | None = None
    shows_row: bool = True
    pass_over: Callable[[BadRowError], object] = no_op

    def policy(self, num_passed: int) -> BadRowPolicy:
        """What is done with a bad row after ``num_passed`` that were passed over."""
        stops = self.is_raised or (self.max is not None and num_passed >= self.max)
        return BadRowPolicy(stops, self.is_raised, self.max, self.shows_row, self.pass_over)


class Taken(NamedTuple):
    """Samples ``[start, stop)`` of a chunk, and its rows ``[first_row, stop_row)``."""

    chunk: AnyChunk
    start: int
    stop: int
    first_row: int
    stop_row: int

    def piece(self) -> Piece:
        """What the record of a merged chunk keeps of it."""
        chunk = self.chunk
        first = Position(chunk.first.epoch, chunk.first.window, chunk.first.row + self.first_row)
        is_end = chunk.ends_epoch and self.stop_row == chunk.num_rows
        return Piece(first, self.stop_row - self.first_row, self.stop - self.start, is_end)


class _EpochEnd:
    """In place of a chunk: an epoch that had ended before a restart, and the schedule had not taken notice."""

    num_samples = num_rows = 0
    ends_epoch = True
    drops: tuple[()] = ()
    notes: tuple[()] = ()
    errors: tuple[()] = ()

    def __init__(self, epoch: int) -> None:
        self.first = Position(epoch)


class PartQueue:
    """Ready chunks of one part, in the order of its own D.

    :param cursor: how far the part was delivered before the first chunk.
    :param decisions: decide which rows an epoch has; None: all. No sample of an epoch is taken before it is decided.
    :ivar cursor: how far it is merged.
    :ivar error: the error that ends the part after its chunks.
    :ivar is_cut: whether the chunks end with a bad row that may not be passed over, so that no sample follows.
    :ivar num_ready: samples that are not taken.
    :ivar num_taken: samples that were taken, or left out because their epoch excludes them.
    :ivar num_passed_over: how often it was its turn, and it had no row to replay.
    """

    def __init__(
        self, leaf: Leaf, rules: BadRowRules, cursor: PartCursor, decisions: PartDecisions | None = None
    ) -> None:
        self.leaf = leaf
        self.rules = rules
        self.cursor = cursor
        self.error: AsyncDataError | None = None
        self.is_cut = False
        self.num_ready = self.num_taken = self.num_bytes = self.num_passed_over = 0
        self._decisions = decisions
        self._is_limited = leaf.epochs_left is not None
        self._chunks: deque[Any] = deque()
        self._sample = self._row = 0
        self._epoch_samples = self._num_read = cursor.epoch_samples
        self._epoch_drops: dict[str, int] = {}
        if cursor.is_at_end and self._is_limited:
            self._chunks.append(_EpochEnd(cursor.position.epoch - 1))

    def add(self, chunk: Chunk) -> None:
        """Append the next chunk. After an epoch without a sample, the part has an error."""
        remaining: AnyChunk = chunk
        is_decided = self._is_decided(chunk)
        if self._decisions is not None and is_decided:
            remaining = without(chunk, self._decisions.excluded(chunk.first.epoch))
        self._chunks.append(remaining)
        self.num_ready += remaining.num_samples
        self.num_taken += chunk.num_samples - remaining.num_samples
        self.num_bytes += chunk.num_bytes
        if is_decided:
            self._count(remaining)
        self._num_read += chunk.num_samples
        if chunk.ends_epoch:
            if not self._num_read and not is_decided:  # without a sample, whatever is decided
                for one in self._chunks:
                    if one.first.epoch == chunk.first.epoch:
                        self._count(one)
            self._num_read = 0

    def fail(self, error: AsyncDataError) -> None:
        """The part ends after its chunks with this error."""
        if isinstance(error, NoSamplesError):
            error = NoSamplesError(self._no_sample(str(error).removeprefix("AD401 ")))
        self.error = error

    def _is_decided(self, chunk: Any) -> bool:
        return (
            self._decisions is None
            or isinstance(chunk, _EpochEnd)
            or self._decisions.is_decided(int(chunk.first.epoch))
        )

    def _count(self, chunk: AnyChunk) -> None:
        self._epoch_samples += chunk.num_samples
        if not self._epoch_samples:
            for reason, number in _dropped(chunk):
                self._epoch_drops[reason] = self._epoch_drops.get(reason, 0) + number
        if chunk.ends_epoch:
            if not self._epoch_samples:
                self.error = NoSamplesError(self._no_samples(chunk.first.epoch))
            self._epoch_samples, self._epoch_drops = 0, {}

    def _no_samples(self, epoch: int) -> str:
        num_rows = sum(self._epoch_drops.values())
        return self._no_sample(
            f"in epoch {epoch} of it {num_rows} rows were read, and 0 kept: {by_reason(self._epoch_drops)}"
        )

    def _no_sample(self, found: str) -> str:
        part = f"part {self.leaf.name!r} of the mixture"
        return f"AD407 {part} has no sample: {found}; take the part out, or change what drops its rows"

    def available(self) -> int:
        """Samples that may be taken before the schedule has to know of the end of an epoch, or one is decided."""
        if not self._is_limited and self._decisions is None:
            return self.num_ready

        number = -self._sample
        for chunk in self._chunks:
            if number + chunk.num_samples and not self._is_decided(chunk):  # or it is delivered, and may be forgotten
                break

            number += chunk.num_samples
            if self._is_limited and chunk.ends_epoch:
                break
        return number

    @property
    def undecided(self) -> int | None:
        """The epoch of the next sample, if it is not decided yet which rows it has; else None."""
        if self._decisions is None or self.is_at_end or (self.is_cut and not self.num_ready):
            return None

        epoch = self._next_epoch()
        return None if self._decisions.is_decided(epoch) else epoch

    def _next_epoch(self) -> int:
        number, epoch = -self._sample, self.cursor.position.epoch
        for chunk in self._chunks:
            number += chunk.num_samples
            if number:
                return int(chunk.first.epoch)

            epoch = chunk.first.epoch + (1 if chunk.ends_epoch else 0)
        return epoch

    def decide(self) -> bool:
        """Decide which rows the epoch of the next sample has. False: it has none yet, so the part is passed over."""
        epoch = self.undecided
        assert epoch is not None and self._decisions is not None, "it is undecided"
        if not self._decisions.decide(epoch):
            return False

        excluded = self._decisions.excluded(epoch)
        for place, chunk in enumerate(self._chunks):
            if chunk.first.epoch == epoch and not isinstance(chunk, _EpochEnd):
                remaining = without(chunk, excluded)
                self._chunks[place] = remaining
                num_excluded = chunk.num_samples - remaining.num_samples
                self.num_ready, self.num_taken = self.num_ready - num_excluded, self.num_taken + num_excluded
                self._count(remaining)
        return True

    @property
    def is_at_end(self) -> bool:
        """Whether no sample is left of an epoch, and the schedule has to know."""
        if not self._is_limited or self.is_cut:
            return False

        number = -self._sample
        for chunk in self._chunks:
            number += chunk.num_samples
            if number:
                return False

            if chunk.ends_epoch:
                return True
        return False

    @property
    def is_empty(self) -> bool:
        """Whether all rows are taken."""
        return not self._chunks

    def lengths(self, number: int) -> list[int]:
        """Tokens of each of the next ``number`` samples."""
        lengths: list[int] = []
        start = self._sample
        for chunk in self._chunks:
            if len(lengths) >= number:
                break

            if chunk.num_samples > start:
                lengths += chunk.lengths_of(start, chunk.num_samples).tolist()
            start = 0
        return lengths[:number]

    def take(self, number: int) -> list[Taken]:
        """Take the next ``number`` samples, with the rows before each that yielded none."""
        self.num_ready -= number
        self.num_taken += number
        taken: list[Taken] = []
        while number:
            chunk = self._chunks[0]
            stop = min(chunk.num_samples, self._sample + number)
            number -= stop - self._sample
            taken.append(self._cut(chunk, stop, chunk.num_rows if number else chunk.row_of(stop - 1) + 1))
        return taken

    def take_rest(self) -> list[Taken]:
        """Take the rows that are left of an epoch, or up to the cut, without a further sample."""
        taken: list[Taken] = []
        while self._chunks:
            chunk = self._chunks[0]
            ends_epoch = chunk.ends_epoch
            taken.append(self._cut(chunk, chunk.num_samples, chunk.num_rows))
            if ends_epoch:
                if self._chunks and self._chunks[0] is chunk:
                    self._pop()
                break
        return taken

    def _cut(self, chunk: Any, stop: int, stop_row: int) -> Taken:
        taken = Taken(chunk, self._sample, stop, self._row, stop_row)
        self._sample, self._row = stop, stop_row
        is_used_up = stop == chunk.num_samples and stop_row == chunk.num_rows
        if is_used_up and not (self._is_limited and chunk.ends_epoch):
            self._pop()
        return taken

    def _pop(self) -> None:
        chunk = self._chunks.popleft()
        self.num_bytes -= getattr(chunk, "num_bytes", 0)
        self._sample = self._row = 0

    def end_epoch(self, epoch: int) -> None:
        """The schedule has taken notice of the end of ``epoch``."""
        self.cursor = msgspec.structs.replace(
            self.cursor, position=Position(epoch + 1), is_at_end=False, epoch_samples=0
        )


def _dropped(chunk: AnyChunk) -> list[tuple[str, int]]:
    drops = [(drop.reason, len(np.atleast_1d(drop.rows))) for drop in chunk.drops]
    return drops + [(f"bad row {error.code}", 1) for error in chunk.errors]
