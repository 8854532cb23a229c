"""The figures of the fault tests: added up, or the worst of them; whether a target is reached is never guessed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.table import figures_of
from tests.support.figures import TARGETS, Figure, table, total

TWO_MODULES = ("tests/faults/test_simulation.py", "tests/faults/test_snapshot_fuzz.py")
"""Fault tests that record figures, and that two rounds are enough for: a second or two."""


def block(figures: list[Figure], name: str) -> str:
    lines = table(figures).splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith(f"{name:<4} ")]
    return " ".join(lines[place : place + 3])


def test_counts_are_added_up_and_of_times_the_longest_counts():
    figures = [
        Figure("R7", "idle", {"kills": 60, "left": 0, "gone_s": 0.5}),
        Figure("R7", "busy", {"kills": 50, "left": 0, "gone_s": 0.25}),
    ]

    assert total(figures) == {"R7": {"kills": 110, "left": 0, "gone_s": 0.5}}
    assert TARGETS["R7"].title + ": reached" in block(figures, "R7")
    assert "gone 0.5 s" in block(figures, "R7")


def test_a_bad_count_is_said_whatever_else_was_reached():
    figures = [Figure("R1", "all", {"kills": 10_000, "lost": 1, "repeated": 0})]

    assert "MISSED, 1 lost" in block(figures, "R1")


def test_fewer_rounds_than_wanted_are_not_the_target():
    assert "so far, with 5 kills" in block([Figure("R1", "quick", {"kills": 5, "lost": 0})], "R1")
    assert "not measured" in block([], "R1")


def test_the_page_has_a_row_for_each_figure_and_names_tests_that_exist():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in page.splitlines()) if len(cells) == 7}

    assert set(TARGETS) | {"R6", "R14"} == set(rows) - {"", "---"}
    named = [path for cells in rows.values() for path in re.findall(r"tests/[\w/.]+", cells[5])]
    assert len(named) > len(TARGETS)
    assert all((root / path).exists() for path in named)


@pytest.mark.thorough
def test_figures_found_by_several_processes_are_added_up(tmp_path):
    path = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-m", "", "-p", "no:cacheprovider", *TWO_MODULES],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"ASYNCDATA_FAULT_ROUNDS": "2", "ASYNCDATA_FAULT_FIGURES": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    figures = figures_of(path)
    assert total(figures)["SIM"]["schedules"] == 2
    assert total(figures)["R5"]["files"] >= 2
    assert table(figures) in run.stdout
