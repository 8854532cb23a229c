"""Ten thousand files that are no snapshots any more, or never were: each is refused, and no code of theirs runs."""

import json

import pytest

from tests.faults.support.damage import KINDS
from tests.support.faults import Program, num_rounds
from tests.support.figures import record

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=700, full=10_500, long=1_400_000)


def test_every_damaged_or_foreign_file_is_refused_and_no_code_of_theirs_runs(tmp_path):
    with Program.of("damage", {"folder": str(tmp_path), "number": ROUNDS, "seed": 1}) as program:
        found = json.loads(program.said(60 + ROUNDS / 20).splitlines()[-1])

    outcomes = found["outcomes"]
    accepted = sum(number for name, number in outcomes.items() if name.endswith(" accepted"))
    counts = {"files": ROUNDS, "accepted": accepted, "other_errors": outcomes.get("other error", 0)}
    record("R5", f"{len(KINDS)} kinds", **counts, code_runs=found["code_runs"], peak_mb=found["peak_mb"])
    assert not found["others"], "\n".join(found["others"])
    assert sum(outcomes.values()) == ROUNDS
    assert accepted == 0
    assert found["code_runs"] == 0
    assert outcomes["SnapshotError"] > ROUNDS / 2
