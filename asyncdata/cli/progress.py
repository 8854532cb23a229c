"""How far a run is, shown while it runs: a bar on a terminal, lines in a pipe, JSON for a program."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Literal, Protocol

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
    :ivar seconds: since this process began to wait for the first batch.
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
        """Rows and tokens by second."""
        return f"{si(self.rows_per_s):>5} rows/s  {si(self.tokens_per_s):>5} tokens/s"


class Meter(Protocol):
    """Shows readings."""

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next reading: they cost more than a batch does."""
        ...

    def show(self, reading: Reading) -> None:
        """This is how far it is."""
        ...

    def close(self) -> None:
        """No further reading will come."""
        ...


def meter(mode: Mode, *, indent: str = "") -> Meter:
    """The meter for stderr as it is."""
    if mode == "auto":
        mode = "bar" if is_terminal(sys.stderr) else "plain"
    match mode:
        case "bar":
            return _Bar(indent)
        case "json":
            return _Lines(_JSON_EVERY_S, 0.0, lambda reading: msgspec.json.encode(reading).decode())
        case "none":
            return _Nothing()
    return _Lines(_LINE_EVERY_S, _LINE_EVERY_S, lambda reading: indent + reading.line())


class _Clock:
    """Knows when the next reading is due."""

    def __init__(self, every_s: float, first_s: float = 0.0) -> None:
        self._every_s = every_s
        self._next = time.monotonic() + first_s

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def _shown(self) -> None:
        self._next = time.monotonic() + self._every_s


class _Nothing:
    is_due = False

    def show(self, reading: Reading) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines(_Clock):
    def __init__(self, every_s: float, first_s: float, line: Callable[[Reading], str]) -> None:
        super().__init__(every_s, first_s)
        self._line = line

    def show(self, reading: Reading) -> None:
        self._shown()
        sys.stderr.write(self._line(reading) + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        pass


class _Bar(_Clock):
    def __init__(self, indent: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(_BAR_EVERY_S)
        console = Console(file=sys.stderr)
        console.width = min(console.width, MAX_WIDTH)
        full = "\u2588" if console.encoding.startswith("utf") else "#"
        self._gauge = full, " " if console.no_color else full
        self._progress = Progress(
            *([TextColumn(indent[1:])] if indent else []),  # the columns have a space between them
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[rates]}", style="cyan"),
            TextColumn("channel {task.fields[channel]}"),
            console=console,
            expand=True,
            refresh_per_second=1 / _BAR_EVERY_S,
        )
        self._task = self._progress.add_task("", total=None, rates="starting the workers", channel="")
        self._progress.start()

    def show(self, reading: Reading) -> None:
        self._shown()
        self._progress.update(
            self._task,
            total=1.0,
            completed=reading.fraction,
            rates=reading.rates(),
            channel=self._channel(reading.channel_fill),
        )

    def _channel(self, fill: float) -> str:
        full, empty = self._gauge
        number = round(fill * _GAUGE_WIDTH)
        return f"[green]{full * number}[/][dim]{empty * (_GAUGE_WIDTH - number)}[/] {fill:4.0%}"

    def close(self) -> None:
        self._progress.stop()
