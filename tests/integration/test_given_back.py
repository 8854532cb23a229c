"""``DataLoader``: groups that the trainer gives back come first, whole, and none is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdata import ConfigError, FilterError, InvalidGroupError, Sample
from tests.support.loaders import make
from tests.support.loading import ids, order_of, write_rows

if TYPE_CHECKING:
    from pathlib import Path


NUM_ROWS = 200


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


# Giving back


def test_what_is_given_back_comes_first_each_once_and_then_the_order_goes_on(path):
    expected = order_of(path)

    with make(path, n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(6)
        groups[1][0].response = "half a"
        loader.add_samples([groups[1], groups[4]])
        assert loader.statistics().buffered_groups == 2
        again = loader.get_samples(3)
        after = loader.get_samples(1)

    assert again[:2] == [groups[1], groups[4]]  # the very samples: equality is identity
    assert again[0][0].response == "half a"
    assert [ids(group)[0] for group in [*again[2:], *after]] == expected[6:8]


def test_a_sample_made_by_hand_may_be_added(path):
    mine = Sample(prompt="mine", tokens=np.array([9, 9], np.int32), metadata={"a": 1})

    with make(path) as loader:
        loader.add_samples([[mine]])
        assert loader.get_next_batch(2)[0] is mine


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
    with make(path, n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(3)
        with pytest.raises(InvalidGroupError, match=f"^AD432 .*{match}"):
            loader.add_samples(spoil(groups))
        assert loader.statistics().buffered_groups == 0
        assert ids(loader.get_next_batch(2)) == [order_of(path)[3]] * 2


def test_a_filter_chooses(path):
    with make(path, buffer_filter=lambda buffer, num_groups: buffer[-1:]) as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[:3])
        served = loader.get_samples(2)
        left = loader.statistics().buffered_groups

    assert served[0] == groups[2]
    assert ids(served[1]) == order_of(path)[4:5]
    assert left == 2


def test_a_filter_by_import_path(path):
    with make(path, buffer_filter="tests.support.filters:newest_first") as loader:
        groups = loader.get_samples(3)
        loader.add_samples(groups)
        assert loader.get_samples(3) == groups[::-1]


def test_a_filter_that_breaks_its_contract_takes_nothing(path):
    wrong: list[Any] = [lambda buffer, number: 1 / 0, lambda buffer, number: [[]], lambda buffer, number: None]

    for function in wrong:
        with make(path, buffer_filter=function) as loader:
            groups = loader.get_samples(2)
            loader.add_samples(groups)
            with pytest.raises(FilterError, match="^AD43[01] "):
                loader.get_samples(1)
            assert loader.statistics().buffered_groups == 2


def test_a_filter_that_gives_too_much_is_capped_and_loses_nothing(path):
    with make(path, buffer_filter=lambda buffer, number: buffer) as loader:
        groups = loader.get_samples(5)
        loader.add_samples(groups)
        assert loader.get_samples(2) == groups[:2]
        assert loader.get_samples(3) == groups[2:]


@pytest.mark.parametrize("name", ["tests.support.filters:nothing", "no path", 7])
def test_a_filter_that_is_none_is_refused_at_once(path, name):
    with pytest.raises(ConfigError):
        make(path, buffer_filter=name)
