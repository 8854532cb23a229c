"""Histograms: each number is in the bucket with the largest edge that is not above it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.telemetry.histogram import Histogram
from asyncdata.telemetry.records import EDGES

SIZE = 1 << 16
"""Numbers below it are looked up, others are searched."""

around = st.sampled_from([*EDGES, SIZE]).flatmap(lambda edge: st.integers(max(0, edge - 2), edge + 2))


@given(st.lists(st.lists(st.integers(0, 300) | around, max_size=20), max_size=5))
def test_many_numbers_are_counted_as_one_by_one(parts):
    together, single = Histogram(), Histogram()
    for numbers in parts:
        together.add_many(np.array(numbers, np.int64))
        single.add(numbers)

    buckets = [max(edge for edge in EDGES if edge <= number) for numbers in parts for number in numbers]
    expected = {bucket: buckets.count(bucket) for bucket in sorted(set(buckets))}
    assert together.counts() == single.counts() == expected
