"""A state with one other value, of any type, is loaded or refused with a SnapshotError: never anything else."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    DataLoader,
    HardPacking,
    LengthGrouping,
    RowShuffle,
    SnapshotError,
    SoftPacking,
    XTunerPacking,
)
from tests.support.loading import NEVER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.thorough

WRONG: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2**40, 2**70, -(2**70), 1.5, float("nan"), float("inf")),
    *("", "x", "1", "\ud800", b"x", [], {}, [[]], [1], [0, 0, 0], [None], {"a": 1}),
]
GONE = object()
PLAN = RowShuffle(method="none", only_kept=True)

KINDS: dict[str, dict[str, Any]] = {
    "soft packs": {"packing": SoftPacking(max_length=64, window_samples=10, window_tokens=200)},
    "hard packs": {"packing": HardPacking(max_length=64)},
    "grouped packs": {
        "packing": SoftPacking(max_length=64, window_samples=5, window_tokens=100),
        "length_grouping": LengthGrouping(window=4),
    },
    "grouped samples": {"length_grouping": LengthGrouping(window=8)},
    "planned packs": {
        "packing": HardPacking(max_length=64, across_epochs=False),
        "plan_packs": True,
        "shuffle": "full",
    },
    "XTuner's packs": {"packing": XTunerPacking(max_length=64, seed=1), "plan_packs": True, "shuffle": PLAN},
}


def ids_of(row: dict[str, Any]) -> list[int]:
    return list(range(row["n"] % 37 + 1))


ids_of.version = 1  # type: ignore[attr-defined]


@pytest.fixture
def loader_of(tmp_path: Path) -> Iterator[Callable[[str], DataLoader]]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(400)))
    opened: list[DataLoader] = []

    def open_loader(kind: str) -> DataLoader:
        settings = {
            "batch_size": 2,
            "num_workers": 0,
            "epochs": 3,
            "timeout_s": NEVER_S,
            "cache": {"folder": str(tmp_path)},
        }
        opened.append(DataLoader(str(path), tokenize_fn=ids_of, **settings | KINDS[kind]))
        return opened[-1]

    yield open_loader
    for loader in opened:
        loader.close()


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in it; of a list, of the first two."""
    if place:
        yield place
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*place, key))
    if isinstance(value, list):
        for number in range(min(2, len(value))):
            yield from places(value[number], (*place, number))


def with_another(state: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    state = copy.deepcopy(state)
    at: Any = state
    for key in place[:-1]:
        at = at[key]
    if value is GONE:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return state


def state_of(loader: DataLoader) -> dict[str, Any]:
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    state = loader.state_dict()
    assert json.loads(json.dumps(state))["packing"]["num_packs"] == 18
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_one_other_value_is_loaded_or_refused(loader_of, kind):
    state = state_of(loader_of(kind))
    loader, num_refused, others = loader_of(kind), 0, []
    for place in places(state):
        for value in (*WRONG, GONE):
            try:
                loader.load_state_dict(with_another(state, place, value))
            except SnapshotError:
                num_refused += 1
            except Exception as error:
                others.append((place, value, error))

    assert others == []
    assert num_refused > 700
    loader.load_state_dict(state)
    assert next(iter(loader))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["world_size", "accumulation", "window", "num_gone", "epoch", "last"])
def test_a_number_that_no_run_has_is_refused(loader_of, kind, name):
    """Or the loader would make packs for that many ranks, and deliver none."""
    state = state_of(loader_of(kind))
    state["packing"][name] = [0, 0, -1] if name == "last" else -1

    with pytest.raises(SnapshotError, match="^AD602 "):
        loader_of(kind).load_state_dict(state)


def test_packs_for_no_ranks_are_refused(loader_of):
    state = state_of(loader_of("grouped packs"))
    state["packing"] |= {"world_size": 0, "num_gone": 1}

    with pytest.raises(SnapshotError, match="^AD602 the state of a packer cannot be read"):
        loader_of("grouped packs").load_state_dict(state)
