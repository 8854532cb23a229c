"""The order D: pinned for ever, independent for every seed and epoch, well mixed, and reached at once anywhere."""

from __future__ import annotations

import tracemalloc
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import ConfigError, RowShuffle, Shuffle
from asyncdata.order.order import ROWS_PER_WINDOW, Order, RowOrder
from asyncdata.order.permutation import feistel_permutation, shuffled_rows
from asyncdata.order.rank_share import Share
from asyncdata.order.splitmix import GOLDEN, MASK, mix, mix_one
from asyncdata.order.torch_randperm import TorchGenerator
from tests.support.examples import in_ci

# These are promises to every snapshot there is. A change that moves one of them makes every run start anew: make a
# second order beside this one instead.
WINDOWS_OF_TEN = (
    [[7, 1, 6], [5, 8, 3], [9, 0, 2, 4]],  # epoch 0
    [[9, 7, 3], [0, 1, 5], [2, 8, 6, 4]],
)
TWELVE_ROWS = [8, 6, 9, 11, 7, 4, 2, 5, 3, 0, 1, 10]
BLOCK_DIGESTS = [
    (0, 0, 1, 0, "ca08ea5bca49cc18"),
    (42, 0, 2, 0, "eb82aaee034ca970"),
    (42, 0, 1000, 0, "f56db0393d200519"),
    (42, 1, 1000, 0, "0cb9df52c63bd095"),
    (0, 1, 1000, 0, "c7cce83613807198"),
    (1, 0, 1000, 0, "d4c6c1f96161d917"),
    (-1, 0, 1000, 0, "6383b186f50be0ac"),
    (2**80, 3, 5000, 2, "221c667daa4ace61"),
    (42, 7, 1_600_000, 1561, "f4cc63ef7a5ec9c5"),
    (42, 0, 10**10, 9_765_624, "39ceb18c840d6eae"),
    (7, 2**40, 2**60, 12345, "c2e1f83f8b7a124d"),
]
ROW_DIGESTS = [
    (42, 0, 0, 1, "ca08ea5bca49cc18"),
    (42, 0, 0, 1000, "2b047532ce7a62ba"),
    (42, 0, 1, 1000, "d24e91897c453437"),
    (42, 1, 0, 1000, "0b5fb134209d2fe6"),
    (0, 1, 0, 1000, "b7588d7e3ca1d819"),
    (1, 0, 0, 1000, "41789244e2ef1c2e"),
    (-1, 0, 0, 1000, "82539514e5275075"),
    (2**80, 3, 2, 37_700, "652b6eba4d0481f8"),
    (7, 2**40, 2**30, 4096, "bf3b57b556a9d611"),
]
TWELVE_OF_ALL_ROWS = [7, 4, 2, 10, 9, 6, 11, 5, 3, 8, 0, 1]
ALL_ROWS_DIGESTS = [
    (42, 0, 0, 1000, "36a57e340c19c090"),
    (42, 1, 0, 1000, "733e1698701ee762"),
    (0, 1, 0, 1000, "e0cdcc8afff93469"),
    (42, 0, 0, 150_000, "e3bed6505b95e9ae"),
    (42, 0, 2, 150_000, "0e0127fed69e92b1"),
    (-1, 7, 15258, 10**9, "648f5af4fc405c1f"),
]


def digest(order: Order, epoch: int, window: int = 0) -> str:
    return blake2b(order.blocks(epoch, window).astype("<i8").tobytes(), digest_size=8).hexdigest()


def digest_of_rows(order: Order | RowOrder, epoch: int, window: int, num_rows: int) -> str:
    return blake2b(order.rows(epoch, window, num_rows).astype("<i8").tobytes(), digest_size=8).hexdigest()


def test_ten_blocks_come_in_this_order_for_ever() -> None:
    order = Order(Shuffle(window_blocks=4), 42, 10)

    assert [order.blocks(0, window).tolist() for window in range(3)] == WINDOWS_OF_TEN[0]
    assert [order.blocks(1, window).tolist() for window in range(3)] == WINDOWS_OF_TEN[1]


def test_twelve_rows_come_in_this_order_for_ever() -> None:
    assert Order(Shuffle(), 42, 10).rows(0, 0, 12).tolist() == TWELVE_ROWS


