"""The page of a run: its parts, hostile texts and bounds. ``tests/transcripts`` has the rest."""

import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.report.figures import lines, origins
from asyncdata.report.page import Run, visible
from asyncdata.telemetry.reader import read
from tests.support import parts, telemetry_files
from tests.support.examples import in_ci
from tests.support.pages import read_page


def test_the_page_has_its_sections_in_their_order(tmp_path):
    written = telemetry_files.written_page(tmp_path).decode()
    sections = "overview waits left-out samples steps ranks lengths mix rates rollouts bad-rows events configuration"
    assert re.findall(r'<section id="([\w-]+)"', written) == sections.split()
    style, *_ = re.findall(r"\.run\.trained \{(.*?)\}", written, re.DOTALL)
    assert "border-bottom" in style
    assert re.search(r"padding-bottom: [1-9]", style), "the line under trained text leaves underscores free"


def test_no_text_of_a_run_is_markup_or_program(tmp_path):
    telemetry_files.write_hostile_run(tmp_path / "hostile")
    found = read_page(telemetry_files.page_of(tmp_path / "hostile", tmp_path / "h.html"))

    known = read_page(telemetry_files.written_page(tmp_path)).tags
    assert {tag for tag, _ in found.tags} <= {tag for tag, _ in known}
    assert sum(tag == "script" for tag, _ in found.tags) == 2
    assert [name for _, values in found.tags for name in values if name.startswith("on") or name == "src"] == []
    shown = visible(telemetry_files.HOSTILE)
    assert found.data[0]["place"] == f"{shown}:1"
    assert found.data[0]["texts"][0][1][0][0].startswith("</script><script>window.hacked = 1")
    assert found.tables["dropped-table"] == [["reason", "all", shown], [shown, "3", "3"]]
    assert found.tables["events-table"][1][2:] == [shown, shown, f"{shown}={shown}"]


def test_names_that_are_not_utf_8_are_shown_with_their_bytes(tmp_path):
    folder = tmp_path / "r\udcffn"
    telemetry_files.write(folder / "rank-00000-0000.jsonl", [telemetry_files.start()])
    assert "r⟨U+DCFF⟩n" in read_page(telemetry_files.page_of(folder, tmp_path / "r.html")).text


def test_tables_of_bad_rows_and_events_are_bounded_and_say_so(tmp_path):
    number = parts.MAX_ROWS + 7
    bad = [
        parts.BadRowRecord(at=telemetry_files.BEGAN, code="AD421", path="a.jsonl", line=at + 1) for at in range(number)
    ]
    events = [parts.Event(at=telemetry_files.BEGAN + at, name="worker.lost") for at in range(number)]
    telemetry_files.write(tmp_path / "run" / "rank-00000-0000.jsonl", [telemetry_files.start(), *bad, *events])
    page = read_page(telemetry_files.page_of(tmp_path / "run", tmp_path / "r.html", "--samples", 25))

    assert len(page.data) == 25
    assert len(page.tables["bad-rows-table"]) == len(page.tables["events-table"]) == 1 + parts.MAX_ROWS
    assert f"The first {parts.MAX_ROWS} of {number} bad rows" in page.text
    assert f"The last {parts.MAX_ROWS} of {number} events" in page.text
    assert page.tables["event-names"][1] == ["worker.lost", str(number)]


@pytest.mark.parametrize("values", [[], [0.0], [None], [1e-9], [5.0] * 3, [1e15, 1.0]])
def test_every_series_has_axes_with_few_ticks_from_end_to_end(values):
    chart = lines("a", "A", "about", list(map(float, range(len(values)))), [parts.Series("a", values)], unit="x")
    assert (chart.y.ticks[0].at, chart.y.ticks[-1].at) == (0, 100)
    assert 2 <= len(chart.y.ticks) <= 6
    assert max([value for value in values if value is not None], default=0) <= chart.y.high * (1 + 1e-9)
    assert 1 <= len(chart.x.ticks) <= 8


def test_the_time_of_a_call_is_shown_until_it_ended_also_over_moments_without_an_answer(tmp_path):
    moments = [telemetry_files.interval(0, 0, elapsed, 40 * elapsed, 0) for elapsed in range(5)]
    nothing = {"calls": 0, "wait_s": {}, "step_s": 0.0}
    moments[1:3] = [msgspec.structs.replace(moment, **nothing) for moment in moments[1:3]]
    telemetry_files.write(tmp_path / "rank-00000-0000.jsonl", [telemetry_files.start(), *moments])
    run = read(tmp_path)
    steps = parts.steps_of(run.stream, origins(run)[0], of_calls=True)
    assert [(s.since, s.until, s.added.calls) for s in steps if s is not None] == [(0, 15, 30), (15, 20, 10)]


ANY_TEXT = st.text(st.characters(exclude_categories=()))  # with lone surrogates


def test_text_stays_as_it_is_and_what_cannot_be_seen_has_its_code_point():
    assert visible("naïve 😀 قريب\n\tx") == "naïve 😀 قريب\n\tx"
    assert visible("a\u202eb\x00\ud83d") == "a⟨U+202E⟩b⟨U+0000⟩⟨U+D83D⟩"
    assert parts.script_json(["</script>", "<!--", "\u2028"]) == r'["\u003c/script\u003e","\u003c!--","\u2028"]'


@in_ci(max_examples=30)
@given(
    st.recursive(
        ANY_TEXT | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner)
    ),
    ANY_TEXT,
)
def test_json_in_a_script_is_the_value_and_cannot_end_it_and_no_text_turns_what_follows(value, text):
    found = parts.script_json(value)
    assert json.loads(found) == value
    assert not set("<>&\u2028\u2029") & set(found)
    assert all(char.isprintable() or char in "\n\t" for char in visible(text))


def shown(*samples, **limits):
    found = parts.Samples(**limits)
    for one in samples:
        found.add(one)
    return found


def sample(*runs):
    return parts.ShownSample(position="0:0:1", place="a.jsonl:2", texts=[parts.ShownText("", list(runs))])


def test_what_cannot_be_seen_is_shown_in_every_text_of_a_sample():
    bad = "\u202e"
    hidden = parts.ShownSample(position="0:0:1", place=f"a{bad}", source=bad, reason=bad, facts={bad: bad})
    assert bad not in parts.script_json(shown(hidden, sample(Run(bad))).shown)


def test_of_a_long_sample_the_first_and_the_last_half_are_shown_with_a_note_of_how_much_is_not():
    half, trained = parts.MAX_SAMPLE_CHARS // 2, {"is_trained": True}
    (found,) = shown(sample(Run("12", **trained), Run("a" * 999_994), Run("34"), Run("56", **trained))).shown
    note = f"\n⟨… {1_000_000 - parts.MAX_SAMPLE_CHARS:,} characters are not shown …⟩\n"
    runs = [["12", 1], ["a" * (half - 2), 0], [note, 4], ["a" * (half - 4), 0], ["34", 0], ["56", 1]]
    assert found["texts"] == [["", runs]]


@pytest.mark.parametrize("limits", [{"max_samples": 2}, {"max_bytes": 100_000}], ids=["samples", "bytes"])
def test_samples_beyond_the_most_are_counted(limits):
    found = shown(*[sample(Run("é" * parts.MAX_SAMPLE_CHARS))] * 50, **limits)
    assert found.is_full
    assert len(found.shown) + found.num_left_out == 50
    size = len(parts.script_json(found.shown).encode())
    assert len(found.shown) == 2 if "max_samples" in limits else 100_000 <= size < 100_000 + 3 * parts.MAX_SAMPLE_CHARS
