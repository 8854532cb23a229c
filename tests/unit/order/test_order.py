"""The order D: pinned for ever, independent for every seed and epoch, well mixed, reached at once; mixtures' epochs."""

import tracemalloc
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import RowShuffle, Shuffle
from asyncdata.errors import ConfigError
from asyncdata.order import order as orders
from asyncdata.order.mixture import Leaf, Node, ScheduleCursor
from tests.support.examples import in_ci

# These are promises to every snapshot there is. A change that moves one of them makes every run start anew: make a
# second order beside this one instead.
WINDOWS_OF_TEN = (
    [[7, 1, 6], [5, 8, 3], [9, 0, 2, 4]],  # epoch 0
    [[9, 7, 3], [0, 1, 5], [2, 8, 6, 4]],
)
TWELVE_ROWS = [8, 6, 9, 11, 7, 4, 2, 5, 3, 0, 1, 10]
TWELVE_OF_ALL_ROWS = [7, 4, 2, 10, 9, 6, 11, 5, 3, 8, 0, 1]
DIGESTS = [
    ("blocks", 0, 0, 1, 0, "ca08ea5bca49cc18"), ("blocks", 42, 0, 2, 0, "eb82aaee034ca970"),
    ("blocks", 42, 0, 1000, 0, "f56db0393d200519"), ("blocks", 42, 1, 1000, 0, "0cb9df52c63bd095"),
    ("blocks", 0, 1, 1000, 0, "c7cce83613807198"), ("blocks", 1, 0, 1000, 0, "d4c6c1f96161d917"),
    ("blocks", -1, 0, 1000, 0, "6383b186f50be0ac"), ("blocks", 2**80, 3, 5000, 2, "221c667daa4ace61"),
    ("blocks", 42, 7, 1_600_000, 1561, "f4cc63ef7a5ec9c5"), ("blocks", 42, 0, 10**10, 9_765_624, "39ceb18c840d6eae"),
    ("blocks", 7, 2**40, 2**60, 12345, "c2e1f83f8b7a124d"), ("rows", 42, 0, 1, 0, "ca08ea5bca49cc18"),
    ("rows", 42, 0, 1000, 0, "2b047532ce7a62ba"), ("rows", 42, 0, 1000, 1, "d24e91897c453437"),
    ("rows", 42, 1, 1000, 0, "0b5fb134209d2fe6"), ("rows", 0, 1, 1000, 0, "b7588d7e3ca1d819"),
    ("rows", 1, 0, 1000, 0, "41789244e2ef1c2e"), ("rows", -1, 0, 1000, 0, "82539514e5275075"),
    ("rows", 2**80, 3, 37_700, 2, "652b6eba4d0481f8"), ("rows", 7, 2**40, 4096, 2**30, "bf3b57b556a9d611"),
    ("all rows", 42, 0, 1000, 0, "36a57e340c19c090"), ("all rows", 42, 1, 1000, 0, "733e1698701ee762"),
    ("all rows", 0, 1, 1000, 0, "e0cdcc8afff93469"), ("all rows", 42, 0, 150_000, 0, "e3bed6505b95e9ae"),
    ("all rows", 42, 0, 150_000, 2, "0e0127fed69e92b1"), ("all rows", -1, 7, 10**9, 15258, "648f5af4fc405c1f"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "seed", "epoch", "size", "window", "expected"), DIGESTS)
def test_the_order_of_a_window_is_the_same_for_ever(kind, seed, epoch, size, window, expected):
    order = orders.RowOrder(RowShuffle(), seed) if kind == "all rows" else orders.Order(Shuffle(), seed, size)
    found = order.blocks(epoch, window) if kind == "blocks" else order.rows(epoch, window, size)

    assert blake2b(found.astype("<i8").tobytes(), digest_size=8).hexdigest() == expected


def test_ten_blocks_and_twelve_rows_come_in_this_order_for_ever():
    order = orders.Order(Shuffle(window_blocks=4), 42, 10)

    assert [order.blocks(0, window).tolist() for window in range(3)] == WINDOWS_OF_TEN[0]
    assert [order.blocks(1, window).tolist() for window in range(3)] == WINDOWS_OF_TEN[1]
    assert order.rows(0, 0, 12).tolist() == TWELVE_ROWS
    assert orders.RowOrder(RowShuffle(), 42).rows(0, 0, 12).tolist() == TWELVE_OF_ALL_ROWS


