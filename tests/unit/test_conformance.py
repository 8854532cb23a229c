"""The conformance kit: a sound loader passes, ours does, and each check finds the loader that is broken in its way."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.__main__ import main
from tests.conformance.checks import CHECKS, run_checks
from tests.conformance.lab import FEATURES, Knobs, Lab, difference, raised
from tests.conformance.ours import AsyncData
from tests.conformance.toy_loaders import BROKEN, Narrow, ToyAdapter, epochs_of

ROOT = Path(__file__).parents[2]
FAST = [name for name in CHECKS if name != "after_sigkill"]
TOYS = "tests.conformance.toy_loaders"


@pytest.fixture
def impatient(monkeypatch):
    """Only a loader that fails takes as long as its check waits; a sound one on a busy machine takes less."""
    monkeypatch.setattr("tests.conformance.checks._PATIENCE_S", 3.0)


def assert_every_check_passes(loader):
    report = run_checks(loader)
    assert [(outcome.check, outcome.result) for outcome in report.outcomes] == [(name, "passed") for name in CHECKS]


@pytest.mark.thorough
def test_a_sound_loader_passes_every_check():
    assert_every_check_passes(ToyAdapter())


@pytest.mark.thorough
def test_ours_passes_every_check():
    assert_every_check_passes(AsyncData())


@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS)
def test_each_check_finds_the_loader_that_is_broken_in_its_way_and_is_the_only_one(check, impatient):
    report = run_checks(BROKEN[check](), [*FAST, check] if check not in FAST else FAST)
    assert [outcome.check for outcome in report.failures] == [check]
    assert re.search(r"row|worker|epoch", report.failures[0].detail)


@pytest.mark.parametrize(
    ("check", "detail"),
    [
        ("between_items", "resumed after 1 rows: row 1 should come first, and row 2 came (1 lost, 0 too many)"),
        ("other_workers", "begun with 2 workers, resumed with 1: it raised AssertionError: another number of workers"),
        ("idle_workers", "of 2 workers over one file, 1 did all the work, epoch after epoch"),
    ],
)
def test_a_failure_says_what_came_in_place_of_what(check, detail, impatient):
    (outcome,) = run_checks(BROKEN[check](), [check]).outcomes
    assert outcome.detail == detail


def test_what_a_loader_cannot_do_is_not_held_against_it_and_the_reason_is_told():
    report = run_checks(Narrow(), FAST)
    results = {outcome.check: (outcome.result, outcome.detail) for outcome in report.outcomes}
    assert report.failures == []
    passed = {"second_resume", "later_epoch", "between_items", "epoch_boundary", "short_tail"}
    assert {check for check, (result, _) in results.items() if result == "passed"} == passed
    assert results["bad_rows"] == ("not applicable", "a bad row ends it")
    assert results["read_ahead"] == ("not applicable", "it does not read ahead")
    assert set(Narrow.lacks) == set(FEATURES)


def test_a_loader_that_another_process_cannot_import_is_not_killed():
    class Here(ToyAdapter):
        pass

    (outcome,) = run_checks(Here(), ["after_sigkill"]).outcomes

    assert outcome.result == "not applicable"
    assert "cannot be imported" in outcome.detail


def test_a_report_is_a_table_and_an_exit_status(capsys):
    report = run_checks(BROKEN["between_items"](), ["second_resume", "between_items"])

    head, first, second = report.table().splitlines()
    assert head == "toy 1: 1 passed, 1 failed, 0 not applicable"
    assert first == "second_resume  passed"
    assert second.startswith("between_items  failed          resumed after 1 rows: ")
    assert main([f"{TOYS}:ToyAdapter", "--check", "second_resume"]) == 0
    assert capsys.readouterr().out.startswith("toy 1: 1 passed, 0 failed")
    assert main([f"{TOYS}:FreezesItsStateAdapter", "--check", "second_resume"]) == 1
    assert capsys.readouterr().out.startswith("toy 1: 0 passed, 1 failed")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([1, 2, 3, 4, 9], None),
        ([1, 2, 4, 3], "row 3 should come after 2 others, and row 4 came (the same rows in another order)"),
        ([1, 2, 2, 3], "row 3 should come after 2 others, and row 2 came (1 lost, 1 too many)"),
        ([1, 2], "row 3 should come after 2 others, and nothing came (2 lost, 0 too many)"),
        ([], "row 1 should come first, and nothing came (4 lost, 0 too many)"),
    ],
)
def test_the_first_difference_is_told_in_words(found, words):
    assert difference([1, 2, 3, 4], found) == words


def test_of_an_assertion_that_says_nothing_its_line_is_told():
    try:
        assert FAST == []  # said nothing
    except AssertionError as error:
        error.args = ()
        assert raised(error) == "it raised AssertionError: assert FAST == []  # said nothing"


def test_rows_of_the_data_have_the_numbers_that_the_checks_speak_of(tmp_path):
    rows = Lab(ToyAdapter(), str(tmp_path)).data(6, bad=(2,))
    assert list(epochs_of(ToyAdapter().open(rows, Knobs(passes_bad_rows=True)), 2)) == [[0, 1, 3, 4, 5]] * 2
    assert list(epochs_of(ToyAdapter().open(rows, Knobs(keep_every=3)), 1)) == [[0, 3]]


def test_the_page_says_that_ours_passes_every_check():
    page = (ROOT / "docs/reference/testing.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE) == [(name, "passed") for name in CHECKS]
    assert len(CHECKS) == 16


def test_the_kit_needs_nothing_but_python(tmp_path):
    """So that it runs in the environment of any loader: with the standard library alone."""
    program = (
        "import sys; sys.modules['asyncdata'] = None; "
        f"sys.path.insert(0, {str(ROOT)!r}); "
        "from tests.conformance.__main__ import main; "
        f"sys.exit(main(['{TOYS}:ToyAdapter', '--check', 'second_resume']))"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, cwd=tmp_path)
