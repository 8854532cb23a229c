"""Measure the library and print a table: ``python -m tests.benchmarks.run --tokenizer DIR [--only first_batch,order]``.

Each figure is taken in fresh processes, what is compared is interleaved, and medians are shown with their range.
Absolute figures belong to the machine; what is quoted elsewhere are the ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.inputs import prompts
from tests.benchmarks.shuffle_quality import shuffle_quality

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
NUM_ROUNDS = 5


def probe(name: str, **arguments: Any) -> dict[str, float]:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.probe", name, json.dumps(arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")

    return {key: float(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def rounds(*calls: Callable[[], dict[str, float]], num_rounds: int = NUM_ROUNDS) -> list[dict[str, list[float]]]:
    """Run the calls in turn, again and again; every figure of each."""
    results: list[dict[str, list[float]]] = [{} for _ in calls]
    for _ in range(num_rounds):
        for call, result in zip(calls, results, strict=True):
            for key, value in call().items():
                result.setdefault(key, []).append(value)
    return results


def show(values: list[float], unit: str = "") -> str:
    return f"{statistics.median(values):.3g}{unit} ({min(values):.3g} to {max(values):.3g})"


class Bench:
    """The inputs, and the rows of the table."""

    def __init__(self, folder: Path, tokenizer: str, large_mb: int) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.small = str(prompts(folder, 50))
        self.large_mb = large_mb
        self.rows: list[dict[str, str]] = []

    @property
    def large(self) -> str:
        return str(prompts(self.folder, self.large_mb))

    def report(self, goal: str, what: str, value: str) -> None:
        self.rows.append({"goal": goal, "what": what, "value": value})
        print(f"{goal:4} {what:68} {value}", flush=True)

    def first_batch(self) -> None:
        small, large = rounds(
            lambda: probe("first_batch", path=self.small, tokenizer=self.tokenizer, num_workers=2),
            lambda: probe("first_batch", path=self.large, tokenizer=self.tokenizer, num_workers=2),
        )
        self.report(
            "S5", "first batch of 32, from the process's first statement, 50 MB", show(small["first_batch_s"], " s")
        )
        self.report("S5", f"the same, {self.large_mb} MB", show(large["first_batch_s"], " s"))
        ratios = [a / b for a, b in zip(large["first_batch_s"], small["first_batch_s"], strict=True)]
        self.report("S5", "ratio of the two", show(ratios))

    def memory(self) -> None:
        arguments = {"tokenizer": self.tokenizer, "num_rows": 8000}
        for num_workers in (2, 8):
            small, large = rounds(
                lambda: probe("steady", path=self.small, num_workers=num_workers, watch=True, **arguments),  # noqa: B023
                lambda: probe("steady", path=self.large, num_workers=num_workers, watch=True, **arguments),  # noqa: B023
                num_rounds=3,
            )
            self.report("S6", f"whole process tree, {num_workers} workers, 50 MB", show(small["peak_pss_mb"], " MB"))
            self.report("S6", f"the same, {self.large_mb} MB", show(large["peak_pss_mb"], " MB"))

    def throughput(self) -> None:
        ours, raw = rounds(
            lambda: probe("steady", path=self.small, tokenizer=self.tokenizer, num_workers=2),
            lambda: probe("raw_in_processes", path=self.small, tokenizer=self.tokenizer, num_processes=2),
        )
        self.report("S2", "steady rows/s, shuffled, 2 workers", show(ours["rows_per_s"]))
        self.report("S2", "encode_batch_fast alone in 2 processes, rows/s", show(raw["rows_per_s"]))
        ratios = [a / b for a, b in zip(ours["rows_per_s"], raw["rows_per_s"], strict=True)]
        self.report("S2", "ratio of the two", show(ratios))

    def scaling(self) -> None:
        one, two = rounds(
            lambda: probe("steady", path=self.small, tokenizer=self.tokenizer, num_workers=1, num_rows=10_000),
            lambda: probe("steady", path=self.small, tokenizer=self.tokenizer, num_workers=2, num_rows=20_000),
            num_rounds=3,
        )
        ratios = [b / a for a, b in zip(one["rows_per_s"], two["rows_per_s"], strict=True)]
        self.report("S12", "rows/s with 2 workers over 1 worker", show(ratios))

    def trainer_cost(self) -> None:
        (call,) = rounds(lambda: probe("call_cost", path=self.small, tokenizer="bytes", num_workers=2))
        self.report("S8", "get_next_batch(32), everything ready, median", show(call["call_us_p50"], " us"))
        self.report("S8", "the same, 99th percentile", show(call["call_us_p99"], " us"))
        arguments = {"path": self.small, "tokenizer": "bytes", "num_workers": 2, "buffer_size": 8192}
        (steady,) = rounds(lambda: probe("steady", num_rows=70_000, **arguments))
        self.report(
            "S8", "CPU of the trainer's process per row, all threads", show(steady["parent_cpu_us_per_row"], " us")
        )
        self.report("S8", "rows/s with a tokenize function that costs nothing", show(steady["rows_per_s"]))
        (busy,) = rounds(lambda: probe("busy_trainer", rows_per_s=20_000, **arguments), num_rounds=3)
        self.report("S8", "beside a trainer that keeps the GIL, 20k rows/s wanted, had", show(busy["rows_per_s"]))
        self.report("S8", "the same, longest stall", show(busy["worst_stall_ms"], " ms"))
        slow, idle = rounds(
            lambda: probe("busy_trainer", rows_per_s=10_000, **arguments),
            lambda: probe("idle_trainer"),
            num_rounds=3,
        )
        ratios = [a / b for a, b in zip(slow["turns_per_busy_s"], idle["turns_per_s"], strict=True)]
        self.report("S8", "its speed at 10k rows/s over its speed alone", show(ratios))

    def resume(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            base = {"path": self.large, "tokenizer": self.tokenizer, "num_workers": 2}
            probe("make_snapshots", snapshot=f"{folder}/s", **base)
            start, end = rounds(
                lambda: probe("resume", snapshot=f"{folder}/s.0", **base),
                lambda: probe("resume", snapshot=f"{folder}/s.99", **base),
            )
        self.report("S7", f"resume at 0 % of {self.large_mb} MB, first batch", show(start["resume_s"], " s"))
        self.report("S7", "resume at 99 %, first batch", show(end["resume_s"], " s"))
        ratios = [b / a for a, b in zip(start["resume_s"], end["resume_s"], strict=True)]
        self.report("S7", "ratio of the two", show(ratios))

    def order(self) -> None:
        for name, (whole, tail) in shuffle_quality(self.folder, probe).items():
            self.report("S11", f"deff at batch 256, {name}: whole epoch / last 1 %", f"{whole:.2f} / {tail:.2f}")


BENCHES = ("first_batch", "memory", "throughput", "scaling", "trainer_cost", "resume", "order")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="a folder with tokenizer.json")
    parser.add_argument(
        "--folder", default=str(Path(tempfile.gettempdir()) / "asyncdata_benchmarks"), help="for inputs"
    )
    parser.add_argument("--large-mb", type=int, default=5000, help="size of the large input")
    parser.add_argument("--only", default=",".join(BENCHES), help="which, separated by commas")
    parser.add_argument("--json", metavar="FILE", help="write the table there too")
    arguments = parser.parse_args()
    bench = Bench(Path(arguments.folder), arguments.tokenizer, arguments.large_mb)
    for name in arguments.only.split(","):
        getattr(bench, name)()
    if arguments.json:
        table = {"python": platform.python_version(), "machine": platform.platform(), "rows": bench.rows}
        Path(arguments.json).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
