"""Groups of rows that are excluded while they are out, in the buffer, or to come again after a restart."""

from __future__ import annotations

import json

import pytest

from asyncdata import Mix, Outcomes, PassRate
from asyncdata.errors import ConfigError
from tests.support.loaders import make
from tests.support.loading import ids, write_rows

NUM_ROWS = 30


@pytest.fixture(params=["one source", "a mixture", "with outcomes"])
def opened(request, tmp_path):
    """Opens a loader of one source or of a mixture, perhaps from a state."""
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", NUM_ROWS) for name in "ab"}

    def open_loader(state=None, **knobs):
        if request.param == "with outcomes":
            knobs |= {"outcomes": Outcomes(policy=PassRate(drop_above=0.5))}
        loader = make(Mix(paths) if request.param == "a mixture" else paths["a"], **knobs)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        return loader

    return open_loader


MODES = {"on_delivery": {}, "on_ack": {"commit": "on_ack"}, "tracked": {}}


@pytest.fixture(params=MODES)
def began(request, opened):
    """As ``opened``, in each of the ways in which delivery is committed."""

    def open_loader(state=None, **knobs):
        loader = opened(state, **MODES[request.param], **knobs)
        if request.param == "tracked":
            loader.track()
        return loader

    return open_loader


def numbers(groups):
    return [group[0].group_index for group in groups]


def rows_of(groups):
    return [(group[0].source_name, *ids(group[:1])) for group in groups]


def test_a_group_that_is_out_and_excluded_is_dropped_and_counted_when_it_comes_back(began):
    with began(n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(4)
        loader.exclude([groups[2]])
        loader.add_samples([groups[2], groups[1]])
        assert loader.statistics().dropped_groups_total == {"excluded": 1}
        assert loader.statistics().buffered_groups == 1
        state = loader.state_dict()
        assert numbers(loader.get_samples(3)) == [1, 4, 5]
    with began(state, n_samples_per_prompt=2) as loader:
        assert loader.statistics().dropped_groups_total == {"excluded": 1}
        assert rows_of([groups[2]])[0] not in rows_of(loader.get_samples(40))


def test_a_group_that_was_given_back_and_served_again_does_not_come_after_it_is_excluded(began):
    with began() as loader:
        groups = loader.get_samples(4)
        loader.add_samples([groups[2], groups[3]])
        assert numbers(loader.get_samples(2)) == [2, 3]
        loader.exclude([groups[2]])
        state = loader.state_dict()
    with began(state) as loader:
        assert rows_of([groups[2]])[0] not in rows_of(loader.get_samples(40))


def test_what_waits_in_a_state_that_was_saved_before_does_not_come_either(began):
    """A state of before excluded groups were dropped may have them in its buffer."""
    with began() as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[2:])
        state = loader.state_dict()
        loader.exclude([groups[2]])
        excluded = loader.state_dict()["excluded"]
    with began(state | {"excluded": excluded}) as loader:
        again = loader.get_samples(3)
        assert numbers(again[:1]) == [3]
        assert rows_of([groups[2]])[0] not in rows_of(again)


@pytest.mark.parametrize("mode", [{}, {"commit": "on_ack"}])
def test_groups_keep_their_numbers_whatever_is_excluded_and_each_is_ended_by_itself(opened, mode):
    with opened(**mode) as loader:
        loader.track()
        groups = loader.get_samples(6)
        loader.add_samples(groups[5:])
        loader.exclude([groups[1]])
        state = loader.state_dict()
    for _ in range(2):
        with opened(state, **mode) as loader:
            loader.track()
            again = loader.get_samples(6)
            assert numbers(again) == [5, 0, 2, 3, 4, 6]
            assert rows_of(again[:5]) == rows_of([groups[5], groups[0], *groups[2:5]])
            state = loader.state_dict()
    with opened(state, **mode) as loader:
        loader.track()
        again = loader.get_samples(8)
        loader.consume([group for group in again if group[0].group_index == 5])
        state = loader.state_dict()
    with opened(state, **mode) as loader:
        loader.track()
        assert rows_of(loader.get_samples(7)) == rows_of([*again[1:8]])


def test_groups_keep_their_numbers_where_rows_are_excluded_before_they_come_again(opened):
    """Before the first lease, between two, after the last, and after the restart: before and while they come again."""
    with opened() as loader:
        whole = loader.get_samples(26)
    with opened() as loader:
        loader.track()
        loader.exclude([whole[1]])
        first = loader.get_samples(4)
        loader.exclude([first[1], whole[6]])
        second = loader.get_samples(4)
        assert numbers(second) == [4, 5, 6, 7]
        loader.exclude([second[0]])
        loader.add_samples(second[3:])
        state = loader.state_dict()
    with opened(state) as loader:
        loader.track()
        loader.exclude([first[2], second[3]])
        assert numbers(loader.get_samples(1)) == [0]
        loader.exclude([second[1]])
        again = loader.get_samples(4)
        assert numbers(again) == [3, 6, 8, 9]
        assert rows_of(again[:2]) == rows_of([first[3], second[2]])
        state = loader.state_dict()
    with opened(state) as loader:
        seen = loader.get_samples(30)
        assert numbers(seen[:6]) == [0, 3, 6, 8, 9, 10]
        assert rows_of(seen[:5]) == rows_of([first[0], *again])
        out = [whole[1], first[1], whole[6], second[0], first[2], second[3], second[1]]
        assert not set(rows_of(seen)).intersection(rows_of(out))


def test_a_group_that_is_out_and_excluded_ends_as_any_other(opened):
    with opened() as loader:
        loader.track()
        groups = loader.get_samples(4)
        loader.exclude(groups[:3])
        loader.consume([groups[0]])
        assert loader.drop([groups[1]], "stale") == 1
        loader.add_samples([groups[2]])
        assert loader.statistics().dropped_groups_total == {"stale": 1, "excluded": 1}
        assert loader.statistics().tracked_groups == 1
        with pytest.raises(ConfigError, match="AD437 consume .*: group 2 was not served, or was"):
            loader.consume([groups[2]])


def test_a_group_that_a_trainer_made_of_several_rows_is_dropped_if_one_of_them_is_excluded(opened):
    with opened(n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(3)
        loader.add_samples([[groups[0][0], groups[1][0]]])
        loader.exclude([groups[1]])
        loader.add_samples([[groups[2][0], groups[1][1]], [groups[0][1], groups[2][1]]])
        assert loader.statistics().dropped_groups_total == {"excluded": 2}
        assert loader.get_samples(1) == [[groups[0][1], groups[2][1]]]


def test_another_epoch_numbers_its_groups_after_all_that_were_served(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    with make(path) as loader:
        loader.track()
        groups = loader.get_samples(6)
        loader.add_samples(groups[5:])
        loader.exclude([groups[1]])
        state = loader.state_dict()
    with make(path) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(1)
        again = loader.get_samples(31)
        assert numbers(again) == [5, *range(6, 36)]
        loader.set_epoch(0)
        assert rows_of([groups[1]])[0] not in rows_of(loader.get_samples(29))
    with make(path, seed=1) as loader:
        loader.load_state_dict(state, allow_changed={"seed"})
        assert numbers(loader.get_samples(3)) == [5, 6, 7]
