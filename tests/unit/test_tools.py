"""The tools that judge the library: what they count, which tests they choose; and that nothing is no success."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks.framework import ratios, rounds
from tests.benchmarks.peers.environments import ENVIRONMENTS
from tests.benchmarks.run import FIGURES, Results
from tests.benchmarks.watching import MeasurementError, measured
from tests.coverage_limits import folder_of, shortfalls
from tests.faults.table import figures_of
from tests.support import figures as of_faults
from tests.support import mutants
from tests.support.combinations import each_pair, each_value
from tests.support.figures import TARGETS, Figure, total
from tests.support.mutants import SCORES, chosen, percent
from tests.unit.test_architecture import FOLDERS, PACKAGE

ROOT = Path(__file__).parents[2]

# Combinations of parameters

KINDS = (["a", "b", "c"], {"two": 2, "three": 3}, [False, True], range(5))
ALL = list(itertools.product("abc", [2, 3], [False, True], range(5)))


@pytest.mark.parametrize(("select", "number", "most"), [(each_value, 1, 5), (each_pair, 2, 17)])
def test_ci_has_whatever_values_are_asked_for_in_few_combinations_and_the_others_are_slow(select, number, most):
    params = select(*KINDS)
    in_ci = [param.values for param in params if not param.marks]
    parts = [
        {part for each in tried for part in itertools.combinations(enumerate(each), number)} for tried in (in_ci, ALL)
    ]

    assert [param.values for param in params] == ALL
    assert parts[0] == parts[1]
    assert len(in_ci) <= most
    assert {mark.name for param in params for mark in param.marks} == {"slow"}
    assert len({param.id for param in params}) == len(ALL)
    assert [param.id for param in each_value(["a"], {"none": None, "one": 1})] == ["a-none", "a-one"]


def test_every_file_belongs_to_a_folder_that_is_listed_and_what_is_below_a_limit_is_named():
    paths = {"core/errors.py": "core", "__init__.py": "asyncdata", "filters.py": "loader", "__main__.py": "__main__"}

    assert {path: folder_of(PACKAGE / path) for path in paths} == paths
    assert {folder_of(path) for path in PACKAGE.rglob("*.py")} == set(FOLDERS)
    assert shortfalls(95.0, {"core": 100.0, "order": 100.0, "sources": 50.0}) == []
    assert shortfalls(94.99, {"core": 100.0, "order": 99.9, "sources": 50.0}) == [
        "overall 94.99 %, less than 95",
        "order 99.90 %, less than 100",
    ]


FATES = {
    "ledger.x_lease_key__mutmut": ("killed", "survived", "timeout", "no tests"),
    "rollout_buffer.x_choose__mutmut": ("segfault",),
    "order.x__feistel__mutmut": ("not checked",),
}
PRINTED = [
    f"    asyncdata.delivery.{name}_{n}: {fate}" for name, fates in FATES.items() for n, fate in enumerate(fates, 1)
]


def test_a_mutant_is_noticed_by_a_failure_a_hang_or_a_crash_and_counts_only_if_it_was_tried():
    rows = [line.split() for line in mutants.table(mutants.read(PRINTED)).splitlines()[1:]]

    assert rows == [
        ["delivery.ledger", "4", "1", "2", "1", "50.0", "%"],
        ["delivery.rollout_buffer", "1", "1", "0", "0", "100.0", "%"],
        ["all", "5", "2", "2", "1", "60.0", "%"],
    ]
    assert percent(Counter()) == 0, "no mutants are no success"


def test_a_sample_of_mutants_is_the_same_for_the_same_seed_and_0_is_all():
    names = [f"asyncdata.order.order.x__feistel__mutmut_{number}" for number in range(50)]

    assert chosen(names, 10, 3) == chosen(names[::-1], 10, 3) != chosen(names, 10, 4)
    assert sorted(chosen(names, 0, 3)) == sorted(chosen(names, 90, 3)) == sorted(names)
    assert set(json.loads(SCORES.read_text())) <= {path.name for path in PACKAGE.iterdir() if path.is_dir()}


# Figures of the fault tests: added up, or the worst of them; whether a target is reached is never guessed


def shown(figures: list[Figure], name: str) -> str:
    lines = of_faults.table(figures).splitlines()
    (place,) = [number for number, line in enumerate(lines) if line.startswith(f"{name:<4} ")]
    return " ".join(lines[place : place + 3])


def test_counts_are_added_up_of_times_the_longest_counts_and_fewer_rounds_are_not_the_target():
    found = [
        Figure("R7", of, {"kills": kills, "left": 0, "gone_s": s}) for of, kills, s in (("a", 60, 0.5), ("b", 50, 0.25))
    ]

    assert total(found) == {"R7": {"kills": 110, "left": 0, "gone_s": 0.5}}
    assert TARGETS["R7"].title + ": reached" in shown(found, "R7")
    assert "gone 0.5 s" in shown(found, "R7")
    assert "MISSED, 1 lost" in shown([Figure("R1", "all", {"kills": 10_000, "lost": 1, "repeated": 0})], "R1")
    assert "so far, with 5 kills" in shown([Figure("R1", "quick", {"kills": 5, "lost": 0})], "R1")
    assert "not measured" in shown([], "R1")


def test_the_page_has_a_row_for_each_figure_and_names_tests_that_exist():
    page = (ROOT / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in page.splitlines()) if len(cells) == 7}

    assert set(TARGETS) | {"R6", "R14"} == set(rows) - {"", "---"}
    named = [path for cells in rows.values() for path in re.findall(r"tests/[\w/.]+", cells[5])]
    assert len(named) > len(TARGETS)
    assert all((ROOT / path).exists() for path in named)


@pytest.mark.thorough
def test_figures_found_by_several_processes_are_added_up(tmp_path):
    path = tmp_path / "figures.json"
    modules = ("tests/faults/test_simulation.py", "tests/faults/test_snapshot_fuzz.py")  # two rounds: a second or two
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-m", "", "-p", "no:cacheprovider", *modules],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"ASYNCDATA_FAULT_ROUNDS": "2", "ASYNCDATA_FAULT_FIGURES": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    found = figures_of(path)
    assert total(found)["SIM"]["schedules"] == 2
    assert total(found)["R5"]["files"] >= 2
    assert of_faults.table(found) in run.stdout


def test_calls_take_turns_and_a_ratio_is_that_of_a_round():
    order = []

    def call(name: str, value: float) -> dict[str, float]:
        order.append(name)
        return {"rate": value * len(order)}

    ours, theirs = rounds(lambda: call("ours", 4.0), lambda: call("theirs", 1.0), num_rounds=3)

    assert order == ["ours", "theirs"] * 3
    assert ratios(ours["rate"], theirs["rate"]) == [4 * 1 / 2, 4 * 3 / 4, 4 * 5 / 6]


def test_results_are_kept_at_once_and_gone_on_with_if_their_settings_are_the_same(tmp_path):
    path, settings = tmp_path / "results.json", {"tokenizer": "t", "quick": True}
    Results(path, settings, resume=False).add("S2", {"rows": [], "data": {}, "seconds": 1.0})

    assert set(Results(path, settings, resume=True).figures) == {"S2"}
    with pytest.raises(SystemExit, match="is of other settings"):
        Results(path, {**settings, "quick": False}, resume=True)
    assert Results(path, settings, resume=False).figures == {}


def test_a_measurement_has_its_memory_and_one_that_fails_or_does_not_end_says_so():
    found = measured(["/bin/sh", "-c", "read -t 0.5 line; echo '{\"rows\": 3}'"], watched=True)
    assert set(found) == {"rows", "peak_pss_mb"}

    with pytest.raises(MeasurementError, match="no such peer") as failed:
        measured(["/bin/sh", "-c", "echo {}; echo 'no such peer' >&2; exit 3"])
    assert failed.value.last_words == "no such peer"
    with pytest.raises(MeasurementError, match="took more than"):
        measured(["/bin/sh", "-c", "sleep 1000 & sleep 1000"], timeout_s=0.1)


def test_the_page_of_measurements_explains_every_figure_once_and_has_results_of_each():
    page = (ROOT / "docs" / "explanation" / "measurements.md").read_text(encoding="utf-8")
    sections = (
        page.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0] for name in ("What is measured", "Time and memory")
    )
    explained, results = (re.findall(r"^\| (S\d+b?) \|", section, re.MULTILINE) for section in sections)

    assert explained == list(FIGURES)
    assert list(dict.fromkeys(results)) == list(FIGURES)
    assert all("==" in package for peer in ENVIRONMENTS.values() for step in peer.steps for package in step)
