"""``asyncdata bench``: how fast the user's data comes on the user's machine, beside the tokenizer alone."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from asyncdata.cli.commands.bench_report import as_text
from asyncdata.cli.commands.watched_run import environment
from asyncdata.cli.options import loader_of
from asyncdata.cli.row_kinds import settle_kind
from asyncdata.core.errors import WorkerError
from asyncdata.loader.config import BadRows
from asyncdata.workers.machine import num_usable_cpus

if TYPE_CHECKING:
    import argparse

    from asyncdata.cli.output import Output
    from asyncdata.loader.loader import DataLoader

__all__ = ("run",)

BATCH = 32
_MAX_WORKERS = 8
_TIMEOUT_S = 120.0
_SHARE = 0.2
"""Of the given time, for each of: the tokenize function alone, the tokenizer alone, full rate, half rate."""

_WARM_UP_SHARE = 0.25
"""Of each of these: the first part is not counted, while caches and the read-ahead fill."""


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    settle_kind(args, output)
    if args.num_workers is None:
        args.num_workers = min(_MAX_WORKERS, num_usable_cpus())
    part_s, ends = _SHARE * args.seconds, time.perf_counter() + args.seconds
    bad_rows = BadRows(policy=args.bad_rows, max=None)
    with loader_of(args, buffer_size=args.buffer_size, bad_rows=bad_rows, timeout_s=_TIMEOUT_S) as loader:
        output.say(f"at full rate, then at half of it, --num-workers {args.num_workers} ...")
        loader.get_next_batch(BATCH)
        report = _taken(loader, part_s)
        at_half = _taken(loader, part_s, step_s=2 * BATCH / report["rows_per_s"])
        report |= {name: at_half[name] for name in at_half if name not in report or "call" in name or "wait" in name}
        report["memory_bytes"] = _tree_pss(os.getpid())
    output.say("the first batch of a new process ...")
    began_s = time.monotonic()
    (started,) = _in_processes(args, [{"part": "first_batch", "began_s": began_s}])
    output.say("the tokenizer alone, as often as there are workers ...")
    num_processes = max(1, args.num_workers)
    left_s = max(ends - time.perf_counter(), part_s)  # two parts, and the start of the processes
    told = {"part": "tokenizer_alone", "num_processes": num_processes, "seconds": min(part_s, left_s / 3)}
    alone = _in_processes(args, [{**told, "number": number} for number in range(num_processes)])
    report |= started | {name: _total([one[name] for one in alone]) for name in alone[0]}
    report |= {"num_workers": args.num_workers, "buffer_size": args.buffer_size, "num_cpus": num_usable_cpus()}
    output.put(report, as_text)
    return 0


def _taken(loader: DataLoader, seconds: float, step_s: float = 0.0) -> dict[str, Any]:
    """Take batches for this long, as a trainer does whose step takes ``step_s``."""
    _times(loader, _WARM_UP_SHARE * seconds, step_s)
    before, began, cpu = loader.statistics(), time.perf_counter(), time.process_time()
    times = sorted(_times(loader, (1 - _WARM_UP_SHARE) * seconds, step_s))
    now, wall, cpu = loader.statistics(), time.perf_counter() - began, time.process_time() - cpu
    num_samples = now.samples_total - before.samples_total
    waited_s = now.data_wait_seconds_total - before.data_wait_seconds_total
    return {
        "num_samples": num_samples,
        "rows_per_s": num_samples / wall,
        "tokens_per_s": (now.tokens_total - before.tokens_total) / wall,
        "cpu_us_per_row": cpu / num_samples * 1e6,
        "num_calls": len(times),
        "data_wait_share": min(1.0, waited_s / wall),
        "call_us": times[len(times) // 2] * 1e6,
        "call_p999_us": times[len(times) * 999 // 1000] * 1e6,
        "longest_call_us": times[-1] * 1e6,
    }


def _times(loader: DataLoader, seconds: float, step_s: float) -> list[float]:
    """Seconds of each call; of one at least."""
    times: list[float] = []
    pause = threading.Event()
    began = due = time.perf_counter()
    while time.perf_counter() - began < seconds or not times:
        pause.wait(max(0.0, due - time.perf_counter()))
        asked = time.perf_counter()
        loader.get_next_batch(BATCH)
        times.append(time.perf_counter() - asked)
        due += step_s
    return times


def _tree_pss(pid: int) -> int | None:
    """Bytes of a process and all its children as proportional set size; None where the system does not say."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            total = next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
        children = []
        for path in glob.glob(f"/proc/{pid}/task/*/children"):
            with open(path, encoding="ascii") as file:
                children += file.read().split()
    except OSError:  # the process or a thread of it has ended since, or is another user's
        return None

    return total + sum(_tree_pss(int(child)) or 0 for child in children)


def _total(rates: list[float | None]) -> float | None:
    return None if None in rates else sum(rate for rate in rates if rate is not None)


def _in_processes(args: argparse.Namespace, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the parts find, each in a process of its own, all at the same time.

    :raises WorkerError: if one fails; it says why on stderr.
    """
    options = {name: value for name, value in vars(args).items() if name != "run"}
    command = [sys.executable, "-P", "-m", "asyncdata.cli.commands.bench_child"]
    # A tokenizer has one thread, as in a worker.
    variables = environment() | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": variables}
    running = [subprocess.Popen([*command, json.dumps({"args": options, **part})], **pipes) for part in parts]
    try:
        for process in running:
            next(iter(process.stdout or ()), "")  # until it is ready
        found = [process.communicate("go\n")[0] for process in running]
    finally:
        for process in running:
            with process:
                process.kill()
    for process in running:
        if process.returncode:
            raise WorkerError(f"a process of the bench ended with exit status {process.returncode}")

    return [json.loads(text) for text in found]
