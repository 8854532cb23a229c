"""The benchmark suite's own promises: goals, rounds, kept results, plots, and the page that names its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.framework import Goal, Row, at_least, at_most, ratios, rounds, show
from tests.benchmarks.peers.environments import ENVIRONMENTS
from tests.benchmarks.run import FIGURES, Results
from tests.benchmarks.table import contest_table, goals_table
from tests.benchmarks.watching import MeasurementError, measured

ROOT = Path(__file__).parents[2]
RATES = {"first_batch_s": [1.0], "steady_rows_per_s": [900.0], "end_to_end_rows_per_s": [500.0], "peak_pss_mb": [99.0]}


@pytest.mark.parametrize(
    ("goal", "value", "is_reached"),
    [(at_most(5), 5.0, True), (at_most(5), 5.1, False), (at_least(0.95), 0.95, True), (at_least(0.95), 0.9, False)],
)
def test_a_goal_is_reached_at_its_bound_and_on_its_side(goal: Goal, value, is_reached):
    assert goal.is_reached(value) is is_reached


def test_calls_take_turns_and_a_ratio_is_that_of_a_round():
    order = []

    def call(name: str, value: float) -> dict[str, float]:
        order.append(name)
        return {"rate": value * len(order)}

    ours, theirs = rounds(lambda: call("ours", 4.0), lambda: call("theirs", 1.0), num_rounds=3)

    assert order == ["ours", "theirs"] * 3
    assert ratios(ours["rate"], theirs["rate"]) == [4 * 1 / 2, 4 * 3 / 4, 4 * 5 / 6]


def test_a_row_shows_median_range_number_goal_and_verdict():
    row = Row("S2", "ours over the tokenizer", "x", [1.0, 3.0, 2.0], ">= 2.5", False)

    assert show(row.values) == "2 (1 to 3, n=3)"
    assert re.fullmatch(r"S2 +ours over the tokenizer +>= 2.5 +2 \(1 to 3, n=3\) x +missed", str(row))


def test_a_row_that_was_not_measured_says_why():
    assert str(Row("S10", "second epoch", note="not in this build")).endswith("not in this build")


def test_results_are_kept_at_once_and_gone_on_with(tmp_path):
    path, settings = tmp_path / "results.json", {"tokenizer": "t", "quick": True}
    Results(path, settings, resume=False).add("S2", {"rows": [], "data": {}, "seconds": 1.0})

    assert set(Results(path, settings, resume=True).figures) == {"S2"}
    assert Results(path, settings, resume=False).figures == {}


def test_results_of_other_settings_are_not_gone_on_with(tmp_path):
    path = tmp_path / "results.json"
    Results(path, {"quick": True}, resume=False).add("S2", {"rows": []})

    with pytest.raises(SystemExit, match="is of other settings"):
        Results(path, {"quick": False}, resume=True)


def test_what_fails_says_what_it_said():
    command = ["/bin/sh", "-c", "echo {}; echo 'no such peer' >&2; exit 3"]

    with pytest.raises(MeasurementError, match="no such peer") as failed:
        measured(command)

    assert failed.value.last_words == "no such peer"


def test_what_does_not_end_is_ended_with_all_its_children():
    with pytest.raises(MeasurementError, match="took more than"):
        measured(["/bin/sh", "-c", "sleep 1000 & sleep 1000"], timeout_s=0.1)


def test_what_is_watched_has_its_memory():
    found = measured(["/bin/sh", "-c", "read -t 0.5 line; echo '{\"rows\": 3}'"], watched=True)

    assert set(found) == {"rows", "peak_pss_mb"}


def test_the_page_of_measurements_explains_every_figure_once_and_has_results_of_each():
    page = (ROOT / "docs" / "explanation" / "measurements.md").read_text(encoding="utf-8")
    explained, results = (figures_under(heading, page) for heading in ("## What is measured", "## Time and memory"))

    assert explained == list(FIGURES)
    assert list(dict.fromkeys(results)) == list(FIGURES)


def figures_under(heading: str, page: str) -> list[str]:
    section = page.split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| (S\d+b?) \|", section, re.MULTILINE)


def test_every_peer_is_pinned():
    for environment in ENVIRONMENTS.values():
        assert all("==" in package for step in environment.steps for package in step)


def test_tables_have_what_has_a_goal_and_what_was_not_measured():
    rows = [
        {"code": "S2", "what": "ratio", "unit": "x", "values": [0.96], "goal": ">= 0.95", "is_reached": True},
        {"code": "S2", "what": "a rate", "values": [5000.0]},
        {"code": "S10", "what": "second epoch", "note": "not in this build"},
    ]

    lines = goals_table({"figures": {"S2": {"rows": rows}}}).splitlines()

    assert lines[2:] == [
        "| S2 | ratio | >= 0.95 | 0.96 x | reached |",
        "| S10 | second epoch |  | not in this build |  |",
    ]


def test_the_table_of_the_contest_has_everyone():
    lines = contest_table({"ours": RATES, "hf": RATES, "hf gigatoken": RATES}).splitlines()

    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| asyncdata, hf",
        "| Hugging Face streaming",
        "| Hugging Face streaming, gigatoken",
    ]
    assert lines[2].endswith("| 1.00 | 900 | 500 | 99 |")


def test_plots_are_small_and_the_same_for_the_same_figures(tmp_path):
    pytest.importorskip("matplotlib")
    from tests.benchmarks.plots import PLOTS, draw

    sizes = {"sizes": {"ours": {"5": [1.0], "50": [1.1]}, "hf": {"5": [2.0], "50": [2.1]}}}
    waits = {"by_rate": {"ours": {"top": 9.0, "waits": {"0.5": 0.0, "1.0": 0.5}}}}
    data = {
        "S3": {"contest": {"ours": RATES, "hf": RATES}},
        "S4": {"gigatoken": {"small": {"ours gigatoken": RATES}}},
        "S5": sizes,
        "S6": sizes,
        "S7": {"resume": {"ours": {"0": [0.5], "99": [0.5]}}},
        "S9": waits,
    }
    content = {"figures": {code: {"rows": [], "data": found} for code, found in data.items()}}

    first, second = (draw(json.loads(json.dumps(content)), tmp_path / name) for name in ("first", "second"))

    assert [path.stem for path in first] == list(PLOTS)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert all(path.stat().st_size < 60_000 for path in first)


def test_a_plot_without_its_figure_is_left_out(tmp_path):
    pytest.importorskip("matplotlib")
    from tests.benchmarks.plots import draw

    assert draw({"figures": {"S3": {"failed": "no"}}}, tmp_path) == []
