"""A loader that finds its workers and its read-ahead: what it delivers is D, and it does find them."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from asyncdata import DataLoader
from asyncdata.loader import autotune as tuners
from tests.support.combinations import each_value
from tests.support.faces import FACES
from tests.support.inner import change
from tests.support.loading import NEVER_S, SHUFFLE, ids, order_of, write_rows
from tests.support.tokenize_fns import row_id

pytestmark = pytest.mark.thorough

NUM_ROWS = 500


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("autotuned") / "rows.jsonl", NUM_ROWS)


class Eager(tuners.Tuner):
    """It adds a worker at every change that chance picks, as long as it may."""

    chance = random.Random(3)

    def look(self) -> bool | None:
        return self._add() if self.chance.random() < 0.2 else None


@pytest.fixture
def senseless(monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, tuner=Eager)


def knobs(**given: Any) -> dict[str, Any]:
    return {"tokenize_fn": row_id, "shuffle": SHUFFLE, "timeout_s": NEVER_S, **given}


@pytest.mark.usefixtures("senseless")
@pytest.mark.parametrize(("face", "backend"), each_value(FACES, ["asyncio", "trio", "uvloop"]))
def test_whatever_is_decided_at_any_moment_the_order_is_the_same(path, face, backend):
    settings = knobs(event_loop=backend, limits={"max_workers": 3}, num_workers=None, epochs=2, batch_size=7)
    with capture_logs(), face(path, **settings) as loader:
        found = [number for _ in range(2) for batch in loader for number in ids(batch)]
        num_workers = loader.statistics().num_workers

    assert found == order_of(path, 2)
    assert num_workers == 3


def test_what_is_given_is_not_tuned(path, monkeypatch):
    change(monkeypatch, tuner=None)
    with DataLoader(path, **knobs(num_workers=1, buffer_size=20)) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS)) == order_of(path)
        now = loader.statistics()

    assert (now.num_workers, now.capacity_samples) == (1, 20)


def slow(row: dict[str, Any]) -> list[int]:
    time.sleep(0.005)
    return [row["id"]]


def test_a_trainer_that_waits_for_workers_gets_more_of_them(path):
    """The work is a pause here, so that as many can do it at once as there are, whatever the machine."""
    function = "tests.integration.test_autotuned:slow"
    with capture_logs() as logs, DataLoader(path, **knobs(tokenize_fn=function, limits={"max_workers": 4})) as loader:
        assert loader.statistics().num_workers == 1
        found, deadline = [], time.monotonic() + NEVER_S
        while loader.statistics().num_workers < 4 and time.monotonic() < deadline:
            found += ids(loader.get_next_batch(10))
        now = loader.statistics()

    assert now.num_workers == 4
    assert found == order_of(path, 1 + len(found) // NUM_ROWS)[: len(found)]
    changes = [log for log in logs if log["event"] == "autotune.changed"]
    assert changes[0]["before"] == 1
    assert changes[-1]["after"] == 4
