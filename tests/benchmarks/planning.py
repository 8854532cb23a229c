"""How long a plan of a million rows takes, in a worker and in the trainer's process.

``python -m tests.benchmarks.planning``
"""

from __future__ import annotations

import argparse
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata import HardPacking, LengthGrouping, RowShuffle, SoftPacking, XTunerPacking
from asyncdata.batching.planned.plan import Packs, Plan, PlannedEpoch, PlannedOrder
from asyncdata.batching.planned.worker import answer
from asyncdata.core.messages import Block, Indexed, Packed, Permuted, encode
from asyncdata.prefetch.row_index.row_index import RowIndex
from tests.benchmarks.packing import lengths_of

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("Clock", "index_of", "plan_times")

WINDOW = 1 << 16
ROWS_PER_BLOCK = 1000


class OneFile:
    """Blocks of a megabyte."""

    are_arrays = ()

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        return [Block(0, number << 20, (number + 1) << 20) for number in ids]


def index_of(lengths: Any) -> RowIndex:
    """A complete index of rows that have so many tokens."""
    num_blocks = -(-len(lengths) // ROWS_PER_BLOCK)
    index = RowIndex(OneFile(num_blocks), RowShuffle(only_kept=True))  # type: ignore[arg-type]
    for first in range(0, len(lengths), ROWS_PER_BLOCK):
        some = lengths[first : first + ROWS_PER_BLOCK].astype(np.int32)
        numbers = np.arange(len(some), dtype=np.int32).tobytes()
        counts = array("i", [len(some)]).tobytes()
        index.append(Indexed(counts, numbers, numbers, b"", 0, num_tokens=some.tobytes()))
    index.complete()
    return index


class Clock:
    """Seconds since it was last asked."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self) -> float:
        began, self._began = self._began, time.perf_counter()
        return self._began - began


def plan_times(plan: Plan, index: RowIndex) -> dict[str, float]:
    """Seconds of each step; those of ``pack`` and ``order`` pass in a worker."""
    order = PlannedOrder(plan, RowShuffle(only_kept=True), 0)
    clock = Clock()
    request = order.request_packs(index.num_tokens, index.rows_of_files, 0)
    encode(request)
    times = {"ask": clock()}
    reply = answer(request)
    times["pack"] = clock()
    assert isinstance(reply, Packed)
    packs = Packs.of(reply)
    request_order = order.request_order(packs, plan.dealt, 0)
    times["take"] = clock()
    ordered = answer(request_order)
    times["order"] = clock()
    assert isinstance(ordered, Permuted)
    numbers = np.frombuffer(ordered.rows, np.uint32).astype(np.int64)
    epoch = PlannedEpoch(packs, numbers, plan.num_delivered(packs.num_packs))
    times["epoch"] = clock()
    pieces = epoch.pieces(0, WINDOW)
    epoch.packs_at(0, WINDOW)
    index.places(pieces.rows)
    times["window"] = clock()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    num_rows = parser.parse_args().rows
    groupings = (None, LengthGrouping(), LengthGrouping(method="xtuner"))
    names = ("ask", "pack", "take", "order", "epoch", "window")
    print(f"{num_rows} rows, 8 ranks, accumulation 4; seconds of a worker, milliseconds of the trainer's process")
    print(f"{'packing':34} {'grouping':15}" + "".join(f"{name:>9}" for name in names))
    for max_length in (4096, 32768):
        index = index_of(lengths_of("lognormal", num_rows, max_length, 0))
        for packing in (
            XTunerPacking(max_length=max_length, seed=0),
            XTunerPacking(max_length=max_length, seed=0, kind="hard"),
            SoftPacking(max_length=max_length, across_epochs=False),
            HardPacking(max_length=max_length, across_epochs=False),
        ):
            for grouping in groupings:
                times = plan_times(Plan(packing=packing, grouping=grouping, world_size=8, accumulation=4), index)
                kind = f"{type(packing).__name__} {getattr(packing, 'kind', '')} {max_length}"
                shown = (f"{times[n]:7.2f} s" if n in {"pack", "order"} else f"{1e3 * times[n]:6.1f} ms" for n in names)
                print(f"{kind:34} {grouping.method if grouping else '-':15}" + "".join(shown), flush=True)


if __name__ == "__main__":
    main()
