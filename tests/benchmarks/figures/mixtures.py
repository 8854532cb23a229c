"""S19: a mixture beside one file of the same rows: its rate with five parts, and its first batch with twenty."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.framework import at_least, at_most, ratios, rounds

if TYPE_CHECKING:
    from tests.benchmarks.framework import Bench

__all__ = ("mixtures",)


def mixtures(bench: Bench) -> None:
    """Rate and first batch, in turn."""
    for backend in bench.backends:
        is_fast = backend != "hf"
        path = bench.fresh if is_fast else bench.small
        loading: dict[str, Any] = {"tokenizer": bench.tokenizer, "backend": backend, "num_workers": bench.num_workers}
        loading["num_rows"] = (16_000 if bench.quick else 190_000) if is_fast else (4000 if bench.quick else 20_000)
        loading["num_warm_rows"] = 4096
        one, five = rounds(
            partial(bench.probe, "steady", path=path, **loading),
            partial(bench.probe, "steady", path=cut(path, 5), **loading),
            num_rounds=bench.num_rounds,
        )
        found = ratios(five["rows_per_s"], one["rows_per_s"])
        bench.report("S19", f"{backend}: rows/s, a mixture of 5 parts over one file", found, "x", at_least(0.95))
        bench.report("S19", f"{backend}: CPU of the trainer's process per row", five["parent_cpu_us_per_row"], "us")
    knobs = {"tokenizer": bench.tokenizer}
    one, twenty = rounds(
        partial(bench.probe, "first_batch", path=bench.small, **knobs),
        partial(bench.probe, "first_batch", path=cut(bench.small, 20), **knobs),
        num_rounds=bench.num_rounds,
    )
    found = ratios(twenty["first_batch_s"], one["first_batch_s"])
    bench.report("S19", "first batch of 32, a mixture of 20 parts over one file", found, "x", at_most(1.2))


def cut(path: str, num_parts: int) -> str:
    """The rows of a file in so many parts, and a mixture of these in equal shares."""
    mix = Path(f"{path}.{num_parts}.mix.json")
    if mix.exists():
        return str(mix)

    names = [f"{path}.{number}-of-{num_parts}.jsonl" for number in range(num_parts)]
    with open(path, "rb") as file:
        lines = file.readlines()
    for number, name in enumerate(names):
        Path(name).write_bytes(b"".join(lines[number::num_parts]))
    mix.write_text(json.dumps({"parts": {f"part{number:02}": name for number, name in enumerate(names)}}))
    return str(mix)
