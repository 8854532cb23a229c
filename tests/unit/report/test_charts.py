"""The geometry of charts."""

from __future__ import annotations

import re

import pytest

from asyncdata.report.charts import Series, columns, duration, lines, short, strips, time_axis


def test_a_column_is_as_high_as_its_value_on_the_axis():
    chart = columns("a", "A", "about", [("1", 50), ("2", 0), ("3", 180)], of="tokens", unit="samples", head=("x", "y"))

    assert chart.y.high == 200
    assert [mark.height for mark in chart.columns] == [25, 0, 90]
    assert [mark.label for mark in chart.columns][2] == "3 tokens: 180 samples"
    assert chart.rows == [["1", "50"], ["2", "0"], ["3", "180"]]
    assert all(0 <= mark.x and mark.x + mark.width <= 100 for mark in chart.columns)


def test_a_line_goes_through_its_values_and_breaks_where_there_is_none():
    series = [
        Series("a", [0, 50, None, 100]),
        Series("goal", [10, 10, 10, 10], is_target=True),
        Series("b", [1, 2, 3, 4]),
    ]
    chart = lines("a", "A", "about", [0, 10, 20, 40], series, unit="%", top=100)

    assert chart.curves[0].path == "M0.0 100.0L25.0 50.0M100.0 0.0h-1"
    assert [(curve.color, curve.is_target) for curve in chart.curves] == [(0, False), (0, True), (1, False)]
    assert chart.head == ["time", "a", "goal", "b"]
    assert chart.rows[2] == ["20 s", "–", "10.0 %", "3.0 %"]
    assert chart.at == [0, 25, 50, 100]


@pytest.mark.parametrize("values", [[], [0.0], [None], [1e-9], [5.0] * 3, [1e15, 1.0]])
def test_every_series_has_axes_with_few_ticks_from_end_to_end(values):
    times = [float(at) for at in range(len(values))]
    chart = lines("a", "A", "about", times, [Series("a", values)], unit="x")

    assert (chart.y.ticks[0].at, chart.y.ticks[-1].at) == (0, 100)
    assert 2 <= len(chart.y.ticks) <= 6
    assert max([value for value in values if value is not None], default=0) <= chart.y.high * (1 + 1e-9)
    assert 1 <= len(chart.x.ticks) <= 8


@pytest.mark.parametrize("seconds", [0.0, 0.5, 7.0, 90.0, 3_000.0, 50_000.0, 2_000_000.0])
def test_the_ticks_of_a_time_axis_are_few_and_on_it(seconds):
    axis = time_axis(0, seconds)

    assert 2 <= len(axis.ticks) <= 8
    assert all(0 <= tick.at <= 100.001 for tick in axis.ticks)
    assert len({tick.label for tick in axis.ticks}) == len(axis.ticks)


def test_the_parts_of_a_bin_are_stacked_from_the_bottom_and_as_high_as_their_shares():
    trainer, wait, other = strips([(0, 5), (5, 10)], 20, [[0.75, 0.25, 0], [0.5, 0, 0.1]], 3)

    assert trainer == "M0.0 25.0H25.0v75.0H0.0zM25.0 50.0H50.0v50.0H25.0z"
    assert wait == "M0.0 0.0H25.0v25.0H0.0z"
    assert re.fullmatch(r"M25.0 40.0H50.0v10.0H25.0z", other)


def test_figures_have_three_digits_and_a_unit():
    assert [short(value) for value in (0, 0.1234, 812, 999.6, 81_234, 8_123_456, 3e13)] == [
        *("0", "0.123", "812", "1k", "81.2k", "8.12M", "30T")
    ]
    assert [duration(value) for value in (0, 0.25, 90, 900, 11_700, 259_200)] == [
        *("0 s", "0.25 s", "90 s", "15 min", "3.25 h", "3 d")
    ]