@pytest.mark.parametrize(("seed", "epoch", "num_blocks", "window", "expected"), BLOCK_DIGESTS)
def test_the_blocks_of_a_window_are_the_same_for_ever(
    seed: int, epoch: int, num_blocks: int, window: int, expected: str
) -> None:
    assert digest(Order(Shuffle(), seed, num_blocks), epoch, window) == expected


@pytest.mark.parametrize(("seed", "epoch", "window", "num_rows", "expected"), ROW_DIGESTS)
def test_the_rows_of_a_window_are_the_same_for_ever(
    seed: int, epoch: int, window: int, num_rows: int, expected: str
) -> None:
    assert digest_of_rows(Order(Shuffle(), seed, 1), epoch, window, num_rows) == expected


def test_twelve_of_all_rows_come_in_this_order_for_ever() -> None:
    assert RowOrder(RowShuffle(), 42).rows(0, 0, 12).tolist() == TWELVE_OF_ALL_ROWS


@pytest.mark.parametrize(("seed", "epoch", "window", "num_rows", "expected"), ALL_ROWS_DIGESTS)
def test_an_order_of_all_rows_is_the_same_for_ever(
    seed: int, epoch: int, window: int, num_rows: int, expected: str
) -> None:
    assert digest_of_rows(RowOrder(RowShuffle(), seed), epoch, window, num_rows) == expected


@pytest.mark.parametrize("size", [1, 2, 10, 257])
def test_blocks_and_rows_are_permuted_as_the_module_says(size: int) -> None:
    """Written once more, in whole numbers and without numpy: this is the definition."""
    order = Order(Shuffle(window_blocks=300), -7, size)

    assert order.blocks(5, 0).tolist() == [permuted(number, size, keys_of(-7, 5, "blocks")) for number in range(size)]
    key = keys_of(-7, 5, "rows 0")[0]
    by_mix = sorted(range(size), key=lambda row: plain_mix((row * 0x9E3779B97F4A7C15 + key) & MASK))
    assert order.rows(5, 0, size).tolist() == by_mix


def keys_of(seed: int, epoch: int, stream: str) -> list[int]:
    digest = blake2b(f"asyncdata order 1|{seed}|{epoch}|{stream}".encode(), digest_size=48).digest()
    return [int.from_bytes(digest[8 * round : 8 * round + 8], "little") for round in range(6)]


def plain_mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def permuted(number: int, size: int, keys: list[int]) -> int:
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    left, right = number >> half, number % 2**half
    for key in keys:
        left, right = right, left ^ plain_mix((right + key) & MASK) % 2**half
    image = (left << half) + right
    return image if image < size else permuted(image, size, keys)


def test_another_seed_or_epoch_makes_another_order() -> None:
    orders = [
        digest(Order(Shuffle(), seed, 1000), epoch) for seed in (-2, -1, 0, 1, 2, 2**64, -(2**64)) for epoch in range(4)
    ]

    assert len(set(orders)) == len(orders)


def test_every_window_has_an_order_of_its_own() -> None:
    order = Order(Shuffle(), 7, 5000)

    rows = [order.rows(0, window, 100).tolist() for window in range(order.num_windows)]

    assert len({tuple(found) for found in rows}) == order.num_windows


def test_rows_are_shuffled_independently_of_blocks() -> None:
    """Equal numbers of both must not come in the same order."""
    order = Order(Shuffle(window_blocks=500), 3, 500)

    assert order.blocks(0, 0).tolist() != order.rows(0, 0, 500).tolist()


