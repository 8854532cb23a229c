"""The read-ahead of one part of a mixture: ready chunks, of which the schedule takes samples.

All calls are made in the service's thread, so there is no lock.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.errors import AsyncDataError, NoSamplesError, by_reason
from asyncdata.core.log import get_logger
from asyncdata.core.messages import EXCLUDED_REASON
from asyncdata.delivery.channel import Channel, Exclusions
from asyncdata.delivery.items import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.delivery.chunk import BadRow, Chunk
    from asyncdata.delivery.ledger import DeliveryRules
    from asyncdata.delivery.mixture import PartCursor
    from asyncdata.order.mixture import Leaf

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
    """What all parts have ready together.

    :param limit: returns how many bytes that may be.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self.num_samples = self.num_bytes = 0
        self._limit = limit

    @property
    def bytes_left(self) -> int:
        """How many more bytes may be ready."""
        return self._limit() - self.num_bytes


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
        self,
        leaf: Leaf,
        rules: DeliveryRules,
        cursor: PartCursor,
        ready: ReadyAhead,
        decisions: Exclusions | None,
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

    def take(self, number: int) -> list[Taken]:
        """Take the next ``number`` available samples, with the rows before each that yielded none."""
        taken: list[Taken] = []
        while number:
            ready = self._ready[0]
            assert not isinstance(ready, EpochEnd), "these samples are available"
            stop = min(len(ready.samples), self._sample + number)
            number -= stop - self._sample
            taken.append(self._cut(ready, stop, ready.chunk.num_rows if number else int(ready.rows[stop - 1]) + 1))
        return taken

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
