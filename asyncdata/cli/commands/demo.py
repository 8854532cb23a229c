"""``asyncdata demo``: kills a run with SIGKILL, resumes it, and compares it with the same run without a kill."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.cli.commands.run_record import combined_digest, read_record
from asyncdata.cli.output import si, table
from asyncdata.cli.progress import Progress, Reading
from asyncdata.core.errors import WorkerError
from asyncdata.demo import tokenizer_folder, write_docstring_prompts
from asyncdata.workers.machine import num_usable_cpus

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from asyncdata.cli.commands.run_record import Delivered
    from asyncdata.cli.output import Output

__all__ = ("Outcome", "compare", "run")

_EPOCHS = 2
_BATCH_SIZE = 32
_RUN_S = 4.0
_MAX_STEP_S = 0.05
_SNAPSHOTS = 15
_KILL_AT = 0.55
_MAX_WORKERS = 4
_INDENT = "   "


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the comparison.

    :ivar is_identical: whether the killed and resumed run delivered what the uninterrupted one did.
    :ivar samples: samples of the killed run up to its snapshot, and of the run that resumed it.
    :ivar digest: of these.
    :ivar killed_at: samples delivered when the kill came.
    :ivar resumed_at: the sample that the resumed run began with.
    :ivar repeated: samples delivered after the snapshot and before the kill: they came again, as they should.
    :ivar repeated_identical: whether they were the same again.
    :ivar first_difference: the first sample that differs; None if none does.
    """

    is_identical: bool
    samples: int
    tokens: int
    digest: str
    uninterrupted_samples: int
    uninterrupted_tokens: int
    uninterrupted_digest: str
    killed_at: int
    resumed_at: int
    repeated: int
    repeated_identical: bool
    first_difference: int | None


