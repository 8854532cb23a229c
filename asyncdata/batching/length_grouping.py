"""Groups packs of similar cost into the same step, so that no rank waits for another.

Packs have the same number of tokens, but not the same cost, as attention is quadratic in the length of a document.
The packs of a window are sorted by cost and cut into groups of one pack for each rank. The groups are mixed into
optimizer steps, and within a step packs are dealt to ranks so that their sums are nearly equal: by largest differencing
(N. Karmarkar, R. Karp, "The Differencing Method of Set Partitioning", 1982), one pack of every group for each rank.
XTuner's order leaves the groups sorted, so that its rank 0 has the heaviest pack of each.
"""

from __future__ import annotations

import functools
import heapq
import operator
import random
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description
from asyncdata.order.order import TorchGenerator, order_keys, shuffled_rows

Indices = np.ndarray[Any, np.dtype[np.int64]]
Costs = np.ndarray[Any, np.dtype[np.float64]]

# XTuner: a quarter of the packs are sorted together, or this many global batches.
_XTUNER_SHARE, _XTUNER_MAX_BATCHES = 4, 50

Weight = Annotated[float, msgspec.Meta(ge=0)]


class LengthGrouping(Description, frozen=True, kw_only=True):
    """Puts packs of similar cost into the same step, so that all ranks have about the same work.

    The order of a window's packs depends only on their costs, the seed and the window's number. Packs at the end of the
    data that are too few for an optimizer step keep their order.

    :ivar window: groups of ``world_size`` packs that are sorted together. More of them balance better; all their packs
        are held at once. The first windows have one step, then four, sixteen and so on, and balance less well, so that
        the first step does not wait.
    :ivar linear: cost of a token. For a transformer, with a cost of 1 for a pair of tokens, about 6 times the hidden
        size: 24576 is for a width of 4096.
    :ivar quadratic: cost of the square of a document's tokens.
    :ivar method: how a step's packs are dealt to ranks: ``karmarkar_karp``; or ``snake``, to and fro. ``xtuner`` is
        XTuner's order (:func:`xtuner_order`), for which the window is the epoch.
    :raises ConfigError: for a setting that cannot work.
    """

    window: Annotated[int, msgspec.Meta(ge=1)] = 64
    linear: Weight = 24576.0
    quadratic: Weight = 1.0
    method: Literal["karmarkar_karp", "snake", "xtuner"] = "karmarkar_karp"

    def check(self) -> None:
        """Check that costs are not all zero."""
        if self.linear == self.quadratic == 0:
            raise ConfigError("LengthGrouping: with linear=0 and quadratic=0 all packs cost nothing")

    def cost(self, lengths: Sequence[int]) -> float:
        """The cost of a pack whose documents have so many tokens."""
        return self.linear * sum(lengths) + self.quadratic * sum(length * length for length in lengths)

    def steps_of_window(self, window: int, accumulation: int = 1) -> int | None:
        """Optimizer steps of window number ``window``; None: all of the epoch."""
        if self.method == "xtuner":
            return None

        return min(1 << 2 * min(window, 15), max(1, self.window // accumulation))

    def order(
        self,
        costs: Sequence[float],
        *,
        world_size: int,
        accumulation: int = 1,
        seed: int,
        epoch: int = 0,
        window: int = 0,
    ) -> Indices:
        """The packs of a window in the order in which they are delivered.

        :param costs: one for each pack, in the order of packing.
        :param world_size: ranks that compute at the same time.
        :param accumulation: packs of each rank in an optimizer step.
        :returns: int64 of shape (num_packs,): pack m of rank r in step s is at place
            ``(s * accumulation + m) * world_size + r``.
        :raises ConfigError: for a cost that is not finite.
        """
        values = np.asarray(costs, np.float64)
        if not np.isfinite(values).all():
            raise ConfigError("LengthGrouping: a cost is not finite")

        if self.method == "xtuner":
            return xtuner_order(costs, world_size, world_size * accumulation, seed + epoch)

        num_steps = len(values) // (world_size * accumulation)
        num_grouped = num_steps * world_size * accumulation
        key, rank_key, *_ = order_keys(seed, epoch, f"groups {window}")
        # Costs that are equal stay in order, so the packs need no other key.
        groups = np.argsort(-values[:num_grouped], kind="stable").reshape(-1, world_size)
        mixed = groups[shuffled_rows(len(groups), key)].reshape(num_steps, accumulation, world_size)
        deal = _karmarkar_karp if self.method == "karmarkar_karp" else _snake
        steps = _turned(values, [deal(values, step) for step in mixed], shuffled_rows(world_size, rank_key))
        return np.concatenate([*(step.ravel() for step in steps), np.arange(num_grouped, len(values))]).astype(np.int64)


def _turned(costs: Costs, steps: list[Indices], ranks: Indices) -> list[Indices]:
    """Each step's columns, given to ranks: the heaviest to the rank with the least so far. Ties: as in ``ranks``."""
    had = np.zeros(len(ranks))
    turned = []
    for step in steps:
        sums = functools.reduce(operator.add, costs[step])
        turn = ranks[np.argsort(had[ranks], kind="stable")]
        columns = np.argsort(-sums, kind="stable")
        result = np.empty_like(step)
        result[:, turn] = step[:, columns]
        had[turn] += sums[columns]
        turned.append(result)
    return turned


def _karmarkar_karp(costs: Costs, groups: Indices) -> Indices:
    """Each row of ``groups``, permuted so that the columns' sums are nearly equal.

    The shape is (accumulation, world_size), int64.

    Rows are sorted, the costliest first. The two rows that differ most within themselves are added up, the heaviest of
    the one to the lightest of the other, until there is one row of sums.
    """
    heap = [(-float(np.ptp(costs[row])), number, costs[row], [(number, row)]) for number, row in enumerate(groups)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, sums, rows = heapq.heappop(heap)
        _, _, others, other_rows = heapq.heappop(heap)
        sums = sums + others[::-1]
        order = np.argsort(-sums, kind="stable")
        merged = [(place, row[order]) for place, row in rows]
        merged += [(place, row[::-1][order]) for place, row in other_rows]
        heapq.heappush(heap, (-float(np.ptp(sums)), number, sums[order], merged))
        number += 1
    return np.stack([row for _, row in sorted(heap[0][3])])


def _snake(costs: Costs, groups: Indices) -> Indices:
    """Every other row reversed, in the order of their costs; shapes as in :func:`_karmarkar_karp`."""
    by_cost = np.argsort(-costs[groups].max(axis=1), kind="stable")
    result = groups.copy()
    for place in by_cost[1::2]:
        result[place] = groups[place][::-1]
    return result


def xtuner_order(costs: Sequence[float], world_size: int, global_batch_size: int, seed: int) -> Indices:
    """The order of XTuner v1's ``LengthGroupedSampler``, before it is rounded to whole batches and cut by rank.

    :param costs: one for each pack of the epoch, what XTuner calls ``longest``.
    :param global_batch_size: packs of an optimizer step, over all ranks.
    :param seed: its seed plus the number of the epoch.
    :returns: int64 of shape (num_packs,).
    """
    num_batches = min(len(costs) // (global_batch_size * _XTUNER_SHARE), _XTUNER_MAX_BATCHES)
    num_sorted = max(num_batches, 1) * global_batch_size
    rows = TorchGenerator(seed).randperm(len(costs))
    values = -np.asarray(costs, np.float64)
    shuffler = random.Random(seed)
    order: list[Indices] = []
    for first in range(0, len(rows), num_sorted):
        some = rows[first : first + num_sorted]
        some = some[np.argsort(values[some], kind="stable")]
        groups = [some[start : start + world_size] for start in range(0, len(some), world_size)]
        shuffler.shuffle(groups)
        order += groups
    return np.concatenate([np.empty(0, np.int64), *order])
