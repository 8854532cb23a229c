"""``Telemetry(trace=...)``: a file in Chrome's trace format, with spans in order, also after a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import Mix, Part, Telemetry
from asyncdata.telemetry.call_times import Wait
from asyncdata.telemetry.trace import Trace
from tests.support.loaders import make
from tests.support.loading import write_rows
from tests.support.tokenize_fns import kills_on_13

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", 200)


FIELDS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "i": {"ph", "name", "pid", "tid", "ts", "s"},
}
"""What the format's description asks for, by phase. There are no B, E, s, t or f events, which need partners."""


def check_event(event: dict[str, Any]) -> None:
    """Whether it has the fields of its phase, and no other, with values of their types."""
    assert set(event) == FIELDS[event["ph"]]
    assert isinstance(event["name"], str) and event["name"]
    for field in {"pid", "tid", "ts", "dur"} & set(event):
        assert type(event[field]) is int and event[field] >= 0, field  # whole microseconds
    if event["ph"] == "M":
        assert event["name"] in {"process_name", "thread_name"}
        assert list(event["args"]) == ["name"] and isinstance(event["args"]["name"], str)
    if event["ph"] == "C":
        assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
    if event["ph"] == "i":
        assert event["s"] in {"g", "p", "t"}


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events, if the file follows the format: an array, which may be left open after a whole event."""
    text = path.read_text(encoding="utf-8")
    events = json.loads(text if text.endswith("]\n") else text.rstrip().rstrip(",") + "]")
    tracks = defaultdict(list)
    for event in events:
        check_event(event)
        if event["ph"] == "X":
            tracks[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len({event["pid"] for event in events}) == 1  # that of the end, too: another would be a process of its own
    names_of = [(event["name"], event["tid"]) for event in events if event["ph"] == "M"]
    assert names_of.count(("process_name", 0)) == 1 and len(set(names_of)) == len(names_of)
    named = {tid for name, tid in names_of if name == "thread_name"}
    assert set(tracks) <= named
    for spans in tracks.values():
        edges = [edge for span in spans for edge in span]
        assert edges == sorted(edges)  # none goes backwards, and none overlaps another
    return events


def names(events: list[dict[str, Any]]) -> set[str]:
    return {event["name"] for event in events if event["ph"] == "X"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trace_has_spans_of_workers_windows_and_waits(path, tmp_path, num_workers):
    trace = tmp_path / "traces/run.json"
    with make(path, num_workers=num_workers, epochs=2, batch_size=10, telemetry=Telemetry(trace=str(trace))) as loader:
        num_samples = sum(len(batch) for _ in range(2) for batch in loader)
        num_waits = loader.statistics().waits_total

    events = read_trace(trace)
    spans = [event for event in events if event["ph"] == "X"]
    assert {"chunk", "read blocks"} <= names(events)
    windows = {name.rpartition(":")[0] for name in names(events) if name.startswith("window ")}
    assert windows == {"window 0", "window 1"}  # one whose first chunk comes after a later window's has no span
    assert len([span for span in spans if span["name"].startswith("wait: ")]) == num_waits
    assert sum(span["args"]["rows"] for span in spans if span["name"] == "chunk") >= num_samples
    assert events[-1]["name"] == "end"
    assert events[-1]["ts"] >= max(span["ts"] + span["dur"] for span in spans)
    assert loader.statistics().telemetry_lost_total == {}


def test_a_worker_that_is_lost_leaves_a_trace_in_order(path, tmp_path):
    trace = tmp_path / "run.json"
    knobs = {"bad_rows": "skip", "num_workers": 2, "epochs": 1, "batch_size": 10}
    with make(path, kills_on_13, telemetry=Telemetry(trace=str(trace)), **knobs) as loader:
        assert sum(map(len, loader)) == 199

    assert any(event.get("args", {}).get("crashed") == "AD423" for event in read_trace(trace))


def test_the_parts_of_a_mixture_are_told(path, tmp_path):
    trace = tmp_path / "run.json"
    with make(Mix({"a": Part(path), "b": Part(path)}), telemetry=Telemetry(trace=str(trace))) as loader:
        loader.get_next_batch(50)

    parts = {event["args"].get("part") for event in read_trace(trace) if event["name"] == "chunk"}
    assert parts == {0, 1}


def test_each_rank_has_a_file_of_its_own(path, tmp_path):
    trace = tmp_path / "run.json"
    settings = {"batch_size": 2, "epochs": 1, "ranks": {"rank": 1, "world_size": 2, "share_node": False}}
    with make(path, telemetry={"trace": str(trace)}, **settings) as loader:
        next(iter(loader))

    assert read_trace(tmp_path / "run-rank-00001.json")[0]["args"] == {"name": "rank 1"}
    assert not trace.exists()


_SCRIPT = """
import os, sys
from asyncdata import DataLoader, Telemetry
telemetry = Telemetry(trace=sys.argv[2], interval_s=0.001)
loader = DataLoader(sys.argv[1], tokenize_fn="tests.support.tokenize_fns:row_id", num_workers=1, telemetry=telemetry)
while not (os.path.exists(sys.argv[2]) and b'"ph":"X"' in open(sys.argv[2], "rb").read()):
    loader.get_next_batch(10)
os.kill(os.getpid(), 9)
"""


def test_a_trace_can_be_read_after_a_kill(path, tmp_path):
    trace = tmp_path / "run.json"

    assert subprocess.run([sys.executable, "-c", _SCRIPT, path, trace], check=False).returncode == -9

    assert names(read_trace(trace))


def test_a_trace_that_cannot_be_written_is_a_number(path, tmp_path):
    (tmp_path / "file").write_text("")
    with make(path, telemetry=Telemetry(trace=str(tmp_path / "file/run.json")), epochs=1, batch_size=10) as loader:
        assert sum(map(len, loader)) == 200

    assert loader.statistics().telemetry_lost_total["disk"] > 0


def test_a_trace_keeps_its_limit_and_stays_whole(tmp_path):
    path = tmp_path / "run.json"
    trace = Trace(str(path), 0, 5000)
    for number in range(1000):
        trace.wait(Wait(float(number), 0.5, "read"))
    trace.flush(is_last=True)
    trace.close()

    assert path.stat().st_size <= 5000
    assert trace.lost["size"] > 900
    assert read_trace(path)[-1]["name"] == "end"


def test_waits_of_several_threads_do_not_overlap(tmp_path):
    path = tmp_path / "run.json"
    trace = Trace(str(path), 0, 1 << 20)
    began = trace._began  # noqa: SLF001 - the clock of its file
    for first, seconds in ((0.0, 5.0), (1.0, 2.0), (4.0, 3.0)):
        trace.wait(Wait(began + first, seconds, "read"))
    trace.flush(is_last=True)
    trace.close()

    spans = [(event["ts"], event["dur"]) for event in read_trace(path) if event["ph"] == "X"]
    assert spans == [(0, 5_000_000), (5_000_000, 0), (5_000_000, 2_000_000)]
