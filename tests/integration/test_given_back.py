"""``DataLoader``: groups that the trainer gives back, or has not acknowledged, come first, also after a restart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from asyncdata import BadRowError, ConfigError, FilterError, InvalidGroupError, Sample, Status
from tests.support.loaders import make, resumed, state_after
from tests.support.loading import ids, line_of, order_of, write_rows
from tests.support.tokenize_fns import fails_on_13, kills_on_13

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 100
PAIRS = {"n_samples_per_prompt": 2}


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def numbers(groups: list[list[Sample]]) -> list[int | None]:
    return [group[0].group_index for group in groups]


# Giving back


def test_what_is_given_back_comes_first_each_once_and_then_the_order_goes_on(path):
    mine = Sample(prompt="mine", tokens=np.array([9, 9], np.int32), metadata={"a": 1})
    with make(path) as loader:
        groups = loader.get_samples(6)
        groups[1][0].response = "half a"
        loader.add_samples([groups[1], groups[4], [mine]])
        assert loader.statistics().buffered_groups == 3
        again = loader.get_samples(4)
        after = loader.get_samples(1)

    assert again[:3] == [groups[1], groups[4], [mine]]  # the very samples: equality is identity
    assert again[0][0].response == "half a"
    assert [ids(group)[0] for group in [*again[3:], *after]] == order_of(path)[6:8]


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda groups: [*groups, groups[0][:1]], "group 3 has 1 samples, and n_samples_per_prompt is 2"),
        (lambda groups: [*groups, [1, 2]], "group 3 must be a list of Sample, got a list of int"),
        (lambda groups: [*groups, groups[0]], "group 3 is in the buffer already"),
        (lambda groups: groups[0][0], "takes a list of groups, got Sample"),
        (lambda groups: [setattr(groups[2][1], "reward", object()) or group for group in groups], "group 2: .*reward"),
    ],
)
def test_groups_are_added_all_or_none(path, spoil, match):
    with make(path, **PAIRS) as loader:
        groups = loader.get_samples(3)
        with pytest.raises(InvalidGroupError, match=f"^AD432 .*{match}"):
            loader.add_samples(spoil(groups))
        assert loader.statistics().buffered_groups == 0
        assert ids(loader.get_next_batch(2)) == [order_of(path)[3]] * 2


@pytest.mark.parametrize(
    ("buffer_filter", "served", "left"),
    [
        (lambda buffer, num_groups: buffer[-1:], [2, 4], 2),
        ("tests.support.filters:newest_first", [2, 1], 1),
        (lambda buffer, num_groups: buffer, [0, 1], 1),  # too many
    ],
)
def test_a_filter_chooses_and_what_it_gives_too_much_is_not_lost(path, buffer_filter, served, left):
    with make(path, buffer_filter=buffer_filter) as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[:3])
        assert numbers(loader.get_samples(2)) == served
        assert loader.statistics().buffered_groups == left


@pytest.mark.parametrize("name", ["tests.support.filters:nothing", "no path", 7])
def test_a_filter_that_is_none_is_refused_at_once(path, name):
    with pytest.raises(ConfigError):
        make(path, buffer_filter=name)


def test_a_filter_that_breaks_its_contract_takes_nothing(path):
    wrong: list[Any] = [lambda buffer, number: 1 / 0, lambda buffer, number: [[]], lambda buffer, number: None]

    for function in wrong:
        with make(path, buffer_filter=function) as loader:
            groups = loader.get_samples(2)
            loader.add_samples(groups)
            with pytest.raises(FilterError, match="^AD43[01] "):
                loader.get_samples(1)
            assert loader.statistics().buffered_groups == 2


# After a restart


def test_groups_given_back_are_in_the_state_whole_until_they_are_served(path):
    with make(path, **PAIRS) as loader:
        groups = loader.get_samples(5)
        first, second = groups[1]
        first.response, first.response_length, first.reward = "so far", 2, {"math": 0.5}
        first.loss_mask, first.rollout_log_probs, first.status = [1, 0], [-0.25, -1.5], Status.TRUNCATED
        first.tokens = np.array([7, 8, 9], np.int32)
        first.metadata["tool"] = ["search", 1]
        second.extra["reward_model"] = {"version": 3}
        loader.add_samples([groups[0], groups[3], groups[1]])
        loader.get_samples(1)
        state = json.loads(json.dumps(loader.state_dict()))

    with make(path, **PAIRS) as loader:
        loader.load_state_dict(state)
        restored = loader.get_samples(3)

    assert [[sample.group_index for sample in group] for group in restored] == [[3, 3], [1, 1], [5, 5]]
    for before, after in zip([*groups[3], *groups[1]], [*restored[0], *restored[1]], strict=True):
        assert msgspec.to_builtins(before.to_dict()) == msgspec.to_builtins(after.to_dict())
    assert restored[1][0].tokens.tolist() == [7, 8, 9]
    assert restored[1][0].status is Status.TRUNCATED
    with make(path) as loader:
        with pytest.raises(ConfigError, match="groups of 2 samples, and n_samples_per_prompt is 1"):
            loader.load_state_dict(state)
        assert ids(loader.get_next_batch(1)) == order_of(path)[:1]


def test_what_was_not_acknowledged_is_delivered_again_in_order_also_after_a_second_restart(path):
    expected = order_of(path)
    with make(path, commit="on_ack") as loader:
        first, second, third = (loader.get_samples(4) for _ in range(3))
        loader.ack(first)
        loader.ack([second[1], second[2][0]])  # a group, and a sample that stands for its group
        state = loader.state_dict()
        assert numbers(loader.get_samples(2)) == [12, 13], "within a run nothing comes twice"

    with make(path, commit="on_ack") as loader:
        loader.load_state_dict(state)
        state = loader.state_dict()
    with make(path, commit="on_ack") as loader:
        loader.load_state_dict(state)
        again = loader.get_samples(6)
        then = loader.get_samples(2)

    unacknowledged = [second[0], second[3], *third]
    assert numbers(again) == numbers(unacknowledged)
    assert [ids(group) for group in again] == [ids(group) for group in unacknowledged]
    assert numbers(then) == [12, 13]
    assert [number for group in then for number in ids(group)] == expected[12:14]


def test_acknowledging_is_enough_once_in_any_order_or_of_all_at_once(path):
    with make(path, commit="on_ack") as loader:
        groups = loader.get_samples(6)
        for group in groups[::-1]:
            loader.ack([group])
            loader.ack([group])
        assert loader.statistics().leased_requests == 0
        loader.get_samples(1)
        loader.ack()
        state = loader.state_dict()

    assert state["leases"] == []
    assert resumed(path, state, 3, commit="on_ack") == order_of(path)[7:10]


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

    assert numbers(again) == [1, 2, 3, 4]
    assert again[0][0].response == "half"


@pytest.mark.thorough
def test_acknowledging_over_an_epochs_end_counts_every_epoch_once(path):
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

    assert seen[:300] == order_of(path, 3)


# Bad rows after a restart


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
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == expected
        journal = loader.state_dict()["journal"]
    assert journal == [[0, line_of(path, 13)[1]]]

    before["journal"] = journal  # a run that goes through the row a second time, and knows of it
    with make(path, kills_on_13, num_workers=1, bad_rows="skip") as loader:
        loader.load_state_dict(before)
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == expected
        assert loader.statistics().worker_restarts_total == 0
        assert loader.statistics().dropped_total == {"journal": 1}