@pytest.mark.parametrize("num_blocks", [10**10, 2**60])
def test_a_window_of_any_number_of_blocks_costs_the_same(num_blocks):
    order = orders.Order(Shuffle(), 42, num_blocks)
    order.blocks(0, 0)

    tracemalloc.start()
    blocks = order.blocks(3, order.num_windows - 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(set(blocks.tolist())) == len(blocks) in {1023, 1024}
    assert 0 <= blocks.min() < blocks.max() < num_blocks
    assert peak_bytes < 200_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: orders.Order(Shuffle(), 0, 0), "at least one block"),
        (lambda: Shuffle(block_bytes=0), "block_bytes must be at least 1, got 0"),
        (lambda: Shuffle(window_blocks=-1), "window_blocks must be at least 1, got -1"),
        (lambda: Shuffle(block_bytes=1 << 20, window_blocks=1025), "1 GiB"),
        (lambda: Shuffle(block_bytes=1024, window_blocks=1 << 18), "1 GiB"),  # what is read beyond small blocks
        (lambda: RowShuffle(part="test"), "part='test': it must be 'train', 'eval' or None"),
        (lambda: RowShuffle(train_ratio=1.5), "from 0 to 1, got 1.5"),
        (lambda: orders.Share(rank=2, world_size=2), "there is no rank 2 among 2: ranks are counted from 0"),
        (lambda: orders.Share(rank=-1, world_size=2), "there is no rank -1 among 2: ranks are counted from 0"),
        (lambda: orders.Share(rank=0, world_size=0), "there is no rank 0 among 0: ranks are counted from 0"),
        (lambda: orders.TorchGenerator(0).randperm(-1), "not for -1"),
        (lambda: orders.TorchGenerator(0).randperm(2**32), "not for 4294967296"),
    ],
)
def test_an_order_that_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_description_names_everything_the_order_follows_from():
    settings = {"seed": 3, "shuffle": "rows", "method": "slime", "first": 1, "stop": None, "only_kept": True}
    shuffle = RowShuffle(method="slime", first=1, only_kept=True, train_ratio=0.5)
    split = {"part": "eval", "train_ratio": 0.5, "split_seed": 42}
    blocks = {"seed": -5, "enabled": True, "block_bytes": 4096, "window_blocks": 1024, "num_blocks": 3}

    assert orders.RowOrder(shuffle, 3).description() == settings
    assert orders.RowOrder(msgspec.structs.replace(shuffle, part="eval"), 3).description() == settings | split
    assert orders.Order(Shuffle(block_bytes=4096), -5, 3).description() == blocks


@pytest.mark.parametrize("method", ["keyed", "none"])
def test_the_windows_of_all_rows_hold_every_row_once_and_all_but_the_last_are_full(method: Any):
    order, num_rows = orders.RowOrder(RowShuffle(method=method), 0), 2 * orders.ROWS_PER_WINDOW + 5

    windows = [order.rows(3, window, num_rows).tolist() for window in range(3)]

    assert list(map(len, windows)) == [orders.ROWS_PER_WINDOW, orders.ROWS_PER_WINDOW, 5]
    rows = sum(windows, [])
    assert (sorted(rows), rows == list(range(num_rows))) == (list(range(num_rows)), method == "none")


# Whatever the sizes, an epoch has every block and every row, each once

seeds, epochs, keys = st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 2**64 - 1)


@in_ci(max_examples=40)
@given(st.integers(1, 3000), st.integers(1, 30), seeds, epochs, st.booleans())
def test_the_windows_of_an_epoch_hold_every_block_once(num_blocks, num_windows, seed, epoch, enabled):
    window_blocks = -(-num_blocks // num_windows)
    order = orders.Order(Shuffle(enabled=enabled, window_blocks=window_blocks), seed, num_blocks)

    windows = [order.blocks(epoch, window) for window in range(order.num_windows)]

    assert sorted(np.concatenate(windows).tolist()) == list(range(num_blocks))
    sizes = {len(window) for window in windows}
    assert max(sizes) - min(sizes) <= 1, "a short window would mix its rows badly"
    assert max(sizes) == order.max_window_blocks <= window_blocks


@in_ci(max_examples=40)
@given(st.integers(0, 3000), keys)
def test_the_rows_of_a_window_come_once_each_with_a_key_of_any_length(num_rows, key):
    assert sorted(orders.shuffled_rows(num_rows, key).tolist()) == list(range(num_rows))
    assert orders.shuffled_rows(num_rows, 2**64 + key).tolist() == orders.shuffled_rows(num_rows, key).tolist()


@in_ci(max_examples=40)
@given(
    st.integers(1, 2**62),
    st.lists(keys, min_size=6, max_size=6),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=200),
)
def test_it_sends_different_numbers_to_different_numbers_within_the_size(size, keys, numbers):
    ids = np.array(sorted({number % size for number in numbers}), dtype=np.int64)

    image = orders.feistel_permutation(ids, size, keys)

    assert len(np.unique(image)) == len(ids)
    assert 0 <= image.min() <= image.max() < size


# Quality. All of it is arithmetic on fixed keys: these tests pass always, or never.


@pytest.mark.parametrize("size", [1000, 4096, 100_003])
def test_a_permutation_keeps_no_trace_of_the_old_order(size):
    order = orders.Order(Shuffle(), 42, size)
    image = np.concatenate([order.blocks(0, window) for window in range(order.num_windows)])

    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 4 / np.sqrt(size)
    assert (np.abs(np.diff(image)) == 1).sum() <= 12, "two are expected, whatever the size"


