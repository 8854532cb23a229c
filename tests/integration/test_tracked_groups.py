"""Tracked groups: what is refused, and what a run that dies leaves. ``test_whole_loader.py`` holds the rest."""

from __future__ import annotations

import anyio
import pytest

from asyncdata import AsyncDataLoader, SoftPacking
from asyncdata.errors import ConfigError
from tests.support.loaders import make
from tests.support.loading import SHUFFLE, write_rows
from tests.support.tokenize_fns import row_id

NUM_ROWS, SIZE = 24, 2


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def numbers(groups):
    return [group[0].group_index for group in groups]


def test_a_loop_that_generates_without_end_loses_nothing_when_its_process_dies(rows):
    """Of eight groups, two are trained, one is stale, one is given back with half an answer; the others are out."""

    async def first_run():
        async with AsyncDataLoader(rows, tokenize_fn=row_id, shuffle=SHUFFLE, num_workers=0) as loader:
            loader.track()
            groups = await loader.get_samples(8)
            loader.consume([groups[1], groups[4]])
            loader.drop([groups[2]], "stale")
            groups[6][0].response = "half an ans"
            loader.add_samples([groups[6]])
            return loader.state_dict(), groups

    async def second_run(state):
        async with AsyncDataLoader(rows, tokenize_fn=row_id, shuffle=SHUFFLE, num_workers=0) as loader:
            loader.load_state_dict(state)
            loader.track()
            again = await loader.get_samples(6)
            return again, loader.statistics()

    state, groups = anyio.run(first_run)
    again, now = anyio.run(second_run, state)
    assert numbers(again) == [6, 0, 3, 5, 7, 8]
    assert again[0][0].response == "half an ans"
    assert [group[0].tokens.tolist() for group in again[1:5]] == [groups[n][0].tokens.tolist() for n in (0, 3, 5, 7)]
    assert now.dropped_groups_total == {"stale": 1}
    assert now.to_dict()["asyncdata_dropped_groups_stale_total"] == 1
    assert now.tracked_groups == 6


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
