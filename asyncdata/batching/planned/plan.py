"""Plans of packs, made from the number of tokens of every row before any row is read.

With a plan, each rank knows which rows are its own, and tokenizes only these. XTuner's packs always need a plan, as the
first of them depends on all lengths. D of a planned epoch is the rows of its packs, pack after pack. A row that is cut
in two comes twice.

A plan takes seconds for a million rows, so a worker makes it (``worker.py``). The trainer's process does only a few
array operations for each epoch and each window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.batching.length_grouping import LengthGrouping  # noqa: TC001 - msgspec reads it
from asyncdata.batching.packers.base import Counts
from asyncdata.batching.packers.hard import HardPacking
from asyncdata.batching.packers.soft import SoftPacking
from asyncdata.batching.packers.unpacked import SinglePacking
from asyncdata.batching.packers.xtuner import XTunerPacking
from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import OrderPacks, Packed, PackRows
from asyncdata.core.settings import Description
from asyncdata.order.order import RowOrder

if TYPE_CHECKING:
    from asyncdata.order.shuffle import RowShuffle

__all__ = ("PACKINGS", "AnyPacking", "Dealt", "Packs", "Pieces", "Plan", "PlannedEpoch", "PlannedOrder")

Int64 = np.ndarray[Any, np.dtype[np.int64]]
Int32 = np.ndarray[Any, np.dtype[np.int32]]
Float64 = np.ndarray[Any, np.dtype[np.float64]]
Positive = Annotated[int, msgspec.Meta(ge=1)]
AnyPacking = XTunerPacking | SoftPacking | HardPacking | SinglePacking

PACKINGS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (XTunerPacking, SoftPacking, HardPacking, SinglePacking)
}


class Dealt(NamedTuple):
    """The number of ranks that packs are grouped for, and the packs of each rank in an optimizer step."""

    world_size: int
    accumulation: int


class Pieces(NamedTuple):
    """Consecutive rows of a planned epoch; each array has shape (num_pieces,).

    :ivar rows: int64, their numbers in the row index.
    :ivar starts: int32, the first token that the pack has of the row.
    :ivar stops: int32, where it ends.
    """

    rows: Int64
    starts: Int32
    stops: Int32


class Packs(NamedTuple):
    """Packs, in the order of packing.

    :ivar offsets: int64 of shape (num_packs + 1,): pack p has the pieces ``offsets[p]`` to ``offsets[p + 1]``.
    :ivar rows: int32 of shape (num_pieces,): the row of each piece, numbered as the row index does.
    :ivar starts: int32 of shape (num_pieces,): its first token.
    :ivar stops: int32 of shape (num_pieces,): where it ends.
    :ivar costs: float64 of shape (num_packs,): what packs are grouped by.
    :ivar counts: what was not packed.
    """

    offsets: Int64
    rows: Int32
    starts: Int32
    stops: Int32
    costs: Float64
    counts: Counts

    @classmethod
    def of(cls, reply: Packed) -> Packs:
        """The packs of a worker's reply."""
        offsets, costs = np.frombuffer(reply.offsets, np.int64), np.frombuffer(reply.costs, np.float64)
        rows, starts, stops = (np.frombuffer(data, np.int32) for data in (reply.rows, reply.starts, reply.stops))
        return cls(offsets, rows, starts, stops, costs, Counts(dict(reply.samples), dict(reply.tokens)))

    @property
    def num_packs(self) -> int:
        """The number of packs."""
        return len(self.costs)


