"""What ``pytest`` runs without options: the quick tests, and among them an integration test of each promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_each_promise_is_held_by_an_integration_test_of_the_quick_selection():
    pattern = re.compile(r"`(tests/integration/[\w/]+\.py::[\w:]+)`")
    page = (ROOT / "docs/explanation/reliability.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (P\d): .*?\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    named = {promise: pattern.findall(text) for promise, text in sections}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sum(named.values(), [])],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    quick = {line.partition("[")[0] for line in run.stdout.splitlines()}
    assert len(named) == 8
    assert [promise for promise, names in named.items() if not quick.intersection(names)] == []
