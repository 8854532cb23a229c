"""What a page is made of: the geometry of charts, figures from telemetry, samples, and the texts of users."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.report.figures import lines, origins, short, summed
from asyncdata.report.page import Run, visible
from asyncdata.telemetry.reader import read
from tests.support.examples import in_ci
from tests.support.parts import (
    MAX_SAMPLE_CHARS,
    Samples,
    Series,
    ShownSample,
    ShownText,
    by_rank,
    duration,
    quantile,
    script_json,
    steps_of,
)
from tests.support.report_pages import write_run_of
from tests.support.telemetry_files import interval, start, write


def test_a_line_goes_through_its_values_and_breaks_where_there_is_none():
    goal = Series("goal", [10, 10, 10, 10], is_target=True)
    series = [Series("a", [0, 50, None, 100]), goal, Series("b", [1, 2, 3, 4])]
    chart = lines("a", "A", "about", [0, 10, 20, 40], series, unit="%", top=100)
    assert chart.curves[0].path == "M0.0 100.0L25.0 50.0M100.0 0.0h-1"
    assert [(curve.color, curve.is_target) for curve in chart.curves] == [(0, False), (0, True), (1, False)]
    assert chart.head == ["time", "a", "goal", "b"]
    assert chart.rows[2] == ["20 s", "–", "10.0 %", "3.0 %"]
    assert chart.at == [0, 25, 50, 100]


@pytest.mark.parametrize("values", [[], [0.0], [None], [1e-9], [5.0] * 3, [1e15, 1.0]])
def test_every_series_has_axes_with_few_ticks_from_end_to_end(values):
    chart = lines("a", "A", "about", list(map(float, range(len(values)))), [Series("a", values)], unit="x")
    assert (chart.y.ticks[0].at, chart.y.ticks[-1].at) == (0, 100)
    assert 2 <= len(chart.y.ticks) <= 6
    assert max([value for value in values if value is not None], default=0) <= chart.y.high * (1 + 1e-9)
    assert 1 <= len(chart.x.ticks) <= 8


def test_numbers_have_three_digits_and_a_unit():
    figures = {0: "0", 0.1234: "0.123", 812: "812", 999.6: "1k", 81_234: "81.2k", 8_123_456: "8.12M", 3e13: "30T"}
    times = {0: "0 s", 0.25: "0.25 s", 90: "90 s", 900: "15 min", 11_700: "3.25 h", 259_200: "3 d"}
    assert {value: short(value) for value in figures} == figures
    assert {value: duration(value) for value in times} == times


def test_a_quantile_is_the_bucket_that_has_it_and_sums_leave_out_what_is_zero():
    wanted = {0.01: 4, 0.5: 4, 0.51: 16, 0.95: 16, 0.96: 64, 0.99: 64, 1.0: 256}
    assert {share: quantile({4: 50, 16: 45, 64: 4, 256: 1}, share) for share in wanted} == wanted
    assert quantile({}, 0.5) is None
    assert summed([{"a": 1, "b": 0}, {"a": 2, "c": 3}]) == {"a": 3, "c": 3}


def steps_in(folder, *moments, **settings):
    """The steps of a run of these moments."""
    write(folder / "rank-00000-0000.jsonl", [start(), *moments])
    run = read(folder)
    return list(steps_of(run.stream, origins(run)[0], **settings))


@pytest.mark.parametrize("max_points", [1, 3, 7, 1000])
def test_fewer_steps_have_the_same_totals_and_the_same_ends(tmp_path, max_points):
    write_run_of(tmp_path, ranks=1, samples=0, intervals=50)
    run = read(tmp_path)
    steps = [step for step in steps_of(run.stream, origins(run)[0], max_points) if step is not None]
    assert len(steps) <= max_points + 1
    assert (steps[0].since, steps[-1].until) == (0, 250)
    assert all(before.until == after.since for before, after in zip(steps, steps[1:], strict=False))
    assert sum(step.added.samples for step in steps) == 50 * 4 * 40
    assert sum(step.seconds for step in steps) == 250


def test_totals_before_and_after_a_state_was_loaded_are_not_compared(tmp_path):
    moments = [interval(0, 0, elapsed, groups, 0) for elapsed, groups in enumerate((0, 40, 80, 20, 60))]
    moments[3] = msgspec.structs.replace(moments[3], begins=True)
    steps = steps_in(tmp_path, *moments)
    assert [None if step is None else step.added.samples for step in steps] == [160, 160, None, 160]
    assert by_rank(read(tmp_path))[0].calls == 40  # the calls of before count: the time was spent


def test_the_time_of_a_call_is_shown_until_it_ended_also_over_moments_without_an_answer(tmp_path):
    moments = [interval(0, 0, elapsed, 40 * elapsed, 0) for elapsed in range(5)]
    nothing = {"calls": 0, "wait_s": {}, "step_s": 0.0}
    moments[1:3] = [msgspec.structs.replace(moment, **nothing) for moment in moments[1:3]]
    found = [(s.since, s.until, s.added.calls) for s in steps_in(tmp_path, *moments, of_calls=True) if s is not None]
    assert found == [(0, 15, 30), (15, 20, 10)]


ANY_TEXT = st.text(st.characters(exclude_categories=()))  # with lone surrogates


def test_text_stays_as_it_is_and_what_cannot_be_seen_has_its_code_point():
    assert visible("naïve 😀 قريب\n\tx") == "naïve 😀 قريب\n\tx"
    assert visible("a\u202eb\x00\ud83d") == "a⟨U+202E⟩b⟨U+0000⟩⟨U+D83D⟩"
    assert script_json(["</script>", "<!--", "\u2028"]) == r'["\u003c/script\u003e","\u003c!--","\u2028"]'


@in_ci(max_examples=30)
@given(
    st.recursive(
        ANY_TEXT | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner)
    ),
    ANY_TEXT,
)
def test_json_in_a_script_is_the_value_and_cannot_end_it_and_no_text_turns_what_follows(value, text):
    found = script_json(value)
    assert json.loads(found) == value
    assert not set("<>&\u2028\u2029") & set(found)
    assert all(char.isprintable() or char in "\n\t" for char in visible(text))


def shown(*samples, **limits):
    """Samples on a page."""
    found = Samples(**limits)
    for one in samples:
        found.add(one)
    return found


def sample(*runs):
    return ShownSample(position="0:0:1", place="a.jsonl:2", texts=[ShownText("", list(runs))])


def test_what_cannot_be_seen_is_shown_in_every_text_of_a_sample():
    bad = "\u202e"
    hidden = ShownSample(position="0:0:1", place=f"a{bad}", source=bad, reason=bad, facts={bad: bad})
    assert bad not in script_json(shown(hidden, sample(Run(bad))).shown)


def test_of_a_long_sample_the_first_and_the_last_half_are_shown_with_a_note_of_how_much_is_not():
    half, trained = MAX_SAMPLE_CHARS // 2, {"is_trained": True}
    (found,) = shown(sample(Run("12", **trained), Run("a" * 999_994), Run("34"), Run("56", **trained))).shown
    note = f"\n⟨… {1_000_000 - MAX_SAMPLE_CHARS:,} characters are not shown …⟩\n"
    runs = [["12", 1], ["a" * (half - 2), 0], [note, 4], ["a" * (half - 4), 0], ["34", 0], ["56", 1]]
    assert found["texts"] == [["", runs]]


@pytest.mark.parametrize("limits", [{"max_samples": 2}, {"max_bytes": 100_000}], ids=["samples", "bytes"])
def test_samples_beyond_the_most_are_counted(limits):
    found = shown(*[sample(Run("é" * MAX_SAMPLE_CHARS))] * 50, **limits)
    assert found.is_full
    assert len(found.shown) + found.num_left_out == 50
    size = len(script_json(found.shown).encode())
    assert len(found.shown) == 2 if "max_samples" in limits else 100_000 <= size < 100_000 + 3 * MAX_SAMPLE_CHARS