@pytest.mark.parametrize(("epoch", "window", "first"), [(0, 0, 0), (5, 1, 3), (9, 2, 6)])
def test_without_shuffle_everything_comes_as_it_lies(epoch: int, window: int, first: int) -> None:
    order = Order(Shuffle(enabled=False, window_blocks=4), 42, 10)

    assert order.blocks(epoch, window).tolist() == list(range(first, min(first + 4, 10) if window == 2 else first + 3))
    assert order.rows(epoch, window, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_blocks", [10**10, 2**60])
def test_a_window_of_any_number_of_blocks_costs_the_same(num_blocks: int) -> None:
    order = Order(Shuffle(), 42, num_blocks)
    order.blocks(0, 0)

    tracemalloc.start()
    blocks = order.blocks(3, order.num_windows - 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(blocks) in {1023, 1024}
    assert len(set(blocks.tolist())) == len(blocks)
    assert 0 <= blocks.min() < blocks.max() < num_blocks
    assert peak_bytes < 200_000


def test_an_order_needs_a_block() -> None:
    with pytest.raises(ConfigError, match="at least one block"):
        Order(Shuffle(), 0, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_bytes": 0}, "block_bytes must be at least 1, got 0"),
        ({"window_blocks": -1}, "window_blocks must be at least 1, got -1"),
        ({"block_bytes": 1 << 20, "window_blocks": 1025}, "1 GiB"),
        ({"block_bytes": 1024, "window_blocks": 1 << 18}, "1 GiB"),
    ],
    ids=["no block", "a window of less than none", "more than memory holds", "with what is read beyond small blocks"],
)
def test_a_shuffle_that_cannot_be_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shuffle(**settings)


def test_a_description_of_rows_names_a_split_only_where_there_is_one() -> None:
    settings = {"seed": 3, "shuffle": "rows", "method": "slime", "first": 1, "stop": None, "only_kept": True}
    shuffle = RowShuffle(method="slime", first=1, only_kept=True, train_ratio=0.5)
    split = {"part": "eval", "train_ratio": 0.5, "split_seed": 42}

    assert RowOrder(shuffle, 3).description() == settings
    assert RowOrder(msgspec.structs.replace(shuffle, part="eval"), 3).description() == settings | split


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"part": "test"}, "part='test': it must be 'train', 'eval' or None"),
        ({"train_ratio": 1.5}, "from 0 to 1, got 1.5"),
    ],
)
def test_a_split_that_cannot_be_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RowShuffle(**settings)


@pytest.mark.parametrize("ratio", [0, 1])
def test_a_part_may_have_no_row_or_all_of_them(ratio: float) -> None:
    assert RowShuffle(part="train", train_ratio=ratio).train_ratio == ratio


@pytest.mark.parametrize("method", ["keyed", "none"])
def test_the_windows_of_all_rows_hold_every_row_once_and_all_but_the_last_are_full(method: Any) -> None:
    order, num_rows = RowOrder(RowShuffle(method=method), 0), 2 * ROWS_PER_WINDOW + 5

    windows = [order.rows(3, window, num_rows) for window in range(3)]

    assert [len(window) for window in windows] == [ROWS_PER_WINDOW, ROWS_PER_WINDOW, 5]
    rows = np.concatenate(windows)
    assert sorted(rows.tolist()) == list(range(num_rows))
    assert (rows.tolist() == list(range(num_rows))) == (method == "none")


def test_rows_of_a_part_are_known_only_when_all_rows_are() -> None:
    assert RowShuffle(method="none").grows
    assert not RowShuffle(method="none", part="train").grows


def test_a_description_names_everything_the_order_follows_from() -> None:
    assert Order(Shuffle(block_bytes=4096), -5, 3).description() == {
        "seed": -5,
        "enabled": True,
        "block_bytes": 4096,
        "window_blocks": 1024,
        "num_blocks": 3,
    }


# Whatever the sizes, an epoch has every block and every row, each once

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)
keys = st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6)


@in_ci(max_examples=40)
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


@in_ci(max_examples=40)
@given(st.integers(0, 3000), st.integers(0, 2**64 - 1))
def test_the_rows_of_a_window_come_once_each(num_rows: int, key: int) -> None:
    assert sorted(shuffled_rows(num_rows, key).tolist()) == list(range(num_rows))


@in_ci(max_examples=40)
@given(st.integers(1, 2**62), keys, st.lists(st.integers(0, 2**62), min_size=1, max_size=200, unique=True))
def test_it_sends_different_numbers_to_different_numbers_within_the_size(
    size: int, keys: list[int], numbers: list[int]
) -> None:
    ids = np.array(sorted({number % size for number in numbers}), dtype=np.int64)

    image = feistel_permutation(ids, size, keys)

    assert len(np.unique(image)) == len(ids)
    assert image.min() >= 0
    assert image.max() < size


# Quality. All of it is arithmetic on fixed keys: these tests pass always, or never.


def chi_square(counts: np.ndarray) -> float:
    expected = counts.mean()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.thorough
