"""Several rewards: each is remembered by itself, whatever the others are, and the policy reads one of them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import Mix, Outcomes, Part, PassRate
from asyncdata.errors import InvalidGroupError
from tests.support.examples import in_ci
from tests.support.loaders import make
from tests.support.loading import ids, write_rows
from tests.support.parts import main

NUM_ROWS, SIZE = 12, 2
KEYS = ["accuracy", "format", "größe"]
BY_ACCURACY = PassRate(drop_above=0.5, key="accuracy")


def remembering(rows, policy=BY_ACCURACY, **knobs):
    return make(rows, n_samples_per_prompt=SIZE, outcomes=Outcomes(policy=policy), **knobs)


values = st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0])
of_groups = st.dictionaries(
    st.sampled_from(KEYS), st.lists(values | st.lists(values, min_size=SIZE, max_size=SIZE), min_size=3, max_size=3)
)


@in_ci(max_examples=25)
@given(reports=st.lists(st.tuples(st.integers(0, NUM_ROWS - 3), of_groups.filter(bool), st.booleans()), max_size=5))
def test_each_reward_is_remembered_by_itself(reports):
    """Groups are reported, and the run is restarted now and then; the model is a dict of all scores of each reward."""
    scores = {key: {} for key in KEYS}
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder) / "rows.jsonl", NUM_ROWS)
        loader = remembering(rows)
        groups = loader.get_samples(NUM_ROWS)
        order = ids(group[0] for group in groups)
        loader.report(groups[:1], {"accuracy": [[0.25, None]]})  # so that the policy's reward is known
        scores["accuracy"][order[0], 0], num_skipped = 0.25, 1
        for first, given_scores, restarts in reports:
            num_new = 0
            for key, column in given_scores.items():
                for row, value in zip(order[first:], column, strict=False):
                    for attempt, score in enumerate(value if isinstance(value, list) else [value] * SIZE):
                        num_skipped += score is None
                        if score is not None and (row, attempt) not in scores[key]:
                            scores[key][row, attempt] = score
                            num_new += 1
            assert loader.report(groups[first : first + 3], given_scores) == num_new
            if restarts:
                state = json.loads(json.dumps(loader.state_dict()))
                loader.close()
                loader = remembering(rows)
                loader.load_state_dict(state)

        now, second = loader.statistics(), []
        accuracy = {row: [s for (of, _), s in scores["accuracy"].items() if of == row] for row in order}
        kept = [row for row in range(NUM_ROWS) if not accuracy[row] or sum(accuracy[row]) / len(accuracy[row]) < 0.5]
        if kept:
            second = ids(group[0] for group in loader.get_samples(len(kept)))
        loader.close()

    assert sorted(second) == kept
    assert now.outcome_skipped_total == num_skipped
    assert +Counter(now.outcome_rewards_total) == +Counter({key: len(found) for key, found in scores.items()})
    assert now.outcome_scores_total == sum(map(len, scores.values()))
    assert now.outcome_rows == max(len({row for row, _ in found}) for found in scores.values())


def test_rewards_of_samples_may_be_dicts_and_those_that_are_missing_are_skipped(rows):
    with remembering(rows) as loader:
        groups = loader.get_samples(NUM_ROWS)
        for place, (first, second) in enumerate(groups):
            first.reward = {"accuracy": float(place % 2), "format": 1.0}
            second.reward = {"accuracy": float(place % 2)} if place else None
        assert loader.report(groups) == 3 * NUM_ROWS - 1
        solved = {ids(group)[0] for group in groups[1::2]}
        assert set(ids(loader.get_next_batch(NUM_ROWS))) == set(range(NUM_ROWS)) - solved
        now = loader.statistics()
    assert now.outcome_rewards_total == {"accuracy": 2 * NUM_ROWS - 1, "format": NUM_ROWS}
    assert now.outcome_skipped_total == NUM_ROWS + 1


def hard_format(outcomes, epoch):
    return outcomes.last_mean > 0.5


hard_format.key = "format"


def test_a_policy_of_ones_own_says_which_reward_it_reads_and_a_later_policy_keeps_what_an_epoch_has_decided(rows):
    with remembering(rows, policy=f"{__name__}:hard_format") as loader:
        groups = loader.get_samples(NUM_ROWS)
        halves = [float(place < NUM_ROWS // 2) for place in range(NUM_ROWS)]
        loader.report(groups, {"format": halves, "accuracy": [1.0 - half for half in halves]})
        begun = ids(group[0] for group in loader.get_samples(2))
        state = loader.state_dict()
    with remembering(rows) as loader:  # accuracy counts from the next epoch on
        loader.load_state_dict(state)
        begun += ids(group[0] for group in loader.get_samples(NUM_ROWS // 2 - 2))
        following = ids(group[0] for group in loader.get_samples(NUM_ROWS // 2))

    first_half = sorted({ids(group)[0] for group in groups[: NUM_ROWS // 2]})
    assert sorted(begun) == sorted(set(range(NUM_ROWS)) - set(first_half))
    assert sorted(following) == first_half


def test_a_run_that_had_one_reward_continues_with_several(rows):
    with remembering(rows, policy=PassRate(drop_above=0.5)) as loader:
        loader.report(loader.get_samples(4), [1.0] * 4)
        state = loader.state_dict()
    del state["outcomes"]["by_key"], state["outcomes"]["num_skipped"]  # as in states of before
    with remembering(rows) as loader:
        loader.load_state_dict(state)
        loader.report(loader.get_samples(2), {"accuracy": [1.0, 0.0]})
        now = loader.statistics()
    assert (now.outcome_scores_total, now.outcome_rewards_total, now.outcome_rows) == (12, {"accuracy": 4}, 4)


def test_each_part_of_a_mixture_has_its_own(tmp_path):
    parts = {name: Part(write_rows(tmp_path / f"{name}.jsonl", 4), weight=1) for name in ("a", "b")}
    with remembering(Mix(parts)) as loader:
        groups = loader.get_samples(6)
        loader.report(groups, {"accuracy": [0.0] * 6, "format": [None, *[1.0] * 5]})
        now = loader.statistics()
    assert now.outcome_rewards_total == {"accuracy": 12, "format": 10}
    assert all(part.outcome_scores_total for part in now.by_source.values())
    assert sum(part.outcome_scores_total for part in now.by_source.values()) == 22
    assert sum(part.outcome_skipped_total for part in now.by_source.values()) == 2
    assert now.to_dict()["asyncdata_outcome_rewards_format_total"] == 10
    assert 'asyncdata_outcome_rewards_total{reward="format"} 10' in now.to_prometheus()


def test_a_recorded_run_has_the_totals_of_each_reward_of_each_start_and_its_page_has_their_means(rows, tmp_path):
    with remembering(rows, telemetry=tmp_path / "telemetry") as loader:
        groups = loader.get_samples(3)
        loader.report(groups[:1], {"accuracy": [0.5], "format": [[None, 1.0]]})
        loader.report(groups[1:], {"accuracy": [[0.0, 1.0], None], "format": [1.0, 0.5]})
    (file,) = (tmp_path / "telemetry").glob("*.jsonl")
    last = [record for line in file.read_text().splitlines() if (record := json.loads(line))["kind"] == "interval"][-1]
    assert last["rewards"] == {
        "accuracy": {"groups": 3, "scores": 4, "skipped": 2, "degenerate": 1, "total": 2.0},
        "format": {"groups": 3, "scores": 5, "skipped": 1, "degenerate": 2, "total": 4.0},
    }
    assert main(["report", str(file.parent), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Reward accuracy" in page
    assert "mean of 5 scores, 1 skipped; 2 of 3 groups have equal scores" in page


@pytest.mark.parametrize(
    ("policy", "scores", "message"),
    [
        (BY_ACCURACY, {"acuracy": [1.0, 0.0]}, "AD484 .* the rewards 'acuracy', and .* key='accuracy'"),
        (BY_ACCURACY, [1.0, 0.0], "AD484 .* the rewards one without a key, and the policy"),
        (PassRate(drop_above=0.5), {"b": [1, 0], "a": [1, 0]}, "AD484 .* the rewards 'a', 'b', and .* without a key"),
        (None, {}, r"AD482 the keys of several rewards are names, got \[\]"),
        (None, {"": [1.0, 0.0]}, "AD482 the keys of several rewards are names"),
        (None, {"a": [1.0]}, "AD482 .* 2 samples or groups, and 1 scores"),
        (None, {"a": [1.0, [0.0]]}, "AD482 a group of 2 samples was reported with 1 scores"),
        (None, {"a": [1.0, 0.0], "b": [1.0, float("nan")]}, "AD482 the score of .* must be a finite number, got nan"),
    ],
)  # fmt: skip
def test_rewards_that_cannot_be_counted_are_refused_and_none_is_counted(rows, policy, scores, message):
    with remembering(rows, policy=policy) as loader:
        groups = loader.get_samples(2)
        with pytest.raises(InvalidGroupError, match=message):
            loader.report(groups, scores)
        groups[0][0].reward, groups[1][0].reward = {"accuracy": 1.0}, 0.5
        with pytest.raises(InvalidGroupError, match="AD482 .* has the reward 0.5, and others a dict"):
            loader.report(groups)
        assert loader.statistics().outcome_scores_total == 0
