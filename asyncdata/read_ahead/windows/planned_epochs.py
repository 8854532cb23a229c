"""Plans the packs of epochs: workers compute them once the row index is complete. Equal plans are shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncdata.batching.planned import PlannedEpoch, PlannedOrder, packs_of
from asyncdata.batching.rules import Dealt
from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import Packed, Permuted
from asyncdata.core.types import Position
from asyncdata.order.rank_share import row_of_epoch

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.batching.packs import Int64, Packs
    from asyncdata.read_ahead.calls import Calls
    from asyncdata.read_ahead.row_index.row_index import RowIndex


class PlannedRows:
    """The planned epochs of one loader. Call methods in the service's thread, unless they say "from any thread".

    :param restart_point: returns the first position that a restart would need now.
    :ivar start: where delivery began, or was restored to.
    """

    def __init__(
        self,
        order: PlannedOrder,
        index: RowIndex,
        calls: Calls,
        restart_point: Callable[[], Position] = Position,
    ) -> None:
        self._restart_point = restart_point
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
        return self._restart_point().epoch - 1
