"""Windows of rows that are ordered one by one: the row index knows each row's location, so nothing is scanned."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.batching.planned import Dealt, PlannedEpoch, PlannedOrder, packs_of, refuse_too_many
from asyncdata.core.errors import AsyncDataError, ConfigError, get_logger
from asyncdata.core.messages import (
    NO_SLOT,
    NOT_IN_SLOT,
    TOO_LONG,
    Overflow,
    Packed,
    Permute,
    Permuted,
    Tokenize,
    Tokenized,
    expected_elsewhere,
    is_elsewhere,
)
from asyncdata.core.types import Position, SourceLocation
from asyncdata.order.order import ROWS_PER_WINDOW, RowOrder, Share, row_of_epoch
from asyncdata.read_ahead.calls import Calls
from asyncdata.read_ahead.windows import Feed, Int32, Int64, OpenWindow, Windows, no_such_place
from asyncdata.workers.changes import Promise

if TYPE_CHECKING:
    from asyncdata.batching.packs import Int64, Packs
    from asyncdata.read_ahead.indexer import Indexer
    from asyncdata.read_ahead.row_index import Places, RowIndex
    from asyncdata.sources.base import Blocks


class PlannedRows:
    """The planned epochs of one loader. Call methods in the service's thread, unless they say "from any thread".

    :ivar feed: where their rows go.
    :ivar start: where delivery began, or was restored to.
    """

    feed: Feed

    def __init__(self, order: PlannedOrder, index: RowIndex, calls: Calls) -> None:
        self.start = Position()
        self._order = order
        self._index = index
        self._calls = calls
        self._resumed: tuple[int, Dealt] | None = None
        self._packs: dict[int, Packs] = {}
        self._epochs: dict[int, PlannedEpoch] = {}  # replaced, never changed, as other threads read it

    def restart(self, start: Position) -> None:
        """From ``start`` on, packs are dealt as the plan says."""
        self._epochs = {}
        self.start = start

    # What a snapshot keeps.

    def dealt_at(self, position: Position) -> Dealt | None:
        """How the packs of the epoch at ``position`` are dealt, if it has begun and has groups. From any thread."""
        if self._order.plan.grouping is None or (position.window, position.row) == (0, 0):
            return None

        return self._dealt(position.epoch)

    def resume_dealt(self, position: Position, dealt: tuple[int, int] | None) -> None:
        """Prepare for a restart at ``position``, from a snapshot that kept ``dealt``; None: as the plan says.

        From any thread. :meth:`restart` keeps this, as the service may start after it.
        """
        self._resumed = None if dealt is None else (position.epoch, Dealt(*dealt))

    def _dealt(self, epoch: int) -> Dealt:
        resumed = self._resumed
        return resumed[1] if resumed is not None and resumed[0] == epoch else self._order.plan.dealt

    # The plans.

    def find(self, number: int) -> PlannedEpoch | None:
        """The plan of an epoch, if it is known. From any thread, while the epoch is delivered."""
        return self._epochs.get(number)

    async def epoch(self, number: int) -> PlannedEpoch:
        """The plan of an epoch; all rows are known.

        :raises ConfigError: if no pack can be made.
        """
        if number not in self._epochs:
            packs = await self._packs_of(self._order.packs_of(number))
            request = self._order.request_order(packs, self._dealt(number), number)
            order = np.frombuffer((await self._calls.ask(request, Permuted)).rows, np.uint32).astype(np.int64)
            self._take_order(number, packs, order)
        return self._epochs[number]

    async def _packs_of(self, epoch: int) -> Packs:
        index, plan = self._index, self._order.plan
        if epoch in self._packs:
            return self._packs[epoch]

        if not index.num_rows:
            raise index.no_samples()

        plan.refuse_numbers(index.num_rows, index.num_found)
        request = self._order.request_packs(index.num_tokens, index.rows_of_files, epoch, index.costs)
        packs = packs_of(await self._calls.ask(request, Packed))
        if packs.num_packs == 0:
            num_tokens = int(index.num_tokens.sum(dtype=np.int64))
            raise ConfigError(
                f"AD453 all {index.num_rows} samples together have {num_tokens} tokens and fill no pack of "
                f"max_length={plan.packing.max_length}; lower it, or keep the last pack"
            )

        kept = {number: kept for number, kept in self._packs.items() if number >= self._first_wanted}
        self._packs = {**kept, epoch: packs}
        return packs

    def _take_order(self, epoch: int, packs: Packs, order: Int64) -> None:
        first = 0
        if self.start.epoch == epoch:
            once = PlannedEpoch(packs, order, len(order))
            times, row = divmod(row_of_epoch(self.start), once.num_rows)
            first = times * len(order) + once.pack_at(row)
        num_packs = self._order.plan.num_delivered(packs.num_packs, first)
        kept = {number: planned for number, planned in self._epochs.items() if number >= self._first_wanted}
        self._epochs = {**kept, epoch: PlannedEpoch(packs, order, num_packs)}

    @property
    def _first_wanted(self) -> int:
        """The first epoch whose plan is kept. The batches may still be in the epoch before the one that is read."""
        return self.feed.restart_position().epoch - 1


_log = get_logger(__name__)

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class _Rows(NamedTuple):
    """The rows of a window.

    :ivar numbers: int64, as the row index numbers them.
    :ivar units: for each row, the number of its unit: a unit is dealt to one rank, and is a row or a pack.
    :ivar first: the unit with which the epoch's first batch begins.
    :ivar stop: one more than the epoch's last unit.
    :ivar are_all: whether these are all rows of the window; otherwise its first ones, and the others are not known yet.
    """

    numbers: Int64
    units: Int64
    first: int
    stop: int
    is_last: bool
    are_all: bool = True


class IndexedWindow(OpenWindow):
    """Rows by their locations. It is window ``number`` of ``epoch``."""

    def __init__(self, source: Blocks, index: RowIndex, epoch: int, number: int) -> None:
        self._source, self._index, self.epoch, self.number = source, index, epoch, number
        self._places: Places | None = None
        self._expected: Int32 | None = None

    def fill(self, places: Places, expected: Int32 | None, *, is_last: bool, are_all: bool = True) -> None:
        """Add the rows, all of them or the next ones.

        :param expected: as in :class:`~asyncdata.core.messages.Tokenize`.
        """
        self._expected = expected
        self._places = places if self._places is None else self._places.followed_by(places)
        self.num_rows, self.is_last, self.is_ready = len(self._places.lengths), is_last, are_all

    @property
    def _known(self) -> Places:
        assert self._places is not None, "it is used after its first rows are known"
        return self._places

    def request(self, first: int, stop: int) -> Tokenize:
        known = self._known
        lengths = known.lengths[first:stop]
        starts = np.full(stop - first, NOT_IN_SLOT, np.int32)
        is_read, expected = lengths != TOO_LONG, b""
        if self._expected is not None:
            numbers = self._expected[first:stop]
            is_read, expected = is_read & ~is_elsewhere(numbers), numbers.tobytes()
        places = self._places_of(first, is_read)
        return Tokenize(NO_SLOT, starts.tobytes(), lengths.tobytes(), places, expected)

    def _places_of(self, first: int, is_read: Bools) -> list[Overflow]:
        """The places of those rows from ``first`` on that are read."""
        known, stop, rows = self._known, first + len(is_read), np.flatnonzero(is_read)
        columns = (known.file_ids, known.offsets, *(known.copies or ()))
        return list(map(Overflow, rows.tolist(), *(column[first:stop][rows].tolist() for column in columns)))

    def keys(self, first: int, stop: int) -> tuple[Int64, Int64]:
        return self._index.origins(self._known.rows[first:stop])

    def answered(self, reply: Tokenized) -> None:
        """Log damaged copies of rows: the first time, and each time their number has about doubled."""
        index, before = self._index, self._index.num_mended
        index.num_mended += reply.num_mended
        if index.num_mended.bit_length() > before.bit_length():
            _log.warning("index.copy_damaged", path=index.spool, num_rows=index.num_mended)

    def location(self, row: int) -> SourceLocation:
        file_id, offset = self.key(row)
        place = self._source.location(file_id, offset, int(self._known.lengths[row]))
        return self._index.numbered(place, file_id, int(self._known.rows[row]))


class IndexedWindows(Windows):
    """Windows over the row index.

    :param indexer: what fills ``index``.
    :param share: the rows that this rank tokenizes; None: all.
    :ivar start: where delivery began, or was restored to. In that epoch, rows that are dealt to ranks one by one are
        counted from there; in later epochs, from the epoch's start.
    :ivar plans: the planned epochs; None if no packs are planned.
    """

    def __init__(
        self,
        source: Blocks,
        order: RowOrder | PlannedOrder,
        calls: Calls,
        index: RowIndex,
        indexer: Indexer,
        share: Share | None = None,
    ) -> None:
        self.start = Position()
        self._source, self._order, self._calls, self._index, self._indexer = source, order, calls, index, indexer
        self._share = share
        self._begun: Promise[bool] = Promise()  # no event: it would belong to the loop of the code that makes a loader
        self._permutations: dict[int, Any] = {}
        self.plans = PlannedRows(order, index, calls) if isinstance(order, PlannedOrder) else None

    def begin(self, feed: Feed) -> None:
        super().begin(feed)
        if self.plans is not None:
            self.plans.feed = feed
        if not self._begun.is_kept:
            self._begun.keep(True)
            self._indexer.begin()

    def restart(self) -> None:
        if self.plans is not None or self._share is not None:
            self.start = self._feed.restart_position()
        if self.plans is not None:
            self.plans.restart(self.start)

    async def run(self) -> None:
        """Build the index, from the first start on."""
        await self._begun
        await self._indexer.build()

    def rows_after(self, position: Position) -> int | None:
        """Exact, but only known if the index is complete and no packs are planned."""
        if not self._index.is_complete or isinstance(self._order, PlannedOrder):
            return None

        return max(0, self._index.num_rows - row_of_epoch(position))

    def share_before(self, position: Position) -> float:
        """Known where :meth:`rows_after` is."""
        left, num_rows = self.rows_after(position), self._index.num_rows
        return 1 - left / num_rows if left is not None and num_rows else 0.0

    async def opened(self, epoch: int, number: int) -> IndexedWindow:
        if number == 0 and epoch > 0:
            self._source.check_unchanged()
        window = IndexedWindow(self._source, self._index, epoch, number)
        await self.more(window)
        return window

    @property
    def _own(self) -> Share | None:
        """The rows that this rank tokenizes; all if some are left out, as those behind them go to other ranks then."""
        return None if self.leaves_out else self._share

    async def more(self, window: OpenWindow) -> None:
        assert isinstance(window, IndexedWindow), "it was opened here"
        number = window.number
        try:
            found = await self._rows(window.epoch, number, window.num_rows)
        except AsyncDataError as error:
            self._index.fail(error)  # calls may wait for it
            raise

        if number and found.are_all and len(found.numbers) == 0:
            raise no_such_place(Position(window.epoch, number), "all rows of the epoch are before it")

        self._indexer.leave_room()
        places = self._index.places(found.numbers[window.num_rows :])
        window.fill(places, self._expected(found), is_last=found.is_last, are_all=found.are_all)

    def _expected(self, found: _Rows) -> Int32 | None:
        """How many tokens the rows have, if every row is a sample; see :class:`~asyncdata.core.messages.Tokenize`."""
        share = self._own
        if self.plans is None and share is None:
            return None

        counted = self._index.num_tokens_of(found.numbers)
        if share is None:
            return counted

        return np.where(share.owns(found.units, found.first, found.stop), counted, expected_elsewhere(counted))

    async def _rows(self, epoch: int, number: int, num_known: int) -> _Rows:
        """The rows of a window, once there are more than ``num_known``."""
        first, stop = number * ROWS_PER_WINDOW, (number + 1) * ROWS_PER_WINDOW
        index, order = self._index, self._order
        are_all = await self._indexer.growth.until(partial(self._are_all, first + num_known, stop))
        if isinstance(order, PlannedOrder):
            assert self.plans is not None, "they are planned"
            return self._planned_rows(await self.plans.epoch(epoch), epoch, first, stop)

        if order.shuffle.method == "slime":
            numbers = (await self._permutation(epoch))[first:stop].astype(np.int64)
        else:
            numbers = order.rows(epoch, number, index.num_rows)
        counted_from = row_of_epoch(self.start) if self.start.epoch == epoch else 0
        units = np.arange(first, first + len(numbers)) - counted_from
        is_last = index.is_complete and stop >= index.num_rows
        return _Rows(numbers, units, 0, index.num_rows - counted_from, is_last, are_all)

    def _are_all(self, num_known: int, stop: int) -> bool | None:
        """Whether all rows up to number ``stop`` of an epoch are known; None: no more than ``num_known`` are.

        :raises AsyncDataError: if they will never be.
        """
        index, shuffle = self._index, self._order.shuffle
        if index.fault is not None:
            raise index.fault

        if self.plans is not None:
            refuse_too_many(index.num_rows)  # as soon as there are
        if index.is_complete and index.are_all_excluded:
            raise index.no_samples()

        # No row may belong to the epoch's last batch, which is dealt in another way.
        num_needed = stop + (0 if self._own is None else self._own.global_batch)
        grows = self.plans is None and shuffle.grows and index.num_found > num_known
        if index.is_complete or (grows and index.num_rows > num_needed):
            return True

        return False if grows and self._own is None and index.num_rows > num_known else None

    def _planned_rows(self, plan: PlannedEpoch, epoch: int, first: int, stop: int) -> _Rows:
        first, last = min(first, plan.num_rows), min(stop, plan.num_rows)
        begun = plan.first_pack_from(row_of_epoch(self.start)) if self.start.epoch == epoch else 0
        rows, packs = plan.pieces(first, last).rows, plan.packs_at(first, last)
        return _Rows(rows, packs, begun, plan.num_packs, stop >= plan.num_rows)

    async def _permutation(self, epoch: int) -> Any:
        """Row numbers in slime's order."""
        if epoch not in self._permutations:
            request = Permute(self._index.num_rows, self._order.seed + epoch)
            found = np.frombuffer((await self._calls.ask(request, Permuted)).rows, np.uint32)
            kept = {number: rows for number, rows in self._permutations.items() if number >= epoch - 1}
            self._permutations = {**kept, epoch: found}
        return self._permutations[epoch]
