"""Groups of excluded rows, where `test_whole_loader.py` does not get: of older states, and made of several rows."""

from __future__ import annotations

import json

import pytest

from asyncdata import Mix, Outcomes, PassRate
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


def numbers(groups):
    return [group[0].group_index for group in groups]


def rows_of(groups):
    return [(group[0].source_name, *ids(group[:1])) for group in groups]


def test_what_waits_in_a_state_that_was_saved_before_does_not_come_either(opened):
    """A state of before excluded groups were dropped may have them in its buffer."""
    with opened() as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[2:])
        state = loader.state_dict()
        loader.exclude([groups[2]])
        excluded = loader.state_dict()["excluded"]
    with opened(state | {"excluded": excluded}) as loader:
        again = loader.get_samples(3)
        assert numbers(again[:1]) == [3]
        assert rows_of([groups[2]])[0] not in rows_of(again)


def test_a_group_that_a_trainer_made_of_several_rows_is_dropped_if_one_of_them_is_excluded(opened):
    with opened(n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(3)
        loader.add_samples([[groups[0][0], groups[1][0]]])
        loader.exclude([groups[1]])
        loader.add_samples([[groups[2][0], groups[1][1]], [groups[0][1], groups[2][1]]])
        assert loader.statistics().dropped_groups_total == {"excluded": 2}
        assert loader.get_samples(1) == [[groups[0][1], groups[2][1]]]
