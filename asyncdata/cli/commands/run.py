"""``asyncdata run``: delivers the user's data as to a trainer, with progress, and reports how fast it was.

``--record`` writes a line of JSON per delivered sample, with a digest of its position and tokens.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from contextlib import ExitStack, closing
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from asyncdata.cli.options import loader_of, settle_kind
from asyncdata.cli.output import fields, is_terminal, shown_path
from asyncdata.core.errors import EndOfData
from asyncdata.report.figures import short

if TYPE_CHECKING:
    from collections.abc import Iterable
    from io import FileIO
    from types import SimpleNamespace

    from asyncdata.cli.output import Output
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