@pytest.mark.parametrize("num_blocks", [16, 160, 1600])
def test_over_many_epochs_a_block_comes_everywhere_alike(num_blocks: int) -> None:
    order = Order(Shuffle(window_blocks=num_blocks), 42, num_blocks)
    epochs = [order.blocks(epoch, 0) for epoch in range(800)]

    firsts = np.array([epoch[0] for epoch in epochs])
    places_of_the_last = np.array([int(np.flatnonzero(epoch == num_blocks - 1)[0]) for epoch in epochs])

    # 15 degrees of freedom: 37.7 is exceeded once in a thousand draws of a perfect permutation.
    assert chi_square(np.bincount(firsts * 16 // num_blocks, minlength=16)) < 37.7
    assert chi_square(np.bincount(places_of_the_last * 16 // num_blocks, minlength=16)) < 37.7


@pytest.mark.parametrize("size", [1000, 4096, 100_003])
def test_a_permutation_keeps_no_trace_of_the_old_order(size: int) -> None:
    order = Order(Shuffle(window_blocks=1024), 42, size)
    image = feistel_permutation(np.arange(size, dtype=np.int64), size, order._keys(0, "blocks"))  # noqa: SLF001

    correlation = np.corrcoef(np.arange(size), image)[0, 1]
    num_neighbours = int((np.abs(np.diff(image)) == 1).sum())

    assert abs(correlation) < 4 / np.sqrt(size)
    assert num_neighbours <= 12, "two are expected, whatever the size"


def test_the_first_rows_of_a_window_come_from_all_over_it() -> None:
    rows = np.concatenate([shuffled_rows(1000, key)[:10] for key in range(200)])

    assert chi_square(np.bincount(rows // 50, minlength=20)) < 43.8  # 19 degrees of freedom, one in a thousand


def test_a_key_of_any_length_is_taken() -> None:
    assert shuffled_rows(50, 2**64 + 5).tolist() == shuffled_rows(50, 5).tolist()


# Which rows or packs a rank owns


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_there_is_not_is_refused(rank, world_size):
    with pytest.raises(ConfigError, match=f"there is no rank {rank} among {world_size}: ranks are counted from 0"):
        Share(rank=rank, world_size=world_size)


@in_ci(max_examples=40)
@given(data=st.data(), world_size=st.integers(1, 5), batch_size=st.integers(1, 4), num_rows=st.integers(0, 60))
def test_each_row_of_a_whole_batch_has_one_owner_and_the_rest_all(data, world_size, batch_size, num_rows):
    first = data.draw(st.integers(0, 20))
    shares = [Share(rank=rank, world_size=world_size, batch_size=batch_size) for rank in range(world_size)]
    stop = first + num_rows
    owners = [share.owns(range(first, stop), first, stop).tolist() for share in shares]

    num_whole = num_rows // (world_size * batch_size) * world_size * batch_size
    for number in range(num_rows):
        found = [rank for rank in range(world_size) if owners[rank][number]]
        expected = [(first + number) % world_size] if number < num_whole else list(range(world_size))
        assert found == expected


# Mixing is pinned: the order of every run, and the digest in every snapshot, follow from it

# The first numbers of splitmix64 with seed 1234567, as its authors' program prints them.
SPLITMIX_SEED = 1234567
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_it_is_the_published_one() -> None:
    words = [SPLITMIX_SEED + turn * GOLDEN & MASK for turn in range(1, 6)]

    assert mix(np.array(words, np.uint64)).tolist() == PUBLISHED
    assert [mix_one(word) for word in words] == PUBLISHED


@in_ci(max_examples=40)
@given(st.lists(st.integers(0, MASK), min_size=1, max_size=5))
def test_one_number_is_mixed_as_many_are(words: list[int]) -> None:
    given_words = np.array(words, np.uint64)

    assert mix(given_words).tolist() == [mix_one(word) for word in words]
    assert given_words.tolist() == words


# torch's permutations without torch: pinned, and compared with torch where it is installed


def test_ten_numbers_are_permuted_so_for_ever() -> None:
    generator = TorchGenerator(42)

    assert generator.randperm(10).tolist() == [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]
    assert generator.randperm(5).tolist() == [3, 0, 1, 2, 4]


@pytest.mark.parametrize("seed", [0, 42, 2**31, 2**32 + 5, -3, 2**63 - 1])
def test_the_permutations_are_torchs_one_after_the_other(seed: int) -> None:
    torch = pytest.importorskip("torch")
    theirs, ours = torch.Generator().manual_seed(seed), TorchGenerator(seed)

    for size in (0, 1, 2, 3, 10, 1000, 12345, 0, 7):
        assert ours.randperm(size).tolist() == torch.randperm(size, generator=theirs).tolist()


@pytest.mark.parametrize("size", [-1, 2**32])
def test_sizes_that_torch_permutes_otherwise_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"not for {size}"):
        TorchGenerator(0).randperm(size)
