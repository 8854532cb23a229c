"""Values of the stream over time, as lines of a chart."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asyncdata.report.charts import Series, lines
from asyncdata.report.figures import origins, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.report.charts import Chart
    from asyncdata.report.figures import Step
    from asyncdata.telemetry.reader import Run

__all__ = ("OverTime", "ratio")


class OverTime:
    """The steps of a run's stream, computed once for all charts.

    :ivar steps: with None between two starts.
    """

    def __init__(self, run: Run) -> None:
        self.steps: list[Step | None] = list(steps_of(run.stream, origins(run)[0]))
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


def ratio(part: float, whole: float) -> float:
    """The share; NaN of nothing."""
    return part / whole if whole else math.nan
