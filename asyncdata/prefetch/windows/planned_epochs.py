"""Plans the packs of epochs: workers compute them once the row index is complete. Equal plans are shared."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncdata.batching.planned import Dealt, PlannedEpoch, PlannedOrder, packs_of, refuse_too_many
from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import Packed, Permuted
from asyncdata.core.types import Position
from asyncdata.order.rank_share import row_of_epoch
from asyncdata.workers.base import Crashed, error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.batching.packs import Int64, Packs
    from asyncdata.core.messages import OrderPacks, PackRows, Reply
    from asyncdata.prefetch.row_index.row_index import RowIndex
    from asyncdata.workers.base import Executor

__all__ = ("PlannedRows",)


class PlannedRows:
    """The planned epochs of one loader. Call methods in the service's thread, unless they say "from any thread".

    :param on_found: called when a plan is known, or the index has a fault.
    :param restart_point: returns the first position that a restart would need now.
    :ivar start: where delivery began, or was restored to.
    """

    def __init__(
        self,
        order: PlannedOrder,
        index: RowIndex,
        executor: Executor,
        on_found: Callable[[], object],
        restart_point: Callable[[], Position] = Position,
    ) -> None:
        self._restart_point = restart_point
        self.start = Position()
        self._order = order
        self._index = index
        self._executor = executor
        self._on_found = on_found
        self._resumed: tuple[int, Dealt] | None = None
        self._packs: dict[int, Packs] = {}
        self._epochs: dict[int, PlannedEpoch] = {}  # replaced, never changed, as other threads read it
        self._asked: set[tuple[str, int]] = set()

    def restart(self, start: Position) -> None:
        """Drop requests in flight. From ``start`` on, packs are dealt as the plan says."""
        self._asked.clear()
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

    def epoch(self, number: int) -> PlannedEpoch | None:
        """The plan of an epoch; if it is not known, None, and it is requested once all rows are known."""
        try:
            refuse_too_many(self._index.num_rows)  # as soon as there are
        except ConfigError as error:
            self._index.fail(error)
        if self._index.fault is not None or not self._index.is_complete:
            return None

        if number not in self._epochs:
            packs = self._packs.get(self._order.packs_of(number))
            if packs is None:
                self._ask_for_packs(self._order.packs_of(number))
            else:
                self._ask("order", number, self._order.request_order(packs, self._dealt(number), number))
        return self._epochs.get(number)

    def _ask_for_packs(self, epoch: int) -> None:
        index = self._index
        if index.num_rows:
            self._ask("packs", epoch, self._order.request_packs(index.num_tokens, index.rows_of_files, epoch))
        else:
            index.fail(index.no_samples())

    def _ask(self, what: str, epoch: int, request: PackRows | OrderPacks) -> None:
        if (what, epoch) not in self._asked:
            self._asked.add((what, epoch))
            self._executor.submit(request, partial(self._on_reply, what, epoch))

    def _on_reply(self, what: str, epoch: int, reply: Reply | Crashed) -> None:
        self._asked.discard((what, epoch))
        self._take(epoch, reply)
        self._on_found()

    def _take(self, epoch: int, reply: Reply | Crashed) -> None:
        if isinstance(reply, Packed):
            self._take_packs(epoch, packs_of(reply))
        elif isinstance(reply, Permuted):
            self._take_order(epoch, np.frombuffer(reply.rows, np.uint32).astype(np.int64))
        else:
            self._index.fail(error_of(reply))

    def _take_packs(self, epoch: int, packs: Packs) -> None:
        self._packs = {number: kept for number, kept in self._packs.items() if number >= self._first_wanted}
        self._packs[epoch] = packs
        if packs.num_packs == 0:
            plan = self._order.plan
            num_tokens = int(self._index.num_tokens.sum(dtype=np.int64))
            self._index.fail(
                ConfigError(
                    f"AD453 all {self._index.num_rows} samples together have {num_tokens} tokens and fill no pack of "
                    f"max_length={plan.packing.max_length}; lower it, or keep the last pack"
                )
            )

    def _take_order(self, epoch: int, order: Int64) -> None:
        packs = self._packs[self._order.packs_of(epoch)]
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
