"""``asyncdata run``: delivers the user's data as to a trainer, with progress, and reports how fast it was. ``asyncdata
demo``: kills a run with SIGKILL, resumes it, and compares it with the same run without a kill.

``--record`` writes a line of JSON per delivered sample, with a digest of its position and tokens.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from hashlib import blake2b
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from asyncdata.cli.options import loader_of, settle_kind
from asyncdata.cli.output import Output, fields, is_terminal, shown_path, table
from asyncdata.core.errors import EndOfData, WorkerError
from asyncdata.demo import tokenizer_folder, write_docstring_prompts
from asyncdata.report.figures import short
from asyncdata.workers.machine import num_usable_cpus

if TYPE_CHECKING:
    from io import FileIO

    from asyncdata.core.types import Sample
    from asyncdata.loader.loader import DataLoader
    from asyncdata.loader.statistics import Statistics


Mode = Literal["auto", "bar", "plain", "json", "none"]

_EVERY_S = {"bar": 0.1, "plain": 2.0, "json": 0.05, "none": math.inf}
_BAR_WIDTH = 12
_WAITS = {"bar": "bar", "plain": "lines", "json": "none", "none": "none"}
"""``--progress`` -> how waits are shown."""


def run(args: SimpleNamespace, output: Output) -> int:
    """The command."""
    settle_kind(args, output)
    began = time.monotonic()
    epochs = args.epochs or (None if args.num_batches else 1)
    loader = loader_of(args, epochs=epochs, progress=_ways_of_waits(args.progress))
    _resume(args, loader, output)
    with ExitStack() as stack:
        stack.enter_context(loader)
        # Unbuffered: after a kill, all batches before it are in the file.
        record = stack.enter_context(open(args.record, "ab", buffering=0)) if args.record is not None else None
        trial = _Trial(args, loader, record, epochs, began)
        trial.go()
        report = trial.report()
    output.put(report, _text)
    return 0


def _ways_of_waits(mode: str) -> str:
    return _WAITS.get(mode) or ("bar" if is_terminal(sys.stderr) else "lines")


def _resume(args: SimpleNamespace, loader: DataLoader[Any, Any], output: Output) -> None:
    """Continue from the snapshot, if that was asked for and the file exists."""
    if not args.resume:
        return

    if not os.path.exists(args.snapshot):
        output.say(f"there is no {args.snapshot} yet: starting from the beginning")
        return

    loader.restore(args.snapshot, allow_changed=args.allow_changed, same_rows=args.same_rows)
    output.say(f"resumed from {args.snapshot} at sample {loader.statistics().samples_total:,}")


class _Trial:
    """One run of the command, from where the loader is."""

    def __init__(
        self,
        args: SimpleNamespace,
        loader: DataLoader[Any, Any],
        record: FileIO | None,
        epochs: int | None,
        began: float,
    ) -> None:
        self._args, self._loader, self._record = args, loader, record
        self._limit: int | None = args.num_batches * args.batch_size if args.num_batches else None
        self._epochs = epochs
        self._rows_of_epoch = 0.0  # not known yet
        self._before = loader.statistics()
        self._first: Statistics | None = None
        self._first_index: int | None = None
        self._began = self._first_batch_at = self._ended = began
        self._snapshot_samples = self._before.samples_total
        self._num_batches = self._num_samples = self._num_tokens = 0
        self._digest = blake2b(digest_size=16)

    def go(self) -> None:
        """Deliver everything, with snapshots, and one at the end, also after an error or an interrupt."""
        progress = Progress(self._args.progress)
        try:
            with closing(progress):
                while (batch := self._next_batch()) is not None:
                    self._take(batch)
                    if self._args.snapshot and self._num_batches % self._args.snapshot_every == 0:
                        self._save()
                    if progress.is_due:
                        progress.show(self._reading())
                    if self._args.step_s:
                        threading.Event().wait(self._args.step_s)
                progress.show(msgspec.structs.replace(self._reading(), fraction=1.0))
        finally:
            self._ended = time.monotonic()
            self._save_what_was_done()

    def _next_batch(self) -> list[Sample] | None:
        size = self._args.batch_size
        if self._limit is not None:
            size = min(size, self._limit - self._before.samples_total - self._num_samples)
        if size <= 0:
            return None

        try:
            return self._loader.get_next_batch(size)
        except EndOfData as end:
            return end.samples or None

    def _take(self, batch: list[Sample]) -> None:
        """Count a batch, and append it to the record in one write."""
        digests = [sample_digest(sample) for sample in batch]
        self._digest.update(b"".join(digests))
        if self._record is not None:
            self._record.write(b"".join(map(record_line, batch, digests)))
        self._num_batches += 1
        self._num_samples += len(batch)
        self._num_tokens += sum(len(sample.tokens) for sample in batch)
        if self._first is None:
            self._first_index = batch[0].index
            self._first_batch_at = time.monotonic()
            self._first = self._loader.statistics()

    def _save(self) -> None:
        self._loader.save(self._args.snapshot)
        self._snapshot_samples = self._loader.statistics().samples_total

    def _save_what_was_done(self) -> None:
        """Save, unless nothing is new, or an interrupt came between the delivery of a batch and its record."""
        num_delivered = self._before.samples_total + self._num_samples
        is_news = num_delivered != self._snapshot_samples
        if self._args.snapshot and is_news and num_delivered == self._loader.statistics().samples_total:
            self._save()

    def _reading(self) -> Reading:
        now = self._loader.statistics()
        rows_per_s, tokens_per_s = self._rates(now, time.monotonic())
        return Reading(
            samples=now.samples_total,
            rows=_rows(now),
            epoch=now.epoch,
            seconds=time.monotonic() - self._began,
            rows_per_s=rows_per_s,
            tokens_per_s=tokens_per_s,
            channel_fill=min(1.0, now.ready_samples / now.capacity_samples),
            fraction=self._fraction(now),
            snapshot_samples=self._snapshot_samples,
        )

    def _fraction(self, now: Statistics) -> float:
        of_batches = now.samples_total / self._limit if self._limit else 0.0
        if self._epochs is None:
            return min(1.0, of_batches)

        rows_left = self._loader.state_dict().get("rows_left")  # estimated; unknown at the start of an epoch
        if rows_left is not None:
            self._rows_of_epoch = (_rows(now) + rows_left) / (now.epoch + 1)
        of_epochs = _rows(now) / (self._epochs * self._rows_of_epoch) if self._rows_of_epoch else 0.0
        return min(1.0, max(of_batches, of_epochs))

    def _rates(self, now: Statistics, until: float) -> tuple[float, float]:
        """Rows and tokens per second since the first batch; of the first batch if it is the only one."""
        since, began = self._first or self._before, self._first_batch_at
        if since.samples_total == now.samples_total:
            since, began = self._before, self._began
        seconds = max(until - began, 1e-9)
        return (_rows(now) - _rows(since)) / seconds, (now.tokens_total - since.tokens_total) / seconds

    def report(self) -> dict[str, Any]:
        """What is printed at the end; numbers are of this process, except ``samples_total`` and ``position``."""
        now, before = self._loader.statistics(), self._before
        rows_per_s, tokens_per_s = self._rates(now, self._ended)
        waited_s = now.data_wait_seconds_total - (self._first or before).data_wait_seconds_total
        return {
            "num_samples": self._num_samples,
            "num_batches": self._num_batches,
            "num_tokens": self._num_tokens,
            "first_index": self._first_index,
            "samples_total": now.samples_total,
            "position": f"{now.epoch}:{now.window}:{now.row}",
            "digest": self._digest.hexdigest(),
            "seconds": round(self._ended - self._began, 6),
            "first_batch_s": round(self._first_batch_at - self._began, 6) if self._first else None,
            "rows_per_s": round(rows_per_s, 3),
            "tokens_per_s": round(tokens_per_s, 3),
            "data_wait_share": round(min(1.0, waited_s / max(self._ended - self._first_batch_at, 1e-9)), 6),
            "dropped": _grown(now.dropped_total, before.dropped_total),
            "bad_rows": now.bad_rows_total - before.bad_rows_total,
            "worker_restarts": now.worker_restarts_total,
            "snapshot": os.path.abspath(self._args.snapshot) if self._args.snapshot else None,
        }


def _rows(now: Statistics) -> int:
    return now.groups_total + sum(now.dropped_total.values())


def _grown(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: number - before.get(name, 0) for name, number in now.items() if number > before.get(name, 0)}


def _text(report: dict[str, Any]) -> str:
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in report["dropped"].items())
    lines = [
        (
            "delivered",
            f"{report['num_samples']:,} samples in {report['num_batches']:,} batches, {report['num_tokens']:,} tokens",
        ),
        ("so far", f"{report['samples_total']:,} samples; the next position is {report['position']}"),
        ("dropped", dropped or "nothing"),
    ]
    if report["first_batch_s"] is not None:
        lines += [
            ("first batch", f"after {report['first_batch_s']:.2f} s"),
            ("rate", f"{report['rows_per_s']:,.0f} rows/s, {report['tokens_per_s']:,.0f} tokens/s"),
            ("data wait", f"{report['data_wait_share']:.1%} of the time after the first batch"),
        ]
    if report["worker_restarts"]:
        lines.append(("restarts", f"{report['worker_restarts']} workers were replaced"))
    if report["snapshot"]:
        lines.append(("snapshot", shown_path(report["snapshot"])))
    return fields([*lines, ("digest", f"{report['digest']} of positions and tokens")])


# How far it is, on stderr: a bar on a terminal, lines in a pipe, or JSON for a program


class Reading(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="progress"):
    """One measurement of a run in progress. Rates are since its first batch.

    :ivar samples: delivered, in this process and in those that it resumed.
    :ivar rows: samples, and rows that yielded none.
    :ivar seconds: since the command started.
    :ivar channel_fill: ready samples divided by the channel's capacity, 0 to 1.
    :ivar fraction: how much of the run is done, 0 to 1; an estimate where the number of rows is one.
    :ivar snapshot_samples: samples delivered when the last snapshot was written; 0 before there is one.
    """

    samples: int
    rows: int
    epoch: int
    seconds: float
    rows_per_s: float
    tokens_per_s: float
    channel_fill: float
    fraction: float
    snapshot_samples: int

    def line(self) -> str:
        """One line for people."""
        rates = f"{short(self.rows_per_s):>5} rows/s  {short(self.tokens_per_s):>5} tokens/s"
        return f"{self.fraction:4.0%}  {self.samples:,} samples  {rates}  channel {self.channel_fill:.0%} full"


class Progress:
    """Writes readings to stderr. ``auto`` is ``bar`` on a terminal and ``plain`` elsewhere."""

    def __init__(self, mode: Mode, *, indent: str = "") -> None:
        self._mode = mode if mode != "auto" else "bar" if is_terminal(sys.stderr) else "plain"
        self._indent = indent
        self._next_s = time.monotonic() + (_EVERY_S[self._mode] if self._mode == "plain" else 0.0)

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next reading. Making one takes longer than delivering a batch."""
        return self._mode != "none" and time.monotonic() >= self._next_s

    def show(self, reading: Reading) -> None:
        """Write a reading."""
        self._next_s = time.monotonic() + _EVERY_S[self._mode]
        if self._mode == "json":
            _write(msgspec.json.encode(reading).decode() + "\n")
        elif self._mode == "plain":
            _write(f"{self._indent}{reading.line()}\n")
        elif self._mode == "bar":
            bar = "#" * round(reading.fraction * _BAR_WIDTH)
            line = f"{self._indent}[{bar:<{_BAR_WIDTH}}] {reading.line()}"
            # The cursor is left at the line's start: the next reading, or a message, is written over it.
            _write(f"\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}\r")

    def close(self) -> None:
        """End the line of the bar. No further reading follows."""
        if self._mode == "bar":
            _write("\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


# The record


class Delivered(msgspec.Struct, frozen=True):
    """One line of a record.

    :ivar index: number of the sample in the run, from 0.
    :ivar digest: of its position and its tokens, as 32 hexadecimal digits.
    """

    index: int
    position: str
    num_tokens: int
    digest: str


def sample_digest(sample: Sample) -> bytes:
    """blake2b-128 of the sample's position in D and of its token ids."""
    state = blake2b(str(sample.position).encode(), digest_size=16)
    state.update(sample.tokens.astype("<i4", copy=False).tobytes())
    return state.digest()


def combined_digest(digests: Iterable[str]) -> str:
    """The digest of a sequence of samples, from theirs."""
    return blake2b(bytes.fromhex("".join(digests)), digest_size=16).hexdigest()


def record_line(sample: Sample, digest: bytes) -> bytes:
    """The line of a sample: index, position, path, byte_offset, num_bytes, num_tokens and digest."""
    values = {"index": sample.index, "position": str(sample.position)}
    if sample.source is not None:
        values |= {name: getattr(sample.source, name) for name in ("path", "byte_offset", "num_bytes")}
    return json.dumps({**values, "num_tokens": len(sample.tokens), "digest": digest.hex()}).encode() + b"\n"


def read_record(path: str | os.PathLike[str]) -> list[Delivered]:
    """The lines of a record. A last line that a kill has cut off is left out."""
    with open(path, "rb") as file:
        return [msgspec.json.decode(line, type=Delivered) for line in file if line.endswith(b"\n")]


# asyncdata demo

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
        output.data(_demo_text(outcome))
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


def _demo_text(outcome: Outcome) -> str:
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
