"""Whoever reads a run sees the same: its statistics, dashboards, the telemetry, the page about it, and the trace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from asyncdata import BadRows, Mix, Part, Telemetry
from asyncdata.telemetry import recorder
from asyncdata.telemetry.call_times import Wait
from asyncdata.telemetry.reader import read
from asyncdata.telemetry.trace import Trace
from tests.support.html_page import read_page
from tests.support.loaders import make
from tests.support.loading import NEVER_S, write_rows
from tests.support.report_pages import page_of
from tests.support.tokenize_fns import kills_on_13

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncdata import DataLoader

NUM_ROWS = 60
BATCH_SIZE = 7


def drops_and_fails(row):
    if row["id"] == 20:
        raise ValueError("no good")

    return "too long" if row["id"] % 3 == 0 else [row["id"]] * (1 + row["id"] % 5)


class Counts(NamedTuple):
    """What a reader says of a run; None: it does not tell."""

    samples: int | None
    tokens: int | None
    dropped: dict[str, int] | None
    sources: dict[str, int]


class Delivered(NamedTuple):
    """A run that is over. ``folder`` has its telemetry in ``run``, and its trace in ``trace.json``."""

    folder: Path
    loader: DataLoader
    counts: Counts

    @property
    def statistics(self):
        return self.loader.statistics()


@pytest.fixture(scope="module", params=[0, 1], ids=["in a thread", "by a worker"])
def delivered(request, tmp_path_factory):
    """Two epochs of a mixture, of which some rows are dropped and some are bad."""
    folder = tmp_path_factory.mktemp("run")
    paths = {name: write_rows(folder / f"{name}.jsonl", NUM_ROWS) for name in ("math", "code")}
    mix = Mix({name: Part(path, when_done="leave") for name, path in paths.items()})
    telemetry = Telemetry(folder=str(folder / "run"), trace=str(folder / "trace.json"))
    knobs = {"batch_size": BATCH_SIZE, "epochs": 1, "bad_rows": BadRows(policy="skip"), "num_workers": request.param}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "_CLOSE_TIMEOUT_S", NEVER_S)  # as for each test: the last records are there
        with make(mix, drops_and_fails, telemetry=telemetry, **knobs) as loader:
            samples = [sample for batch in loader for sample in batch]
    sources = Counter(sample.source_name for sample in samples)
    dropped = {"too long": 2 * NUM_ROWS // 3, "bad row AD421": 2}
    counts = Counts(len(samples), sum(len(one.tokens) for one in samples), dropped, dict(sources))
    return Delivered(folder, loader, counts)


def by_statistics(run):
    now = run.statistics
    return Counts(now.samples_total, now.tokens_total, now.dropped_total, samples_of(now.by_source))


def samples_of(parts):
    return {name: part.samples for name, part in parts.items()}


def by_flat_numbers(run):
    flat = run.statistics.to_dict()
    names = {"too long": "too_long", "bad row AD421": "bad_row_ad421"}
    dropped = {reason: flat[f"asyncdata_dropped_{name}_total"] for reason, name in names.items()}
    sources = {name: flat[f"asyncdata_source_{name}_samples_total"] for name in ("math", "code")}
    return Counts(flat["asyncdata_samples_total"], flat["asyncdata_tokens_total"], dropped, sources)


def by_prometheus(run):
    line = re.compile(r'^asyncdata_(\w+?)(?:\{\w+="(.*)"\})? (\S+)$', re.MULTILINE)
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, label, value in line.findall(run.statistics.to_prometheus()):
        found[name][label] = int(float(value))
    samples, tokens = found["samples_total"][""], found["tokens_total"][""]
    return Counts(samples, tokens, found["dropped_total"], found["source_samples_total"])


def by_telemetry(run):
    totals = read(run.folder / "run").totals
    return Counts(totals.samples, totals.tokens, totals.dropped, samples_of(totals.by_source))


def by_page(run):
    tables = page_about(run).tables
    dropped = {row[0]: int(row[1]) for row in tables["dropped-table"][1:]}
    sources = {row[0]: int(row[3].replace(",", "")) for row in tables["mix-table"][1:]}
    samples = sum(int(row[1].replace(",", "")) for row in tables["lengths-chart-data"][1:])
    return Counts(samples, None, dropped, sources)


def page_about(run):
    return read_page(page_of(run.folder / "run", run.folder / "page.html"))


READERS: list[Callable[[Delivered], Counts]] = [by_statistics, by_flat_numbers, by_prometheus, by_telemetry, by_page]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_every_reader_of_a_run_has_its_counts(delivered, reader):
    found = reader(delivered)
    assert found == delivered.counts._replace(tokens=found.tokens and delivered.counts.tokens)


def test_the_page_finds_dropped_and_bad_rows_by_their_reason_and_their_text(delivered):
    shown = page_about(delivered).data
    dropped = [one for one in shown if "dropped: too long" in one["states"]]
    lines = {line for name in ("math", "code") for line in (delivered.folder / f"{name}.jsonl").read_text().split("\n")}
    assert len(dropped) == 2 * 16
    assert {one["texts"][0][1][0][0] for one in dropped} <= lines
    assert [one["place"] for one in shown if one["state"] == "bad"].count(f"{delivered.folder}/math.jsonl:21") == 1


# The trace

FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "i": {"ph", "name", "pid", "tid", "ts", "s"},
}
"""What the format's description asks for, by phase. There are no B, E, s, t or f events, which need partners."""


