"""Shows how far a run is: as a bar on a terminal, as lines in a pipe, or as JSON for a program."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from asyncdata.cli.output import MAX_WIDTH, is_terminal, si

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("Meter", "Mode", "Reading", "meter")

Mode = Literal["auto", "bar", "plain", "json", "none"]

_LINE_EVERY_S = 2.0
_JSON_EVERY_S = 0.05
_BAR_EVERY_S = 0.1
_GAUGE_WIDTH = 8


class Reading(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="progress"):
    """A moment of a run. Rates are since its first batch.

    :ivar samples: delivered, in this process and those it resumed.
    :ivar rows: samples, and rows that yielded none.
    :ivar seconds: since the command began.
    :ivar channel_fill: ready samples by the channel's capacity, 0 to 1.
    :ivar fraction: how much of the run is done, 0 to 1; where rows are only estimated, about that.
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
        """For a log."""
        return f"{self.fraction:4.0%}  {self.samples:,} samples  {self.rates()}  channel {self.channel_fill:.0%} full"

    def rates(self) -> str:
        """Rows and tokens per second."""
        return f"{si(self.rows_per_s):>5} rows/s  {si(self.tokens_per_s):>5} tokens/s"


class Meter:
    """Shows readings, at most one in ``every_s`` seconds and the first after ``first_s``; ``inf`` for none."""

    def __init__(
        self,
        write: Callable[[Reading], object],
        every_s: float,
        first_s: float = 0.0,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._write = write
        self._every_s = every_s
        self._next = time.monotonic() + first_s
        self._close = close

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next reading. Making one costs more than a batch."""
        return time.monotonic() >= self._next

    def show(self, reading: Reading) -> None:
        """Show a reading."""
        self._next = time.monotonic() + self._every_s
        self._write(reading)

    def close(self) -> None:
        """No further reading will come."""
        self._close()


def meter(mode: Mode, *, indent: str = "") -> Meter:
    """The meter for stderr as it is."""
    if mode == "auto":
        mode = "bar" if is_terminal(sys.stderr) else "plain"
    match mode:
        case "bar":
            return _bar(indent)
        case "json":
            return Meter(lambda reading: _say(msgspec.json.encode(reading).decode()), _JSON_EVERY_S)
        case "none":
            return Meter(lambda _: None, math.inf, math.inf)
    return Meter(lambda reading: _say(indent + reading.line()), _LINE_EVERY_S, _LINE_EVERY_S)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _bar(indent: str) -> Meter:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stderr)
    console.width = min(console.width, MAX_WIDTH)
    full = "\u2588" if console.encoding.startswith("utf") else "#"
    empty = " " if console.no_color else full
    progress = Progress(
        *([TextColumn(indent[1:])] if indent else []),  # the columns have a space between them
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:3.0f}%"),
        TextColumn("{task.fields[rates]}", style="cyan"),
        TextColumn("channel {task.fields[channel]}"),
        console=console,
        expand=True,
        refresh_per_second=1 / _BAR_EVERY_S,
    )
    task = progress.add_task("", total=None, rates="starting the workers", channel="")
    progress.start()

    def show(reading: Reading) -> None:
        number = round(reading.channel_fill * _GAUGE_WIDTH)
        gauge = f"[green]{full * number}[/][dim]{empty * (_GAUGE_WIDTH - number)}[/] {reading.channel_fill:4.0%}"
        progress.update(task, total=1.0, completed=reading.fraction, rates=reading.rates(), channel=gauge)

    return Meter(show, _BAR_EVERY_S, close=progress.stop)
