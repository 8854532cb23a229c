"""S20: a run that is recorded beside one that is not, after as many rows as are measured.

With these, the recorder's helper loads the vocabulary, and most of the samples are chosen that are kept.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.framework import at_least, ratios

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("recorded",)

_NUM_ROUNDS = 6


def recorded(bench: Bench) -> None:
    """Rows/s with ``telemetry=...`` over without, in turn."""
    for backend in bench.backends:
        is_fast = backend != "hf"
        loading: dict[str, Any] = {"tokenizer": bench.tokenizer, "backend": backend, "num_workers": bench.num_workers}
        loading["path"] = bench.fresh if is_fast else bench.small
        loading["num_rows"] = (16_000 if bench.quick else 250_000) if is_fast else (4000 if bench.quick else 10_000)
        loading["num_warm_rows"] = 4096 if bench.quick else loading["num_rows"]
        loading["pause_s"] = 1.0
        plain, watched = _in_turn(bench, loading)
        found = ratios(_all(watched, "rows_per_s"), _all(plain, "rows_per_s"))
        bench.report("S20", f"{backend}: rows/s, recorded over not recorded", found, "x", at_least(0.98))
        name = f"{backend}: CPU of the trainer's process per row"
        bench.report("S20", name, _all(watched, "parent_cpu_us_per_row"), "us")
        bench.report("S20", f"{backend}: the same, not recorded", _all(plain, "parent_cpu_us_per_row"), "us")


def _in_turn(bench: Bench, loading: dict[str, Any]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """What is found without and with it. Every other round begins with the other one."""
    plain, watched = list[dict[str, float]](), list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        calls = [(plain, {}), (watched, {"telemetry": str(Path(folder) / "run")})]
        for _ in range(1 if bench.quick else _NUM_ROUNDS):
            for found, knobs in calls:
                found.append(bench.probe("steady", **loading, **knobs))
            calls.reverse()
    return plain, watched


def _all(found: list[dict[str, float]], name: str) -> list[float]:
    return [each[name] for each in found]
