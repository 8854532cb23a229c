"""Makes the packs of a plan, and puts them in their order. This code runs in a worker."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.batching.length_grouping import LengthGrouping, xtuner_order
from asyncdata.batching.packers.base import Counts
from asyncdata.batching.packers.xtuner import XTunerPacking
from asyncdata.batching.planned.plan import PACKINGS, AnyPacking, Dealt, Packs
from asyncdata.core.errors import ConfigError
from asyncdata.core.messages import OrderPacks, Packed, PackRows, Permuted
from asyncdata.order.permutation import feistel_permutation, order_keys
from asyncdata.order.torch_randperm import TorchGenerator

if TYPE_CHECKING:
    from asyncdata.batching.packers.hard import HardPacking
    from asyncdata.batching.packers.soft import SoftPacking
    from asyncdata.batching.packers.unpacked import SinglePacking

__all__ = ("answer", "order_packs", "pack_rows")

Int64 = np.ndarray[Any, np.dtype[np.int64]]
Int32 = np.ndarray[Any, np.dtype[np.int32]]
Float64 = np.ndarray[Any, np.dtype[np.float64]]

_MAX_PIECES = 1 << 26
"""12 bytes a piece have to fit in a frame."""


def answer(request: PackRows | OrderPacks) -> Packed | Permuted:
    """The reply to a request.

    :raises ConfigError: for rows that cannot be packed.
    """
    if isinstance(request, OrderPacks):
        return Permuted(_order(request).astype(np.uint32).tobytes())

    packing: AnyPacking = _packing_of(request.packing)
    lengths, sizes = np.frombuffer(request.lengths, np.int32), np.frombuffer(request.sizes, np.int64)
    rows = _arranged(len(lengths), request.method, request.seed, request.epoch)
    packs = pack_rows(packing, lengths, sizes, rows, request.weights)
    if len(packs.rows) > _MAX_PIECES:
        raise ConfigError(f"AD453 {len(packs.rows)} pieces of rows are too many for a plan; pack without one")

    offsets, rows_of_pieces, starts, stops, costs = (column.tobytes() for column in packs[:5])
    return Packed(offsets, rows_of_pieces, starts, stops, costs, packs.counts.samples, packs.counts.tokens)


def pack_rows(
    packing: AnyPacking,
    lengths: Int32,
    sizes: Int64,
    rows: Int64 | None = None,
    weights: tuple[float, float] | None = None,
) -> Packs:
    """The packs of an epoch.

    :param lengths: int32 of shape (num_rows,): the tokens of each row; rows of none are counted.
    :param sizes: int64 of shape (num_data_sets,): how many rows each data set has.
    :param rows: int64 of shape (num_rows,): the order in which rows are packed; None: in the order of the row index.
    :param weights: the cost of a token, and of the square of a document's; None: XTuner's, or the tokens'.
    :raises ConfigError: AD450, for a row that is longer than it may be.
    """
    if isinstance(packing, XTunerPacking):
        packs = _xtuners(packing, lengths, sizes)
    else:
        packs = _as_they_come(packing, lengths, np.arange(len(lengths)) if rows is None else rows)
    return packs if weights is None else packs._replace(costs=_costs(packs, *weights))


def order_packs(
    costs: Float64, grouping: LengthGrouping | None, dealt: Dealt, seed: int, epoch: int, *, shuffled: bool
) -> Int64:
    """The order of an epoch's packs, int64 of shape (num_packs,).

    :param costs: float64 of shape (num_packs,), in the order of packing.
    :param shuffled: packs that are not grouped are in torch's random order, as XTuner's ``ParallelSampler`` has them.
    """
    if grouping is None:
        return TorchGenerator(seed + epoch).randperm(len(costs)) if shuffled else np.arange(len(costs))

    world_size, accumulation = dealt
    if grouping.method == "xtuner":
        return xtuner_order(costs, world_size, world_size * accumulation, seed + epoch)  # type: ignore[arg-type]

    parts = [np.empty(0, np.int64)]
    first = window = 0
    while first < len(costs):
        num_packs = (grouping.steps_of_window(window, accumulation) or 1) * world_size * accumulation
        some = costs[first : first + num_packs]
        order = grouping.order(
            some,  # type: ignore[arg-type]
            world_size=world_size,
            accumulation=accumulation,
            seed=seed,
            epoch=epoch,
            window=window,
        )
        parts.append(first + order)
        first, window = first + num_packs, window + 1
    return np.concatenate(parts)


def _order(request: OrderPacks) -> Int64:
    grouping = None if request.grouping is None else LengthGrouping(**request.grouping)
    costs, dealt = np.frombuffer(request.costs, np.float64), Dealt(request.world_size, request.accumulation)
    return order_packs(costs, grouping, dealt, request.seed, request.epoch, shuffled=request.shuffled)


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


def _xtuners(packing: XTunerPacking, lengths: Int32, sizes: Int64) -> Packs:
    kept = np.flatnonzero(lengths)
    ends = np.searchsorted(kept, np.cumsum(sizes))
    found = packing.plan(np.split(lengths[kept].astype(np.int64), ends[:-1]))
    counts = Counts()
    counts.add("empty", samples=len(lengths) - len(kept))
    packed = int((found.stops - found.starts).sum())
    counts.add("tail", tokens=int(lengths.sum(dtype=np.int64)) - packed)
    rows, starts, stops = (column.astype(np.int32) for column in (kept[found.rows], found.starts, found.stops))
    return Packs(found.offsets, rows, starts, stops, found.costs.astype(np.float64), counts)


def _as_they_come(packing: SoftPacking | HardPacking | SinglePacking, lengths: Int32, rows: Int64) -> Packs:
    packer = packing.open()
    packs = packer.extend(lengths[rows].tolist(), rows.tolist())
    packs += packer.flush()
    offsets = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    pieces = np.array([piece for pack in packs for piece in pack], np.int32).reshape(-1, 3)
    numbers, starts, stops = np.ascontiguousarray(pieces.T)
    found = Packs(offsets, numbers, starts, stops, np.empty(0), packer.counts)
    return found._replace(costs=_costs(found, 1.0, 0.0))


def _costs(packs: Packs, linear: float, quadratic: float) -> Float64:
    """The same as :meth:`LengthGrouping.cost`, for all packs."""
    sizes = packs.stops.astype(np.int64) - packs.starts
    if not len(sizes):
        return np.empty(0)

    sums, squares = (np.add.reduceat(values, packs.offsets[:-1]) for values in (sizes, sizes * sizes))
    result: Float64 = linear * sums + quadratic * squares
    return result


def _packing_of(described: dict[str, Any]) -> Any:
    settings = dict(described)
    return PACKINGS[settings.pop("type")](**settings)
