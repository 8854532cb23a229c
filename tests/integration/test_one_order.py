"""One order, whatever runs it: workers, ranks, read-ahead, batches, event loops, Python versions and machines."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, Shuffle
from tests.support.figures import record
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

NAMES = ("num_workers", "dp_size", "buffer_size", "batch_size", "event_loop")
KINDS = ((0, 1, 2, 4), (1, 2, 8), (1, 64, 4096), (1, 7, 64), ("asyncio", "uvloop", "trio"))
ALL = [dict(zip(NAMES, values, strict=True)) for values in itertools.product(*KINDS)]
SOME = ALL[::47]  # every value is there


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("one_order") / "rows.jsonl", NUM_ROWS)


def digest(numbers: Iterable[int]) -> str:
    return hashlib.sha256(",".join(map(str, numbers)).encode()).hexdigest()


SETTINGS: dict[str, Any] = {"tokenize_fn": row_id, "shuffle": SHUFFLE, "timeout_s": 240, "epochs": NUM_EPOCHS}


def run(path: Path, **knobs: Any) -> list[int]:
    """Two epochs by two loops. Batches end with an epoch, so that the sizes of all of them come into play."""
    with DataLoader(path, **SETTINGS | knobs) as loader:
        return [number for _ in range(NUM_EPOCHS) for batch in loader for number in ids(batch)]


def test_the_order_is_the_one_that_was_pinned(path):
    assert digest(order_of(path, NUM_EPOCHS)) == ORDER
    assert digest(order_of(path, NUM_EPOCHS, seed=-1)) == ORDER_OF_ANOTHER_SEED


@pytest.mark.thorough
@pytest.mark.parametrize("knobs", SOME, ids=str)
def test_some_of_all_ways_to_run_it_give_that_order(path, knobs):
    assert digest(run(path, **knobs)) == ORDER


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_ways_to_run_it_give_that_order(path):
    """324 runs of two epochs each."""
    digests = [digest(run(path, **knobs)) for knobs in ALL]
    record("R3", "a file", settings=len(ALL), other_digests=len(set(digests) - {ORDER}))
    assert set(digests) == {ORDER}


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
    found = run(tmp_path, num_workers=num_workers, buffer_size=100, batch_size=50, shuffle=shuffle)

    assert found == order_of(sorted(tmp_path.iterdir()), NUM_EPOCHS, shuffle=shuffle)
    assert digest(found) == ORDER_OF_FILES