def check_event(event):
    """Whether it has the fields of its phase, and no other, with values of their types."""
    assert set(event) == FIELDS[event["ph"]]
    assert isinstance(event["name"], str) and event["name"]
    for field in {"pid", "tid", "ts", "dur"} & set(event):
        assert type(event[field]) is int and event[field] >= 0, field  # whole microseconds
    match event:
        case {"ph": "M"}:
            assert event["name"] in {"process_name", "thread_name"}
            assert list(event["args"]) == ["name"] and isinstance(event["args"]["name"], str)
        case {"ph": "C"}:
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
        case {"ph": "i"}:
            assert event["s"] in {"g", "p", "t"}
        case {"ph": "X"}:
            assert isinstance(event["args"], dict)


def read_trace(path):
    """The events, if the file follows the format: an array, which may be left open after a whole event."""
    text = path.read_text(encoding="utf-8")
    events: list[dict[str, Any]] = json.loads(text if text.endswith("]\n") else text.rstrip().rstrip(",") + "]")
    tracks = defaultdict(list)
    for event in events:
        check_event(event)
        if event["ph"] == "X":
            tracks[event["tid"]] += [event["ts"], event["ts"] + event["dur"]]
    assert len({event["pid"] for event in events}) == 1  # that of the end, too: another would be a process of its own
    names = [(event["name"], event["tid"]) for event in events if event["ph"] == "M"]
    assert names.count(("process_name", 0)) == 1 and len(set(names)) == len(names)
    assert set(tracks) <= {tid for name, tid in names if name == "thread_name"}
    assert all(edges == sorted(edges) for edges in tracks.values()), "none goes backwards, and none overlaps another"
    return events


def spans(events):
    return [event for event in events if event["ph"] == "X"]


def test_a_trace_has_spans_of_workers_windows_and_waits(delivered):
    events = read_trace(delivered.folder / "trace.json")

    names = Counter(span["name"].partition(":")[0] for span in spans(events))
    chunks = [span["args"] for span in spans(events) if span["name"] == "chunk"]
    assert {"chunk", "read blocks", "window 0"} <= set(names)
    assert names["wait"] == delivered.statistics.waits_total
    assert sum(chunk["rows"] for chunk in chunks) >= 2 * NUM_ROWS
    assert {chunk["part"] for chunk in chunks} == {0, 1}
    assert events[-1]["name"] == "end"
    assert events[-1]["ts"] >= max(span["ts"] + span["dur"] for span in spans(events))
    assert delivered.statistics.telemetry_lost_total == {}


def test_a_worker_that_is_lost_leaves_a_trace_in_order(tmp_path):
    path, trace = write_rows(tmp_path / "rows.jsonl", NUM_ROWS), tmp_path / "traces/run.json"
    knobs = {"bad_rows": "skip", "num_workers": 2, "epochs": 1, "batch_size": 10}
    with make(path, kills_on_13, telemetry=Telemetry(trace=str(trace)), **knobs) as loader:
        assert sum(map(len, loader)) == NUM_ROWS - 1
    assert any(event.get("args", {}).get("crashed") == "AD423" for event in read_trace(trace))


def test_each_rank_has_a_file_of_its_own(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    settings = {"batch_size": 2, "epochs": 1, "ranks": {"rank": 1, "world_size": 2}}
    with make(path, telemetry={"trace": str(tmp_path / "run.json")}, **settings) as loader:
        next(iter(loader))
    assert read_trace(tmp_path / "run-rank-00001.json")[0]["args"] == {"name": "rank 1"}
    assert not (tmp_path / "run.json").exists()


_SCRIPT = """
import os, sys
from asyncdata import DataLoader, Telemetry
telemetry = Telemetry(trace=sys.argv[2], interval_s=0.001)
loader = DataLoader(sys.argv[1], tokenize_fn="tests.support.tokenize_fns:row_id", num_workers=1, telemetry=telemetry)
while not (os.path.exists(sys.argv[2]) and b'"ph":"X"' in open(sys.argv[2], "rb").read()):
    loader.get_next_batch(10)
os.kill(os.getpid(), 9)
"""


def test_a_trace_can_be_read_after_a_kill(tmp_path):
    path, trace = write_rows(tmp_path / "rows.jsonl", NUM_ROWS), tmp_path / "run.json"
    assert subprocess.run([sys.executable, "-c", _SCRIPT, path, trace], check=False).returncode == -9
    assert spans(read_trace(trace))


def test_a_trace_that_cannot_be_written_is_a_number(tmp_path):
    path, blocked = write_rows(tmp_path / "rows.jsonl", NUM_ROWS), tmp_path / "file"
    blocked.write_text("")
    with make(path, telemetry=Telemetry(trace=str(blocked / "run.json")), epochs=1, batch_size=10) as loader:
        assert sum(map(len, loader)) == NUM_ROWS
    assert loader.statistics().telemetry_lost_total["disk"] > 0


def trace_of(path, max_bytes, waits):
    """The trace of waits, which begin so many seconds after its start, and its events."""
    trace = Trace(str(path), 0, max_bytes)
    for first, seconds in waits:
        trace.wait(Wait(trace._began + first, "read", seconds))  # noqa: SLF001 - the clock of its file
    trace.flush(is_last=True)
    trace.close()
    return trace, read_trace(path)


def test_a_trace_keeps_its_limit_and_stays_whole(tmp_path):
    trace, events = trace_of(tmp_path / "run.json", 5000, [(number, 0.5) for number in range(1000)])
    assert (tmp_path / "run.json").stat().st_size <= 5000
    assert trace.lost["size"] > 900
    assert events[-1]["name"] == "end"


def test_waits_of_several_threads_do_not_overlap(tmp_path):
    _, events = trace_of(tmp_path / "run.json", 1 << 20, [(0.0, 5.0), (1.0, 2.0), (4.0, 3.0)])
    found = [(span["ts"], span["dur"]) for span in spans(events)]
    assert found == [(0, 5_000_000), (5_000_000, 0), (5_000_000, 2_000_000)]
