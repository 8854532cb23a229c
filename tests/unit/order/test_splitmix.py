"""Mixing is pinned: the order of every run, and the digest in every snapshot, follow from it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.order.splitmix import GOLDEN, MASK, mix, mix_one

# The first numbers of splitmix64 with seed 1234567, as its authors' program prints them.
SEED = 1234567
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_it_is_the_published_one() -> None:
    words = [SEED + turn * GOLDEN & MASK for turn in range(1, 6)]

    assert mix(np.array(words, np.uint64)).tolist() == PUBLISHED
    assert [mix_one(word) for word in words] == PUBLISHED


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=5))
def test_one_number_is_mixed_as_many_are(words: list[int]) -> None:
    given_words = np.array(words, np.uint64)

    assert mix(given_words).tolist() == [mix_one(word) for word in words]
    assert given_words.tolist() == words
