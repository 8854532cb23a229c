"""slime's rewards are remembered: prompts that are solved are left out of later epochs, and a restart is exact."""

from __future__ import annotations

import json

import pytest

from asyncdata.errors import ConfigError
from asyncdata.integrations.slime import report_outcomes
from tests.support.slime_source import no_rollout, source_of, write_prompts

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")

NUM_ROWS = 24
SOLVED = {"policy": {"drop_above": 0.9}}


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", NUM_ROWS)


def finish(groups, *, reward=None):
    """Finished groups: even rows are solved."""
    for group in groups:
        for sample in group:
            sample.status = type(sample.status)("completed")
            sample.reward = float(int(sample.label) % 2 == 0) if reward is None else reward(sample)
    return groups


def rollout(source, num_groups=4):
    """As slime does it: all finished groups go to the function that ``--rollout-all-samples-process-path`` names.

    The part of a mixture and the label of each.
    """
    groups = finish(source.get_samples(num_groups))
    report_outcomes(source.args, groups, source.get_samples)
    return [(group[0].metadata.get("source_name", ""), group[0].label) for group in groups]


def run(path, num_groups, **given):
    """What twelve rollouts take, of which some are run again from the checkpoint before, and take the same."""
    taken = []
    with source_of(path, **given) as source:
        for number in range(12):
            taken.append(rollout(source, num_groups))
            source.save(number)
    for number in (10, 7, 4):
        with source_of(path, **given) as source:
            source.load(number)
            assert rollout(source, num_groups) == taken[number + 1]
    return taken


def rows(taken, part=""):
    return [int(label) for groups in taken for name, label in groups if name == part]


@pytest.fixture
def given(tmp_path):
    return {"save": str(tmp_path), "load": str(tmp_path), "asyncdata_outcomes": SOLVED}


@pytest.mark.parametrize("order", ["legacy", "stream"])
def test_solved_prompts_are_left_out_and_a_restart_continues_the_run(prompts, given, order):
    taken = run(prompts, 4, **given, n_samples_per_prompt=3, rollout_shuffle=True, asyncdata_order=order)
    assert sorted(rows(taken[:6])) == list(range(NUM_ROWS))
    assert sorted(rows(taken[6:9])) == list(range(1, NUM_ROWS, 2))


def test_each_part_of_a_mixture_remembers_its_own_prompts_and_a_restart_continues_the_run(given, tmp_path):
    for name, number in (("math", 16), ("code", 8)):
        write_prompts(tmp_path / f"{name}.jsonl", number)
    parts = {"math": {"source": "math.jsonl", "weight": 3}, "code": "code.jsonl"}
    (tmp_path / "mix.json").write_text(json.dumps({"quota": 8, "parts": parts}))

    taken = run(None, 8, **given, n_samples_per_prompt=2, asyncdata_mix=str(tmp_path / "mix.json"))

    # Of the rollout in which an epoch begins, scores are too late for it.
    assert sorted(rows(taken, "math")[:16]) == list(range(16))
    assert {row % 2 for row in rows(taken, "math")[40:]} == {1}


def test_groups_that_come_back_finished_are_reported_and_aborted_ones_are_not(prompts):
    with source_of(prompts, n_samples_per_prompt=2, asyncdata_outcomes=SOLVED) as source:
        done, aborted = source.get_samples(2)
        finish([done])
        for sample in aborted:
            sample.status, sample.reward = type(sample.status)("aborted"), 1.0
        source.add_samples([done, aborted])

        numbers = source.statistics()
        assert (numbers["asyncdata_outcome_rows"], numbers["asyncdata_outcome_scores_total"]) == (1, 2)
        report_outcomes(source.args, source.get_samples(2), source)
        assert source.statistics()["asyncdata_outcome_repeated_total"] == 2


def test_tracked_groups_are_reported_when_they_are_consumed_or_dropped(prompts):
    with source_of(prompts, asyncdata_outcomes=SOLVED) as source:
        source.track_groups()
        consumed, dropped, aborted = source.get_samples(3)
        finish([consumed, dropped])
        source.consume_group(consumed)
        source.drop_group(dropped, "dynamic_filter")
        source.drop_group(aborted, "aborted")
        assert source.statistics()["asyncdata_outcome_rows"] == 2


def test_a_reward_is_found_by_its_key_and_what_is_none_is_left_out(prompts):
    rewards = iter([{"math": 1.0}, {"style": 1.0}, None, float("nan"), "good"])
    with source_of(prompts, reward_key="math", asyncdata_outcomes=SOLVED) as source:
        groups = finish(source.get_samples(5), reward=lambda _: next(rewards))
        assert source.report(groups) == 1


def test_of_a_sample_that_became_several_the_last_one_counts(prompts):
    with source_of(prompts, n_samples_per_prompt=2, asyncdata_outcomes=SOLVED) as source:
        ((first, second),) = finish(source.get_samples(1))
        assert source.report([[[first, first], [second]]]) == 2


def test_a_sample_has_its_row_in_its_metadata_only_where_outcomes_are_remembered(prompts):
    with source_of(prompts) as source:
        (plain,) = source.get_samples(1)[0]
        assert source.report(finish([[plain]])) == 0
    with source_of(prompts, asyncdata_outcomes=SOLVED) as source:
        (tagged,) = source.get_samples(1)[0]
        assert "asyncdata_row" not in source.dataset.samples[0].metadata
    assert tagged.metadata == {**plain.metadata, "asyncdata_row": [0, 0]}


def test_another_number_of_ranks_takes_the_memory_over(prompts):
    with source_of(prompts, asyncdata_outcomes=SOLVED) as source:
        rollout(source)
        source.set_train_parallel_config({"dp_size": 2})
        rollout(source)
        source.set_train_parallel_config({"dp_size": 1})
        assert source.statistics()["asyncdata_outcome_rows"] == 8


def test_a_data_source_of_others_is_refused():
    with pytest.raises(ConfigError, match="--data-source-path"):
        report_outcomes(None, [], object())
