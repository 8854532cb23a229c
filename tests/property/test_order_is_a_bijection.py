"""The order D is a permutation: whatever the sizes, an epoch has every block and every row, each once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdata import Shuffle
from asyncdata.order.order import Order
from asyncdata.order.permutation import feistel_permutation, shuffled_rows
from asyncdata.order.splitmix import MASK, mix_one

pytestmark = pytest.mark.thorough

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)
keys = st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6)


@given(st.integers(1, 3000), st.integers(1, 30), seeds, epochs, st.booleans())
def test_the_windows_of_an_epoch_hold_every_block_once(
    num_blocks: int, num_windows: int, seed: int, epoch: int, enabled: bool
) -> None:
    window_blocks = -(-num_blocks // num_windows)
    order = Order(Shuffle(enabled=enabled, window_blocks=window_blocks), seed, num_blocks)

    windows = [order.blocks(epoch, window) for window in range(order.num_windows)]

    assert sorted(np.concatenate(windows).tolist()) == list(range(num_blocks))
    sizes = {len(window) for window in windows}
    assert max(sizes) - min(sizes) <= 1, "a short window would mix its rows badly"
    assert max(sizes) == order.max_window_blocks <= window_blocks


@given(st.integers(0, 3000), st.integers(0, 2**64 - 1))
def test_the_rows_of_a_window_come_once_each(num_rows: int, key: int) -> None:
    assert sorted(shuffled_rows(num_rows, key).tolist()) == list(range(num_rows))


@given(st.integers(1, 5000), keys)
def test_the_keyed_permutation_is_one_for_every_size(size: int, keys: list[int]) -> None:
    image = feistel_permutation(np.arange(size, dtype=np.int64), size, keys)

    assert sorted(image.tolist()) == list(range(size))


@given(st.integers(1, 2**62), keys, st.lists(st.integers(0, 2**62), min_size=1, max_size=200, unique=True))
def test_it_sends_different_numbers_to_different_numbers_within_the_size(
    size: int, keys: list[int], numbers: list[int]
) -> None:
    ids = np.array(sorted({number % size for number in numbers}), dtype=np.int64)

    image = feistel_permutation(ids, size, keys)

    assert len(np.unique(image)) == len(ids)
    assert image.min() >= 0
    assert image.max() < size


@pytest.mark.parametrize("size", [1, 2, 3, 77, 1024, 1025, 4096, 4097, 16_384, 2**40 + 1])
@given(keys, st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
@settings(max_examples=20)
def test_it_is_the_network_walked_one_number_at_a_time(size: int, keys: list[int], numbers: list[int]) -> None:
    def walked(number: int) -> int:
        half = max(1, ((size - 1).bit_length() + 1) // 2)
        while True:
            left, right = divmod(number, 1 << half)
            for key in keys:
                left, right = right, left ^ mix_one((right + key) & MASK) % (1 << half)
            number = (left << half) | right
            if number < size:
                return number

    ids = [number % size for number in numbers]

    assert feistel_permutation(np.array(ids, dtype=np.int64), size, keys).tolist() == [walked(number) for number in ids]


@given(st.integers(1, 3000), st.integers(1, 30), seeds, epochs)
def test_a_window_does_not_depend_on_what_was_asked_before(
    num_blocks: int, num_windows: int, seed: int, epoch: int
) -> None:
    shuffle = Shuffle(window_blocks=-(-num_blocks // num_windows))
    order = Order(shuffle, seed, num_blocks)
    forwards = [order.blocks(epoch, window).tolist() for window in range(order.num_windows)]

    other = Order(shuffle, seed, num_blocks)
    backwards = [other.blocks(epoch, window).tolist() for window in reversed(range(other.num_windows))]

    assert forwards == backwards[::-1]