class Plan(Description, frozen=True, kw_only=True):
    """How the rows of an epoch are packed, and in which order packs are delivered.

    An :class:`~asyncdata.batching.packers.xtuner.XTunerPacking` has its own order of rows, and the same packs in every
    epoch. The others pack the rows of each epoch in their order, and pack all of them by the epoch's end.

    :ivar packing: an ``XTunerPacking``, ``SoftPacking``, ``HardPacking`` or ``SinglePacking``.
    :ivar grouping: None: XTuner's packs are shuffled as by its ``ParallelSampler``; others keep the order of packing.
    :ivar world_size: ranks that compute at the same time.
    :ivar batch_size: packs of each rank in a batch.
    :ivar accumulation: batches of each rank in an optimizer step.
    :ivar round_up: with XTuner's packs or its grouping, repeat packs from the epoch's start until the last step is
        full; otherwise leave that step out.
    :raises ConfigError: for a setting that cannot work.
    """

    packing: Any
    grouping: LengthGrouping | None = None
    world_size: Positive = 1
    batch_size: Positive = 1
    accumulation: Positive = 1
    round_up: bool = True

    def check(self) -> None:
        """Check that the packing can be planned."""
        if not isinstance(self.packing, AnyPacking):
            raise ConfigError(
                f"AD453 packs of {type(self.packing).__name__} cannot be planned, only those of {', '.join(PACKINGS)}"
            )

        if getattr(self.packing, "across_epochs", False):
            raise ConfigError(
                "AD453 packs are planned an epoch at a time: use "
                f"{type(self.packing).__name__}(across_epochs=False, ...), or pack without a plan"
            )

    @property
    def dealt(self) -> Dealt:
        """What the order of grouped packs depends on."""
        return Dealt(self.world_size, self.batch_size * self.accumulation)

    @property
    def is_xtuners(self) -> bool:
        """Whether an epoch is rounded to whole steps, as by XTuner."""
        return isinstance(self.packing, XTunerPacking) or (
            self.grouping is not None and self.grouping.method == "xtuner"
        )

    @property
    def is_shuffled(self) -> bool:
        """Whether packs that are not grouped are shuffled."""
        return isinstance(self.packing, XTunerPacking)

    @property
    def weights(self) -> tuple[float, float] | None:
        """The cost of a token, and of the square of a document's tokens; None: packs have XTuner's costs."""
        if self.grouping is None or (self.grouping.method == "xtuner" and self.is_shuffled):
            return None

        return self.grouping.linear, self.grouping.quadratic

    def num_delivered(self, num_packs: int, first: int = 0) -> int:
        """The packs that are delivered of an epoch with ``num_packs``, after rounding to whole steps.

        :param first: the first pack that is delivered with these settings. If it is in the middle of a batch of these
            settings, whole batches are counted from it.
        """
        if not self.is_xtuners or num_packs == 0:
            return num_packs

        batch = self.world_size * self.batch_size
        first, unit = (0, batch * self.accumulation) if first % batch == 0 else (first, batch)
        left = max(0, num_packs - first)
        return first + (-(-left // unit) if self.round_up else left // unit) * unit

    def description(self) -> dict[str, Any]:
        """The settings that a snapshot must have, too, as builtins: not the number of ranks or the sizes of batches."""
        return {"packing": _described(self.packing), "grouping": msgspec.to_builtins(self.grouping)}


class PlannedOrder:
    """D for one seed, over rows whose tokens are counted. It is not known before they are.

    :param shuffle: the order in which rows are packed; XTuner's packing has its own. Rows without a sample are out.
    """

    def __init__(self, plan: Plan, shuffle: RowShuffle, seed: int) -> None:
        self.plan = plan
        self.shuffle = shuffle
        self.seed = seed

    def description(self) -> dict[str, Any]:
        """The settings that a snapshot must have, too, as builtins."""
        return {**RowOrder(self.shuffle, self.seed).description(), **self.plan.description()}

    def packs_of(self, epoch: int) -> int:
        """The first epoch that has the same packs as ``epoch``, perhaps in another order."""
        return 0 if self.plan.is_shuffled or self.shuffle.method == "none" else epoch

    def request_packs(self, num_tokens: Int32, sizes: Int64, epoch: int) -> PackRows:
        """The request to pack the rows.

        :param num_tokens: int32 of shape (num_rows,): the tokens of each row that has a number, in their order.
        :param sizes: int64 of shape (num_data_sets,): how many of the rows each data set has.
        """
        method = "none" if self.plan.is_shuffled else self.shuffle.method
        packing, weights = _described(self.plan.packing), self.plan.weights
        return PackRows(num_tokens.tobytes(), sizes.tobytes(), packing, weights, method, self.seed, epoch)

    def request_order(self, packs: Packs, dealt: Dealt, epoch: int) -> OrderPacks:
        """The request to order the packs."""
        plan = self.plan
        grouping = msgspec.to_builtins(plan.grouping)
        return OrderPacks(packs.costs.tobytes(), grouping, plan.is_shuffled, *dealt, self.seed, epoch)


class PlannedEpoch:
    """The packs of one epoch, in the order of delivery. Its *rows* are those of D: a row of the data may come twice.

    :ivar order: int64 of shape (num_packs,): the number of each in ``packs``. With ``round_up`` some come twice.
    :ivar offsets: int64 of shape (num_packs + 1,): pack p has the epoch's rows ``offsets[p]`` to ``offsets[p + 1]``.
    :ivar num_left_out: packs that are not delivered, as they fill no step.
    """

    def __init__(self, packs: Packs, order: Int64, num_packs: int) -> None:
        self.packs = packs
        self.order = np.resize(order, num_packs)
        self.num_left_out = max(0, len(order) - num_packs)
        sizes = np.diff(packs.offsets)[self.order]
        self.offsets: Int64 = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @property
    def num_packs(self) -> int:
        """Packs that are delivered."""
        return len(self.order)

    @property
    def num_rows(self) -> int:
        """Rows of all packs that are delivered."""
        return int(self.offsets[-1])

    def pack_at(self, row: int) -> int:
        """The pack of the epoch's row ``row``; ``num_packs`` after the last row."""
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    def first_pack_from(self, row: int) -> int:
        """The first pack that begins at the epoch's row ``row`` or later."""
        return int(np.searchsorted(self.offsets, row))

    def packs_at(self, first: int, stop: int) -> Int64:
        """The packs of the epoch's rows ``[first, stop)``, int64 of shape (stop - first,)."""
        return np.searchsorted(self.offsets, np.arange(first, stop), side="right") - 1

    def pieces(self, first: int, stop: int) -> Pieces:
        """The epoch's rows ``[first, stop)``."""
        number = self.packs_at(first, stop)
        piece = self.packs.offsets[self.order[number]] + np.arange(first, stop) - self.offsets[number]
        rows, starts, stops = (column[piece] for column in self.packs[1:4])
        return Pieces(rows.astype(np.int64), starts, stops)

    @property
    def left_out(self) -> tuple[int, int]:
        """Pieces and tokens of the packs that are not delivered."""
        sizes = self.packs.stops - self.packs.starts
        delivered = self.pieces(0, self.num_rows)
        num_tokens = int(sizes.sum(dtype=np.int64)) - int((delivered.stops - delivered.starts).sum(dtype=np.int64))
        return len(self.packs.rows) - self.num_rows, num_tokens

    def pack(self, number: int) -> Pieces:
        """Pack ``number``."""
        return self.pieces(int(self.offsets[number]), int(self.offsets[number + 1]))


def _described(packing: AnyPacking) -> dict[str, Any]:
    return {"type": type(packing).__name__, **msgspec.to_builtins(packing)}
