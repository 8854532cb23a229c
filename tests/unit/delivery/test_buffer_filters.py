"""The shipped buffer filters: which groups they serve, which stay, and the error for a value they cannot rank."""

import copy
import math
import statistics
from collections import Counter
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from asyncdata import Sample, Status, filters
from asyncdata.delivery.rollout_buffer import choose
from asyncdata.errors import ConfigError, FilterError, InvalidGroupError
from asyncdata.filters import BalancedByMetadata, ByMetadata, ByReward, ByStaleness, Chain, has_reward_spread
from tests.support.examples import in_ci
from tests.support.parts import Returned


def group_of(number, *, size=2, **fields):
    """A group whose number its tokens tell; a field that is a list has one value per sample."""
    group = [Sample(index=number * size + place, group_index=number) for place in range(size)]
    for place, sample in enumerate(group):
        sample.tokens = np.array([number], np.int32)
        for name, value in fields.items():
            setattr(sample, name, value[place] if isinstance(value, list) else copy.deepcopy(value))
    return group


def rewarded(*rewards):
    return [group_of(number, reward=reward) for number, reward in enumerate(rewards)]


def groups_with(field, key, *values):
    return [group_of(number, **{field: {} if value is None else {key: value}}) for number, value in enumerate(values)]


def written_by(*versions, key="policy_version"):
    return groups_with("extra", key, *versions)


def rows_with(*metadata):
    return groups_with("metadata", "source", *metadata)


def served(buffer_filter, buffer, num_groups=None):
    """The numbers of the groups, as a loader asks a filter, with all its checks."""
    items = [Returned(group, []) for group in buffer]
    chosen = choose(items, len(buffer) if num_groups is None else num_groups, buffer_filter)
    return [int(item.group[0].tokens[0]) for item in chosen]


