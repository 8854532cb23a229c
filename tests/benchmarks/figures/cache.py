"""S10: a second epoch out of the token cache, beside the tokenizers alone."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import TYPE_CHECKING

from tests.benchmarks.framework import at_least, ratios, rounds

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("token_cache",)


def token_cache(bench: Bench) -> None:
    """S10, over as many processes as ours has workers."""
    backend = bench.backends[-1]
    path = bench.fresh if backend != "hf" else bench.small
    num_rows = 4000 if bench.quick else 20_000
    raw = {"path": bench.fresh, "tokenizer": bench.tokenizer, "num_processes": bench.num_workers}
    cached, *alone = rounds(
        partial(_second_epoch, bench, path, backend),
        *(
            partial(
                bench.probe, "raw_in_processes", backend=name, num_rows=num_rows * (1 if name == "hf" else 8), **raw
            )
            for name in bench.backends
        ),
        num_rounds=bench.num_long_rounds,
    )
    second = cached["second_rows_per_s"]
    bench.data["rows_per_s"] = cached
    bench.report("S10", "second epoch from the token cache", second, "rows/s")
    bench.report("S10", "of it out of the cache", [100 * share for share in cached["cached_share"]], "%", at_least(100))
    bench.report("S10", "CPU of the trainer's process a row then", cached["second_cpu_us_per_row"], "us")
    bench.report("S10", "CPU of its workers a row then", cached["second_workers_us_per_row"], "us")
    bench.report("S10", "the epoch before, tokenized and written", cached["first_rows_per_s"], "rows/s")
    for name, one in zip(bench.backends, alone, strict=True):
        goal = at_least(100 if name == "hf" else 5)
        bench.report("S10", f"second epoch over {name} alone", ratios(second, one["rows_per_s"]), "x", goal)


def _second_epoch(bench: Bench, path: str, backend: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=bench.folder) as cache:
        return bench.probe(
            "second_epoch",
            path=path,
            tokenizer=bench.tokenizer,
            backend=backend,
            cache=cache,
            num_workers=bench.num_workers,
        )
