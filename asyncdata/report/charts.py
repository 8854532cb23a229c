"""The geometry of charts, in percent of their area. ``assets/blocks.html`` draws them as SVG, with a table of the data.

SVG of our own, as a page has lines and columns only, and text that keeps its size on a phone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_POINTS = 240
"""Points of a line, or columns: more cannot be told apart on a screen."""

_TIMES = ((1, "s"), (60, "min"), (3600, "h"), (86400, "d"))


class Tick(NamedTuple):
    """A label at a percent of an axis."""

    at: float
    label: str


class Axis(NamedTuple):
    """An axis from ``low`` to ``high``."""

    low: float
    high: float
    ticks: list[Tick]

    def at(self, value: float) -> float:
        """Where a value is, in percent."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)


class Series(NamedTuple):
    """Values over time; None where there is none.

    :ivar is_target: drawn dashed, in the colour of the series before it.
    """

    name: str
    values: Sequence[float | None]
    is_target: bool = False


class Curve(NamedTuple):
    """A series as the ``d`` of an SVG path; ``color`` is its number in the palette."""

    name: str
    path: str
    color: int
    is_target: bool


class Mark(NamedTuple):
    """A column, in percent; ``label`` says its value."""

    x: float
    width: float
    height: float
    label: str


class Chart(NamedTuple):
    """A chart over an x-axis, and its data.

    :ivar id: of its element, unique on the page.
    :ivar about: what it shows, in a sentence, for those who cannot see it.
    :ivar head: of the table of its data; ``rows``: one for each point on the x-axis, at ``at`` percent.
    """

    id: str
    title: str
    about: str
    unit: str
    x: Axis
    y: Axis
    at: list[float]
    head: list[str]
    rows: list[list[str]]
    columns: list[Mark] = []
    curves: list[Curve] = []
    form: str = "chart"


def columns(
    id: str, title: str, about: str, bins: Sequence[tuple[str, float]], *, of: str, unit: str, head: tuple[str, str]
) -> Chart:
    """A column for each bin, with its label and value.

    :param of: what the bins are of, for the x-axis; ``unit``: of the values.
    """
    high = max((value for _, value in bins), default=0)
    y = _axis(0, high)
    width = 100 / max(len(bins), 1)
    marks = [
        Mark(
            round(at * width + width * 0.06, 3), round(width * 0.88, 3), y.at(value), f"{label} {of}: {value:,} {unit}"
        )
        for at, (label, value) in enumerate(bins)
    ]
    every = math.ceil(len(bins) / 6)
    ticks = [Tick(round((at + 0.5) * width, 2), bins[at][0]) for at in range(0, len(bins), every or 1)]
    rows = [[label, f"{value:,}"] for label, value in bins]
    middles = [round((at + 0.5) * width, 2) for at in range(len(bins))]
    return Chart(id, title, about, unit, Axis(0, 100, ticks), y, middles, list(head), rows, columns=marks)


def lines(
    id: str,
    title: str,
    about: str,
    times: Sequence[float],
    series: Iterable[Series],
    *,
    unit: str,
    top: float | None = None,
) -> Chart:
    """A line for each series, over seconds.

    :param top: the end of the y-axis; None for what the values need.
    """
    series = list(series)
    high = max((value for one in series for value in one.values if value is not None), default=0)
    x, y = time_axis(0, max(times, default=1)), _axis(0, high if top is None else top)
    curves, color = [], -1
    for one in series:
        color += not one.is_target
        curves.append(Curve(one.name, _path(x, y, times, one.values), color, one.is_target))
    rows = [[duration(at), *(_cell(one.values[i], unit) for one in series)] for i, at in enumerate(times)]
    head = ["time", *(one.name for one in series)]
    return Chart(id, title, about, unit, x, y, [x.at(at) for at in times], head, rows, curves=curves)


def _path(x: Axis, y: Axis, times: Sequence[float], values: Sequence[float | None]) -> str:
    """A line that is broken where there is no value. A value alone is a dash, which can be seen."""
    pieces: list[list[str]] = [[]]
    for at, value in zip(times, values, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{x.at(at)} {round(100 - y.at(value), 2)}")
    return "".join(f"M{'L'.join(points)}{'h-1' if len(points) == 1 else ''}" for points in pieces if points)


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "–"

    return f"{value:.1f} %" if unit == "%" else short(value)


def _axis(low: float, high: float, num_ticks: int = 4) -> Axis:
    """From ``low`` to a round number above ``high``."""
    step = _nice((high - low) / num_ticks or 1)
    num = max(math.ceil((high - low) / step - 1e-9), 1)
    top = low + num * step
    return Axis(low, top, [Tick(round(100 * at / num, 2), short(low + at * step)) for at in range(num + 1)])


def _nice(value: float) -> float:
    """The least of 1, 2, 5, 10, 20 ... that is not below."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def time_axis(low: float, high: float) -> Axis:
    """Seconds since the start."""
    high = high if high > low else low + 1
    size, _ = _unit_of(high)
    step = _nice((high - low) / size / 5) * size
    first = math.ceil(low / step - 1e-9)
    times = [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]
    return Axis(low, high, [Tick(round(100 * (at - low) / (high - low), 2), duration(at)) for at in times])


def _unit_of(seconds: float) -> tuple[int, str]:
    return next(unit for unit in reversed(_TIMES) if abs(seconds) >= unit[0] * (2 if unit[0] > 1 else 0))


def duration(seconds: float) -> str:
    """Such as ``12.5 s``, ``90 s``, ``15 min`` or ``3.25 h``."""
    size, name = _unit_of(seconds)
    return f"{round(seconds / size, 2):,.4g} {name}"


def short(value: float) -> str:
    """Three digits and a unit of a thousand: ``0.125``, ``812``, ``81.2k``, ``8.12M``."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"

        value /= 1000
    return f"{value:.3g}T"
