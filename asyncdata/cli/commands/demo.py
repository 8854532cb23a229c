"""``asyncdata demo``: kills a run with SIGKILL, resumes it, and compares it with the same run without a kill."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.cli.commands.run import Progress, Reading, combined_digest, read_record
from asyncdata.cli.output import table
from asyncdata.core.errors import WorkerError
from asyncdata.demo import tokenizer_folder, write_docstring_prompts
from asyncdata.report.figures import short
from asyncdata.workers.machine import num_usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import SimpleNamespace

    from asyncdata.cli.commands.run import Delivered
    from asyncdata.cli.output import Output

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


def demo(args: SimpleNamespace, output: Output) -> int:
    """The command."""
    with tempfile.TemporaryDirectory(prefix="asyncdata-demo-") as temporary:
        folder = Path(temporary if args.keep is None else args.keep)
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("run.snapshot*"), *folder.glob("*.record.jsonl")):
            old.unlink()
        num_rows, outcome = _prove(args, output, folder)
    kept = None if args.keep is None else str(folder.absolute())
    if output.as_json:
        output.json({**msgspec.structs.asdict(outcome), "rows": num_rows, "folder": kept})
    else:
        output.say("")
        output.data(_text(outcome))
        output.data(*_verdict(outcome))
    if kept is not None:
        output.say(f"\nData, snapshot and records are in {kept}")
    return 0 if outcome.is_identical and outcome.repeated_identical else 1


def _prove(args: SimpleNamespace, output: Output, folder: Path) -> tuple[int, Outcome]:
    """Make the data, run, kill, resume, run without a kill, and compare; also the number of rows."""
    num_workers: int = args.num_workers or min(_MAX_WORKERS, num_usable_cpus())
    output.say(f"asyncdata demo: Python {platform.python_version()}, {num_usable_cpus()} CPUs", "bold")

    output.say("\n1  Prompts from the docstrings of this Python's standard library", "bold")
    data = folder / "prompts.jsonl"
    num_rows = write_docstring_prompts(data, args.rows)
    output.say(f"{_INDENT}{num_rows:,} rows, {short(data.stat().st_size)}B of JSONL")
    num_batches = num_rows * _EPOCHS // _BATCH_SIZE
    every, step_s = num_batches // _SNAPSHOTS, min(_MAX_STEP_S, _RUN_S / num_batches)
    paced = ["--snapshot", str(folder / "run.snapshot"), "--snapshot-every", str(every), "--step-s", f"{step_s:.6f}"]
    paced += [] if args.telemetry is None else ["--telemetry", args.telemetry]

    output.say(
        f"\n2  A run of {_EPOCHS} epochs with {num_workers} workers, slowed down; it will be killed with SIGKILL",
        "bold",
    )
    least_ahead = every * _BATCH_SIZE // 3
    words = [*paced, "--num-workers", str(num_workers)]
    killed = _delivered(data, "killed", words, lambda now: _may_be_killed(now, least_ahead))
    output.say(f"{_INDENT}killed after {len(killed):,} samples", "bold red")

    output.say(
        f"\n3  A new process continues from the snapshot, with {num_workers + 1} workers, slowed down too", "bold"
    )
    resumed = _delivered(data, "resumed", [*paced, "--num-workers", str(num_workers + 1), "--resume"])
    resumed_at = resumed[0].index if resumed else len(killed)
    output.say(f"{_INDENT}resumed at sample {resumed_at:,}")
    output.say(f"{_INDENT}{len(killed) - resumed_at:,} samples came again: those after the last snapshot")

    output.say("\n4  The same run, never interrupted, with 1 worker, as fast as it goes", "bold")
    return num_rows, compare(killed, resumed, _delivered(data, "uninterrupted", ["--num-workers", "1"]))


def _delivered(
    data: Path, name: str, options: Sequence[str], is_enough: Callable[[Reading], bool] | None = None
) -> list[Delivered]:
    """Run ``asyncdata run`` in a new process, and show its progress; what it delivered.

    :param is_enough: kill the process at the first reading for which it is True.
    :raises WorkerError: if the run failed, or ended before it was killed.
    """
    record = data.parent / f"{name}.record.jsonl"
    said = list[str]()
    with (
        _process([*_run_words(data, record), *options]) as process,
        contextlib.closing(Progress("auto", indent=_INDENT)) as progress,
    ):
        reading = None
        for reading in _readings(process, said):
            if is_enough is not None and is_enough(reading):
                process.kill()
                break

            if progress.is_due:
                progress.show(reading)
        if reading is not None:
            progress.show(reading)
        process.communicate()
    if process.returncode != (0 if is_enough is None else -signal.SIGKILL):
        if process.returncode == 0:
            raise WorkerError("the run was over before it could be killed; try more --rows")

        why = "\n".join(said) or "it said nothing"
        raise WorkerError(f"a run ended with exit status {process.returncode}: {why}")

    return read_record(record)


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
