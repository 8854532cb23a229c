"""The shipped filters against models that take one group after the other, whatever is in the buffer."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncdata import BalancedByMetadata, ByMetadata, ByReward, ByStaleness, Chain, Group, Sample, has_reward_spread
from asyncdata.delivery.ledger import Returned
from asyncdata.delivery.rollout_buffer import choose

pytestmark = pytest.mark.thorough

PLACES = ("first", "last", "stay")
SOURCES = ("math", "code", "chat")

versions = st.none() | st.integers(0, 6) | st.lists(st.integers(0, 6), max_size=3)
rewards = st.none() | st.sampled_from([0.0, 0.1, 1.0, math.nan, math.inf, -2]) | st.floats(-10, 10)
samples = st.builds(
    lambda version, reward, source, priority: Sample(
        extra={} if version is None else {"policy_version": version},
        reward=reward,
        metadata={"source": source, "priority": priority},
    ),
    versions,
    rewards,
    st.none() | st.sampled_from(SOURCES),
    st.none() | st.integers(-3, 3) | st.just(math.nan),
)
buffers = st.integers(1, 3).flatmap(lambda size: st.lists(st.lists(samples, min_size=size, max_size=size), max_size=12))
places = st.sampled_from(PLACES)
weights = st.none() | st.dictionaries(st.sampled_from(SOURCES), st.integers(1, 5), max_size=3)

by_staleness = st.builds(
    lambda order, bound, current, place: (
        ByStaleness(order=order)
        if bound is None
        else ByStaleness(order=order, max_staleness=bound, current_version=lambda: current, too_stale=place)
    ),
    st.sampled_from(["freshest_first", "stalest_first", None]),
    st.none() | st.integers(0, 4),
    st.integers(0, 8),
    places,
)
by_reward = st.builds(
    lambda statistic, order, low, width, outside, missing: ByReward(
        statistic=statistic, order=order, above=low, below=low + width, outside=outside, missing=missing
    ),
    st.sampled_from(["mean", "std"]),
    st.sampled_from(["highest_first", "lowest_first", None]),
    st.floats(-2, 2),
    st.floats(0.5, 4),
    places,
    places,
)
by_metadata = st.builds(
    lambda order, missing: ByMetadata("priority", order=order, missing=missing),
    st.sampled_from(["ascending", "descending"]),
    places,
)
balanced = st.builds(
    lambda weights, missing: BalancedByMetadata("source", weights=weights, missing=missing), weights, places
)
single = st.one_of(by_staleness, by_reward, by_metadata, balanced)
every_filter = single | st.lists(single, min_size=1, max_size=3).map(lambda steps: Chain(tuple(steps)))


def numbers_of(groups: list[Group], buffer: list[Group]) -> list[int]:
    place = {id(group): number for number, group in enumerate(buffer)}
    return [place[id(group)] for group in groups]


def served_by(buffer_filter: Any, buffer: list[Group]) -> list[int]:
    return numbers_of(buffer_filter(buffer, len(buffer)), buffer)


# The models: repeatedly the best one that is left. A rank is None for a group that is not ranked.


def best_first(ranks: list[Any], order: str | None, place: str) -> list[int]:
    left = [number for number, rank in enumerate(ranks) if rank is not None]
    others = [number for number, rank in enumerate(ranks) if rank is None]
    taken = []
    while left:
        best = left[0]
        for number in left:
            is_better = ranks[number] > ranks[best] if order in DOWNWARDS else ranks[number] < ranks[best]
            best = number if order is not None and is_better else best
        left.remove(best)
        taken.append(best)
    return {"first": others + taken, "last": taken + others, "stay": taken}[place]


DOWNWARDS = ("freshest_first", "highest_first", "descending")


def version_of(group: Group) -> float:
    found = [sample.extra.get("policy_version", []) for sample in group]
    flat = [version for value in found for version in (value if isinstance(value, list) else [value])]
    return min(flat) if flat else math.inf


@given(by_staleness, buffers)
def test_by_staleness(buffer_filter: ByStaleness, buffer: list[Group]) -> None:
    ranks: list[float | None] = [version_of(group) for group in buffer]
    if buffer_filter.current_version is not None and buffer_filter.max_staleness is not None:
        now, bound = buffer_filter.current_version(), buffer_filter.max_staleness
        ranks = [None if now - version_of(group) > bound else version_of(group) for group in buffer]

    assert served_by(buffer_filter, buffer) == best_first(ranks, buffer_filter.order, buffer_filter.too_stale)
    assert [buffer_filter.is_stale(group) for group in buffer] == [rank is None for rank in ranks]


def is_whole(group: Group) -> bool:
    return all(sample.reward is not None and math.isfinite(sample.reward) for sample in group)  # type: ignore[arg-type]


@given(buffers)
def test_rewards_spread_where_the_exact_deviation_is_not_zero(buffer: list[Group]) -> None:
    for group in filter(is_whole, buffer):
        exact = statistics.pvariance([Fraction(sample.reward) for sample in group])  # type: ignore[arg-type]

        assert has_reward_spread(group) == (exact > 0)
        assert (ByReward(above=0, outside="stay")([group], 1) == [group]) == (exact > 0)


@given(by_reward, buffers)
def test_by_reward(buffer_filter: ByReward, buffer: list[Group]) -> None:
    """Which groups are within the bounds the model is told; rounding may decide that either way at a bound."""
    whole = [number for number, group in enumerate(buffer) if is_whole(group)]
    values = {}
    for number in whole:
        rewards = [float(sample.reward) for sample in buffer[number]]  # type: ignore[arg-type]
        values[number] = statistics.fmean(rewards) if buffer_filter.statistic == "mean" else statistics.pstdev(rewards)
    low, high = buffer_filter.above, buffer_filter.below
    assert low is not None
    assert high is not None
    served = served_by(buffer_filter, buffer)
    inside = [number for number in whole if low < values[number] < high]
    outside = [number for number in whole if number not in inside]
    missing = [number for number in range(len(buffer)) if number not in whole]
    margins = [abs(value - bound) for value in values.values() for bound in (low, high)]
    gaps = [abs(a - b) for a in values.values() for b in values.values() if a != b]
    if any(margin < 1e-9 for margin in margins) or any(gap < 1e-9 for gap in gaps):
        return

    sign = {"highest_first": -1, "lowest_first": 1, None: 0}[buffer_filter.order]
    within = sorted(inside, key=lambda number: (sign * values[number], number))
    wanted = {"first": outside + within, "last": within + outside, "stay": within}[buffer_filter.outside]
    assert served == {"first": missing + wanted, "last": wanted + missing, "stay": wanted}[buffer_filter.missing]


@given(by_metadata, buffers)
def test_by_metadata(buffer_filter: ByMetadata, buffer: list[Group]) -> None:
    found = [group[0].metadata["priority"] for group in buffer]
    ranks = [None if value is None or math.isnan(value) else value for value in found]

    assert served_by(buffer_filter, buffer) == best_first(ranks, buffer_filter.order, buffer_filter.missing)


@given(balanced, buffers)
def test_a_balanced_filter_always_serves_the_value_that_is_furthest_behind(
    buffer_filter: BalancedByMetadata, buffer: list[Group]
) -> None:
    """Sainte-Laguë, seat by seat: the next one goes to the highest quotient ``weight / (2 * seats + 1)``."""
    listed = buffer_filter.weights
    sources = [group[0].metadata["source"] for group in buffer]
    left = [number for number, source in enumerate(sources) if source and (listed is None or source in listed)]
    others = [number for number in range(len(buffer)) if number not in left]
    taken: list[int] = []
    seats: Counter[str] = Counter()
    while left:
        quotient = {
            number: Fraction(int(listed[sources[number]]) if listed is not None else 1, 2 * seats[sources[number]] + 1)
            for number in left
        }
        best = max(left, key=lambda number: (quotient[number], -number))
        seats[sources[best]] += 1
        left.remove(best)
        taken.append(best)

    wanted = {"first": others + taken, "last": taken + others, "stay": taken}[buffer_filter.missing]
    assert served_by(buffer_filter, buffer) == wanted


# Whatever the filter


@given(every_filter, buffers, st.integers(1, 15))
def test_no_group_is_lost_repeated_or_changed(buffer_filter: Any, buffer: list[Group], num_groups: int) -> None:
    items = [Returned(group, []) for group in buffer]
    before = [[sample.to_dict() for sample in group] for group in buffer]

    chosen = choose(items, num_groups, buffer_filter)

    served = numbers_of([item.group for item in chosen], buffer)
    assert len(set(served)) == len(served) <= num_groups
    assert repr([[sample.to_dict() for sample in group] for group in buffer]) == repr(before)  # NaN is not NaN
    assert numbers_of([item.group for item in choose(items, num_groups, buffer_filter)], buffer) == served


@given(every_filter, buffers, st.integers(1, 15))
def test_fewer_groups_are_the_first_of_more(buffer_filter: Any, buffer: list[Group], num_groups: int) -> None:
    assert numbers_of(buffer_filter(buffer, num_groups), buffer) == served_by(buffer_filter, buffer)[:num_groups]


@given(st.lists(single, min_size=1, max_size=3), buffers)
def test_a_chain_is_one_filter_after_the_other(steps: list[Any], buffer: list[Group]) -> None:
    left = buffer
    for step in steps:
        left = step(left, len(left))

    assert served_by(Chain(tuple(steps)), buffer) == numbers_of(left, buffer)


@given(single, buffers)
def test_nothing_stays_in_the_buffer_of_a_filter_that_does_not_say_so(buffer_filter: Any, buffer: list[Group]) -> None:
    settings = [getattr(buffer_filter, name, "last") for name in ("too_stale", "outside", "missing")]

    if "stay" not in settings:
        assert sorted(served_by(buffer_filter, buffer)) == list(range(len(buffer)))
