"""S6: memory of the whole process tree, which must not grow with the file, nor with what has gone through."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks.contestants import OURS, present
from tests.benchmarks.figures.start import LARGEST_LEGACY_MB
from tests.benchmarks.framework import at_most, ratios, rounds

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("memory",)

NUM_ROWS = 8000
REST_S = 1.5
"""At the end: a fast backend's audit begins in a pause, and loads ``tokenizers``."""
GOALS = {2: 300, 8: 400}


def memory(bench: Bench) -> None:
    """S6: the highest of a run, as proportional set size."""
    for backend in bench.backends:
        for num_workers, most in GOALS.items():
            _of(bench, backend, num_workers, most)
        if backend != "hf":
            _bounded(bench, backend)
    _sizes(bench)


def _of(bench: Bench, backend: str, num_workers: int, most: int) -> None:
    knobs = {"tokenizer": bench.tokenizer, "backend": backend, "num_workers": num_workers, "num_rows": NUM_ROWS}
    knobs["rest_s"] = 0 if backend == "hf" else REST_S
    small, large = rounds(
        partial(bench.probe, "steady", watched=True, path=bench.small, **knobs),
        partial(bench.probe, "steady", watched=True, path=bench.large, **knobs),
        num_rounds=bench.num_long_rounds,
    )
    what = f"{backend}, {num_workers} workers, "
    bench.report("S6", f"{what}{bench.small_mb} MB", small["peak_pss_mb"], "MB", at_most(most))
    bench.report("S6", f"{what}{bench.large_mb} MB", large["peak_pss_mb"], "MB", at_most(most))
    found = ratios(large["peak_pss_mb"], small["peak_pss_mb"])
    bench.report("S6", f"{what}large file over small file", found, "x", at_most(1.1))


def _bounded(bench: Bench, backend: str) -> None:
    """What a fast backend remembers of the text it has seen is bounded."""
    knobs = {"tokenizer": bench.tokenizer, "backend": backend, "num_workers": 2, "path": bench.fresh, "rest_s": REST_S}
    few, many = (16_000, 20_000) if bench.quick else (40_000, 200_000)
    some, all_ = rounds(
        partial(bench.probe, "steady", watched=True, num_rows=few, **knobs),
        partial(bench.probe, "steady", watched=True, num_rows=many, **knobs),
        num_rounds=bench.num_long_rounds,
    )
    found = ratios(all_["peak_pss_mb"], some["peak_pss_mb"])
    bench.report("S6", f"{backend}, after {many:,} fresh rows over {few:,}", found, "x", at_most(1.1))


def _sizes(bench: Bench) -> None:
    """For the plot: the first rows of each size, by each contestant."""
    found, _ = present(bench, OURS, "hf", "legacy")
    sizes = [1, bench.small_mb, bench.fresh_mb] if bench.quick else [5, bench.small_mb, 500, bench.large_mb]
    taken: dict[str, dict[str, list[float]]] = {contestant.name: {} for contestant in found}
    for size in sizes:
        for one in found:
            if one.name != "legacy" or size <= LARGEST_LEGACY_MB:
                taken[one.name][str(size)] = [one.epoch(bench, bench.input(size), NUM_ROWS)["peak_pss_mb"]]
    bench.data["sizes"] = taken
