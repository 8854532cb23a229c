"""The page of a run: its figures are those of the telemetry, its texts are text, and its size is bounded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncdata.cli.main import main
from asyncdata.report.plain_text import visible
from asyncdata.report.run_page import MAX_ROWS
from asyncdata.telemetry.records import BadRowRecord, Event
from tests.support.html_page import read_page
from tests.support.report_pages import (
    HOSTILE,
    page_of,
    write_hostile_run,
    write_packed_run,
    write_run_of,
    written_page,
)
from tests.support.telemetry_files import BEGAN, INTERVAL_S, interval, start, write, write_run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.html_page import ReadPage

NUM_INTERVALS = 4 + 6  # of each rank, in its two starts


@pytest.fixture
def page(tmp_path: Path) -> ReadPage:
    return read_page(written_page(tmp_path))


def column(page: ReadPage, table: str, number: int) -> list[str]:
    return [row[number] for row in page.tables[table][1:]]


def about(page: bytes, heading: str) -> str:
    """The text of a section, without its table data."""
    text = page.decode()
    return re.sub(r"<[^>]+>", "", re.search(rf'<section id="{heading}".*?</section>', text, re.DOTALL)[0])


# The figures

SECTIONS = {
    "overview": "Overview",
    "samples": "Samples",
    "waits": "Waits",
    "ranks": "Ranks",
    "lengths": "Lengths and packs",
    "left-out": "Dropped and truncated",
    "mix": "Mix",
    "rates": "Throughput",
    "rollouts": "RL: staleness and groups",
    "bad-rows": "Bad rows",
    "events": "Events",
    "configuration": "Configuration",
}
WORKERS = ("most waited for", "workers waited", "workers' work", "replaced")
SOURCES = ("samples", "tokens", "epoch", "dropped", "noted", "calls waited, s")
HEADS = {
    "ranks-table": ["rank", "waited", "ready", "calls", "waits", "step, ms", *WORKERS],
    "mix-table": ["source", "share", "target now", *SOURCES],
    "events-table": ["UTC", "rank", "level", "event", "fields"],
}


def test_the_page_has_its_sections_and_tables_in_their_order(tmp_path):
    written = written_page(tmp_path)

    found = re.findall(r'<section id="([\w-]+)"[^>]*>\s*<h2[^>]*>(.*?)</h2>', written.decode())
    assert found == list(SECTIONS.items())
    page = read_page(written)
    assert {name: page.tables[name][0] for name in HEADS} == HEADS
    ids = [values["id"] for _, values in page.tags if "id" in values]
    assert len(ids) == len(set(ids)), "an id is of one element"


def test_the_readiness_of_each_rank_is_a_line_over_time(tmp_path):
    for rank, waits in enumerate([[0, 0, 0, 0], [0, 1, 5, 10]]):  # of ten calls in each interval
        moments = [
            msgspec.structs.replace(interval(rank, 0, at, 40 * at, 40 * at), calls=10 * at, waits=sum(waits[:at]))
            for at in range(5)
        ]
        write(tmp_path / f"run/rank-{rank:05}-0000.jsonl", [start(rank), *moments])

    page = read_page(page_of(tmp_path / "run", tmp_path / "r.html"))

    lines = {page.tables["readiness-chart-data"][0][at]: column(page, "readiness-chart-data", at) for at in (1, 2)}
    assert lines == {"rank 0": ["100.0 %"] * 4, "rank 1": ["100.0 %", "90.0 %", "50.0 %", "0.0 %"]}


def test_the_readiness_of_many_ranks_is_that_of_those_that_waited_most(tmp_path):
    write_run_of(tmp_path / "run", ranks=64, samples=0)

    written = page_of(tmp_path / "run", tmp_path / "r.html")

    head = read_page(written).tables["readiness-chart-data"][0]
    assert head == ["time", *(f"rank {rank}" for rank in range(63, 55, -1))]
    assert "the 8 ranks that waited most; 56 more are in the table" in about(written, "ranks")


def test_the_first_figure_is_the_share_of_waiting_of_the_rank_that_waited_most(page):
    waited = 0.5 + 0.5 + NUM_INTERVALS * (0.5 + 0.1)  # rank 1: start twice, tokenize and read of each interval
    share = waited / (waited + 4.0 * NUM_INTERVALS)

    assert f"{100 * share:.1f} %of the trainer's time" in re.sub(r"\s*\n\s*", "", page.text)
    assert "on rank 1, the slowest of 2" in page.text
    assert f"{1000 * (waited + 4.0 * NUM_INTERVALS) / (10 * NUM_INTERVALS):.3g} ms" in page.text
    assert "400 ms" in page.text  # if data were free: 4 s for 10 calls
    assert "Tokenizing was too slow" in page.text


TABLES: dict[str, list[list[str]]] = {
    "waits-chart-data": [
        ["", "workers start, s", "source (read), s", "workers (tokenize), s", "trainer, s"],
        ["rank 0", "1.0", "1.0", "2.5", "40.0"],
        ["rank 1", "1.0", "1.0", "5.0", "40.0"],
    ],
    "dropped-table": [
        ["reason", "all", "math", "code"],
        ["too long", "32", "24", "8"],
        ["bad row AD421", "1", "0", "0"],
    ],
    "noted-table": [["reason", "all", "math", "code"], ["truncated", "16", "12", "4"]],
    "bad-rows-table": [
        ["code", "file and line", "position", "source", "reason", "how it begins"],
        ["AD421", "data/code.jsonl:17", "0:0:16", "code", "the row is not valid JSON", '{"prompt": '],
    ],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_page_has_the_totals_of_all_ranks_each_once(page, name):
    assert page.tables[name] == TABLES[name]


def test_the_ranks_are_listed_with_their_readiness_the_one_that_waited_most_first(page):
    rows = page.tables["ranks-table"]

    assert [row[0] for row in rows[1:]] == ["1", "0"]
    assert rows[1][2:5] == [f"{100 * (1 - NUM_INTERVALS / 100):.1f} %", "100", "10"]
    assert rows[1][5:8] == ["400.0", "workers (tokenize)", "0.0 %"]
    assert rows[2][7] == "100.0 %"  # rank 0 has no room: its workers wait for the trainer


def test_lengths_are_counted_once_where_a_restart_delivered_them_again(page):
    data = dict(page.tables["lengths-chart-data"][1:])

    # 80 groups of the first start count, and 240 of the second; half of each is of 54 tokens, a quarter of 91
    wanted = {"54–63": "160", "91–107": "80", "861–1,023": "80", "256–303": "0"}
    assert {name: data[name] for name in wanted} == wanted


def test_the_mix_is_shown_over_time_beside_its_target(page):
    head, *rows = page.tables["mix-chart-data"]

    assert head == ["time", "math", "math, target", "code", "code, target"]
    shares = [row[1:] for row in rows if row[1] != "–"]
    assert shares == [["75.0 %", "75.0 %", "25.0 %", "25.0 %"]] * NUM_INTERVALS
    assert page.tables["mix-table"][1][:5] == ["math", "75.0 %", "75.0 %", "960", "24,000"]


def test_rates_are_those_of_each_interval_and_break_between_two_starts(page):
    samples = [row[1] for row in page.tables["samples-chart-data"][1:]]

    per_s = f"{4 * 40 / INTERVAL_S:.3g}"
    assert samples == [per_s] * 4 + ["–"] + [per_s] * 6
    assert column(page, "tokens-chart-data", 1)[0] == f"{100 * 40 / INTERVAL_S:.3g}"


def test_staleness_and_equal_scores_are_summed_over_ranks_and_starts(page):
    intervals = 2 * NUM_INTERVALS

    staleness = dict(page.tables["staleness-chart-data"][1:])
    assert (staleness["0"], staleness["8–9"]) == (str(2 * intervals), str(3 * intervals))
    assert f"{2 * intervals} of {10 * intervals}" in page.text
    assert set(column(page, "degenerate-chart-data", 1)) == {"20.0 %", "–"}


def test_samples_are_in_the_order_of_their_places_with_their_mask_and_facts(page):
    places = [tuple(map(int, sample["position"].split(":"))) for sample in page.data]
    kept = [sample for sample in page.data if sample["state"] == "kept"]

    assert places == sorted(places)
    assert [sample["place"] for sample in page.data if sample["state"] == "bad"] == ["data/code.jsonl:17"]
    assert len(kept) == 16  # of each of two sources, 8
    assert kept[0]["texts"] == [["", [["<|im_start|>", 2], ["two ‹0›", 1], ["↵", 4], ["\n", 0]]]]
    assert kept[0]["facts"] == [["label", '"4"'], ["metadata", '{"level":2}']]


def test_packs_have_their_fill_over_time_and_what_is_in_no_pack(tmp_path):
    write_packed_run(tmp_path / "run")
    page = read_page(page_of(tmp_path / "run", tmp_path / "r.html"))

    assert [row[1] for row in page.tables["packs-chart-data"][1:]] == ["80.0 %", "95.0 %"]
    assert "87.5 %" in page.text
    assert page.tables["unpacked-table"][1] == ["overlong", "2"]


def test_killed_processes_and_lost_records_are_said(page):
    assert "2 of 4 files have no end" in page.text
    assert "4 records were not written (4 queue)" in page.text


# What is not there


WITHOUT = {
    "of one source, without scores": (
        write_packed_run,
        {
            "mix": "a single source, so there is no mixture",
            "rollouts": "This run reported no scores. No group was given back",
            "events": "No event was logged",
            "samples": "No sample was recorded",
        },
    ),
    "that was killed at once": (
        lambda folder: write(folder / "rank-00000-0000.jsonl", [start()]),
        {"overview": "No call for data was recorded", "rates": "there are no rates"},
    ),
    "of one moment": (
        lambda folder: write(folder / "rank-00000-0000.jsonl", [start(), interval(0, 0, 0, 0, 0)]),
        {"lengths": "No sample was delivered"},
    ),
}


@pytest.mark.parametrize(("written", "said"), WITHOUT.values(), ids=WITHOUT)
def test_the_page_of_a_run_says_why_a_part_is_empty(tmp_path, written, said):
    written(tmp_path / "run")
    page = page_of(tmp_path / "run", tmp_path / "r.html")

    for heading, text in said.items():
        assert all(sentence in about(page, heading) for sentence in text.split(". "))


def test_without_excerpts_no_text_of_a_row_is_on_the_page_and_it_says_so(tmp_path):
    write_run(tmp_path / "run", shows_rows=False)
    page = page_of(tmp_path / "run", tmp_path / "r.html")

    assert "log_excerpts=False" in about(page, "samples")
    assert [sample["texts"] for sample in read_page(page).data] == [[]] * 18
    assert "prompt" not in str(read_page(page).data)


# Hostile texts


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


# Bounds


def test_a_page_has_at_most_the_samples_that_are_asked_for_and_says_how_many_are_not_there(tmp_path):
    write_run_of(tmp_path / "run", ranks=1, samples=60)
    page = page_of(tmp_path / "run", tmp_path / "r.html", "--samples", 25)

    assert len(read_page(page).data) == 25
    assert "35 more samples are not on this page" in about(page, "samples")
    none = page_of(tmp_path / "run", tmp_path / "r.html", "--samples", 0)
    assert "None of 60 samples was asked for" in about(none, "samples")


def test_tables_of_bad_rows_and_events_are_bounded_and_say_so(tmp_path):
    number = MAX_ROWS + 7
    bad = [BadRowRecord(at=BEGAN, code="AD421", path="a.jsonl", line=at + 1) for at in range(number)]
    events = [Event(at=BEGAN + at, name="worker.lost") for at in range(number)]
    write(tmp_path / "run" / "rank-00000-0000.jsonl", [start(), *bad, *events])
    page = read_page(page_of(tmp_path / "run", tmp_path / "r.html"))

    assert len(page.tables["bad-rows-table"]) == len(page.tables["events-table"]) == 1 + MAX_ROWS
    assert f"The first {MAX_ROWS} of {number} bad rows" in page.text
    assert f"The last {MAX_ROWS} of {number} events" in page.text
    assert page.tables["event-names"][1] == ["worker.lost", str(number)]


# The command


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    write_run(tmp_path / "run")
    page = page_of(tmp_path / "run", tmp_path / "r.html", "--json")

    assert msgspec.json.decode(capsys.readouterr().out) == {
        "page": str(tmp_path / "r.html"),
        "num_bytes": len(page),
        "num_samples": 18,
        "num_samples_left_out": 0,
        "num_starts": 4,
    }


def test_a_folder_without_telemetry_is_refused_and_no_page_is_written(tmp_path, capsys):
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 1

    assert "AD620" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_line_under_trained_text_leaves_underscores_free(tmp_path):
    style = re.search(r"\.run\.trained \{(.*?)\}", written_page(tmp_path).decode(), re.DOTALL)

    assert style is not None and "border-bottom" in style[1] and re.search(r"padding-bottom: [1-9]", style[1])


# The diagnosis


def overview_of(folder: Path, **totals: object) -> str:
    """The overview of one rank, which has these totals after 40 s, and no end."""
    moments = [interval(0, 0, at, 0, 0) for at in (0, 8)]
    nothing = {"calls": 0, "waits": 0, "wait_s": {}, "step_s": 0.0, "dropped": {}, "by_source": {}}
    moments = [msgspec.structs.replace(moment, **nothing) for moment in moments]
    write(folder / "rank-00000-0000.jsonl", [start(), moments[0], msgspec.structs.replace(moments[1], **totals)])
    return about(page_of(folder, folder / "r.html"), "overview")


FIRST = {"start": 9.0, "tokenize": 3.0}
STUCK = {"start": 1.0, "tokenize": 34.0}
OVERVIEWS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "that is stuck on its first batch": (
        {"calls": 1, "waits": 1, "wait_s": STUCK, "first_s": STUCK, "waiting_s": 35.0},
        ["100.0 %", "A call had been waiting for 35 s at the last record.", "Tokenizing was too slow."],
        "not what limits",
    ),
    "whose start-up is told, and not in the headline": (
        {"calls": 5, "waits": 2, "wait_s": {"start": 9.0, "tokenize": 3.5}, "first_s": FIRST, "step_s": 9.5},
        [
            "5.0 %",
            "Tokenizing was too slow.",
            "the first batch of each start took 12 s (workers start 9 s, workers (tokenize) 3 s)",
        ],
        "A call had been waiting",
    ),
    "of one call that was answered": (
        {"calls": 1, "waits": 1, "wait_s": {"start": 9.0}, "first_s": {"start": 9.0}},
        ["No call waited after the first batch", "took 9 s"],
        "A call had been waiting",
    ),
    "that lacks CPUs, which is named, and a second reason": (
        {"calls": 5, "waits": 5, "wait_s": {"cpu": 6.0, "tokenize": 3.0, "read": 1.0}, "step_s": 10.0},
        [
            "50.0 %",
            "The workers had work, but no CPU to run on.",
            "(60.0 % of 10 s of waiting)",
            "Tokenizing was too slow.",
        ],
        "Reading the source",
    ),
}


@pytest.mark.parametrize(("totals", "said", "unsaid"), OVERVIEWS.values(), ids=OVERVIEWS)
def test_the_overview_of_a_trainer(tmp_path, totals, said, unsaid):
    shown = overview_of(tmp_path, **totals)

    assert [text for text in said if text not in shown] == []
    assert unsaid not in shown
