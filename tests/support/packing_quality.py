"""How full packs are and how well ranks are balanced, beside XTuner's plans: counts, the same on every machine."""

from typing import Any, NamedTuple

import numpy as np

from asyncdata import LengthGrouping, SoftPacking
from asyncdata.batching.length_grouping import xtuner_order
from asyncdata.xtuner import XTunerPacking

Lengths = np.ndarray[Any, np.dtype[np.int64]]
Costs = np.ndarray[Any, np.dtype[np.float64]]

NUM_SAMPLES = 20_000
SEEDS = (0, 1, 2)
LOOKAHEADS = (100, 1000)
"""XTuner's default for one data set, and of its packing class."""

LAWS: dict[str, Any] = {
    "lognormal": lambda rng, size: rng.lognormal(6.185, 1.0, size),  # mean 800
    "zipf": lambda rng, size: rng.zipf(1.5, size) * 50 - rng.integers(0, 50, size),
    "uniform": lambda rng, size: rng.integers(50, 4097, size),
    "bimodal": lambda rng, size: rng.choice([1350, 2450], size) + rng.normal(0, 60, size),
}


def lengths_of(law: str, num_samples: int, max_length: int, seed: int) -> Lengths:
    """Tokens of ``num_samples`` samples; what is longer than a pack is cut."""
    drawn: Lengths = LAWS[law](np.random.default_rng(seed), num_samples).astype(np.int64)
    return np.clip(drawn, 8, max_length)


class Fill(NamedTuple):
    """Tokens over room, in per cent; the farthest that a sample was moved, and the samples of the largest window."""

    ours: float
    xtuners: float
    displacement: int
    window: int


def soft_packs(lengths: Lengths, max_length: int) -> list[Any]:
    packer = SoftPacking(max_length=max_length).open()
    return packer.extend(lengths, range(len(lengths))) + packer.flush()  # type: ignore[arg-type]


def xtuners_plan(lengths: Lengths, max_length: int, seed: int, lookahead: int = 1000) -> Any:
    return XTunerPacking(max_length=max_length, seed=seed, lookahead=lookahead).plan([lengths])


def fill(law: str, max_length: int, seed: int) -> Fill:
    """Ours, beside the better of XTuner's two lookaheads."""
    lengths = lengths_of(law, NUM_SAMPLES, max_length, seed)
    packs, room = soft_packs(lengths, max_length), 100 * lengths.sum() / max_length
    order = np.array([reference for pack in packs for reference, _, _ in pack])
    num_theirs = min(xtuners_plan(lengths, max_length, seed, lookahead).num_packs for lookahead in LOOKAHEADS)
    moved = int(np.abs(order - np.arange(len(order))).max())
    # The longest window that can be: enough samples, and enough tokens.
    packing, before = SoftPacking(max_length=max_length), np.concatenate([[0], np.cumsum(lengths)])
    stops = np.searchsorted(before, before[:-1] + (packing.window_tokens or 8 * packing.max_length))
    window = max(packing.window_samples, int((np.minimum(stops, len(lengths)) - np.arange(len(lengths))).max()))
    return Fill(room / len(packs), room / num_theirs, moved, window)


def costs_of(law: str, num_packs: int, max_length: int, seed: int, *, xtuners: bool = False) -> Costs:
    """The costs of about so many packs, by :class:`LengthGrouping`, in the order of packing."""
    mean = lengths_of(law, NUM_SAMPLES, max_length, seed).mean()
    lengths = lengths_of(law, int(num_packs * max_length / mean), max_length, seed)
    packs = soft_packs(lengths, max_length)
    if xtuners:
        plan = xtuners_plan(lengths, max_length, seed)
        packs = [plan.pack(number) for number in range(plan.num_packs)]
    cost = LengthGrouping().cost
    return np.array([cost([stop - start for _, start, stop in pack]) for pack in packs])


class Balance(NamedTuple):
    """Of a run: mean over slowest rank, summed over steps; rank 0 over the last rank; steps."""

    efficiency: float
    first_over_last: float
    num_steps: int


def balance(costs: Costs, order: Lengths, world_size: int, accumulation: int) -> Balance:
    """How well the ranks' costs within an optimizer step agree."""
    num_steps = len(order) // (world_size * accumulation)
    steps = order[: num_steps * world_size * accumulation].reshape(num_steps, accumulation, world_size)
    ranks = costs[steps].sum(axis=1)
    totals = ranks.sum(axis=0)
    return Balance(float(ranks.mean() / ranks.max(axis=1).mean()), float(totals[0] / totals[-1]), num_steps)


def ours_ordered(costs: Costs, world_size: int, accumulation: int, *, full: bool = True, **settings: Any) -> Lengths:
    """The epoch in our order; ``full``: as after the first windows, which are smaller."""
    grouping, order, first, number = LengthGrouping(**settings), [], 0, 0
    ranks = {"world_size": world_size, "accumulation": accumulation, "seed": 0, "epoch": 0}
    while first < len(costs):
        steps = grouping.steps_of_window(number + 30 * full, accumulation)
        assert steps is not None
        stop = first + steps * world_size * accumulation
        order.append(first + grouping.order(costs[first:stop].tolist(), **ranks, window=number))
        first, number = stop, number + 1
    return np.concatenate(order)


def xtuners_ordered(costs: Costs, world_size: int, accumulation: int) -> Lengths:
    return xtuner_order(costs.tolist(), world_size, world_size * accumulation, 0)
