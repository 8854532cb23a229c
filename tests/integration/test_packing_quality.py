"""Fill and balance on lengths of four kinds, beside XTuner's plans and order: counts, the same on every machine.

XTuner's are made by our own copy of its methods, which tests/integration/test_against_xtuner.py compares with its code.
"""

import functools
import statistics

import pytest

from tests.support.combinations import each_pair, each_value
from tests.support.packing_quality import LAWS, SEEDS, Costs, balance, costs_of, fill, ours_ordered, xtuners_ordered

pytestmark = pytest.mark.thorough

MAX_LENGTHS = (4096, 8192, 32768)
NUM_PACKS = 7400


@pytest.mark.parametrize(("law", "max_length"), each_value(LAWS.keys(), MAX_LENGTHS))
def test_packs_are_as_full_as_those_of_a_plan_of_all_samples(law, max_length):
    found = [fill(law, max_length, seed) for seed in SEEDS]

    ours = statistics.mean(one.ours for one in found)
    assert ours >= statistics.mean(one.xtuners for one in found)
    assert all(one.displacement < one.window for one in found)
    if law in {"lognormal", "zipf"}:
        assert ours >= 99.5


@functools.cache
def costs(law: str, *, xtuners: bool) -> Costs:
    return costs_of(law, NUM_PACKS, 32768, 7, xtuners=xtuners)


@pytest.mark.parametrize(
    ("law", "accumulation", "method"), each_pair(["lognormal", "zipf"], [1, 8], ["karmarkar_karp", "snake"])
)
def test_ranks_are_better_balanced_than_in_xtuners_order(law, accumulation, method):
    order = ours_ordered(costs(law, xtuners=False), 64, accumulation, method=method)
    ours = balance(costs(law, xtuners=False), order, 64, accumulation)
    theirs = costs(law, xtuners=True)
    xtuners = balance(theirs, xtuners_ordered(theirs, 64, accumulation), 64, accumulation)

    assert ours.efficiency >= xtuners.efficiency
    assert ours.efficiency >= 0.985
    assert ours.first_over_last <= 1.01
    assert xtuners.first_over_last > 1.01
