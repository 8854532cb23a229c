"""Our source in a Ray actor, as slime's RolloutManager holds it: killed, it leaves nothing and another continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)  # Ray starts in a second, or in two minutes where the CPUs are busy
def test_an_actor_that_is_killed_leaves_no_process_and_another_goes_on_where_it_saved(jsonl_file, tmp_path):
    path = jsonl_file([{"input": f"prompt {number}"} for number in range(40)])
    command = [sys.executable, "-m", "tests.support.ray_actor", str(path), str(tmp_path / "checkpoints")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["left"] == []
    assert found["num_processes"] >= 3, "the actor and two workers"
    assert found["resumed"][:3] == found["lost"], "what came after the save comes again, with the same numbers"
    assert len({*found["delivered"], *found["resumed"]}) == 11
    assert found["num_prompts"] == 40
