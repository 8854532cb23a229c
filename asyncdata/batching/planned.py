"""Plans of packs, made from the number of tokens of every row before any row is read.

With a plan, each rank knows which rows are its own, and tokenizes only these. XTuner's packs always need a plan, as the
first of them depends on all lengths. D of a planned epoch is the rows of its packs, pack after pack. A row that is cut
in two comes twice.

A plan takes seconds for a million rows, so a worker makes it (:func:`answer`). The trainer's process does only a few
array operations for each epoch and each window.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.batching.length_grouping import LengthGrouping
from asyncdata.batching.packers import HardPacking, Packer, Packing, SinglePacking, SoftPacking
from asyncdata.batching.packs import Counts, Float64, Int32, Int64, Pack, Packs, Positive
from asyncdata.batching.xtuner_packing import PresetPacking, XTunerPacking, proxy_cost
from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import OrderPacks, Packed, PackRows, Permuted
from asyncdata.core.settings import Count, Description
from asyncdata.order.order import RowOrder, TorchGenerator, feistel_permutation, order_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.order.shuffle import RowShuffle


PACKINGS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (XTunerPacking, PresetPacking, SoftPacking, HardPacking, SinglePacking)
}
"""The packings that can be planned, by name."""

PLANNED_PACKINGS = XTunerPacking, PresetPacking
"""Those that are always planned, and have the same packs in every epoch, whatever the order of rows."""


class Dealt(NamedTuple):
    """The number of ranks that packs are grouped for, and the packs of each rank in an optimizer step."""

    world_size: int
    accumulation: int


class PackRules(Description, frozen=True, kw_only=True):
    """The settings by which packs are made, ordered, and divided among the ranks.

    :ivar packing: a :class:`~asyncdata.batching.packers.Packing`, or one that is always planned.
    :ivar grouping: how packs are ordered; None: in the order in which they are closed, and XTuner's are shuffled as by
        its ``ParallelSampler``.
    :ivar world_size: ranks that compute at the same time.
    :ivar batch_size: packs of each rank in a batch.
    :ivar accumulation: batches of each rank in an optimizer step, which the grouping balances.
    :ivar is_planned: the packs of an epoch are planned before its rows are read. All rows are packed by its end, and
        :data:`PLANNED_PACKINGS` have the same packs in every epoch.
    :ivar round_up: with XTuner's packs or its grouping, repeat packs from the epoch's start until the last step is
        full; otherwise, and with the order of a ``PresetPacking``, leave that step out.
    :raises ConfigError: for a setting that cannot work.
    """

    packing: Any
    grouping: LengthGrouping | None = None
    seed: int = 0
    rank: Count = 0
    world_size: Positive = 1
    batch_size: Positive = 1
    accumulation: Positive = 1
    is_planned: bool = False
    round_up: bool = True

    def check(self) -> None:
        """Check that the packing can be planned, if it is."""
        if not self.is_planned:
            return

        kind = type(self.packing).__name__
        if not isinstance(self.packing, tuple(PACKINGS.values())):
            raise ConfigError(f"AD453 packs of {kind} cannot be planned, only those of {', '.join(PACKINGS)}")

        if getattr(self.packing, "across_epochs", False):
            raise ConfigError(
                f"AD453 packs are planned an epoch at a time: use {kind}(across_epochs=False, ...), or pack without a "
                "plan"
            )

        if isinstance(self.packing, PresetPacking) and self.grouping is not None:
            raise ConfigError("AD453 PresetPacking has an order of its own: leave length_grouping out")

    @property
    def global_batch(self) -> int:
        """Packs of all ranks in a batch."""
        return self.world_size * self.batch_size

    @property
    def dealt(self) -> Dealt:
        """What the order of grouped packs depends on."""
        return Dealt(self.world_size, self.batch_size * self.accumulation)

    @property
    def has_own_packs(self) -> bool:
        """Whether the order of rows does not change the packs."""
        return isinstance(self.packing, PLANNED_PACKINGS)

    @property
    def has_xtuners_order(self) -> bool:
        """Whether the grouping is XTuner's, for which the window is the epoch."""
        return self.grouping is not None and self.grouping.method == "xtuner"

    # For packs of samples as they come.

    @property
    def across_epochs(self) -> bool:
        """Whether packs may hold samples of two epochs."""
        return bool(self.packing.across_epochs) and not self.has_xtuners_order

    def description(self) -> dict[str, Any]:
        """The settings that a snapshot must have, too, as builtins."""
        settings = {"packing": self.packing, "length_grouping": self.grouping}
        found: dict[str, Any] = {}
        for name, value in settings.items():
            if value is not None:
                fields = msgspec.to_builtins(value)
                found |= {name: type(value).__name__, **{f"{name}.{field}": fields[field] for field in fields}}
        return found

    # For packs that are planned.

    def refuse_numbers(self, num_rows: int, num_found: int) -> None:
        """Check that rows can be named by their lines, if they are.

        :raises ConfigError: AD453, if some have no number.
        """
        if isinstance(self.packing, PresetPacking) and num_rows < num_found:
            raise ConfigError(
                f"AD453 PresetPacking names rows by their lines, and {num_found - num_rows} of {num_found} rows are no "
                "samples, or are left out: every row of its files must be a sample"
            )

    @property
    def weights(self) -> tuple[float, float] | None:
        """The cost of a token, and of the square of a document's tokens; None: packs have XTuner's costs."""
        if self.grouping is None or (self.has_xtuners_order and self.has_own_packs):
            return None

        return self.grouping.linear, self.grouping.quadratic

    def num_delivered(self, num_packs: int, first: int = 0) -> int:
        """The packs that are delivered of an epoch with ``num_packs``: XTuner's, rounded to whole steps.

        :param first: the first pack that is delivered with these settings. If it is in the middle of a batch of these
            settings, whole batches are counted from it.
        """
        if not (self.has_own_packs or self.has_xtuners_order) or num_packs == 0:
            return num_packs

        batch, round_up = self.global_batch, self.round_up and not isinstance(self.packing, PresetPacking)
        first, unit = (0, batch * self.accumulation) if first % batch == 0 else (first, batch)
        left = max(0, num_packs - first)
        return first + (-(-left // unit) if round_up else left // unit) * unit


_MAX_PIECES = 1 << 26
"""12 bytes a piece have to fit in a frame."""

_ROWS_AT_ONCE = 1 << 16
"""That a packer is given: 300 bytes a row, until their packs are columns."""


class Pieces(NamedTuple):
    """Consecutive rows of a planned epoch; each array has shape (num_pieces,).

    :ivar rows: int64, their numbers in the row index.
    :ivar starts: int32, the first token that the pack has of the row.
    :ivar stops: int32, where it ends.
    """

    rows: Int64
    starts: Int32
    stops: Int32


def packs_of(reply: Packed) -> Packs:
    """The packs of a worker's reply."""
    offsets, costs = np.frombuffer(reply.offsets, np.int64), np.frombuffer(reply.costs, np.float64)
    rows, starts, stops = (np.frombuffer(data, np.int32) for data in (reply.rows, reply.starts, reply.stops))
    return Packs(offsets, rows, starts, stops, costs, Counts(dict(reply.samples), dict(reply.tokens)))


def refuse_too_many(num_pieces: int) -> None:
    """Check that so many rows, or pieces of rows, can be planned.

    :raises ConfigError: AD453, if not.
    """
    if num_pieces > _MAX_PIECES:
        raise ConfigError(
            f"AD453 {num_pieces} rows or pieces of rows are more than the {_MAX_PIECES} that can be planned: pack "
            "without a plan"
        )


class PlannedOrder:
    """D for one seed, over rows whose tokens are counted. It is not known before they are.

    :param shuffle: the order in which rows are packed; XTuner's packing has its own. Rows without a sample are out.
    :param names: of the files, for a packing that names them.
    """

    def __init__(self, plan: PackRules, shuffle: RowShuffle, seed: int, names: Sequence[str] = ()) -> None:
        packing, self._names = plan.packing, list(names)
        is_preset = isinstance(packing, PresetPacking)
        self._packing = {"type": "PresetPacking", **packing.description()} if is_preset else _described(packing)
        self.plan = plan
        self.shuffle = shuffle
        self.seed = seed

    def description(self) -> dict[str, Any]:
        """The settings that a snapshot must have, too, as builtins: not the number of ranks or the sizes of batches."""
        plan = {"packing": self._packing, "grouping": msgspec.to_builtins(self.plan.grouping)}
        return {**RowOrder(self.shuffle, self.seed).description(), **plan}

    def packs_of(self, epoch: int) -> int:
        """The first epoch that has the same packs as ``epoch``, perhaps in another order."""
        return 0 if self.plan.has_own_packs or self.shuffle.method == "none" else epoch

    def request_packs(self, num_tokens: Int32, sizes: Int64, epoch: int, costs: Float64) -> PackRows:
        """The request to pack the rows.

        :param num_tokens: int32 of shape (num_rows,): the tokens of each row that has a number, in their order.
        :param sizes: int64 of shape (num_data_sets,): how many of the rows each data set has.
        :param costs: float64 of shape (num_rows,): as the tokenize function says, NaN where it does not; or empty.
        """
        method = "none" if self.plan.has_own_packs else self.shuffle.method
        packing, weights = _described(self.plan.packing), self.plan.weights
        return PackRows(
            num_tokens.tobytes(),
            sizes.tobytes(),
            packing,
            weights,
            method,
            self.seed,
            epoch,
            costs=costs.tobytes(),
            names=self._names,
        )

    def request_order(self, packs: Packs, dealt: Dealt, epoch: int) -> OrderPacks:
        """The request to order the packs."""
        grouping, is_shuffled = msgspec.to_builtins(self.plan.grouping), isinstance(self.plan.packing, XTunerPacking)
        return OrderPacks(packs.costs.tobytes(), grouping, is_shuffled, *dealt, self.seed, epoch)


class PlannedEpoch:
    """The packs of one epoch, in the order of delivery. Its *rows* are rows of D: a row of the data may come twice.

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


def _described(packing: Any) -> dict[str, Any]:
    return {"type": type(packing).__name__, **msgspec.to_builtins(packing)}


# In a worker.


def answer(request: PackRows | OrderPacks) -> Packed | Permuted:
    """The reply to a request.

    :raises ConfigError: for rows that cannot be packed.
    """
    if isinstance(request, OrderPacks):
        return Permuted(_order(request).astype(np.uint32).tobytes())

    settings = dict(request.packing)
    packing = PACKINGS[settings.pop("type")](**settings)
    lengths, sizes = np.frombuffer(request.lengths, np.int32), np.frombuffer(request.sizes, np.int64)
    if isinstance(packing, PresetPacking):
        packs = packing.plan(lengths, sizes, request.names)
    else:
        packs = _packed(packing, lengths, sizes, request)
    refuse_too_many(len(packs.rows))
    offsets, rows_of_pieces, starts, stops, costs = (column.tobytes() for column in packs[:5])
    return Packed(offsets, rows_of_pieces, starts, stops, costs, packs.counts.samples, packs.counts.tokens)


def _packed(packing: Packing | XTunerPacking, lengths: Int32, sizes: Int64, request: PackRows) -> Packs:
    rows = _arranged(len(lengths), request.method, request.seed, request.epoch)
    own = np.frombuffer(request.costs, np.float64)
    of_rows = np.where(np.isnan(own), proxy_cost(lengths.astype(np.int64)), own) if len(own) else None
    return pack_rows(packing, lengths, sizes, rows, request.weights, of_rows)


def pack_rows(
    packing: Packing | XTunerPacking,
    lengths: Int32,
    sizes: Int64,
    rows: Int64,
    weights: tuple[float, float] | None = None,
    costs: Float64 | None = None,
) -> Packs:
    """The packs of an epoch.

    :param lengths: int32 of shape (num_rows,): the tokens of each row; rows of none are counted.
    :param sizes: int64 of shape (num_data_sets,): how many rows each data set has.
    :param rows: int64 of shape (num_rows,): the order in which rows are packed, if the packing is not XTuner's.
    :param weights: the cost of a token, and of the square of a document's; None: XTuner's, or the tokens'.
    :param costs: float64 of shape (num_rows,): XTuner's cost of each row; None: that of text.
    :raises ConfigError: AD450, for a row that is longer than it may be.
    """
    if not isinstance(packing, XTunerPacking):
        packer = packing.open()
        packs = Packs.of(_portions(packer, lengths, rows), [], packer.counts)
        return _with_costs(packs, *(weights or (1.0, 0.0)))

    kept, counts = np.flatnonzero(lengths), Counts()
    ends = np.searchsorted(kept, np.cumsum(sizes))
    own = None if costs is None else np.split(costs[kept], ends[:-1])
    packs = packing.plan(np.split(lengths[kept], ends[:-1]), own)
    num_packed = int((packs.stops - packs.starts).sum(dtype=np.int64))
    counts.add("empty", samples=len(lengths) - len(kept))
    counts.add("tail", tokens=int(lengths.sum(dtype=np.int64)) - num_packed)
    packs = packs._replace(rows=kept[packs.rows].astype(np.int32), counts=counts)
    return packs if weights is None else _with_costs(packs, *weights)


def _portions(packer: Packer, lengths: Int32, rows: Int64) -> Iterator[list[Pack]]:
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        yield packer.extend(lengths[some].tolist(), some.tolist())
    yield packer.flush()


def _with_costs(packs: Packs, linear: float, quadratic: float) -> Packs:
    """The packs, with the same costs as by :meth:`LengthGrouping.cost`."""
    sizes = packs.stops.astype(np.int64) - packs.starts
    if not len(sizes):
        return packs._replace(costs=np.empty(0))

    sums, squares = (np.add.reduceat(values, packs.offsets[:-1]) for values in (sizes, sizes * sizes))
    return packs._replace(costs=linear * sums + quadratic * squares)


def _arranged(num_rows: int, method: str, seed: int, epoch: int) -> Int64:
    """The order in which a RowShuffle of this method has the rows."""
    rows = np.arange(num_rows, dtype=np.int64)
    if method == "keyed" and num_rows:
        return feistel_permutation(rows, num_rows, order_keys(seed, epoch, "all rows"))

    if method == "slime":
        numbers = rows.tolist()
        random.Random(seed + epoch).shuffle(numbers)
        return np.array(numbers, np.int64)

    return rows


def _order(request: OrderPacks) -> Int64:
    """The order of an epoch's packs, int64 of shape (num_packs,)."""
    costs, seed, epoch = np.frombuffer(request.costs, np.float64), request.seed, request.epoch
    if request.grouping is None:
        return TorchGenerator(seed + epoch).randperm(len(costs)) if request.shuffled else np.arange(len(costs))

    grouping, dealt = LengthGrouping(**request.grouping), Dealt(request.world_size, request.accumulation)
    parts = [np.empty(0, np.int64)]
    first = window = 0
    while first < len(costs):
        steps = grouping.steps_of_window(window, dealt.accumulation)
        stop = len(costs) if steps is None else first + steps * dealt.world_size * dealt.accumulation
        some: Any = costs[first:stop]
        order = grouping.order(some, **dealt._asdict(), seed=seed, epoch=epoch, window=window)
        parts.append(first + order)
        first, window = stop, window + 1
    return np.concatenate(parts)
