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
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain, count
from math import inf
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from asyncdata.batching.packers import SoftPacking
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description, whole_number
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


Bins = list[list[int]]
Dealt = list[list[list[int]]]


def balance(
    groups: Iterable[Any],
    ranks: int,
    token_budget: int,
    *,
    cost: Callable[[int], float] | Literal["attention"] | None = None,
    over_budget: Literal["error", "alone"] = "error",
    allow_empty: bool = False,
) -> Dealt:
    """Deal rows to ranks and micro-batches, with nearly the same number of tokens, or the same cost, for each rank.

    Each row is dealt once, each rank has the same number of micro-batches, and no micro-batch has more than
    ``token_budget`` tokens. The result depends on the lengths, in their order, and on nothing else.

    The method is longest processing time first across ranks, and within a rank the emptiest micro-batch, or best fit
    decreasing where rows would not fit otherwise. It takes about 3 microseconds a row.

    With ``cost``, the micro-batches that ranks run at the same time cost nearly the same, so that ranks that wait for
    each other after each one wait little. There are no more micro-batches than without.

    :param groups: rows, or groups (lists) of them, whose rows need not stay together. A row is a :class:`Sample`, any
        other object with ``tokens``, or the number of its tokens.
    :param ranks: data-parallel ranks.
    :param token_budget: most tokens of a micro-batch, without padding.
    :param cost: what a row of so many tokens costs, from 0 on; a micro-batch costs the sum of its rows. ``attention``
        is ``24576 * n + n * n``, for a transformer of width 4096; for width h, ``lambda n: 6 * h * n + n * n``. A layer
        takes ``24 * h * h * n + 4 * h * n * n`` operations (D. Narayanan et al., "Efficient Large-Scale Language Model
        Training on GPU Clusters Using Megatron-LM", 2021), which is 4 h times as much.
    :param over_budget: what to do with a row that is longer: ``error``, or ``alone``: it is a micro-batch by itself.
    :param allow_empty: micro-batches may have no rows, where there are fewer rows than micro-batches.
    :return: for each rank, its micro-batches, those with the most tokens first; with ``cost``, micro-batch k of all
        ranks cost about the same, and the costliest come first. Each is a list of the rows' numbers, counted from 0
        through all groups, ascending.
    :raises ConfigError: AD454, for a row that is too long or has no token, for fewer rows than micro-batches, or for a
        cost that is no number from 0 on.
    """
    lengths = _lengths_of(groups)
    ranks, token_budget = _positive("ranks", ranks), _positive("token_budget", token_budget)
    _refuse_over_budget(lengths, token_budget, over_budget)
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])  # stable: of one length, the first comes first
    fewest = (_fewest if cost is None else _fewest_by_tokens)(lengths, order, ranks, token_budget)
    costs = [] if cost is None else _costs(lengths, cost)
    for number in count(fewest):
        if len(lengths) < ranks * number and not allow_empty:
            raise ConfigError(
                f"AD454 {len(lengths)} rows are fewer than {ranks} ranks with {number} micro-batches each, which "
                f"token_budget={token_budget} needs: give more rows, fewer ranks or a larger budget; or, if your "
                "trainer can run a micro-batch without rows, allow_empty=True"
            )

        if costs and (bins := _by_cost(lengths, costs, ranks, number, token_budget)):
            return _in_step(bins, lengths, costs, ranks, token_budget)

        for is_tight in (True, False) if costs else (False, True):
            dealt = _dealt(lengths, order, ranks, number, token_budget, is_tight=is_tight)
            if dealt is not None:
                return _in_step(list(chain(*dealt)), lengths, costs, ranks, token_budget) if costs else dealt

    raise AssertionError("with a micro-batch for each row, all rows fit")


