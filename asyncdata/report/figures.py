"""Charts, and the steps of a run over time that they show. Values from telemetry, no markup."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from asyncdata.telemetry.reader import Run, Start, difference
from asyncdata.telemetry.records import Interval, RewardCounts

MAX_POINTS = 240
"""Points of a line, or columns: more cannot be told apart on a screen."""

_TIMES = ((1, "s"), (60, "min"), (3600, "h"), (86400, "d"))


class Tick(NamedTuple):
    """A label at a percent of an axis."""

    at: float
    label: str


class Axis(NamedTuple):
    """An axis from 0 to ``high``."""

    high: float
    ticks: list[Tick]

    def at(self, value: float) -> float:
        """Where a value is, in percent."""
        return round(100 * value / self.high, 2)


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
    y = _axis(high)
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
    return Chart(id, title, about, unit, Axis(100, ticks), y, middles, list(head), rows, columns=marks)


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
    x, y = _time_axis(max(times, default=1)), _axis(high if top is None else top)
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


def _axis(high: float) -> Axis:
    """From 0 to a round number that is not below ``high``, with about four ticks."""
    step = _nice(high / 4 or 1)
    num = max(math.ceil(high / step - 1e-9), 1)
    return Axis(num * step, [Tick(round(100 * at / num, 2), short(at * step)) for at in range(num + 1)])


def _nice(value: float) -> float:
    """The least of 1, 2, 5, 10, 20 ... that is not below."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _time_axis(high: float) -> Axis:
    """Seconds since the start."""
    high = high if high > 0 else 1
    size, _ = _unit_of(high)
    step = _nice(high / size / 5) * size
    times = [at * step for at in range(math.floor(high / step + 1e-9) + 1)]
    return Axis(high, [Tick(round(100 * at / high, 2), duration(at)) for at in times])


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


_Key = TypeVar("_Key", int, str)
_Number = TypeVar("_Number", int, float, "RewardCounts")


class Step(NamedTuple):
    """What came between two recorded moments of a start.

    :ivar since: the earlier moment, in seconds of the run; ``until``: the later one.
    :ivar added: the totals that were added; all else as at the later moment.
    """

    since: float
    until: float
    added: Interval

    @property
    def seconds(self) -> float:
        """How long it took, on a clock that is never set back."""
        return self.added.elapsed_s

    def percent_of(self, name: str) -> float:
        """The share of its time that waits with this name took; or, for ``step``, the trainer's own work."""
        spent = {**self.added.wait_s, "step": self.added.step_s}
        return 100 * spent.get(name, 0.0) / (max(sum(spent.values()), self.seconds) or 1.0)


def origins(run: Run) -> tuple[dict[str, float], float]:
    """For each start, by its path, the moment that is 0 on the run's own clock; and how long the run took.

    The clock stands still between a generation of starts and the next one, which may be days later.
    """
    found, passed = dict[str, float](), 0.0
    for generation in run.generations:
        began = min(start.header.at for start in generation)
        found |= {start.path: began - passed for start in generation}
        passed += max(start.last_at for start in generation) - began
    return found, passed


def steps_of(
    starts: Iterable[Start], began: Mapping[str, float], max_points: int = MAX_POINTS, *, of_calls: bool = False
) -> Iterator[Step | None]:
    """The steps of starts that follow each other, about ``max_points`` of them. None stands between two starts, and
    where a state was loaded: the totals before and after it are not to be compared.

    :param began: as :func:`origins` gives it.
    :param of_calls: each step ends with a moment at which further calls were answered, or one waits: the trainer's own
        time is recorded when it ends.
    """
    streams = [(began[start.path], stream) for start in starts for stream in _streams(start)]
    if of_calls:
        streams = [(origin, _with_calls(stream)) for origin, stream in streams]
    every = max(math.ceil(sum(len(stream) for _, stream in streams) / max_points), 1)
    for number, (origin, stream) in enumerate(streams):
        if number:
            yield None
        kept = [*stream[:-1:every], stream[-1]]
        for before, after in itertools.pairwise(kept):
            yield Step(before.at - origin, after.at - origin, difference(before, after))


def _streams(start: Start) -> list[list[Interval]]:
    """The moments of a start, apart for each time that its stream began."""
    found: list[list[Interval]] = []
    for moment in start.intervals:
        if moment.begins or not found:
            found.append([])
        found[-1].append(moment)
    return found


def _with_calls(stream: list[Interval]) -> list[Interval]:
    later = [after for before, after in itertools.pairwise(stream) if after.calls > before.calls or after.waiting_s]
    return [*stream[:1], *later]


def summed(counts: Iterable[dict[_Key, _Number]]) -> dict[_Key, _Number]:
    """The sums by key, without those that are 0."""
    total: dict[_Key, _Number] = {}
    for one in counts:
        for key, value in one.items():
            total[key] = total[key] + value if key in total else value
    return {key: value for key, value in total.items() if value}


def quantile(histogram: dict[int, int], share: float) -> int | None:
    """The lower bound of the bucket in which the quantile is; None of an empty histogram."""
    left = share * sum(histogram.values())
    for edge, count in sorted(histogram.items()):
        left -= count
        if count and left <= 0:
            return edge
    return None


class OverTime:
    """Steps, for charts over time.

    :ivar steps: with None between two starts.
    """

    def __init__(self, steps: Iterable[Step | None]) -> None:
        self.steps = list(steps)
        self._times: list[float] = []
        for step in self.steps:
            self._times.append(step.until if step is not None else max(self._times, default=0.0))

    def line(self, name: str, value: Callable[[Step], float], *, is_target: bool = False) -> Series:
        """A value of every step; NaN is drawn as a gap."""
        values = [math.nan if step is None else value(step) for step in self.steps]
        return Series(name, [None if math.isnan(number) else round(number, 4) for number in values], is_target)

    def chart(
        self, id: str, title: str, about: str, series: Sequence[Series], unit: str, top: float | None = None
    ) -> Chart:
        """A chart of lines; ``top`` is the end of the y-axis, or None for what the values need."""
        return lines(id, title, about, self._times, series, unit=unit, top=top)

    def percents(self, id: str, title: str, about: str, name: str, share: Callable[[Step], float]) -> Chart:
        """A chart of one line: a share, 0 to 1, as a percentage."""
        return self.chart(id, title, about, [self.line(name, lambda step: 100 * share(step))], unit="%", top=100.0)
