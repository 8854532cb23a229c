"""One order, whatever runs it: workers, ranks, read-ahead, batches, event loops, Python versions and machines."""

from __future__ import annotations

import hashlib
import itertools
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import AsyncDataLoader, DataLoader, Shuffle
from tests.support.loading import SHUFFLE, ids, order_of, write_rows
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


NUM_ROWS = 500


NUM_EPOCHS = 2


# A change of one of these changes the order of every run that exists.
ORDER = "952f6f5fb7a7ba0bc0870cd8ecf4ee77dca589cccafe233ca4069c977043f3db"


ORDER_OF_ANOTHER_SEED = "884bc11b79828e47f6525cbf522c5c3e04cf6f9ba4b4972a3938d9d1daade096"


ORDER_OF_FILES = "60e5acd40bfb4b9e481bfe15269c6a0f48e1234127ac9c502ddd341317f291fe"


NUM_WORKERS = (0, 1, 2, 3)


DP_SIZES = (1, 8)


BUFFER_SIZES = (1, 64, 4096)


BATCH_SIZES = (1, 7, 64)


BACKENDS = ("asyncio", "uvloop", "trio")


KINDS = (NUM_WORKERS, DP_SIZES, BUFFER_SIZES, BATCH_SIZES, BACKENDS)


ALL = list(itertools.product(*KINDS))


SOME = [ALL[number] for number in range(0, len(ALL), 35)]  # 35 and 216 have no factor in common: every value is there


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("one_order") / "rows.jsonl", NUM_ROWS)


def digest(numbers: Iterable[int]) -> str:
    return hashlib.sha256(",".join(map(str, numbers)).encode()).hexdigest()


def settings_of(combination: tuple[int, int, int, int, str]) -> dict[str, Any]:
    num_workers, dp_size, buffer_size, batch_size, event_loop = combination
    return {
        "tokenize_fn": row_id,
        "shuffle": SHUFFLE,
        "timeout_s": 240,
        "epochs": NUM_EPOCHS,
        "num_workers": num_workers,
        "dp_size": dp_size,
        "buffer_size": buffer_size,
        "batch_size": batch_size,
        "event_loop": event_loop,
    }


def run(path: Path, combination: tuple[int, int, int, int, str]) -> list[int]:
    """Two epochs by two loops. Batches end with an epoch, so that the sizes of all of them come into play."""
    with DataLoader(path, **settings_of(combination)) as loader:
        return [number for _ in range(NUM_EPOCHS) for batch in loader for number in ids(batch)]


def test_the_order_is_the_one_that_was_pinned(path):
    assert digest(order_of(path, NUM_EPOCHS)) == ORDER
    assert digest(order_of(path, NUM_EPOCHS, seed=-1)) == ORDER_OF_ANOTHER_SEED


def test_every_epoch_is_a_permutation_of_all_rows(path):
    found = order_of(path, 3)
    epochs = [found[number * NUM_ROWS : (number + 1) * NUM_ROWS] for number in range(3)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_ROWS))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.thorough
@pytest.mark.parametrize("combination", SOME, ids=str)
def test_some_of_all_ways_to_run_it_give_that_order(path, combination):
    assert digest(run(path, combination)) == ORDER


def test_some_of_all_ways_are_of_every_kind():
    for values, kind in zip(zip(*SOME, strict=True), KINDS, strict=True):
        assert set(values) == set(kind)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_ways_to_run_it_give_that_order(path):
    """216 runs of two epochs each."""
    wrong = [combination for combination in ALL if digest(run(path, combination)) != ORDER]

    assert wrong == []


@pytest.mark.thorough
@pytest.mark.asyncio
@pytest.mark.parametrize("combination", SOME[::2], ids=str)
async def test_the_async_face_gives_that_order(path, combination):
    async with AsyncDataLoader(path, **settings_of(combination)) as loader:
        found = [number for _ in range(NUM_EPOCHS) async for batch in loader for number in ids(batch)]

    assert digest(found) == ORDER


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_files_are_mixed_and_give_one_order_too(tmp_path, num_workers):
    """Three files, one of them without a final newline, one with rows longer than a block."""
    rows = write_rows(tmp_path / "all.jsonl", NUM_ROWS, {i: {"pad": "y" * 3000} for i in range(200, 300, 9)})
    lines = rows.read_bytes().splitlines()
    rows.unlink()
    for name, part in (("a", lines[:150]), ("b", lines[150:310]), ("c", lines[310:])):
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(part) + (b"\n" if name != "b" else b""))

    shuffle = Shuffle(block_bytes=700, window_blocks=50)
    settings = settings_of((num_workers, 1, 100, 50, "asyncio")) | {"shuffle": shuffle}
    with DataLoader(tmp_path, **settings) as loader:
        found = [number for _ in range(NUM_EPOCHS) for batch in loader for number in ids(batch)]

    assert found == order_of(sorted(tmp_path.iterdir()), NUM_EPOCHS, shuffle=shuffle)
    assert digest(found) == ORDER_OF_FILES


# Workers come and go


def resize(loader: DataLoader, num_workers: int) -> None:
    """As a tuner in the service's loop does."""
    engine = loader._engine  # noqa: SLF001 - there is no other way to be in that loop
    executor, call_soon = engine._executor, engine.service._call_soon  # noqa: SLF001 - as above
    assert call_soon is not None
    call_soon(partial(executor.set_num_workers, num_workers))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_the_order_does_not_depend_on_how_many_workers_there_are_when(path, seed):
    chance, found = random.Random(seed), []
    with DataLoader(path, **settings_of((2, 1, 100, 1, "asyncio")) | {"epochs": None}) as loader:
        while len(found) < 2 * NUM_ROWS:
            found += ids(loader.get_next_batch(chance.choice([1, 7, 32, 100])))
            resize(loader, chance.randint(1, 5))
        restarts = loader.statistics().worker_restarts_total

    assert digest(found[: 2 * NUM_ROWS]) == ORDER
    assert restarts == 0