def _dealt(
    lengths: Sequence[int], order: Sequence[int], num_ranks: int, number: int, budget: int, *, is_tight: bool
) -> Dealt | None:
    """The rows dealt to ``number`` micro-batches of each rank; None if they do not fit this way.

    :param is_tight: put rows into the fullest micro-batch of the rank that has room, not into the emptiest.
    """
    ranks = [(0, rank) for rank in range(num_ranks)]  # a heap, by tokens
    loads = [[(0, place) for place in range(number)] for _ in range(num_ranks)]  # of each rank, ascending
    found: Dealt = [[[] for _ in range(number)] for _ in range(num_ranks)]
    num_empty = num_ranks * number
    for num_left, row in zip(range(len(order), 0, -1), order, strict=True):
        length, passed = lengths[row], []
        while ranks:
            tokens, rank = heappop(ranks)
            place = _place(loads[rank], length, budget, is_tight=is_tight, needs_empty=num_left <= num_empty)
            if place is not None:
                load, batch = loads[rank].pop(place)
                insort(loads[rank], (load + length, batch))
                found[rank][batch].append(row)
                num_empty -= not load
                passed.append((tokens + length, rank))
                break

            passed.append((tokens, rank))
        else:
            return None

        for item in passed:
            heappush(ranks, item)
    return [[sorted(found[rank][batch]) for _, batch in reversed(loads[rank])] for rank in range(num_ranks)]


def _by_cost(lengths: Sequence[int], costs: Sequence[float], ranks: int, number: int, budget: int) -> Bins | None:
    """The rows in micro-batches of about the same cost; None if they do not fit this way."""
    rows = sorted(range(len(costs)), key=lambda row: -costs[row])
    left, num_left = list(rows), ranks * number
    filled: Bins = []
    while len(left) >= num_left > ranks and costs[left[0]] * num_left > sum(costs[row] for row in left):
        most = costs[left[0]]
        for _ in range(ranks):
            num_left -= 1
            filled.append(_filled(left, lengths, costs, most, budget, num_left))
    bins = _cheapest_first(left, lengths, costs, num_left, budget)
    if bins is None:
        return _cheapest_first(rows, lengths, costs, ranks * number, budget) if filled else None

    return filled + bins


def _filled(
    left: list[int], lengths: Sequence[int], costs: Sequence[float], most: float, budget: int, num_kept: int
) -> list[int]:
    """A micro-batch of the costliest rows of ``left`` that fit; they are taken out.

    :param left: rows, in descending order of cost.
    :param most: what it may cost.
    :param num_kept: rows that are left for other micro-batches, at least.
    """
    found: list[int] = []
    cost, tokens, place = 0.0, 0, 0
    while place < len(left) > num_kept:
        row = left[place]
        if cost + costs[row] > most or (found and tokens + lengths[row] > budget):
            place += 1
            continue

        found.append(left.pop(place))
        cost, tokens = cost + costs[row], tokens + lengths[row]
        place = max(place, bisect_left(left, cost - most, key=lambda row: -costs[row]))
    return found


def _cheapest_first(
    rows: Iterable[int], lengths: Sequence[int], costs: Sequence[float], number: int, budget: int
) -> Bins | None:
    """Each row in the cheapest of ``number`` micro-batches that has room for it; None if a row finds none."""
    found: Bins = [[] for _ in range(number)]
    heap = [(0.0, 0, batch) for batch in range(number)]
    for row in rows:
        passed = []
        while heap:
            cost, tokens, batch = heappop(heap)
            if not tokens or tokens + lengths[row] <= budget:
                found[batch].append(row)
                passed.append((cost + costs[row], tokens + lengths[row], batch))
                break

            passed.append((cost, tokens, batch))
        else:
            return None

        for item in passed:
            heappush(heap, item)
    return found