def run(args: argparse.Namespace, output: Output) -> int:
    """The command."""
    with _folder(args.keep) as folder:
        outcome = _Demo(args, output, folder).run()
    return 0 if outcome.is_identical and outcome.repeated_identical else 1


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """The folder of the files; without ``--keep`` it is removed at the end."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="asyncdata-demo-") as name:
            yield Path(name)
        return

    folder = Path(keep)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("run.snapshot*"), *folder.glob("*.record.jsonl")):
        old.unlink()
    yield folder


class _Demo:
    """The demo, from its data to the comparison."""

    def __init__(self, args: argparse.Namespace, output: Output, folder: Path) -> None:
        self._output = output
        self._folder = folder
        self._is_kept = args.keep is not None
        self._recorded: list[str] = [] if args.telemetry is None else ["--telemetry", args.telemetry]
        self._max_rows: int = args.rows
        self._num_workers: int = args.num_workers or min(_MAX_WORKERS, num_usable_cpus())
        self._data = folder / "prompts.jsonl"
        self._facts: dict[str, Any] = {}

    def run(self) -> Outcome:
        """Make the data, run, kill, resume, run without a kill, and compare."""
        self._output.say(f"asyncdata demo: Python {platform.python_version()}, {num_usable_cpus()} CPUs", "bold")
        num_batches = self._write_data() * _EPOCHS // _BATCH_SIZE
        step_s, every = min(_MAX_STEP_S, _RUN_S / num_batches), num_batches // _SNAPSHOTS
        paced = ["--snapshot", str(self._folder / "run.snapshot"), "--snapshot-every", str(every)]
        paced += ["--step-s", f"{step_s:.6f}", *self._recorded]
        killed = self._run_and_kill(paced, every * _BATCH_SIZE // 3)
        resumed = self._resume(paced, killed, step_s)
        outcome = compare(killed, resumed, self._run_through())
        self._report(outcome)
        return outcome

    def _write_data(self) -> int:
        self._step(1, "Prompts from the docstrings of this Python's standard library")
        began = time.monotonic()
        rows = write_docstring_prompts(self._data, self._max_rows)
        seconds = time.monotonic() - began
        self._note(f"{rows:,} rows, {si(self._data.stat().st_size)}B of JSONL, written in {seconds:.1f} s")
        self._facts["rows"] = rows
        return rows

    def _run_and_kill(self, paced: list[str], least_ahead: int) -> list[Delivered]:
        num_workers = self._num_workers
        self._step(2, f"A run of {_EPOCHS} epochs with {num_workers} workers; it will be killed with SIGKILL")
        self._run("killed", [*paced, "--num-workers", str(num_workers)], lambda now: _may_be_killed(now, least_ahead))
        found = self._record("killed")
        self._note(f"killed after {len(found):,} samples", "bold red")
        return found

    def _resume(self, paced: list[str], killed: list[Delivered], step_s: float) -> list[Delivered]:
        num_workers = self._num_workers + 1
        self._step(3, f"A new process continues from the snapshot, with {num_workers} workers")
        report = self._run("resumed", [*paced, "--num-workers", str(num_workers), "--resume"])
        resumed_at = report["samples_total"] - report["num_samples"]
        self._note(f"resumed at sample {resumed_at:,}; first batch {report['first_batch_s']:.2f} s after its start")
        self._note(f"{len(killed) - resumed_at:,} samples came again: those after the last snapshot")
        step = f"a pretended training step of {1000 * step_s:.1f} ms"
        self._note(f"{step} waited for data {report['data_wait_share']:.1%} of the time")
        self._facts |= {name: report[name] for name in ("first_batch_s", "data_wait_share")}
        return self._record("resumed")

    def _run_through(self) -> list[Delivered]:
        self._step(4, "The same run, never interrupted, with 1 worker, as fast as it goes")
        report = self._run("uninterrupted", ["--num-workers", "1"])
        self._note(f"{report['rows_per_s']:,.0f} rows/s, {report['tokens_per_s']:,.0f} tokens/s")
        self._facts |= {name: report[name] for name in ("rows_per_s", "tokens_per_s")}
        return self._record("uninterrupted")

    def _run(
        self, name: str, options: Sequence[str], is_enough: Callable[[Reading], bool] | None = None
    ) -> dict[str, Any]:
        """Run ``asyncdata run`` in a new process, and show its progress; its report.

        :param is_enough: kill the process at the first reading for which it is True; nothing is reported then.
        :raises WorkerError: if the run failed, or ended before it was killed.
        """
        words = [*_run_words(self._data, self._record_path(name)), *options]
        started, said = time.monotonic(), list[str]()
        first_batch_s = 0.0
        with _process(words) as process, contextlib.closing(Progress("auto", indent=_INDENT)) as progress:
            reading = None
            for reading in _readings(process, said):
                first_batch_s = first_batch_s or time.monotonic() - started
                if is_enough is not None and is_enough(reading):
                    process.kill()
                    break

                if progress.is_due:
                    progress.show(reading)
            if reading is not None:
                progress.show(reading)
            printed, _ = process.communicate()
        if is_enough is not None and process.returncode == -signal.SIGKILL:
            return {}

        if process.returncode != 0:
            why = "\n".join(said) or "it said nothing"
            raise WorkerError(f"a run ended with exit status {process.returncode}: {why}")

        if is_enough is not None:
            raise WorkerError("the run was over before it could be killed; try more --rows")

        report: dict[str, Any] = json.loads(printed)
        return report | {"first_batch_s": round(first_batch_s, 3)}

    def _record_path(self, name: str) -> Path:
        return self._folder / f"{name}.record.jsonl"

    def _record(self, name: str) -> list[Delivered]:
        return read_record(self._record_path(name))

    def _step(self, number: int, title: str) -> None:
        self._output.say(f"\n{number}  {title}", "bold")

    def _note(self, text: str, style: str = "") -> None:
        self._output.say(_INDENT + text, style)

    def _report(self, outcome: Outcome) -> None:
        folder = str(self._folder.absolute()) if self._is_kept else None
        if self._output.as_json:
            self._output.json({**msgspec.structs.asdict(outcome), **self._facts, "folder": folder})
        else:
            self._output.say("")
            self._output.data(_text(outcome))
            self._output.data(*_verdict(outcome))
        if folder is not None:
            self._output.say(f"\nData, snapshot and records are in {folder}")


def _run_words(data: Path, record: Path) -> list[str]:
    """``asyncdata run`` as the demo uses it; ``-P`` and PYTHONPATH: it imports what this process can."""
    words = [sys.executable, "-P", "-m", "asyncdata", "run", str(data), "--tokenizer", tokenizer_folder()]
    words += ["--apply-chat-template", "--label-key", "label", "--batch-size", str(_BATCH_SIZE)]
    return [*words, "--epochs", str(_EPOCHS), "--record", str(record), "--progress", "json", "--json"]


@contextlib.contextmanager
def _process(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process with its output in pipes. It ends with the ``with`` block, at the latest."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with subprocess.Popen(words, text=True, env=variables, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def _readings(process: subprocess.Popen[str], said: list[str]) -> Iterator[Reading]:
    """The readings of a run, until it ends. Other lines that it writes to stderr are added to ``said``."""
    for line in process.stderr or ():
        try:
            yield msgspec.json.decode(line, type=Reading)
        except msgspec.DecodeError:
            said.append(line.rstrip())


def _text(outcome: Outcome) -> str:
    joined = (f"{outcome.samples:,}", f"{outcome.tokens:,}", outcome.digest)
    whole = (f"{outcome.uninterrupted_samples:,}", f"{outcome.uninterrupted_tokens:,}", outcome.uninterrupted_digest)
    head = ("", "samples", "tokens", "digest of all positions and tokens")
    return table([head, ("killed and resumed", *joined), ("never interrupted", *whole)])


def _verdict(outcome: Outcome) -> tuple[str, str]:
    """The last line, and its style."""
    if outcome.first_difference is not None:
        return f"DIFFERENT from sample {outcome.first_difference:,} on", "bold red"

    if not outcome.repeated_identical:
        return "DIFFERENT: the samples that came again are not those of the first time", "bold red"

    return "identical: no sample lost, repeated or out of order", "bold green"


def _may_be_killed(now: Reading, least_ahead: int) -> bool:
    """Whether the run is past its middle, and some samples after its last snapshot, so that some are repeated."""
    is_ahead = now.samples - now.snapshot_samples > least_ahead
    return now.snapshot_samples > 0 and now.fraction > (_KILL_AT if is_ahead else _KILL_AT + 0.2)


def compare(killed: list[Delivered], resumed: list[Delivered], uninterrupted: list[Delivered]) -> Outcome:
    """Compare the killed run up to where the resumed one began, and the resumed one, with the uninterrupted run."""
    resumed_at = resumed[0].index if resumed else len(killed)
    joined = killed[:resumed_at] + resumed
    again = killed[resumed_at:]
    pairs = zip_longest(joined, uninterrupted)
    return Outcome(
        is_identical=joined == uninterrupted,
        samples=len(joined),
        tokens=sum(item.num_tokens for item in joined),
        digest=combined_digest(item.digest for item in joined),
        uninterrupted_samples=len(uninterrupted),
        uninterrupted_tokens=sum(item.num_tokens for item in uninterrupted),
        uninterrupted_digest=combined_digest(item.digest for item in uninterrupted),
        killed_at=len(killed),
        resumed_at=resumed_at,
        repeated=len(again),
        repeated_identical=again == resumed[: len(again)],
        first_difference=next((number for number, (one, other) in enumerate(pairs) if one != other), None),
    )
