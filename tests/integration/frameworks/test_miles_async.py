"""miles' fully asynchronous rollout with ours, killed at any step. ASYNCDATA_MILES names a checkout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.frameworks.killed_runs import checkout, run_driver
from tests.support.frameworks.miles_async import BATCH, NUM_ROLLOUTS, outcome_of

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

KILLS = {"num_kills": 6, "latest_kill": 90}
UNUSED = {"aborts": 0.08, "max_weight_staleness": 0}
RUNS: dict[str, Any] = {
    "no kill": {"seed": 1, "num_kills": 0},
    "nothing unused": {"seed": 1},
    "saved every third rollout": {"seed": 2, "save_every": 3, "latest_kill": 200},
    "retry": {"seed": 3, **UNUSED, "async_unused_samples_handler": "retry"},
    "drop": {"seed": 4, **UNUSED, "dynamic_sampling_filter_path": "tests.support.frameworks.miles_async.keep"},
    "a full buffer": {"seed": 5, "async_data_buffer_capacity_factor": 0.5},
    "groups beyond a batch": {"seed": 6, "async_max_concurrent_samples": 6 * BATCH},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> dict[str, Any]:
    checkout(
        "ASYNCDATA_MILES", "miles/rollout/fully_async_data_buffer.py", ("torch", "ray", "transformers", "pybase64")
    )
    runs = {name: KILLS | given for name, given in RUNS.items()}
    folder = tmp_path_factory.mktemp("miles")
    return run_driver("tests.support.frameworks.miles_async", folder, tokenizer=str(small_tokenizer), runs=runs)


@pytest.mark.parametrize("name", RUNS)
def test_each_group_of_a_killed_run_is_trained_once_or_dropped_and_counted_or_in_the_checkpoint(found, name):
    outcome = outcome_of(found[name])

    assert outcome.num_kills == RUNS[name].get("num_kills", KILLS["num_kills"])
    assert outcome.num_rollouts == NUM_ROLLOUTS
    assert len(outcome.trained) == NUM_ROLLOUTS * BATCH
    assert (outcome.num_lost, outcome.num_repeated) == (0, 0)
    assert outcome.left, "some groups are always on their way"
    assert set(outcome.responses) == {""}, "they are generated anew, with the weights of the restart"


def test_drops_are_counted_by_their_reason_also_in_the_metrics_that_miles_reports(found):
    drops = outcome_of(found["drop"]).drops
    (metrics,) = [event[1] for event in found["drop"]["events"][-1] if event[0] == "metrics"]

    assert set(drops) == {"aborted", "stale", "dynamic_filter"}
    assert outcome_of(found["retry"]).drops == {}
    assert metrics["rollout/fully_async/queue_size"] >= 0
    assert metrics["rollout/asyncdata/tracked_groups"] >= 0
    assert metrics["rollout/asyncdata/dropped_groups_total"] == sum(drops.values())
