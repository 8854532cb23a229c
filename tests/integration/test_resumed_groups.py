"""A restored loader loses no group that was given back or not acknowledged, and counts bad rows once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from asyncdata import BadRowError, ConfigError, Sample, Status
from tests.support.loaders import make, resumed, state_after
from tests.support.loading import ids, line_of, order_of, write_rows
from tests.support.tokenize_fns import fails_on_13, kills_on_13

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 100


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


# What the trainer gave back


def test_groups_given_back_are_in_the_state_whole(path):
    knobs = {"n_samples_per_prompt": 2}
    with make(path, **knobs) as loader:
        groups = loader.get_samples(5)
        first, second = groups[1]
        first.response, first.response_length, first.reward = "so far", 2, {"math": 0.5}
        first.loss_mask, first.rollout_log_probs, first.status = [1, 0], [-0.25, -1.5], Status.TRUNCATED
        first.tokens = np.array([7, 8, 9], np.int32)
        first.metadata["tool"] = ["search", 1]
        second.extra["reward_model"] = {"version": 3}
        loader.add_samples([groups[3], groups[1]])
        state = json.loads(json.dumps(loader.state_dict()))

    with make(path, **knobs) as loader:
        loader.load_state_dict(state)
        restored = loader.get_samples(3)

    assert [[sample.group_index for sample in group] for group in restored] == [[3, 3], [1, 1], [5, 5]]
    for before, after in zip([*groups[3], *groups[1]], [*restored[0], *restored[1]], strict=True):
        assert msgspec.to_builtins(before.to_dict()) == msgspec.to_builtins(after.to_dict())
    assert restored[1][0].tokens.tolist() == [7, 8, 9]
    assert restored[1][0].status is Status.TRUNCATED


def test_a_group_that_was_served_again_is_no_more_in_the_state(path):
    with make(path) as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[:2])
        loader.get_samples(1)
        state = loader.state_dict()

    with make(path) as loader:
        loader.load_state_dict(state)
        assert [group[0].group_index for group in loader.get_samples(3)] == [1, 4, 5]


def test_groups_of_another_size_are_refused_and_change_nothing(path):
    with make(path) as loader:
        loader.add_samples(loader.get_samples(1))
        state = loader.state_dict()

    with make(path, n_samples_per_prompt=2) as loader:
        with pytest.raises(ConfigError, match="groups of 1 samples, and n_samples_per_prompt is 2"):
            loader.load_state_dict(state)
        assert ids(loader.get_next_batch(2)) == [order_of(path)[0]] * 2


# Acknowledging


def groups_of(groups: list[list[Sample]]) -> list[int | None]:
    return [group[0].group_index for group in groups]


def test_what_was_not_acknowledged_is_delivered_again_in_order(path):
    expected = order_of(path)
    with make(path, commit="on_ack") as loader:
        first, second, third = (loader.get_samples(4) for _ in range(3))
        loader.ack(first)
        loader.ack([second[1], second[2][0]])  # a group, and a sample that stands for its group
        state = loader.state_dict()
        following = loader.get_samples(2)  # within a run nothing comes twice

    assert groups_of(following) == [12, 13]
    with make(path, commit="on_ack") as loader:
        loader.load_state_dict(state)
        again = loader.get_samples(6)
        then = loader.get_samples(2)

    unacknowledged = [second[0], second[3], *third]
    assert groups_of(again) == groups_of(unacknowledged)
    assert [ids(group) for group in again] == [ids(group) for group in unacknowledged]
    assert groups_of(then) == [12, 13]
    assert [number for group in then for number in ids(group)] == expected[12:14]


def test_what_is_all_acknowledged_is_not_delivered_again(path):
    with make(path, commit="on_ack") as loader:
        loader.get_samples(7)
        loader.ack()
        state = loader.state_dict()

    assert state["leases"] == []
    assert resumed(path, state, 3, commit="on_ack") == order_of(path)[7:10]


def test_acknowledging_is_enough_once_and_in_any_order(path):
    with make(path, commit="on_ack") as loader:
        groups = loader.get_samples(6)
        for group in groups[::-1]:
            loader.ack([group])
            loader.ack([group])
        assert loader.statistics().leased_requests == 0


def test_a_group_from_the_buffer_is_delivered_again_as_it_was_given_back(path):
    with make(path, commit="on_ack") as loader:
        groups = loader.get_samples(2)
        groups[1][0].response = "half"
        loader.add_samples([groups[1]])
        loader.ack([groups[0]])
        loader.get_samples(3)  # the one from the buffer, and two of the stream
        state = json.loads(json.dumps(loader.state_dict()))

    with make(path, commit="on_ack") as loader:
        loader.load_state_dict(state)
        again = loader.get_samples(4)

    assert groups_of(again) == [1, 2, 3, 4]
    assert again[0][0].response == "half"


def test_leases_survive_a_second_resume(path):
    with make(path, commit="on_ack") as loader:
        groups = loader.get_samples(5)
        loader.ack([groups[2]])
        state = loader.state_dict()
    for _ in range(2):
        with make(path, commit="on_ack") as loader:
            loader.load_state_dict(state)
            state = loader.state_dict()

    with make(path, commit="on_ack") as loader:
        loader.load_state_dict(state)
        assert groups_of(loader.get_samples(6)) == [0, 1, 3, 4, 5, 6]


@pytest.mark.thorough
def test_acknowledging_over_an_epochs_end_counts_every_epoch_once(path):
    expected = order_of(path, 3)
    seen: list[int] = []
    state = None
    for _ in range(30):
        with make(path, commit="on_ack") as loader:
            if state is not None:
                loader.load_state_dict(state)
            batch = loader.get_next_batch(13)
            loader.get_next_batch(5)  # lost with the run
            loader.ack(batch)
            seen += ids(batch)
            state = loader.state_dict()

    assert seen[:300] == expected


# Bad rows


def test_a_bad_row_is_raised_again_after_a_resume_and_skipped_rows_stay_counted(path):
    turn = order_of(path).index(13)

    with make(path, fails_on_13) as loader:
        loader.load_state_dict(state_after(path, turn, fails_on_13))
        with pytest.raises(BadRowError):
            loader.get_next_batch(1)
    with make(path, fails_on_13, bad_rows="skip") as loader:
        loader.load_state_dict(state_after(path, turn + 3, fails_on_13, bad_rows="skip"))
        loader.get_next_batch(1)
        assert loader.statistics().bad_rows_total == 1


@pytest.mark.thorough
def test_a_row_that_killed_workers_is_not_tried_again_after_a_resume(path):
    expected = [number for number in order_of(path) if number != 13]
    with make(path, kills_on_13, num_workers=1, bad_rows="skip") as loader:
        before = loader.state_dict()
        seen = ids(loader.get_next_batch(NUM_ROWS - 1))
        state = loader.state_dict()
    assert seen == expected
    assert state["journal"] == [[0, line_of(path, 13)[1]]]

    before["journal"] = state["journal"]  # a run that goes through the row a second time, and knows of it
    with make(path, kills_on_13, num_workers=1, bad_rows="skip") as loader:
        loader.load_state_dict(before)
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == expected
        assert loader.statistics().worker_restarts_total == 0
        assert loader.statistics().dropped_total == {"journal": 1}
