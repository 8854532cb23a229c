"""S16: packed batches of chats beside XTuner's own loader, both with what an earlier run left in their caches."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.chats import chats
from tests.benchmarks.framework import at_least, ratios, rounds

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("packed_sft",)

_WHAT = "ours over XTuner's loader, packed batches of 4096 tokens"
_NEEDED = ("torch", "transformers", "datasets", "pydantic", "xxhash", "PIL")


def packed_sft(bench: Bench) -> None:
    """XTuner's cache has the rows' offsets and lengths; ours the tokens, or nothing, with a fast tokenizer."""
    lacking = [name for name in _NEEDED if find_spec(name) is None]
    if "ASYNCDATA_XTUNER" not in os.environ or lacking:
        bench.note("S16", _WHAT, f"needs XTuner's tree, named by ASYNCDATA_XTUNER, and {', '.join(_NEEDED)}")
        return

    path = str(chats(bench.folder, 4000 if bench.quick else 40_000))
    common = {"path": path, "tokenizer": bench.tokenizer, "max_length": 4096, "num_workers": bench.num_workers}
    theirs = partial(_steady, bench, "xtuner", num_warm=10, num_batches=40 if bench.quick else 250, **common)
    ours = partial(_steady, bench, "ours", num_warm=20, num_batches=100 if bench.quick else 1500, **common)
    calls = {"XTuner": theirs, "ours, token cache": partial(ours, caches_tokens=True)}
    calls |= {f"ours, {backend}": partial(ours, backend=backend) for backend in bench.backends}
    theirs(num_batches=1)  # fills their cache
    ours(caches_tokens=True, backend=bench.backends[-1], num_batches=100_000)  # the whole epoch fills ours
    found = rounds(*calls.values(), num_rounds=bench.num_long_rounds)
    rates = {name: figures["batches_per_s"] for name, figures in zip(calls, found, strict=True)}
    for name, rate in rates.items():
        bench.report("S16", f"{name}: packed batches of 4096 tokens", rate, "batches/s")
    for name in list(rates)[1:]:
        goal = None if name == "ours, hf" else at_least(10)
        bench.report("S16", f"{name}: over XTuner's loader", ratios(rates[name], rates["XTuner"]), "x", goal)


def _steady(bench: Bench, side: str, **settings: Any) -> dict[str, float]:
    cache = Path(bench.folder) / "packed" / side
    cache.mkdir(parents=True, exist_ok=True)
    return bench.probe_of("tests.benchmarks.xtuner_probe", side, cache=str(cache), **settings)
