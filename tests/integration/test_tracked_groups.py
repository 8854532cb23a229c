"""Tracked groups: what is refused, and what a run that dies leaves. ``test_whole_loader.py`` holds the rest."""

from __future__ import annotations

import pytest

from asyncdata import SoftPacking
from asyncdata.errors import ConfigError
from tests.support.loaders import make
from tests.support.loading import write_rows

NUM_ROWS, SIZE = 24, 2


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def test_what_was_served_before_is_not_tracked_and_a_sample_or_a_copy_stands_for_its_group(rows):
    with make(rows, n_samples_per_prompt=SIZE) as loader:
        early = loader.get_samples(1)
        loader.track()
        loader.track()
        groups = loader.get_samples(3)
        loader.consume([groups[0][1], groups[0][0]])
        loader.consume([list(groups[1])])
        with pytest.raises(ConfigError, match="AD437 consume takes .* once: group 0 was not served, or"):
            loader.consume([*groups[2:], *early])
        assert loader.drop([*groups[2:], *early], "stale") == 1


def test_what_is_not_tracked_is_refused(rows):
    with make(rows) as loader:
        groups = loader.get_samples(2)
        with pytest.raises(ConfigError, match=r"AD437 groups are not tracked: call track\(\) before the first"):
            loader.consume(groups)
        with pytest.raises(ConfigError, match="AD437 groups are not tracked"):
            loader.drop(groups, "stale")
        with pytest.raises(ConfigError, match=r"AD437 drop\(\) takes a reason, such as 'stale', got ''"):
            loader.drop(groups, "")
    with make(rows, commit="on_ack") as loader:
        groups = loader.get_samples(2)
        loader.consume(groups)
        assert loader.statistics().tracked_groups == 0
    packed = make(rows, packing=SoftPacking(max_length=64), batch_size=1)
    with packed as loader, pytest.raises(ConfigError, match=r"not from track\(\)"):
        loader.track()


def test_groups_of_the_buffer_that_are_out_and_excluded_may_be_consumed_or_given_back_and_come_no_more(rows):
    with make(rows, commit="on_ack") as loader:
        loader.add_samples(loader.get_samples(3)[:2])
        first, second = loader.get_samples(2)
        loader.exclude([first, second])
        assert (loader.statistics().tracked_groups, loader.state_dict()["leases"]) == (3, [])
        loader.consume([first])
        loader.add_samples([second])
        now = loader.statistics()
        assert (now.tracked_groups, now.dropped_groups_total) == (1, {"excluded": 1})
