"""Shows how far a run is on stderr: as a bar on a terminal, as lines in a pipe, or as JSON for a program."""

from __future__ import annotations

import math
import shutil
import sys
import time
from typing import Literal

import msgspec

from asyncdata.cli.output import is_terminal, si

__all__ = ("Mode", "Progress", "Reading")

Mode = Literal["auto", "bar", "plain", "json", "none"]

_EVERY_S = {"bar": 0.1, "plain": 2.0, "json": 0.05, "none": math.inf}
_BAR_WIDTH = 12


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
        rates = f"{si(self.rows_per_s):>5} rows/s  {si(self.tokens_per_s):>5} tokens/s"
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
