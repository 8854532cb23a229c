"""The rollout buffer: what may enter, and that no filter can lose a group, repeat one, or smuggle one in."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from asyncdata import ByStaleness, ConfigError, FilterError, Group, InvalidGroupError, Sample, first_in_first_out
from asyncdata.core.types import SampleRange
from asyncdata.delivery.ledger import Returned
from asyncdata.delivery.rollout_buffer import Chooser, choose, filter_of, validate_groups, without
from tests.support.chunks import chunk_of
from tests.support.still_loader import made_by_hand


def buffer_of(num_groups: int) -> list[Returned]:
    return [Returned(made_by_hand(number), [{}]) for number in range(num_groups)]


def names(items: Any) -> list[int]:
    return [int(item.group[0].tokens[0]) for item in items]


# Filters


def test_a_filter_is_a_function_or_its_import_path_and_the_oldest_come_first_without_one() -> None:
    assert filter_of(None) is first_in_first_out
    assert filter_of(without) is without
    assert filter_of("asyncdata.delivery.rollout_buffer:without") is without
    assert filter_of(ByStaleness()) == ByStaleness(), "an object that can be called"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (7, "a function of \\(buffer, num_groups\\), got int"),
        (ByStaleness, "got the class ByStaleness; make one of it"),
        ("asyncdata.delivery.rollout_buffer:__all__", "got tuple"),
        ("asyncdata.filters:ByStaleness", "got the class ByStaleness"),
        ("asyncdata.delivery.rollout_buffer:nothing", "AD420 cannot import"),
    ],
)
def test_what_is_no_filter_is_refused_when_the_loader_is_made(what: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        filter_of(what)


def test_a_filter_is_told_how_many_are_wanted_and_given_the_very_groups() -> None:
    buffer, seen = buffer_of(3), []

    choose(buffer, 2, lambda groups, num_groups: seen.append((groups, num_groups)) or [])

    ((groups, num_groups),) = seen
    assert num_groups == 2
    assert all(group is item.group for group, item in zip(groups, buffer, strict=True))


@pytest.mark.parametrize(
    "foreign",
    [
        lambda buffer: [copy.deepcopy(buffer[0])],
        lambda buffer: [list(buffer[0])],
        lambda buffer: [buffer[0][0]],
        lambda buffer: [buffer[0], made_by_hand(9)],
        lambda buffer: [None],
    ],
    ids=["a copy", "a new list", "a sample", "another group", "None"],
)
def test_only_the_very_groups_of_the_buffer_may_be_returned(foreign: Any) -> None:
    with pytest.raises(
        FilterError, match="AD430 the buffer filter '.*<lambda>' returned something that is no group of the buffer"
    ):
        choose(buffer_of(2), 2, lambda buffer, _: foreign(buffer))


@pytest.mark.parametrize("nothing", [None, 5, iter([])])
def test_a_filter_has_to_return_a_list(nothing: Any) -> None:
    with pytest.raises(
        FilterError, match=f"AD430 .*<lambda>' returned {type(nothing).__name__}; need a list of groups"
    ):
        choose(buffer_of(2), 2, lambda buffer, _: nothing)


def test_an_error_of_a_filter_is_named_with_the_filter() -> None:
    def picky(buffer: list[Group], num_groups: int) -> list[Group]:
        raise KeyError("reward")

    with pytest.raises(FilterError, match=r"AD431 the buffer filter '.*picky' raised KeyError\('reward'\)") as caught:
        choose(buffer_of(2), 2, picky)

    assert isinstance(caught.value.__cause__, KeyError)


def test_a_filter_may_not_call_its_loader_while_it_runs() -> None:
    def meddles(buffer: list[Group], num_groups: int) -> list[Group]:
        chooser.refuse_calls()
        return buffer

    chooser = Chooser(meddles)
    chooser.refuse_calls()

    with pytest.raises(FilterError, match="AD504 the buffer filter '.*meddles' calls the loader that asks it"):
        chooser.choose(buffer_of(2), 2)

    chooser.refuse_calls()
    assert names(Chooser(first_in_first_out).choose(buffer_of(3), 2)) == [0, 1]


# What may enter


def test_a_group_enters_as_it_is_with_a_record_of_this_moment() -> None:
    group = made_by_hand(1, 2, size=2, response="so far", extra={"score": np.float32(0.5)})

    (item,) = validate_groups([group], 2, [])

    assert item.group is group
    assert [Sample.from_dict(record).response for record in item.record] == ["so far"] * 2
    assert [record["extra"] for record in item.record] == [{"score": 0.5}] * 2


def test_a_group_in_the_buffer_releases_its_chunk() -> None:
    """Or one long rollout would keep hundreds of its neighbours in memory."""
    chunk = chunk_of([1, 2], [3])
    sample = SampleRange(chunk, 0, 1, 0, 0, 1).samples()[0]

    validate_groups([[sample]], 1, [])

    assert sample._range is None  # noqa: SLF001
    assert (sample.tokens.tolist(), str(sample.position)) == ([1, 2], "0:0:0")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "AD432 add_samples takes a list of groups, got NoneType"),
        (iter([]), "AD432 add_samples takes a list of groups, got list_iterator"),
        (Sample(), "AD432 add_samples takes a list of groups, got Sample"),
        ([made_by_hand(1), Sample()], "AD432 group 1 must be a list of Sample, got Sample"),
        ([tuple(made_by_hand(1))], "AD432 group 0 must be a list of Sample, got tuple"),
        ([[Sample(), "text", 5]], "AD432 group 0 must be a list of Sample, got a list of Sample, int, str"),
        ([made_by_hand(1), []], "AD432 group 1 has 0 samples, and n_samples_per_prompt is 1"),
        ([made_by_hand(1, size=3)], "AD432 group 0 has 3 samples, and n_samples_per_prompt is 1"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_no_group_is_refused_by_its_number(groups: Any, message: str) -> None:
    with pytest.raises(InvalidGroupError) as caught:
        validate_groups(groups, 1, [])

    assert str(caught.value) == message


def test_a_group_that_is_in_the_buffer_cannot_enter_again() -> None:
    group = made_by_hand(1, size=2)
    buffer = validate_groups([group], 2, [])

    with pytest.raises(InvalidGroupError, match="AD432 group 0 is in the buffer already"):
        validate_groups([group], 2, buffer)
    with pytest.raises(InvalidGroupError, match="AD432 group 0 is in the buffer already"):
        validate_groups([[Sample(), group[1]]], 2, buffer)


def test_a_sample_cannot_enter_twice_at_once() -> None:
    sample, other = Sample(), Sample()

    with pytest.raises(InvalidGroupError, match="AD432 group 1 is in the buffer already, or has a sample twice"):
        validate_groups([[sample], [sample]], 1, [])
    with pytest.raises(InvalidGroupError, match="AD432 group 2 is in the buffer already, or has a sample twice"):
        validate_groups([[sample], [other], [sample]], 1, [])
    with pytest.raises(InvalidGroupError, match="AD432 group 0 .*would be served twice"):
        validate_groups([[other, other]], 2, [])


def test_what_no_snapshot_can_hold_is_refused_with_its_place_and_a_way_out() -> None:
    group = made_by_hand(1, extra={"images": [object()]})

    with pytest.raises(
        InvalidGroupError, match=r"AD432 group 1: \$\.extra\.images\[0\] is a builtins\.object.*Keep it elsewhere"
    ):
        validate_groups([made_by_hand(1), group], 1, [])
