"""The page of a run: hostile texts and bounds. ``tests/transcripts`` has the rest: ``report.md`` and ``pages.md``."""

from __future__ import annotations

import re

import pytest

from asyncdata.report.page import visible
from tests.support.html_page import read_page
from tests.support.parts import MAX_ROWS, BadRowRecord, Event
from tests.support.report_pages import HOSTILE, page_of, write_hostile_run, written_page
from tests.support.telemetry_files import BEGAN, start, write

SECTIONS = "overview waits left-out samples steps ranks lengths mix rates rollouts bad-rows events configuration"


@pytest.fixture
def page(tmp_path):
    return read_page(written_page(tmp_path))


def test_the_page_has_its_sections_in_their_order(tmp_path):
    written = written_page(tmp_path).decode()
    assert re.findall(r'<section id="([\w-]+)"', written) == SECTIONS.split()
    style = re.search(r"\.run\.trained \{(.*?)\}", written, re.DOTALL)
    assert style is not None and "border-bottom" in style[1] and re.search(r"padding-bottom: [1-9]", style[1]), (
        "the line under trained text leaves underscores free"
    )


def test_no_text_of_a_run_is_markup_or_program(tmp_path, page):
    write_hostile_run(tmp_path / "hostile")
    found = read_page(page_of(tmp_path / "hostile", tmp_path / "h.html"))

    known = {tag for tag, _ in page.tags}
    assert {tag for tag, _ in found.tags} <= known
    assert sum(tag == "script" for tag, _ in found.tags) == 2
    assert [name for _, values in found.tags for name in values if name.startswith("on") or name == "src"] == []
    shown = visible(HOSTILE)
    assert found.data[0]["place"] == f"{shown}:1"
    assert found.data[0]["texts"][0][1][0][0].startswith("</script><script>window.hacked = 1")
    assert found.tables["dropped-table"] == [["reason", "all", shown], [shown, "3", "3"]]
    assert found.tables["events-table"][1][2:] == [shown, shown, f"{shown}={shown}"]


def test_names_that_are_not_utf_8_are_shown_with_their_bytes(tmp_path):
    folder = tmp_path / "r\udcffn"
    write(folder / "rank-00000-0000.jsonl", [start()])
    assert "r⟨U+DCFF⟩n" in read_page(page_of(folder, tmp_path / "r.html")).text


def test_tables_of_bad_rows_and_events_are_bounded_and_say_so(tmp_path):
    number = MAX_ROWS + 7
    bad = [BadRowRecord(at=BEGAN, code="AD421", path="a.jsonl", line=at + 1) for at in range(number)]
    events = [Event(at=BEGAN + at, name="worker.lost") for at in range(number)]
    write(tmp_path / "run" / "rank-00000-0000.jsonl", [start(), *bad, *events])
    page = read_page(page_of(tmp_path / "run", tmp_path / "r.html", "--samples", 25))

    assert len(page.data) == 25
    assert len(page.tables["bad-rows-table"]) == len(page.tables["events-table"]) == 1 + MAX_ROWS
    assert f"The first {MAX_ROWS} of {number} bad rows" in page.text
    assert f"The last {MAX_ROWS} of {number} events" in page.text
    assert page.tables["event-names"][1] == ["worker.lost", str(number)]