@pytest.mark.parametrize("kind", ["blocks", "rows"])
def test_the_first_of_a_window_come_from_all_over_it(kind):
    order = orders.Order(Shuffle(window_blocks=1000), 42, 1000)
    epochs = [order.blocks(epoch, 0) if kind == "blocks" else order.rows(epoch, 0, 1000) for epoch in range(200)]

    counts = np.bincount(np.concatenate([epoch[:10] for epoch in epochs]) // 50, minlength=20)
    assert ((counts - 100) ** 2 / 100).sum() < 43.8  # chi square, 19 degrees of freedom: one in a thousand


# The first numbers of splitmix64 with seed 1234567, as its authors' program prints them.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def test_mixing_is_the_published_one_of_one_number_and_of_many():
    words = [1234567 + turn * orders.GOLDEN & orders.MASK for turn in range(1, 6)]
    given_words = np.array(words, np.uint64)

    assert orders.mix(given_words).tolist() == [orders.mix_one(word) for word in words] == PUBLISHED
    assert given_words.tolist() == words


# torch's permutations without torch: pinned, and compared with torch where it is installed


@pytest.mark.parametrize("seed", [0, 42, 2**31, 2**32 + 5, -3, 2**63 - 1])
def test_the_permutations_are_torchs_one_after_the_other(seed):
    generator = orders.TorchGenerator(42)
    assert generator.randperm(10).tolist() == [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]
    assert generator.randperm(5).tolist() == [3, 0, 1, 2, 4]

    torch = pytest.importorskip("torch")
    theirs, ours = torch.Generator().manual_seed(seed), orders.TorchGenerator(seed)
    for size in (0, 1, 2, 3, 10, 1000, 12345, 0, 7):
        assert ours.randperm(size).tolist() == torch.randperm(size, generator=theirs).tolist()


def tree(inner_stages=((0, (1, 1)),), *, by="rows", inner_when_done="leave"):
    """``a``, and ``n`` of ``n.b`` and ``n.c``: the leaves 0, 1 and 2."""
    inner = (Leaf("n.b", "leave", number=1), Leaf("n.c", "leave", number=2))
    node = Node("n", inner_when_done, children=inner, stages=inner_stages, by=by, quota=4)
    return Node("", children=(Leaf("a", "leave", number=0), node), stages=((0, (1, 1)),), by=by, quota=4)


def took(cursor, *leaves):
    for leaf in leaves:
        cursor.took_one(leaf, 1)


def next_leaves(cursor, number):
    """What is picked and taken."""
    found = []
    for _ in range(number):
        found.append(cursor.pick())
        cursor.took(np.array(found[-1:]), np.array([1]))
    return found


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_a_node_is_over_with_its_last_part_and_all_parts_are_back_in_the_next_epoch(by):
    cursor = ScheduleCursor(tree(by=by), seed=1)
    assert sorted(set(next_leaves(cursor, 16))) == [0, 1, 2]
    assert not cursor.epoch_ended(1)
    assert cursor.awaited(10) == {0, 2}
    assert sorted(set(next_leaves(cursor, 16))) == [0, 2]
    assert not cursor.epoch_ended(2), "n has left, and a is there"
    assert cursor.awaited(10) == {0}
    assert (set(next_leaves(cursor, 8)), cursor.state().left) == ({0}, ["n"])
    assert cursor.epoch_ended(0)
    assert cursor.pick() == -1, "nothing is left"
    cursor.begin_epoch()
    assert cursor.awaited(10) == {0, 1, 2}
    assert (sorted(set(next_leaves(cursor, 16))), cursor.state().epochs) == ([0, 1, 2], {})


def test_the_end_of_a_part_counts_only_after_a_sample_of_it():
    cursor = ScheduleCursor(tree(), seed=1)
    took(cursor, 0)
    assert not cursor.epoch_ended(1)
    assert cursor.state().nodes["n"].left == []
    took(cursor, 1)
    assert not cursor.epoch_ended(1)
    assert cursor.state().nodes["n"].left == ["b"]


@pytest.mark.parametrize(("when_done", "is_over"), [("leave", False), ("stop", True)])
def test_a_node_without_a_part_at_a_stage_has_ended(when_done, is_over):
    cursor = ScheduleCursor(tree(((0, (1, 1)), (3, (1, 0))), inner_when_done=when_done), seed=1)
    took(cursor, 1, 2)
    assert not cursor.epoch_ended(1)
    assert not cursor.settle(), "c is there"
    took(cursor, 2, 0)
    assert cursor.settle() is is_over
    assert cursor.state().epochs == {"n": 1}
    assert cursor.state().nodes["n"].left == [], "its next epoch has begun"
    if not is_over:
        assert cursor.awaited(10) == {0}
        assert not cursor.settle(), "it is ended once"
