"""Adapters in the frameworks' own trainers and checkpoints, installed or in checkouts that variables name.

A module of ``tests/support/frameworks`` drives each framework, and says which checkouts and packages it needs.
"""

import importlib
from collections import Counter
from itertools import chain

import pytest

from tests.support.frameworks import miles_async
from tests.support.frameworks.killed_runs import checkout, needs, run_driver

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

DRIVERS = ("torchtitan", "verl", "verl_sft", "xtuner_rl")


@pytest.fixture(scope="module", params=DRIVERS)
def found(request, tmp_path_factory):
    driver = importlib.import_module(f"tests.support.frameworks.{request.param}")
    for variable, file in getattr(driver, "NEEDS", {}).items():
        checkout(variable, file)
    needs(*driver.PACKAGES)
    return {"runs": {}, "same": {}} | run_driver(request.param, tmp_path_factory.mktemp("framework"))


def test_a_killed_run_continues_with_exactly_the_next_row(found):
    """Where rollouts end in any order, the batches may differ, and the rows may not."""
    for name, runs in found["runs"].items():
        for save_at, trained in runs["resumed"]:
            told = f"{name}, killed after a save at step {save_at}"
            assert Counter(chain(*trained)) == Counter(chain(*runs["whole"])), told
            assert trained == runs["whole"] or runs.get("order") == "any", told


def test_each_epoch_has_each_row_once_in_an_order_of_its_own(found):
    """The short batch that a framework leaves out at the end of an epoch begins the next one."""
    for name, runs in found["runs"].items():
        rows, size, order = list(chain(*runs["whole"])), runs["rows"], runs.get("order", "own")
        first, second = rows[:size], rows[size : 2 * size]
        if order == "any":
            times = {rows.count(row) for row in range(size)}
            assert max(times) - min(times) <= 1, name
        else:
            assert sorted(first) == sorted(second) == list(range(size)), name
            assert (first == second == list(range(size))) if order == "files" else (first != second), name


def test_what_the_framework_gets_is_what_its_own_code_makes(found):
    for name, (ours, expected) in found["same"].items():
        assert ours == expected, name


# miles' fully asynchronous rollout with ours, killed at any step

KILLS = {"num_kills": 6, "latest_kill": 90}
UNUSED = {"aborts": 0.08, "max_weight_staleness": 0}
RUNS = {
    "no kill": {"seed": 1, "num_kills": 0},
    "nothing unused": {"seed": 1},
    "saved every third rollout": {"seed": 2, "save_every": 3, "latest_kill": 200},
    "retry": {"seed": 3, **UNUSED, "async_unused_samples_handler": "retry"},
    "drop": {"seed": 4, **UNUSED, "dynamic_sampling_filter_path": "tests.support.frameworks.miles_async.keep"},
    "a full buffer": {"seed": 5, "async_data_buffer_capacity_factor": 0.5},
    "groups beyond a batch": {"seed": 6, "async_max_concurrent_samples": 6 * miles_async.BATCH},
}


@pytest.fixture(scope="module")
def of_miles(tmp_path_factory, small_tokenizer):
    checkout(
        "ASYNCDATA_MILES", "miles/rollout/fully_async_data_buffer.py", ("torch", "ray", "transformers", "pybase64")
    )
    runs = {name: KILLS | given for name, given in RUNS.items()}
    folder = tmp_path_factory.mktemp("miles")
    return run_driver("miles_async", folder, tokenizer=str(small_tokenizer), runs=runs)


def test_each_group_of_slimes_own_asynchronous_rollout_is_trained_once_or_in_the_checkpoint(
    tmp_path_factory, small_tokenizer
):
    checkout("ASYNCDATA_SLIME", "slime/rollout/fully_async_rollout.py", ("torch", "ray", "transformers"))
    runs = {
        "no kill": {"seed": 1, "num_kills": 0, "latest_kill": 1},
        "nothing unused": {"seed": 2, "num_kills": 14, "latest_kill": 40},
        "aborted": {"seed": 3, "num_kills": 14, "latest_kill": 40, "aborts": 0.1},
        "saved every third rollout": {"seed": 4, "num_kills": 14, "latest_kill": 100, "save_every": 3},
    }
    folder = tmp_path_factory.mktemp("slime")
    found = run_driver("slime_async", folder, tokenizer=str(small_tokenizer), runs=runs)
    for name, given in runs.items():
        outcome = miles_async.outcome_of(found[name])
        assert outcome.num_kills >= given["num_kills"] // 2, name  # threads: a life may come to the end before its kill
        assert len(outcome.trained) == miles_async.NUM_ROLLOUTS * miles_async.BATCH, name
        assert (outcome.num_lost, outcome.num_repeated, outcome.drops) == (0, 0, {}), name
        assert outcome.left, "some groups are always on their way"


@pytest.mark.parametrize("name", RUNS)
def test_each_group_of_a_killed_run_is_trained_once_or_dropped_and_counted_or_in_the_checkpoint(of_miles, name):
    outcome = miles_async.outcome_of(of_miles[name])
    assert outcome.num_kills == RUNS[name].get("num_kills", KILLS["num_kills"])
    assert outcome.num_rollouts == miles_async.NUM_ROLLOUTS
    assert len(outcome.trained) == miles_async.NUM_ROLLOUTS * miles_async.BATCH
    assert (outcome.num_lost, outcome.num_repeated) == (0, 0)
    assert outcome.left, "some groups are always on their way"
    assert set(outcome.responses) == {""}, "they are generated anew, with the weights of the restart"


def test_drops_are_counted_by_their_reason_also_in_the_metrics_that_miles_reports(of_miles):
    drops = miles_async.outcome_of(of_miles["drop"]).drops
    (metrics,) = [event[1] for event in of_miles["drop"]["events"][-1] if event[0] == "metrics"]
    assert set(drops) == {"aborted", "stale", "dynamic_filter"}
    assert miles_async.outcome_of(of_miles["retry"]).drops == {}
    assert metrics["rollout/fully_async/queue_size"] >= 0
    assert metrics["rollout/asyncdata/tracked_groups"] >= 0
    assert metrics["rollout/asyncdata/dropped_groups_total"] == sum(drops.values())
