"""Statistics, flat for dashboards; and what is said when a call gets no data in time."""

from __future__ import annotations

import json
import re

import pytest

from asyncdata import SourceLocation, Statistics
from asyncdata.loader.statistics import explain_timeout
from asyncdata.workers.base import WorkerState

IDLE, STARTING = WorkerState(state="idle"), WorkerState(state="starting")
BUSY = WorkerState(state="busy", pid=7, busy_s=12.34, num_rows_done=3)
MISSING_ROW = SourceLocation("/nowhere/rows.jsonl", 30, 10)


def statistics(**values: object) -> Statistics:
    """All zero, but for what is given."""
    zeros = dict.fromkeys(Statistics.__struct_fields__, 0) | {"dropped_total": {}, "by_source": {}, "workers": [IDLE]}
    return Statistics(**(zeros | values))


def explain(now: Statistics, oldest: SourceLocation | None = None, *, is_started: bool = True) -> str:
    return explain_timeout(2.0, 5, now, oldest, is_started)[0]


def stage_of(now: Statistics, *, is_started: bool = True) -> str:
    return explain_timeout(2.0, 5, now, None, is_started)[1]["stage"]


def test_flat_statistics_are_numbers_with_names_for_prometheus():
    now = statistics(samples_total=7, dropped_total={"bad row AD101": 2, "too-long": 1}, workers=[IDLE, BUSY, BUSY])
    flat = now.to_dict()

    assert all(name.startswith("asyncdata_") and name.replace("_", "").isalnum() for name in flat)
    assert all(isinstance(value, int | float) for value in flat.values())
    assert (flat["asyncdata_workers"], flat["asyncdata_workers_busy"], flat["asyncdata_samples_total"]) == (3, 2, 7)
    assert flat["asyncdata_dropped_total"] == 3
    assert flat["asyncdata_dropped_bad_row_ad101_total"] == 2
    assert flat["asyncdata_dropped_too_long_total"] == 1


def test_what_is_noted_is_flat_by_name():
    flat = statistics(noted_total={"question_lost": 2, "other": 1}).to_dict()

    assert flat["asyncdata_noted_total"] == 3
    assert flat["asyncdata_noted_question_lost_total"] == 2


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (statistics(workers=[]), "start: the workers are not there yet"),
        (statistics(workers=[STARTING, STARTING]), "start: the workers are loading"),
        (statistics(workers=[STARTING, WorkerState(state="starting", lacks="no CPU")]), "start: no CPU$"),
        (statistics(workers=[IDLE, BUSY], in_flight_rows=3), "tokenize: .* one hangs \\(busy for 12.3 s\\)"),
        (statistics(workers=[IDLE, BUSY]), "read: a window is being read"),
        (statistics(dropped_total={"a": 3}, groups_total=2), "filter: most rows are dropped"),
        (statistics(dropped_total={"a": 2}, groups_total=2), "read: nothing is under way"),
        (statistics(), "read: nothing is under way"),
    ],
)
def test_the_stage_that_starves_is_named(now, expected):
    assert re.match(expected, stage_of(now))


def test_before_the_start_it_is_the_start_that_takes_long():
    assert stage_of(statistics(workers=[BUSY], in_flight_rows=1), is_started=False).startswith("start: ")


def test_a_timeout_says_what_there_is_what_is_missing_and_what_to_turn(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"one\ntwo\nthree\n")
    now = statistics(
        ready_samples=1, in_flight_rows=3, capacity_samples=9, workers=[IDLE, BUSY], worker_restarts_total=4
    )

    assert explain(now, SourceLocation(str(path), 4, 3)).splitlines() == [
        "AD510 no data for 2.0 s: 1 samples are ready, 5 more are needed.",
        "  stage: tokenize: the workers cannot keep up, or one hangs (busy for 12.3 s)",
        "  channel: 1 ready + 3 in flight of 9",
        "  workers: idle, busy 12.3 s; restarts: 4; queued: 0",
        f"  oldest row in flight: {path}:2 (byte 4)",
        "  try: more num_workers, a larger buffer_size, or a lower Limits(row_timeout_s=...) if a worker hangs",
    ]


def test_a_file_that_is_gone_does_not_hide_the_timeout():
    assert "  oldest row in flight: /nowhere/rows.jsonl (byte 30)" in explain(statistics(), MISSING_ROW).splitlines()


def test_without_workers_and_rows_it_is_said_so():
    text = explain(statistics(workers=[]))

    assert "workers: none" in text
    assert "oldest row" not in text


def test_the_diagnosis_is_plain_builtins():
    _, facts = explain_timeout(2.0, 5, statistics(workers=[BUSY]), MISSING_ROW, True)

    assert json.loads(json.dumps(facts)) == facts
    assert (facts["num_missing"], facts["waited_s"]) == (5, 2.0)
    assert facts["oldest_row"] == {"path": "/nowhere/rows.jsonl", "byte_offset": 30, "num_bytes": 10}
    assert facts["statistics"]["workers"][0]["pid"] == 7


def test_a_row_index_that_is_being_made_is_the_stage_and_says_how_far_it_is() -> None:
    now = statistics(workers=[BUSY], indexed_rows=70_000)

    message, facts = explain_timeout(2.0, 5, now, None, True, is_indexing=True)

    assert facts["stage"] == "index: the row index is being made, 70000 rows are found so far"
    assert "try: a longer timeout_s" in message


def test_where_nothing_is_under_way_the_message_says_what_to_do_if_the_log_is_silent() -> None:
    message, _ = explain_timeout(2.0, 5, statistics(), None, True)

    assert message.endswith("if it says nothing, this is a fault of asyncdata: please report it")
