"""Length grouping: every pack once, groups of like cost, sums that agree, no rank that always has the heaviest."""

from __future__ import annotations

from hashlib import blake2b

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from asyncdata import LengthGrouping
from asyncdata.errors import ConfigError
from tests.support.examples import in_ci

# Promises to every snapshot there is: see tests/unit/order/test_order.py.
ORDERS = {
    "karmarkar_karp": ("025cc23eeb3d8b15", "98e0eed2d733cffe"),
    "snake": ("6ebbc42046a15755", "de194ed3fae98b2b"),
    "xtuner": ("24bc0ca5394afbff", "8e0211eec2595a46"),
}
METHODS = list(ORDERS)
OURS = ["karmarkar_karp", "snake"]


def costs(num_packs, seed=0):
    """A few packs cost much more than the others."""
    return np.round(1000 * np.random.default_rng(seed).lognormal(0, 0.5, num_packs)).tolist()


def order_of(method, values, world_size, accumulation=1, **settings):
    settings = {"seed": 0, **settings}
    return LengthGrouping(method=method).order(values, world_size=world_size, accumulation=accumulation, **settings)


def steps_of(order, values, world_size, accumulation):
    """Costs, of shape (num_steps, accumulation, world_size)."""
    per_step = world_size * accumulation
    return np.asarray(values)[order[: len(order) // per_step * per_step]].reshape(-1, accumulation, world_size)


@pytest.mark.parametrize("method", METHODS)
def test_the_order_is_the_same_for_ever(method):
    """Of equal costs as well, whatever sort a numpy or a processor has for numbers that may change places."""
    window = 0 if method == "xtuner" else 3
    orders = [
        order_of(method, costs(700), 8, 4, seed=42, epoch=1, window=window),
        order_of(method, [float(number % 3) for number in range(700)], 4, 40, seed=42, epoch=1),
    ]

    assert tuple(blake2b(o.astype("<i8").tobytes(), digest_size=8).hexdigest() for o in orders) == ORDERS[method]


@in_ci(max_examples=40)
@given(
    st.lists(st.integers(0, 50) | st.floats(0, 1e12), max_size=80), st.integers(1, 9), st.integers(1, 4),
    st.sampled_from(METHODS), st.integers(0, 5),
)  # fmt: skip
def test_every_pack_comes_once_beside_its_neighbours_in_cost_and_what_is_left_over_last(
    values, world_size, accumulation, method, seed
):
    order = order_of(method, values, world_size, accumulation, seed=seed, epoch=2)

    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(len(values)))
    if method == "xtuner":
        return
    num_grouped = len(values) // (world_size * accumulation) * world_size * accumulation
    assert order[num_grouped:].tolist() == list(range(num_grouped, len(values)))
    groups = order[:num_grouped].reshape(-1, world_size)
    wanted = np.argsort(-np.asarray(values[:num_grouped], float), kind="stable").reshape(-1, world_size)
    assert {frozenset(group.tolist()) for group in groups} == {frozenset(group.tolist()) for group in wanted}


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_differencing_balances_sums_better_than_leaving_groups_sorted_and_no_worse_than_a_snake(world_size):
    values = costs(world_size * 64, 5)
    steps = {method: steps_of(order_of(method, values, world_size, 8), values, world_size, 8) for method in OURS}
    steps["sorted"] = -np.sort(-steps["snake"], axis=2)
    slowest = {method: some.sum(axis=1).max(axis=1).sum() for method, some in steps.items()}

    assert slowest["karmarkar_karp"] <= slowest["snake"] < slowest["sorted"]
    for method in OURS:  # and no rank has always more to do; with XTuner's order the first one has
        ranks = steps[method].sum(axis=(0, 1))
        assert ranks.max() / ranks.min() < 1.03


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"linear": -1.0}, "linear=-1.0"),
        ({"linear": 0, "quadratic": 0}, "all packs cost nothing"),
        ({"method": "lpt"}, "method='lpt'"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        LengthGrouping(**settings)


@pytest.mark.parametrize("cost", [float("nan"), float("inf")])
def test_a_cost_that_is_no_number_is_refused(cost):
    with pytest.raises(ConfigError, match="not finite"):
        order_of("snake", [1.0, cost], 1)
