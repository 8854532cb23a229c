"""``asyncdata bench``: how fast the user's data comes on the user's machine, beside the tokenizer alone."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import threading
import time
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from asyncdata.cli.commands.bench_report import as_text
from asyncdata.cli.options import loader_of
from asyncdata.cli.output import log_to_stderr
from asyncdata.cli.row_kinds import settle_kind
from asyncdata.errors import WorkerError
from asyncdata.machine import num_usable_cpus

if TYPE_CHECKING:
    import argparse

    from asyncdata.cli.output import Output
    from asyncdata.loader import DataLoader

__all__ = ("run",)

BATCH = 32
_MAX_WORKERS = 8
_TIMEOUT_S = 120.0
_SHARE = 0.2
"""Of the time that was given, for each of: the function alone, the tokenizer alone, full rate, half rate."""

_WARM_SHARE = 0.25
"""Of each of those: the first part is not counted. Caches fill, and so does the read-ahead."""


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    log_to_stderr(is_verbose=args.verbose)
    settle_kind(args, output)
    if args.num_workers is None:
        args.num_workers = min(_MAX_WORKERS, num_usable_cpus())
    part_s, ends = _SHARE * args.seconds, time.perf_counter() + args.seconds
    knobs = {"buffer_size": args.buffer_size, "timeout_s": _TIMEOUT_S, "max_bad_rows": None}
    with loader_of(args, **knobs) as loader:
        output.say(f"at full rate, then at half of it, --num-workers {args.num_workers} ...")
        report = _full_rate(loader, part_s)
        report |= _half_rate(loader, report["rows_per_s"] / 2, part_s)
        report["memory_bytes"] = _tree_pss(os.getpid())
    output.say("the first batch of a new process ...")
    report["first_batch_s"] = _first_batch_s(args)
    output.say("the tokenizer alone, as often as there are workers ...")
    left_s = max(ends - time.perf_counter(), part_s)  # two parts, and the start of the processes
    report |= _alone(args, max(1, args.num_workers), min(part_s, left_s / 3))
    report |= {"num_workers": args.num_workers, "buffer_size": args.buffer_size, "num_cpus": num_usable_cpus()}
    if output.as_json:
        output.json(report)
    else:
        output.data(as_text(report))
    return 0


# In this process


def _full_rate(loader: DataLoader, seconds: float) -> dict[str, Any]:
    """Take batches as fast as they come."""
    loader.get_next_batch(BATCH)
    _take_for(loader, _WARM_SHARE * seconds)
    before, began, cpu = loader.statistics(), time.perf_counter(), time.process_time()
    _take_for(loader, (1 - _WARM_SHARE) * seconds)
    now, wall, cpu = loader.statistics(), time.perf_counter() - began, time.process_time() - cpu
    num_rows = now.samples_total - before.samples_total
    return {
        "num_samples": num_rows,
        "rows_per_s": num_rows / wall,
        "tokens_per_s": (now.tokens_total - before.tokens_total) / wall,
        "cpu_us_per_row": cpu / num_rows * 1e6,
    }


def _take_for(loader: DataLoader, seconds: float) -> None:
    """One batch at least."""
    until = time.perf_counter() + seconds
    loader.get_next_batch(BATCH)
    while time.perf_counter() < until:
        loader.get_next_batch(BATCH)


def _half_rate(loader: DataLoader, rows_per_s: float, seconds: float) -> dict[str, Any]:
    """Be a trainer whose step takes so long that it wants half of what could come."""
    _paced(loader, BATCH / rows_per_s, _WARM_SHARE * seconds)
    before, began = loader.statistics(), time.perf_counter()
    times = sorted(_paced(loader, BATCH / rows_per_s, (1 - _WARM_SHARE) * seconds))
    waited_s = loader.statistics().data_wait_seconds_total - before.data_wait_seconds_total
    return {
        "num_calls": len(times),
        "data_wait_share": min(1.0, waited_s / (time.perf_counter() - began)),
        "call_us": times[len(times) // 2] * 1e6,
        "call_p999_us": times[len(times) * 999 // 1000] * 1e6,
        "longest_call_us": times[-1] * 1e6,
    }


def _paced(loader: DataLoader, step_s: float, seconds: float) -> list[float]:
    """Seconds of each call; one at least."""
    times: list[float] = []
    pause = threading.Event()
    began = due = time.perf_counter()
    while due - began < seconds or not times:
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
    except OSError:  # it has ended since, or is not ours to look at
        return None

    children: list[str] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            with open(path, encoding="ascii") as file:
                children += file.read().split()
        except OSError:
            continue
    return total + sum(_tree_pss(int(child)) or 0 for child in children)


# In processes of their own


def _child(args: argparse.Namespace, said: IO[str], **told: Any) -> subprocess.Popen[str]:
    """A process of the bench. Into a file it can say as much as it likes, and a pipe that nobody reads is soon full."""
    options = {name: value for name, value in vars(args).items() if name != "run"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "asyncdata.cli.commands.bench_child", json.dumps({"args": options, **told})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
        # Whatever this process could import, and in the same order; a tokenizer has one thread, as in a worker.
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
            "TOKENIZERS_PARALLELISM": "false",
            "RAYON_NUM_THREADS": "1",
        },
    )


def _answer(process: subprocess.Popen[str], said: IO[str]) -> dict[str, Any]:
    """What it printed, once it has ended.

    :raises WorkerError: if it failed.
    """
    printed, _ = process.communicate("go\n")
    if process.returncode:
        said.seek(0)
        raise WorkerError(f"a process of the bench ended with exit status {process.returncode}: {said.read().strip()}")

    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def _first_batch_s(args: argparse.Namespace) -> float:
    """Seconds from a process's birth to its first batch."""
    with TemporaryFile("w+", errors="replace") as said:
        began = time.perf_counter()
        with _child(args, said) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - began
            if not line:
                _answer(process, said)
            process.communicate()
    return seconds


def _alone(args: argparse.Namespace, num_processes: int, seconds: float) -> dict[str, Any]:
    """Rows by second of so many processes together, which begin together."""
    with TemporaryFile("w+", errors="replace") as said:
        running = [
            _child(args, said, number=number, num_processes=num_processes, seconds=seconds)
            for number in range(num_processes)
        ]
        try:
            for process in running:
                assert process.stdout is not None
                process.stdout.readline()
            found = [_answer(process, said) for process in running]
        finally:
            for process in running:
                with process:
                    process.kill()
    rates = [one["tokenizer_rows_per_s"] for one in found]
    return {
        "tokenize_fn_rows_per_s": sum(one["tokenize_fn_rows_per_s"] for one in found),
        "tokenizer_rows_per_s": None if None in rates else sum(rates),
    }
