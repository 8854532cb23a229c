"""The table of what mixtures can do: its checks find what is wrong, and its column of ours is what a run prints."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.benchmarks.mixture_table import LINES, OURS, PEERS, checked, table

if TYPE_CHECKING:
    from types import ModuleType

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "mixtures.md"


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mixture_checks", PEERS / "mixture_checks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RoundRobin:
    """Rows of all parts in turn, as they lie; exact, but for what a subclass does wrong. The weights have no effect."""

    name, version, ends, unable = "toy", "1", ("repeat",), {"tokens": "no"}
    lost = 0

    def open(self, setup: Any) -> Any:
        return _Turns(setup, self.lost)


class Forgetful(RoundRobin):
    lost = 7


class _Turns:
    def __init__(self, setup: Any, lost: int) -> None:
        rows = [
            [json.loads(line)["row"] for line in Path(path).read_text().splitlines()] for path in setup.files.values()
        ]
        self._parts = list(setup.files)
        self._rows = [cycle(found) for found in rows]
        self._number, self._lost = 0, lost

    def __next__(self) -> tuple[str, int]:
        turn = self._number % len(self._parts)
        self._number += 1
        return self._parts[turn], next(self._rows[turn])

    def state(self) -> int:
        return self._number

    def restore(self, state: int) -> None:
        for _ in range(state + self._lost):
            next(self)


def found_by(checks: ModuleType, library: Any, folder: Path) -> dict[str, str]:
    return {
        name: check(checks.Bench(library, folder))
        for name, check in checks.CHECKS.items()
        if name not in library.unable
    }


def test_a_resume_that_loses_rows_is_told_from_one_that_does_not(checks: ModuleType, tmp_path: Path) -> None:
    good, bad = found_by(checks, RoundRobin(), tmp_path), found_by(checks, Forgetful(), tmp_path)

    assert (good["resumed"], bad["resumed"]) == ("exact", "7 of 300 samples are others")
    assert good["other_weights"] == "each part continues; the old weights stay"
    assert bad["other_weights"].endswith("(0 without a resume); the old weights stay")
    assert good["counts"].endswith("; 166.0 after 1000")
    assert (good["moved"], good["size"]) == ("added: 0 of 3; removed: 0 of 2", "3")
    assert good["ends"] == "`repeat`: 200 small, endless"


def test_a_library_that_is_not_there_is_told_and_not_a_column() -> None:
    said = checked("mixture_of_nothing", sys.executable, [])

    assert isinstance(said, str)
    assert "No module named 'mixture_of_nothing'" in said


def columns_of_the_page() -> dict[str, dict[str, str]]:
    """The cells of the first table, by library and line."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## What others do\n")[2].partition("\nVersions: ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)
    ]
    return {name: {row[0]: row[column] for row in rows} for column, name in enumerate(head) if name}


@pytest.mark.thorough
def test_the_column_of_ours_is_what_a_run_prints() -> None:
    found = checked(OURS, sys.executable, [])

    assert isinstance(found, dict), found
    told = columns_of_the_page()
    assert told["asyncdata"] == {words: found["cells"][check] for check, words in LINES.items()}
    assert len(told) == 6
    assert f"Versions: asyncdata {found['version']}." in table([found])
