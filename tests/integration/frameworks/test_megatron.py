"""MegatronIterator in Megatron-Bridge's own functions. ASYNCDATA_MEGATRON_BRIDGE names a checkout of it."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, DataLoader, SnapshotError
from asyncdata.integrations.megatron import MegatronIterator, ranks_of
from tests.support.frameworks.killed_runs import checkout, resumed_of, run_driver, told
from tests.support.frameworks.megatron import CODE, ROWS, VARIABLE, Group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkout(VARIABLE, f"{CODE}/training/checkpointing.py", ("torch",))
    return run_driver("tests.support.frameworks.megatron", tmp_path_factory.mktemp("megatron"))


def test_a_killed_run_of_megatron_bridge_continues_with_exactly_the_next_row(found: dict[str, Any]) -> None:
    for resumed in resumed_of(found["ours"]):
        assert resumed.trained == found["ours"]["whole"], f"killed after a save at step {resumed.save_at}"
        assert (resumed.skipped, resumed.repeated) == (0, 0)


def test_the_training_continues_past_the_end_of_an_epoch(found: dict[str, Any]) -> None:
    rows = [row for batch in found["ours"]["whole"] for row in batch]

    assert sorted(rows[:ROWS]) == sorted(rows[ROWS : 2 * ROWS]) == list(range(ROWS))


def test_what_megatron_bridges_own_loader_does_with_the_same_kill(found: dict[str, Any]) -> None:
    """Shown with ``-s``. Whatever it does, it comes to the end."""
    sys.stdout.write("\n" + told(found))

    assert all(len(resumed.trained) == 27 for runs in found.values() for resumed in resumed_of(runs))


def _collate(samples: list[Any]) -> list[int]:
    return [int(sample.tokens[0]) for sample in samples]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": [row["number"]]}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"number": number}) + "\n" for number in range(40)))
    return tmp_path


@pytest.fixture
def open_iterator(rows: Path) -> Iterator[Any]:
    """Makes iterators, and closes their loaders at the end."""
    with ExitStack() as stack:

        def opens(rank: int = 0, size: int = 1, *, groups: Any = None, **knobs: Any) -> MegatronIterator:
            place = SimpleNamespace(dp=Group(rank, size))
            more = {"collate_fn": _collate, "num_workers": 0, "timeout_s": 240, "ranks": ranks_of(place), **knobs}
            loader = stack.enter_context(DataLoader(str(rows / "rows.jsonl"), tokenize_fn=_row, **more))
            return MegatronIterator(loader, groups or place)

        yield opens


def _without_what_is_counted_later(state: dict[str, Any]) -> dict[str, Any]:
    """The state, without what a loader knows only once its workers have read that far."""
    kept = json.loads(state["asyncdata"])
    for name in ("rows_left", "canaries"):
        kept.pop(name, None)
    return {**state, "asyncdata": kept}


def test_the_state_is_the_same_on_every_rank_and_loads_with_another_number_of_them(open_iterator: Any) -> None:
    pytest.importorskip("torch")
    alone = open_iterator(batch_size=4)
    wanted = [next(alone) for _ in range(20)]
    two = [open_iterator(rank, 2, batch_size=2) for rank in range(2)]
    taken = [sorted(next(two[0]) + next(two[1])) for _ in range(5)]
    states = [iterator.save_state() for iterator in two]
    resumed = open_iterator(batch_size=4)
    resumed.restore_state(states[1])

    assert _without_what_is_counted_later(states[0]) == _without_what_is_counted_later(states[1])
    assert taken == [sorted(batch) for batch in wanted[:5]]
    assert [next(resumed) for _ in range(15)] == wanted[5:]


def test_a_loader_of_other_ranks_is_refused(open_iterator: Any) -> None:
    with pytest.raises(ConfigError, match=r"AD461 the loader is rank 5 of 8, and this process data-parallel rank 1 of"):
        open_iterator(5, 8, batch_size=2, groups=SimpleNamespace(dp=Group(1, 4)))


@pytest.mark.parametrize("state", [None, {}, {"other": 1}])
def test_a_state_of_another_data_set_is_refused(open_iterator: Any, state: Any) -> None:
    with pytest.raises(SnapshotError, match="AD602 this is not the state of a MegatronIterator"):
        open_iterator(batch_size=2).restore_state(state)


def test_the_end_of_the_data_ends_the_iteration(open_iterator: Any) -> None:
    pytest.importorskip("torch")
    batches = list(open_iterator(batch_size=8, epochs=1))

    assert sorted(number for batch in batches for number in batch) == list(range(40))
