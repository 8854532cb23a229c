"""Workers come and go while rows are delivered; what is delivered is D all the same."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest

from asyncdata import DataLoader
from tests.faults.support.streaming import entry
from tests.support.loading import NEVER_S, SHUFFLE, write_rows
from tests.support.tokenize_fns import id_and_text

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.thorough

NUM_ROWS = 1500


def make(path: Path, num_workers: int) -> DataLoader:
    knobs = {"shuffle": SHUFFLE, "timeout_s": NEVER_S, "buffer_size": 100}
    return DataLoader(path, tokenize_fn=id_and_text, num_workers=num_workers, **knobs)


def resize(loader: DataLoader, num_workers: int) -> None:
    """As a tuner in the service's loop does."""
    engine = loader._engine  # noqa: SLF001 - there is no other way to be in that loop
    executor, call_soon = engine._executor, engine.service._call_soon  # noqa: SLF001 - as above
    assert call_soon is not None
    call_soon(partial(executor.set_num_workers, num_workers))


@pytest.mark.parametrize("seed", range(3))
def test_what_is_delivered_does_not_depend_on_how_many_workers_there_are_when(tmp_path, seed):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    chance, found = random.Random(seed), []
    with make(path, 2) as loader:
        while len(found) < 2 * NUM_ROWS:
            found += [entry(sample) for sample in loader.get_next_batch(chance.choice([1, 7, 32, 100]))]
            resize(loader, chance.randint(1, 5))
        restarts = loader.statistics().worker_restarts_total

    with make(path, 0) as loader:
        assert found == [entry(sample) for sample in loader.get_next_batch(len(found))]
    assert restarts == 0
