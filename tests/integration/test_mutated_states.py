"""A state with one other value, of any type, is loaded or refused with a SnapshotError: never anything else."""

from __future__ import annotations

import copy
import json
from contextlib import ExitStack
from typing import Any

import pytest

from asyncdata import DataLoader, HardPacking, LengthGrouping, RowShuffle, SoftPacking
from asyncdata.errors import SnapshotError
from asyncdata.xtuner import XTunerPacking
from tests.support.combinations import each_value
from tests.support.loading import NEVER_S

pytestmark = pytest.mark.thorough

WRONG: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2**40, 2**70, -(2**70), 1.5, float("nan"), float("inf")),
    *("", "x", "1", "\ud800", b"x", [], {}, [[]], [1], [0, 0, 0], [None], {"a": 1}),
]
GONE = object()
PLAN = RowShuffle(method="none", only_kept=True)

SOFT, HARD = SoftPacking(max_length=64, window_samples=10, window_tokens=200), HardPacking(max_length=64)
ALONE = HardPacking(max_length=64, across_epochs=False)
OF_XTUNER = XTunerPacking(max_length=64, seed=1)

KINDS: dict[str, dict[str, Any]] = {
    "soft packs": {"packing": SOFT},
    "hard packs": {"packing": HARD},
    "grouped packs": {"packing": SOFT, "length_grouping": LengthGrouping(window=4)},
    "grouped samples": {"length_grouping": LengthGrouping(window=8)},
    "planned packs": {"packing": ALONE, "plan_packs": True, "shuffle": "full"},
    "XTuner's packs": {"packing": OF_XTUNER, "plan_packs": True, "shuffle": PLAN},
}


def ids_of(row):
    return list(range(row["n"] % 37 + 1))


ids_of.version = 1


@pytest.fixture
def loader_of(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(400)))
    settings = {
        "batch_size": 2,
        "num_workers": 0,
        "epochs": 3,
        "timeout_s": NEVER_S,
        "cache": {"folder": str(tmp_path)},
    }
    with ExitStack() as opened:
        yield lambda kind: opened.enter_context(DataLoader(str(path), tokenize_fn=ids_of, **settings | KINDS[kind]))


def places(value, place=()):
    """Of every value in it; of a list, of the first two."""
    if place:
        yield place
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*place, key))
    if isinstance(value, list):
        for number in range(min(2, len(value))):
            yield from places(value[number], (*place, number))


def with_another(state, place, value):
    state = at = copy.deepcopy(state)
    for key in place[:-1]:
        at = at[key]
    if value is GONE:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return state


def state_of(loader):
    batches = iter(loader)
    for _ in range(9):
        next(batches)
    state = loader.state_dict()
    assert json.loads(json.dumps(state))["packing"]["num_packs"] == 18
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_one_other_value_is_loaded_or_refused(loader_of, kind):
    state = state_of(loader_of(kind))
    loader, num_refused = loader_of(kind), 0
    for place in places(state):
        for value in (*WRONG, GONE):
            try:
                loader.load_state_dict(with_another(state, place, value))
            except SnapshotError:
                num_refused += 1

    assert num_refused > 700
    loader.load_state_dict(state)
    assert next(iter(loader))


@pytest.mark.parametrize(
    ("kind", "name"), each_value(list(KINDS), ["world_size", "accumulation", "window", "num_gone", "epoch", "last"])
)
def test_a_number_that_no_run_has_is_refused(loader_of, kind, name):
    """Or the loader would make packs for that many ranks, and deliver none."""
    state = state_of(loader_of(kind))
    wrong = [{name: [0, 0, -1] if name == "last" else -1}, {"world_size": 0, "num_gone": 1}]

    for change in wrong if kind == "grouped packs" else wrong[:1]:
        with pytest.raises(SnapshotError, match="^AD602 "):
            loader_of(kind).load_state_dict({**state, "packing": state["packing"] | change})
