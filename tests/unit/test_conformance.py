"""The conformance kit: a sound loader passes, ours does, and checks find the loader that is broken in their way."""

import re
import subprocess
import sys

import pytest

from tests.conformance.checks import CHECKS, run_checks
from tests.conformance.lab import FEATURES
from tests.conformance.ours import AsyncData
from tests.conformance.toy_loaders import BROKEN, Narrow, ToyAdapter
from tests.support.release import ROOT

FAST = [name for name in CHECKS if name != "after_sigkill"]


@pytest.mark.thorough
@pytest.mark.parametrize("adapter", [ToyAdapter, AsyncData])
def test_a_sound_loader_and_ours_pass_every_check(adapter):
    found = {outcome.check: outcome.result for outcome in run_checks(adapter()).outcomes}
    mixes = "mixture" not in adapter.lacks
    assert found == dict.fromkeys(CHECKS, "passed") | ({} if mixes else {"other_weights": "not applicable"})


@pytest.mark.thorough
@pytest.mark.parametrize("check", BROKEN)
def test_a_check_finds_the_loader_that_is_broken_in_its_way_and_is_the_only_one(check):
    report = run_checks(BROKEN[check](), [*FAST, check] if check not in FAST else FAST)
    assert [outcome.check for outcome in report.failures] == [check]
    assert re.search(r"row|worker|epoch", report.failures[0].detail)


def test_what_a_loader_lacks_is_not_held_against_it_and_the_kit_needs_nothing_but_python(tmp_path):
    report = run_checks(Narrow(), FAST)
    results = {outcome.check: (outcome.result, outcome.detail) for outcome in report.outcomes}
    assert report.failures == []
    passed = {"second_resume", "later_epoch", "between_items", "epoch_boundary", "short_tail"}
    assert {check for check, (result, _) in results.items() if result == "passed"} == passed
    assert results["bad_rows"] == ("not applicable", "a bad row ends it")
    assert results["read_ahead"] == ("not applicable", "it does not read ahead")
    assert set(Narrow.lacks) == set(FEATURES)

    page = (ROOT / "docs/reference/testing.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE) == [(name, "passed") for name in CHECKS]
    assert len(CHECKS) == 16

    program = (
        "import sys; sys.modules['asyncdata'] = None; "
        f"sys.path.insert(0, {str(ROOT)!r}); "
        "from tests.conformance.__main__ import main; "
        "sys.exit(main(['tests.conformance.toy_loaders:ToyAdapter', '--check', 'second_resume']))"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, cwd=tmp_path)
