"""Ten thousand files that are no snapshots any more, or never were: each is refused, and no code of theirs runs."""

from __future__ import annotations

import json

import pytest

from tests.faults.support.damage import KINDS
from tests.support.faults import Program, num_rounds, say
from tests.support.figures import record

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=700, full=10_500, long=1_400_000)


@pytest.mark.parametrize("seed", [1])
def test_every_damaged_or_foreign_file_is_refused_and_no_code_of_theirs_runs(tmp_path, seed):
    with Program.of("damage", {"folder": str(tmp_path), "number": ROUNDS, "seed": seed}) as program:
        status, said = program.end(60 + ROUNDS / 20)
        assert status == 0, said[-5000:]
    found = json.loads(said.splitlines()[-1])

    outcomes = found["outcomes"]
    accepted = sum(number for name, number in outcomes.items() if name.endswith(" accepted"))
    record(
        "R5",
        f"{len(KINDS)} kinds, seed {seed}",
        files=ROUNDS,
        accepted=accepted,
        other_errors=outcomes.get("other error", 0),
        code_runs=found["code_runs"],
        peak_mb=found["peak_mb"],
    )
    say(f"damaged files: {outcomes}; {found['peak_mb']:.0f} MB more memory")
    assert not found["others"], "\n".join(found["others"])
    assert sum(outcomes.values()) == ROUNDS
    assert accepted == 0
    assert found["code_runs"] == 0
    assert outcomes["SnapshotError"] > ROUNDS / 2
