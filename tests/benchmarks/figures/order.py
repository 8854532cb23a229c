"""S11: how well the order mixes, read off what a loader delivers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks.framework import at_most
from tests.benchmarks.shuffle_quality import OURS, shuffle_quality

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("order",)


def order(bench: Bench) -> None:
    """S11: the design effect of a batch of 256, on topics of 5,000 rows each, a million rows, 32 MiB at a time."""
    found = shuffle_quality(bench.folder, bench.probe, seeds=(1,) if bench.quick else (1, 2))
    bench.data["deff"] = found
    for name, (whole, tail) in found.items():
        goal = at_most(1.5) if name == OURS else None
        bench.report("S11", f"deff at batch 256, {name}: whole epoch", [whole], "", goal)
        bench.report("S11", f"deff at batch 256, {name}: last 1 %", [tail], "", goal)
