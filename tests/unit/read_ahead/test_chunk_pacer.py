"""How many rows go to a worker at a time: fifty milliseconds of work, and few enough that all workers have some."""

from __future__ import annotations

import pytest

from tests.support.parts import ChunkPacer

MANY = 1 << 20


def learn(pacer: ChunkPacer, row_s: float, number: int) -> list[int]:
    """The sizes of so many chunks, of rows that take so long."""
    sizes = []
    for _ in range(number):
        sizes.append(pacer.num_rows)
        pacer.learn(pacer.num_rows, pacer.num_rows * row_s)
    return [*sizes, pacer.num_rows]


def test_the_first_chunks_are_small_and_each_may_be_twice_as_large():
    assert learn(ChunkPacer(MANY, num_workers=2), 0.0, 7) == [32, 64, 128, 256, 512, 1024, 1024, 1024]


@pytest.mark.parametrize(("row_s", "num_rows"), [(0.0001, 500), (0.001, 50), (0.01, 5), (0.05, 1), (10.0, 1)])
def test_a_chunk_grows_or_shrinks_to_fifty_milliseconds_of_work(row_s, num_rows):
    assert abs(learn(ChunkPacer(MANY, num_workers=2), row_s, 20)[-1] - num_rows) <= 1


def test_one_slow_chunk_does_not_decide_and_an_empty_one_teaches_nothing():
    pacer = ChunkPacer(MANY, num_workers=2)
    pacer.learn(0, 5.0)
    assert pacer.num_rows == 32
    for row_s in [*[0.0005] * 10, 0.001]:
        pacer.learn(100, 100 * row_s)

    assert pacer.num_rows == int(0.05 / (0.8 * 0.0005 + 0.2 * 0.001))


@pytest.mark.parametrize(
    ("capacity", "num_workers", "num_rows"),
    [(1, 1, 1), (1, 8, 1), (8, 1, 4), (64, 2, 16), (64, 8, 4), (1000, 1, 500), (MANY, 2, 1024)],
)
def test_every_worker_can_have_two_chunks_of_the_channel_also_of_another_size(capacity, num_workers, num_rows):
    pacer = ChunkPacer(capacity, num_workers)
    assert learn(pacer, 0.0, 12)[-1] == num_rows

    pacer.resize(capacity, 4 * num_workers)
    assert pacer.num_rows == max(1, min(capacity // (8 * num_workers), 1024))
    pacer.resize(4 * capacity, num_workers)
    assert learn(pacer, 0.0, 12)[-1] == max(1, min(2 * capacity // num_workers, 1024))
