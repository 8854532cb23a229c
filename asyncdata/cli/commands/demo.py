"""``asyncdata demo``: kills a run with SIGKILL, resumes it, and compares it with the same run without a kill."""

from __future__ import annotations

import contextlib
import platform
import signal
import tempfile
import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.cli.commands.run_record import combined_digest, read_record
from asyncdata.cli.commands.watched_run import RunProcess
from asyncdata.cli.output import si, table
from asyncdata.cli.progress import meter
from asyncdata.core.errors import WorkerError
from asyncdata.demo import tokenizer_folder, write_docstring_prompts
from asyncdata.workers.machine import num_usable_cpus

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from asyncdata.cli.commands.run_record import Delivered
    from asyncdata.cli.output import Output
    from asyncdata.cli.progress import Reading

__all__ = ("Outcome", "compare", "run")

_EPOCHS = 2
_BATCH_SIZE = 32
_RUN_S = 4.0
_MAX_STEP_S = 0.05
_SNAPSHOTS = 15
_KILL_AT = 0.55
_MAX_WORKERS = 4
_INDENT = "   "
_RUNS = ("killed", "resumed", "uninterrupted")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the comparison found.

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
        self._max_rows: int = args.rows
        self._num_workers: int = args.num_workers or min(_MAX_WORKERS, num_usable_cpus())
        self._data = folder / "prompts.jsonl"
        self._facts: dict[str, Any] = {}

    def run(self) -> Outcome:
        """Make the data, run, kill, resume, run without a kill, and compare."""
        self._output.say(f"asyncdata demo: Python {platform.python_version()}, {num_usable_cpus()} CPUs", "bold")
        rows = self._write_data()
        num_batches = rows * _EPOCHS // _BATCH_SIZE
        pace = {
            "--snapshot": self._folder / "run.snapshot",
            "--snapshot-every": num_batches // _SNAPSHOTS,
            "--step-s": f"{min(_MAX_STEP_S, _RUN_S / num_batches):.6f}",
        }
        self._run_and_kill(pace)
        self._resume(pace)
        self._run_through()
        outcome = compare(*map(self._record, _RUNS))
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

    def _run_and_kill(self, pace: dict[str, Any]) -> None:
        num_workers = self._num_workers
        self._step(2, f"A run of {_EPOCHS} epochs with {num_workers} workers; it will be killed with SIGKILL")
        least = int(pace["--snapshot-every"]) * _BATCH_SIZE // 3
        with self._start("killed", {**pace, "--num-workers": num_workers}) as process:
            self._watch(process, lambda now: _may_be_killed(now, least))
            if process.kill() != -signal.SIGKILL:
                process.report()
                raise WorkerError("the run was over before it could be killed; try more --rows")

        self._note(f"killed after {len(self._record('killed')):,} samples", "bold red")

    def _resume(self, pace: dict[str, Any]) -> None:
        num_workers = self._num_workers + 1
        self._step(3, f"A new process continues from the snapshot, with {num_workers} workers")
        with self._start("resumed", {**pace, "--num-workers": num_workers}, "--resume") as process:
            self._watch(process)
            report = process.report()
            first_batch_s = process.first_batch_s or 0.0
        resumed_at = report["samples_total"] - report["num_samples"]
        repeated = len(self._record("killed")) - resumed_at
        self._note(f"resumed at sample {resumed_at:,}; first batch {first_batch_s:.2f} s after its start")
        self._note(f"{repeated:,} samples came again: those after the last snapshot")
        step = f"a pretended training step of {1000 * float(pace['--step-s']):.1f} ms"
        self._note(f"{step} waited for data {report['data_wait_share']:.1%} of the time")
        self._facts |= {"first_batch_s": round(first_batch_s, 3), "data_wait_share": report["data_wait_share"]}

    def _run_through(self) -> None:
        self._step(4, "The same run, never interrupted, with 1 worker, as fast as it goes")
        with self._start("uninterrupted", {"--num-workers": 1}) as process:
            self._watch(process)
            report = process.report()
        self._note(f"{report['rows_per_s']:,.0f} rows/s, {report['tokens_per_s']:,.0f} tokens/s")
        self._facts |= {name: report[name] for name in ("rows_per_s", "tokens_per_s")}

    def _start(self, name: str, options: dict[str, Any], *flags: str) -> RunProcess:
        options = {
            "--tokenizer": tokenizer_folder(),
            "--label-key": "label",
            "--batch-size": _BATCH_SIZE,
            "--epochs": _EPOCHS,
            "--record": self._record_path(name),
            **options,
        }
        words = [str(word) for pair in options.items() for word in pair]
        return RunProcess([str(self._data), "--apply-chat-template", *words, *flags])

    def _watch(self, process: RunProcess, is_enough: Callable[[Reading], bool] = lambda _: False) -> None:
        """Show its readings until it ends, or until one of them is enough."""
        with contextlib.closing(meter("auto", indent=_INDENT)) as shown:
            reading = None
            for reading in process.readings():
                if is_enough(reading):
                    break

                if shown.is_due:
                    shown.show(reading)
            if reading is not None:
                shown.show(reading)

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
            self._say_verdict(outcome)
        if folder is not None:
            self._output.say(f"\nData, snapshot and records are in {folder}")

    def _say_verdict(self, outcome: Outcome) -> None:
        if outcome.first_difference is not None:
            self._output.data(f"DIFFERENT from sample {outcome.first_difference:,} on", "bold red")
        elif not outcome.repeated_identical:
            self._output.data("DIFFERENT: the samples that came again are not those of the first time", "bold red")
        else:
            self._output.data("identical: no sample lost, repeated or out of order", "bold green")


def _text(outcome: Outcome) -> str:
    joined = (f"{outcome.samples:,}", f"{outcome.tokens:,}", outcome.digest)
    whole = (f"{outcome.uninterrupted_samples:,}", f"{outcome.uninterrupted_tokens:,}", outcome.uninterrupted_digest)
    head = ("", "samples", "tokens", "digest of all positions and tokens")
    return table([head, ("killed and resumed", *joined), ("never interrupted", *whole)])


def _may_be_killed(now: Reading, least_ahead: int) -> bool:
    """In the middle, and some samples after the last snapshot, so that some are repeated; but not too late."""
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