SOURCE, BALANCED = ByMetadata("source"), BalancedByMetadata("source")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ByStaleness(order="newest"), "ByStaleness: order='newest'"),
        (lambda: ByStaleness(max_staleness=2), "max_staleness and current_version need one another"),
        (lambda: ByStaleness(current_version=lambda: 2), "max_staleness and current_version need one another"),
        (lambda: ByStaleness(max_staleness=-1, current_version=lambda: 2), "max_staleness must be at least 0, got -1"),
        (lambda: ByStaleness(max_staleness=2, current_version=7), "ByStaleness: current_version=7"),
        (lambda: ByReward(statistic="median"), "ByReward: statistic='median'"),
        (lambda: ByReward(outside="nowhere"), "ByReward: outside='nowhere'"),
        (lambda: ByReward(above=1.0, below=1.0), "above must be lower than below, got above=1.0 and below=1.0"),
        (lambda: ByReward(above=math.nan), "above must be lower than below, got above=nan"),
        (lambda: ByMetadata(5), "ByMetadata: key=5"),
        (lambda: BalancedByMetadata("source", weights={"math": 0}), "the weight of 'math' must be above 0, got 0"),
        (lambda: BalancedByMetadata("source", weights={"math": math.inf}), "the weight of 'math' must be above 0"),
        (lambda: BalancedByMetadata("source", weights={"math": "3"}), "BalancedByMetadata: weights="),
        (lambda: Chain(()), "Chain: filters must have at least one filter"),
        (lambda: Chain((ByReward(), "filters:mine")), "Chain: filters="),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_once(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


# Which groups are served, in which order: models that take one group after the other

SOURCES = ("math", "code", "chat")

priorities = st.none() | st.integers(-3, 3) | st.just(math.nan)
rewards = st.none() | st.sampled_from([0.0, 0.1, 1.0, math.nan, math.inf, -2]) | st.floats(-10, 10)
samples = st.builds(
    Sample,
    extra=st.fixed_dictionaries({}, optional={"policy_version": st.integers(0, 6) | st.lists(st.integers(0, 6))}),
    reward=rewards,
    metadata=st.fixed_dictionaries({"source": st.none() | st.sampled_from(SOURCES), "priority": priorities}),
)
buffers = st.integers(1, 3).flatmap(lambda size: st.lists(st.lists(samples, min_size=size, max_size=size), max_size=12))
places = st.sampled_from(["first", "last", "stay"])
weights = st.none() | st.dictionaries(st.sampled_from(SOURCES), st.integers(1, 5), max_size=3)

ages = st.sampled_from(["freshest_first", "stalest_first", None])
now = st.integers(0, 8).map(lambda version: lambda: version)
by_staleness = st.builds(ByStaleness, order=ages) | st.builds(
    ByStaleness, order=ages, max_staleness=st.integers(0, 4), current_version=now, too_stale=places
)
by_reward = st.builds(
    ByReward, statistic=st.sampled_from(["mean", "std"]),
    order=st.sampled_from(["highest_first", "lowest_first", None]), above=st.floats(-2, 0.5), below=st.floats(1, 4),
    outside=places, missing=places,
)  # fmt: skip
by_metadata = st.builds(
    ByMetadata, st.just("priority"), order=st.sampled_from(["ascending", "descending"]), missing=places
)
balanced = st.builds(BalancedByMetadata, st.just("source"), weights=weights, missing=places)
single = st.one_of(by_staleness, by_reward, by_metadata, balanced)
every_filter = single | st.lists(single, min_size=1, max_size=3).map(lambda steps: Chain(tuple(steps)))


def places_of(groups, buffer):
    place = {id(group): number for number, group in enumerate(buffer)}
    return [place[id(group)] for group in groups]


def served_by(buffer_filter, buffer):
    return places_of(buffer_filter(buffer, len(buffer)), buffer)


# The models. A rank is None for a group that is not ranked.

SIGN = {"freshest_first": -1, "highest_first": -1, "descending": -1, None: 0}


def placed(taken, others, place):
    return {"first": others + taken, "last": taken + others, "stay": taken}[place]


def best_first(ranks, order, place):
    taken = [number for number, rank in enumerate(ranks) if rank is not None]
    others = [number for number, rank in enumerate(ranks) if rank is None]
    if order is not None:
        taken.sort(key=lambda number: (SIGN.get(order, 1) * ranks[number], number))
    return placed(taken, others, place)


def version_of(group):
    found = [sample.extra.get("policy_version", []) for sample in group]
    flat = [version for value in found for version in (value if isinstance(value, list) else [value])]
    return min(flat) if flat else math.inf


@in_ci(max_examples=30)
@given(by_staleness, buffers)
def test_by_staleness(buffer_filter, buffer):
    ranks = [version_of(group) for group in buffer]
    if buffer_filter.max_staleness is not None:
        oldest = buffer_filter.current_version() - buffer_filter.max_staleness
        ranks = [None if version < oldest else version for version in ranks]
    assert served_by(buffer_filter, buffer) == best_first(ranks, buffer_filter.order, buffer_filter.too_stale)
    assert [buffer_filter.is_stale(group) for group in buffer] == [rank is None for rank in ranks]


def is_whole(group):
    return all(sample.reward is not None and math.isfinite(sample.reward) for sample in group)


@in_ci(max_examples=30)
@given(buffers)
def test_rewards_spread_where_the_exact_deviation_is_not_zero(buffer):
    for group in filter(is_whole, buffer):
        spreads = statistics.pvariance([Fraction(sample.reward) for sample in group]) > 0
        assert has_reward_spread(group) == (ByReward(above=0, outside="stay")([group], 1) == [group]) == spreads


@in_ci(max_examples=30)
@given(by_reward, buffers)
def test_by_reward(buffer_filter, buffer):
    """Which groups are within the bounds the model is told; rounding may decide that either way at a bound."""
    whole = [number for number, group in enumerate(buffer) if is_whole(group)]
    statistic = statistics.fmean if buffer_filter.statistic == "mean" else statistics.pstdev
    values = {number: statistic([float(sample.reward) for sample in buffer[number]]) for number in whole}
    low, high = buffer_filter.above, buffer_filter.below
    found = served_by(buffer_filter, buffer)
    inside = [number for number in whole if low < values[number] < high]
    outside = [number for number in whole if number not in inside]
    missing = [number for number in range(len(buffer)) if number not in whole]
    margins = [abs(value - bound) for value in values.values() for bound in (low, high)]
    gaps = [abs(a - b) for a in values.values() for b in values.values() if a != b]
    if any(margin < 1e-9 for margin in margins) or any(gap < 1e-9 for gap in gaps):
        return

    within = sorted(inside, key=lambda number: (SIGN.get(buffer_filter.order, 1) * values[number], number))
    assert found == placed(placed(within, outside, buffer_filter.outside), missing, buffer_filter.missing)


@in_ci(max_examples=30)
@given(by_metadata, buffers)
def test_by_metadata(buffer_filter, buffer):
    found = [group[0].metadata["priority"] for group in buffer]
    ranks = [None if value is None or math.isnan(value) else value for value in found]
    assert served_by(buffer_filter, buffer) == best_first(ranks, buffer_filter.order, buffer_filter.missing)


@in_ci(max_examples=30)
@given(balanced, buffers)
def test_a_balanced_filter_always_serves_the_value_that_is_furthest_behind(buffer_filter, buffer):
    """Sainte-Laguë, seat by seat: the next one goes to the highest quotient ``weight / (2 * seats + 1)``."""
    shares = dict.fromkeys(SOURCES, 1) if buffer_filter.weights is None else buffer_filter.weights
    sources = [group[0].metadata["source"] for group in buffer]
    left = [number for number, source in enumerate(sources) if source in shares]
    others = [number for number in range(len(buffer)) if number not in left]
    taken, seats = [], Counter()
    while left:
        quotients = [Fraction(shares[sources[number]]) / (2 * seats[sources[number]] + 1) for number in left]
        best = left[quotients.index(max(quotients))]
        seats[sources[best]] += 1
        left.remove(best)
        taken.append(best)

    assert served_by(buffer_filter, buffer) == placed(taken, others, buffer_filter.missing)


@in_ci(max_examples=30)
@given(every_filter, buffers, st.integers(1, 15))
def test_no_group_is_lost_repeated_or_changed(buffer_filter, buffer, num_groups):
    items = [Returned(group, []) for group in buffer]
    before = [[sample.to_dict() for sample in group] for group in buffer]
    served = places_of([item.group for item in choose(items, num_groups, buffer_filter)], buffer)
    assert len(set(served)) == len(served) <= num_groups
    assert repr([[sample.to_dict() for sample in group] for group in buffer]) == repr(before)  # NaN is not NaN
    assert places_of([item.group for item in choose(items, num_groups, buffer_filter)], buffer) == served


def test_a_reward_of_several_values_is_looked_at_by_its_key_and_staleness_at_the_moment_of_the_call():
    buffer = rewarded([{"accuracy": 1, "style": 2}] * 2, [{"accuracy": 0}, {"accuracy": np.float32(1)}], [True, False])
    assert served(ByReward(reward_key="accuracy"), buffer) == [1, 2, 0]
    assert served(ByStaleness(), written_by(np.int64(3), np.int32(5))) == [1, 0], "and versions may be numpy's"
    version = 5
    buffer_filter = ByStaleness(max_staleness=1, current_version=lambda: version, too_stale="stay", order=None)
    assert served(buffer_filter, written_by(4, 5, None)) == [0, 1, 2]
    version = 6
    assert served(buffer_filter, written_by(4, 5, None)) == [1, 2]


@pytest.mark.parametrize("version", ["7", 7.0, {"step": 7}, [7, "8"]])
def test_a_version_that_is_no_whole_number_is_named_with_its_sample(version):
    buffer_filter, buffer = ByStaleness(version_key="rollout"), written_by(3, version, key="rollout")
    with pytest.raises(InvalidGroupError, match=r"AD433 group 1, sample 2: extra\['rollout'\] .*need a whole number"):
        buffer_filter(buffer, 2)
    with pytest.raises(FilterError, match=r"AD431 the buffer filter ByStaleness\(.*AD433 group 1, sample 2"):
        served(buffer_filter, buffer)


@pytest.mark.parametrize(
    ("buffer_filter", "buffer", "message"),
    [
        (ByReward(), rewarded([0.5, "1.0"]), "group 0, sample 1: reward is .*need a number"),
        (ByReward(), rewarded([0.5, [1.0]]), "group 0, sample 1: reward is .*need a number"),
        (ByReward(), rewarded([{"a": 1, "b": 0.5}] * 2), r"group 0, .*need reward_key, one of \['a', 'b'\]"),
        (SOURCE, rows_with(None, 1, "a"), r"group 2, .* metadata\['source'\] is 'a' \(str\); need a number, as 1"),
        (SOURCE, rows_with("a", 1), r"group 1, .* is '1' \(int\); need a text, as 'a' before it"),
        (SOURCE, rows_with("a", ["b"]), r"group 1, .* metadata\['source'\] is .* \(list\); need a number or"),
        (BALANCED, rows_with("a", ["b"]), r"group 1, .* metadata\['source'\] is .* \(list\); need a number or"),
    ],
)
def test_a_value_that_has_no_rank_is_named_with_its_group(buffer_filter, buffer, message):
    with pytest.raises(InvalidGroupError, match=f"AD433 {message}"):
        buffer_filter(buffer, 1)


def test_the_last_filter_of_a_chain_has_the_last_word_on_the_order_and_alone_is_asked_for_few():
    """Or the first one would decide alone."""
    buffer, asked = rows_with(2, 1, 2, 1), []
    for group, version in zip(buffer, [7, 7, 8, 8], strict=True):
        for sample in group:
            sample.extra = {"policy_version": version}

    def first(buffer, num_groups):
        asked.append(num_groups)
        return tuple(buffer)

    assert served(Chain((SOURCE, ByStaleness())), buffer) == [3, 2, 1, 0]
    assert served(Chain((ByStaleness(), SOURCE)), buffer) == [3, 1, 2, 0]
    assert (served(Chain((first, SOURCE)), buffer, 1), asked) == ([1], [4])


def test_a_filter_of_a_chain_that_returns_nothing_is_named():
    def forgets(buffer, num_groups):
        return None

    with pytest.raises(FilterError, match="AD431 .*forgets.* returned NoneType; need a list of groups"):
        served(Chain((forgets, ByStaleness())), rewarded(1.0))


def test_rewards_differ_by_more_than_a_tolerance_also_under_a_key():
    (near,) = rewarded([0.5, 0.75])
    assert [has_reward_spread(near, tolerance=tolerance) for tolerance in (0.2, 0.25)] == [True, False]
    (keyed,) = rewarded([{"accuracy": 1, "style": 0}, {"accuracy": 1, "style": 1}])
    assert [has_reward_spread(keyed, reward_key=key) for key in ("accuracy", "style")] == [False, True]


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_group_that_is_not_wholly_rewarded_is_not_judged(reward):
    with pytest.raises(InvalidGroupError, match="AD433 group 0, sample 1: reward .*need a finite number; reward every"):
        has_reward_spread(rewarded([1.0, reward])[0])


def rolled_out(number, prompt, response, /, **fields):
    size = len(response)
    made = {
        "response": "so far", "response_length": size, "reward": 1.0, "rollout_log_probs": [[-0.5] * size] * 2,
        "loss_mask": [[1] * size] * 2, "status": Status.ABORTED, "metadata": {"source": "math"},
        "extra": {"policy_version": 3, "note": "kept"},
    }  # fmt: skip
    group = group_of(number, **made | fields)
    for sample in group:
        sample.tokens = np.array(prompt + response, np.int32)
    return group


def test_a_group_that_is_reset_is_as_it_came_from_the_stream_and_tokens_without_the_response_stay():
    gone = dict.fromkeys(("reward", "loss_mask", "rollout_log_probs"))
    group = rolled_out(4, [7, 8], [9, 10, 11])
    fresh = rolled_out(4, [7, 8], [], **gone, response="", status=Status.PENDING, extra={"note": "kept"})
    filters.reset_response(group, response_in_tokens=True)
    assert [sample.to_dict() for sample in group] == [sample.to_dict() for sample in fresh]
    assert group[0].tokens.dtype == np.int32
    assert group[0].tokens.base is None, "or the response's tokens stay in memory"
    group = rolled_out(0, [7, 8, 9], [], response_length=2)
    filters.reset_response(group, response_in_tokens=False)
    assert [sample.tokens.tolist() for sample in group] == [[7, 8, 9]] * 2
    filters.reset_response(group, response_in_tokens=False, version_key="note")
    assert [sample.extra for sample in group] == [{}, {}]


@pytest.mark.parametrize("length", [3, -1])
def test_a_group_with_too_few_tokens_for_its_response_is_not_touched(length):
    group = rolled_out(2, [], [9, 10])
    group[1].response_length = length
    before = [sample.to_dict() for sample in group]
    with pytest.raises(InvalidGroupError, match=f"AD433 group 2, sample 5: response_length is '{length}' .* 2 tokens"):
        filters.reset_response(group, response_in_tokens=True)
    assert [sample.to_dict() for sample in group] == before
