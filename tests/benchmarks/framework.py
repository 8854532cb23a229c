"""What every figure is made with: a probe in a fresh process, rounds in turn, ratios pair by pair, goals, and rows.

Absolute figures belong to the machine and the hour. A ratio is taken of two figures of the same round, and its median
over the rounds is what counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.benchmarks.backends import installed
from tests.benchmarks.inputs import prompts

ROOT = Path(__file__).parents[2]
LOOK_EVERY_S, LOOKING_SHARE = 0.2, 0.02
MAX_WORDS_OF_ERROR = 1500


class MeasurementError(Exception):
    """What was measured ended with an error, and what it said."""

    @property
    def last_words(self) -> str:
        return next((line for line in reversed(str(self).splitlines()) if line.strip()), "")[:120]


def _tree_pss(root: psutil.Process) -> int:
    """Proportional set size of a process and all its children, in bytes."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # ended since, or about to
            total += process.memory_full_info().pss
    return total


def _watch(pid: int, peak: list[int], done: threading.Event) -> None:
    pause_s = LOOK_EVERY_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while not done.wait(pause_s):
            began = time.perf_counter()
            peak[0] = max(peak[0], _tree_pss(psutil.Process(pid)))
            pause_s = max(LOOK_EVERY_S, (time.perf_counter() - began) / LOOKING_SHARE)


def measured(command, environment=None, *, watched=False, timeout_s=900):
    """What ``command`` prints as its last line; watched, with ``peak_pss_mb``."""
    peak, done = [0], threading.Event()
    options: dict[str, Any] = {"cwd": ROOT, "env": os.environ | (environment or {}), "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, **options) as process,
    ):
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, done))
        if watched:
            watcher.start()
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers too
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

            raise MeasurementError(f"{' '.join(command)} took more than {timeout_s} s") from None
        finally:
            done.set()
            if watched:
                watcher.join()
        errors.seek(0)
        if process.returncode:
            raise MeasurementError(f"{' '.join(command)} failed:\n{errors.read()[-MAX_WORDS_OF_ERROR:]}")

    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found | ({"peak_pss_mb": peak[0] / 1e6} if watched else {})


Figures = dict[str, list[float]]
"""Every figure of something measured, by name, a value a round."""


class Goal(NamedTuple):
    """What a median must be: ``sign`` is ``<=`` or ``>=``."""

    sign: str
    bound: float

    def is_reached(self, value: float) -> bool:
        return value <= self.bound if self.sign == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


at_least, at_most = partial(Goal, ">="), partial(Goal, "<=")


@dataclass
class Row:
    """A line of the table: a value a round, or a note why there is none. Without a goal, ``is_reached`` is None."""

    code: str
    what: str
    unit: str = ""
    values: list[float] = field(default_factory=list)
    goal: str = ""
    is_reached: bool | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        return {True: "reached", False: "missed", None: ""}[self.is_reached]

    @property
    def result(self) -> str:
        return f"{show(self.values)} {self.unit}".strip() if self.values else self.note

    def __str__(self) -> str:
        return f"{self.code:4} {self.what:66} {self.goal:>9}  {self.result:40} {self.verdict}".rstrip()


def show(values: list[float]) -> str:
    """Median, range and number."""
    found = statistics.median(values), min(values), max(values)
    median, least, most = (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" for value in found)
    return median if len(values) == 1 else f"{median} ({least} to {most}, n={len(values)})"


def rounds(*calls: Callable[[], dict[str, float]], num_rounds: int) -> list[Figures]:
    """Run the calls in turn, again and again; every figure of each."""
    results: list[Figures] = [{} for _ in calls]
    for _ in range(num_rounds):
        for call, result in zip(calls, results, strict=True):
            for key, value in call().items():
                result.setdefault(key, []).append(value)
    return results


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def percent(shares: list[float]) -> list[float]:
    return [100 * share for share in shares]


def over(one: Figures, other: Figures, key: str = "rows_per_s") -> list[float]:
    """The ratios of this figure."""
    return ratios(one[key], other[key])


class Bench:
    """The inputs, and the rows and data of the figure that is being taken. ``quick`` ones tell whether everything runs,
    and not how fast; ``data`` is for the plots, some of it only if it ``draws``."""

    num_workers = 2

    def __init__(self, folder, tokenizer, peers, large_mb, *, quick, draws=False):
        self.folder, self.tokenizer, self.peers, self.quick, self.draws = folder, tokenizer, peers, quick, draws
        self.small_mb, self.fresh_mb, self.large_mb = (5, 20, 100) if quick else (50, 300, large_mb)
        self.num_rounds, self.num_long_rounds = (2, 1) if quick else (5, 3)
        self.fast_backends = installed()
        self.backends = ["hf", *self.fast_backends]
        self.rows, self.data = [], {}
        settings = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._environment = {"XDG_CACHE_HOME": str(folder / "cache"), **settings}

    def input(self, num_megabytes: int) -> str:
        return str(prompts(self.folder, num_megabytes))

    @property
    def small(self) -> str:
        """50 MB of fresh text."""
        return self.input(self.small_mb)

    @property
    def fresh(self) -> str:
        """300 MB of it: for what is too fast for the small one."""
        return self.input(self.fresh_mb)

    @property
    def large(self) -> str:
        """The small one many times."""
        return self.input(self.large_mb)

    def rounds(self, *calls: Callable[[], dict[str, float]], num_rounds: int = 0) -> list[Figures]:
        """So many; or few, as of what takes long."""
        return rounds(*calls, num_rounds=num_rounds or self.num_long_rounds)

    def probe(self, name: str, **arguments: Any) -> dict[str, float]:
        """One measurement of ours in a process of its own."""
        return self.probe_of("tests.benchmarks.probe", name, **arguments)

    def probe_of(self, module, name, *, watched=False, timeout_s=900, **arguments):
        """One measurement by ``module``, in a process of its own."""
        command = [sys.executable, "-m", module, name, json.dumps(arguments)]
        found = measured(command, self._environment, watched=watched, timeout_s=timeout_s)
        return {key: float(value) for key, value in found.items()}

    def report(self, code: str, what: str, values: list[float], unit: str = "", goal: Goal | None = None) -> None:
        verdict = None if goal is None or self.quick else goal.is_reached(statistics.median(values))
        self._add(Row(code, what, unit, values, str(goal or ""), verdict))

    def note(self, code: str, what: str, why: str) -> None:
        self._add(Row(code, what, note=why))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(row, flush=True)

    def kept(self) -> dict[str, Any]:
        """The figure's rows and data, as JSON has them."""
        return {"rows": [asdict(row) for row in self.rows], "data": self.data}

    def taken(self, measure: Callable[[Bench], None]) -> dict[str, Any]:
        """Take a figure; and how long it took."""
        self.rows, self.data = [], {}
        began = time.perf_counter()
        measure(self)
        return {**self.kept(), "seconds": round(time.perf_counter() - began, 1)}
