"""The pages of reliability and measurements name every figure that is measured, and tests that exist."""

import re
from pathlib import Path

from tests.benchmarks.contestants import ENVIRONMENTS
from tests.benchmarks.run import FIGURES
from tests.support.figures import TARGETS

ROOT = Path(__file__).parents[2]


def test_the_page_has_a_row_for_each_figure_and_names_tests_that_exist():
    page = (ROOT / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in page.splitlines()) if len(cells) == 7}

    assert set(TARGETS) | {"R6", "R14"} == set(rows) - {"", "---"}
    named = [path for cells in rows.values() for path in re.findall(r"tests/[\w/.]+", cells[5])]
    assert len(named) > len(TARGETS)
    assert all((ROOT / path).exists() for path in named)


def test_the_page_of_measurements_explains_every_figure_once_and_has_results_of_each():
    page = (ROOT / "docs" / "explanation" / "measurements.md").read_text(encoding="utf-8")
    sections = (
        page.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0] for name in ("What is measured", "Time and memory")
    )
    explained, results = (re.findall(r"^\| (S\d+b?) \|", section, re.MULTILINE) for section in sections)

    assert explained == list(FIGURES)
    assert list(dict.fromkeys(results)) == list(FIGURES)
    assert all("==" in package for peer in ENVIRONMENTS.values() for step in peer.steps for package in step)
