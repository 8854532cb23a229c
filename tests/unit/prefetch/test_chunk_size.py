"""Chunks: few rows at first, then a fixed time's work, and never more than the channel can share out."""

from __future__ import annotations

import pytest

from asyncdata.prefetch.chunk_size import ChunkPacer


def test_the_first_chunks_are_small_and_each_may_be_twice_as_large() -> None:
    pacer = ChunkPacer(capacity=1 << 20, num_workers=2)
    sizes = [pacer.num_rows]

    for _ in range(7):
        pacer.learn(pacer.num_rows, 0.0)
        sizes.append(pacer.num_rows)

    assert sizes == [32, 64, 128, 256, 512, 1024, 1024, 1024]


@pytest.mark.parametrize(("row_s", "num_rows"), [(0.0001, 500), (0.001, 50), (0.01, 5), (0.05, 1), (10.0, 1)])
def test_a_chunk_grows_or_shrinks_to_fifty_milliseconds_of_work(row_s: float, num_rows: int) -> None:
    pacer = ChunkPacer(capacity=1 << 20, num_workers=2)

    for _ in range(20):
        pacer.learn(pacer.num_rows, pacer.num_rows * row_s)

    assert abs(pacer.num_rows - num_rows) <= 1


def test_one_slow_chunk_does_not_decide() -> None:
    pacer = ChunkPacer(capacity=1 << 20, num_workers=2)
    for _ in range(10):
        pacer.learn(100, 100 * 0.0005)

    pacer.learn(100, 100 * 0.001)

    assert pacer.num_rows == int(0.05 / (0.8 * 0.0005 + 0.2 * 0.001))


@pytest.mark.parametrize(
    ("capacity", "num_workers", "num_rows"),
    [(1, 1, 1), (1, 8, 1), (8, 1, 4), (64, 2, 16), (64, 8, 4), (1000, 1, 500), (1 << 20, 2, 1024)],
)
def test_every_worker_can_have_two_chunks_of_the_channel(capacity: int, num_workers: int, num_rows: int) -> None:
    pacer = ChunkPacer(capacity, num_workers)

    for _ in range(12):
        pacer.learn(pacer.num_rows, 0.0)

    assert pacer.num_rows == num_rows


def test_a_channel_or_a_pool_of_another_size_has_chunks_of_another_size() -> None:
    pacer = ChunkPacer(capacity=1000, num_workers=1)
    for _ in range(12):
        pacer.learn(pacer.num_rows, 0.0)
    assert pacer.num_rows == 500

    pacer.resize(1000, 4)
    assert pacer.num_rows == 125

    pacer.resize(4000, 2)
    pacer.learn(125, 0.0)
    pacer.learn(250, 0.0)
    pacer.learn(500, 0.0)
    pacer.learn(1000, 0.0)
    assert pacer.num_rows == 1000


def test_an_empty_chunk_teaches_nothing() -> None:
    pacer = ChunkPacer(capacity=1 << 20, num_workers=2)

    pacer.learn(0, 5.0)

    assert pacer.num_rows == 32
