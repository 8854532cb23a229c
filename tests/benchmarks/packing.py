"""How full packs are, how well ranks are balanced, and what both cost: ``python -m tests.benchmarks.packing``.

Fill and balance are counts: the same on every machine. Times belong to the machine, so each is beside XTuner's; for
batches that is its own code, if ASYNCDATA_XTUNER names a checkout of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import pytest

from asyncdata import Document, LengthGrouping, PackedCollator, SoftPacking
from asyncdata.batching.length_grouping import xtuner_order
from asyncdata.xtuner import XTunerPacking
from tests.support.peers.checkouts import module_of

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


def report_fill() -> None:
    print(f"\nfill of {NUM_SAMPLES} samples, mean of {len(SEEDS)} draws (per cent); displacement and window in samples")
    for law in LAWS:
        for max_length in (4096, 8192, 32768):
            found = [fill(law, max_length, seed) for seed in SEEDS]
            ours, theirs = (statistics.mean(one[column] for one in found) for column in (0, 1))
            moved, window = (max(one[column] for one in found) for column in (2, 3))
            print(f"{law:10} {max_length:6} ours {ours:6.2f} XTuner {theirs:6.2f} moved {moved:4} window {window:4}")


def report_balance() -> None:
    print("\nbalance: mean over slowest rank (per cent), rank 0 over last rank; ours at windows of 16, 32, 64")
    settings: dict[str, dict[str, Any]] = {str(window): {"window": window} for window in (16, 32, 64)}
    settings |= {"snake": {"window": 64, "method": "snake"}, "from the start": {"full": False}}
    for law in ("lognormal", "zipf"):
        costs, theirs = (costs_of(law, 7400, 32768, 7, xtuners=xtuners) for xtuners in (False, True))
        for ranks in ((8, 1), (8, 4), (64, 1), (64, 8)):
            found = {"XTuner": balance(theirs, xtuners_ordered(theirs, *ranks), *ranks)}
            found |= {
                name: balance(costs, ours_ordered(costs, *ranks, **some), *ranks) for name, some in settings.items()
            }
            figures = (f"{name} {100 * one.efficiency:.2f} {one.first_over_last:.3f}" for name, one in found.items())
            print(f"{law:10} {ranks[0]:3} ranks, {ranks[1]} packs a step: " + "; ".join(figures))


def seconds(rounds: int, call: Any, *args: Any) -> float:
    """Of CPU time, the median."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call(*args)
        times.append(time.process_time() - start)
    return statistics.median(times)


def report_speed() -> None:
    print("\nspeed, median of 5, XTuner's plan made by ours of the same packs")
    for law in LAWS:
        for max_length in (4096, 32768):
            lengths = lengths_of(law, 2 * NUM_SAMPLES, max_length, 0)
            ours = len(lengths) / seconds(5, soft_packs, lengths, max_length)
            theirs = len(lengths) / seconds(5, xtuners_plan, lengths, max_length, 0)
            print(f"{law:10} {max_length:6} ours {ours / 1000:5.0f}k samples/s, plan {theirs / 1000:5.0f}k samples/s")


def report_collating() -> None:
    print("\na pack of 32768 tokens to a batch, median of 100")
    rng, collate = np.random.default_rng(0), module_of("xtuner", "v1.datasets.collator").sft_llm_collator
    for num_documents in (1, 41, 1000):
        sizes = np.diff(np.linspace(0, 32760, num_documents + 1).astype(int)).tolist()
        pack = [Document(rng.integers(0, 100_000, size, dtype=np.int32)) for size in sizes]
        items = [{"input_ids": ids, "labels": ids, "num_tokens": len(ids)} for ids in (d.tokens.tolist() for d in pack)]
        ours = 1e6 * seconds(100, PackedCollator(max_length=32768), [pack])
        theirs = 1e6 * seconds(10, collate, [items], 32768, 0)
        print(f"{num_documents:5} documents: ours {ours:6.0f} us, XTuner {theirs:6.0f} us, {theirs / ours:.0f} times")


REPORTS = {"fill": report_fill, "balance": report_balance, "speed": report_speed, "collating": report_collating}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(REPORTS), help="which, separated by commas")
    for name in parser.parse_args().only.split(","):
        try:
            REPORTS[name]()
        except pytest.skip.Exception as reason:
            print(reason)