def _in_step(bins: Bins, lengths: Sequence[int], costs: Sequence[float], num_ranks: int, budget: int) -> Dealt:
    """The micro-batches in the order of their costs, so that ranks run those of about the same cost together."""

    def cost_of(batch: list[int]) -> float:
        return sum(costs[row] for row in batch)

    def most_of(step: Bins) -> float:
        return max(map(cost_of, step))

    bins.sort(key=cost_of, reverse=True)
    steps = []
    for first in range(0, len(bins), num_ranks):
        step = bins[first : first + num_ranks]
        rows = sorted(chain(*step), key=lambda row: -costs[row])
        steps.append(min(step, _cheapest_first(rows, lengths, costs, num_ranks, budget) or step, key=most_of))
    found: Dealt = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for step in sorted(steps, key=most_of, reverse=True):
        ranks = sorted(range(num_ranks), key=totals.__getitem__)
        for batch, rank in zip(sorted(step, key=cost_of, reverse=True), ranks, strict=True):
            found[rank].append(sorted(batch))
            totals[rank] += cost_of(batch)
    return found


def _place(loads: list[tuple[int, int]], length: int, budget: int, *, is_tight: bool, needs_empty: bool) -> int | None:
    """Which of a rank's micro-batches, ascending by tokens, takes a row of this length; None: none has room."""
    least = loads[0][0]
    if least and (needs_empty or least + length > budget):
        return None

    return (
        0 if needs_empty or not is_tight or length > budget else bisect_right(loads, (budget - length, len(loads))) - 1
    )


def _fewest(lengths: Sequence[int], order: Sequence[int], ranks: int, budget: int) -> int:
    """Micro-batches of a rank that hold all rows, if packs could be dealt freely."""
    fitting = [row for row in order if lengths[row] <= budget]
    packer = SoftPacking(max_length=budget, window_samples=len(fitting) + 1).open()
    packs = packer.extend([lengths[row] for row in fitting], fitting) + packer.flush()
    return -(-(len(packs) + len(order) - len(fitting)) // ranks)


def _fewest_by_tokens(lengths: Sequence[int], order: Sequence[int], ranks: int, budget: int) -> int:
    """As :func:`_fewest`, if rows could be cut as well: quicker, and seldom less."""
    fitting = [lengths[row] for row in order if lengths[row] <= budget]
    return -(-(-(-sum(fitting) // budget) + len(order) - len(fitting)) // ranks)


def _lengths_of(groups: Iterable[Any]) -> list[int]:
    """The tokens of each row, counted through all groups."""
    lengths: list[int] = []
    for item in groups:
        for row in item if isinstance(item, list | tuple) else (item,):
            number = whole_number(len(row.tokens) if hasattr(row, "tokens") else row)
            if number < 1:
                raise ConfigError(
                    f"AD454 row {len(lengths)} is {row!r}: a row is a number of tokens from 1 on, or has tokens"
                )

            lengths.append(number)
    return lengths


def _costs(lengths: Sequence[int], cost: Callable[[int], float] | str) -> list[float]:
    """What each row costs."""
    if not callable(cost) and cost != "attention":
        raise ConfigError(f'AD454 cost must be "attention" or a function of a row\'s number of tokens, got {cost!r}')

    usual = LengthGrouping()
    costs = [float(cost(length) if callable(cost) else usual.cost([length])) for length in lengths]
    for row, one in enumerate(costs):
        if not 0 <= one < inf:
            raise ConfigError(f"AD454 row {row} of {lengths[row]} tokens costs {one}: a cost is a number from 0 on")

    return costs


def _positive(name: str, value: Any) -> int:
    number = whole_number(value)
    if number < 1:
        raise ConfigError(f"AD454 {name} must be a whole number from 1 on, got {value!r}")

    return number


def _refuse_over_budget(lengths: Sequence[int], budget: int, over_budget: str) -> None:
    if over_budget not in {"error", "alone"}:
        raise ConfigError(f'AD454 over_budget must be "error" or "alone", got {over_budget!r}')

    longest = max(range(len(lengths)), key=lengths.__getitem__, default=-1)
    if longest >= 0 and lengths[longest] > budget and over_budget == "error":
        raise ConfigError(
            f"AD454 row {longest} has {lengths[longest]} tokens, more than token_budget={budget}: give a budget for "
            'it, drop the row, or let it be a micro-batch by itself with over_budget="alone"'
        )
