"""What a state is made of, which states a loader refuses, and how a run goes on from one."""

import copy
import gzip
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from asyncdata import DataLoader, HardPacking, LengthGrouping, RowShuffle, Shuffle, SoftPacking
from asyncdata.errors import SnapshotError, SnapshotMismatchError
from asyncdata.xtuner import XTunerPacking
from tests.support import worker_fns
from tests.support.combinations import each_value
from tests.support.faults import until
from tests.support.loaders import make, resumed, state_after
from tests.support.loading import NEVER_S, NUM_ROWS, ids, order_of, write_rows
from tests.support.tokenize_fns import in_batches, row_id


def refused(path: Path, state: dict[str, Any], tokenize_fn: Any = row_id, **knobs: Any) -> SnapshotMismatchError:
    """Why the state is refused; the loader continues unchanged."""
    with make(path, tokenize_fn, **knobs) as loader:
        seen = ids(loader.get_next_batch(5))
        with pytest.raises(SnapshotMismatchError) as caught:
            loader.load_state_dict(state)
        seen += ids(loader.get_next_batch(5))
    with make(path, tokenize_fn, **knobs) as loader:
        assert ids(loader.get_next_batch(10)) == seen
    return caught.value


def state_with_canaries(path: Path, tokenize_fn: Any = row_id) -> dict[str, Any]:
    with make(path, tokenize_fn) as loader:
        loader.get_next_batch(20)
        until(lambda: loader.state_dict()["canaries"])
        return loader.state_dict()


def test_another_seed_is_refused_or_begins_the_next_epoch(path):
    state = state_after(path, 20)
    error = refused(path, state, seed=7)
    assert str(error).startswith("AD603 ")
    assert "seed: saved 42, present 7" in str(error)
    assert error.differences == {"seed": (42, 7)}
    found = resumed(path, state, 5, allow_changed={"seed"}, seed=7)
    assert found == order_of(path, 2, seed=7)[NUM_ROWS : NUM_ROWS + 5]


def test_other_data_is_refused_or_begins_the_next_epoch(path, tmp_path):
    state = state_after(path, 20)
    path = write_rows(tmp_path / "other.jsonl", 120)
    error = refused(path, state)
    assert set(error.differences) == {"data"}
    assert "other.jsonl is new" in str(error)
    assert resumed(path, state, 5, allow_changed=["data"]) == order_of(path, 2)[120:125]


def test_data_is_known_by_its_content_and_not_by_its_place(path, tmp_path):
    state = state_after(path, 20)
    moved = tmp_path / "elsewhere" / path.name
    moved.parent.mkdir()
    path.rename(moved)
    assert resumed(moved, state, 5) == order_of(moved)[20:25]
    moved.write_bytes(moved.read_bytes().replace(b'"id": 55', b'"id": 99'))
    assert "rows.jsonl has other content" in str(refused(moved, state))


def test_another_function_is_refused_or_goes_on(path):
    state = state_after(path, 20)
    error = refused(path, state, in_batches)
    assert set(error.differences) == {"tokenize_fn"}
    assert "row_id" in str(error) and "in_batches" in str(error)
    assert resumed(path, state, 5, in_batches, allow_changed={"tokenize_fn"}) == order_of(path)[20:25]


@pytest.mark.parametrize("shuffle", [False, Shuffle(block_bytes=1024, window_blocks=9)])
def test_another_order_is_refused_or_begins_the_next_epoch(path, shuffle):
    state = state_with_canaries(path)
    assert all(name.startswith("order.") for name in refused(path, state, shuffle=shuffle).differences)
    described = shuffle if isinstance(shuffle, Shuffle) else Shuffle(enabled=False)
    found = resumed(path, state, 5, allow_changed={"order"}, shuffle=shuffle)
    assert found == order_of(path, 2, shuffle=described)[NUM_ROWS : NUM_ROWS + 5]


def test_other_tokens_of_the_same_function_are_found_by_canaries(path, tmp_path):
    """Its path, settings and version are the same; what it calls is not."""
    function = worker_fns.Shifted(str(tmp_path / "shift"))
    state = state_with_canaries(path, function)
    assert resumed(path, state, 5, function) == order_of(path)[20:25]

    (tmp_path / "shift").write_text("1000")
    with make(path, function) as loader:
        loader.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(SnapshotMismatchError, match="^AD603 the tokenize function gives other tokens"):
                loader.get_next_batch(1)
        loader.load_state_dict(state, allow_changed={"tokenize_fn"})
        assert ids(loader.get_next_batch(5)) == [number + 1000 for number in order_of(path)[20:25]]


@pytest.mark.parametrize("place", [(0, 0, 10_000), (0, 10_000, 0), (0, 1 << 46, 1 << 46)], ids=["row", "window", "far"])
@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({}, id="blocks"),
        *(
            pytest.param(knobs, id=name, marks=pytest.mark.thorough)
            for name, knobs in {
                "full": {"shuffle": "full"},
                "growing": {"shuffle": RowShuffle(method="none")},
                "kept": {"shuffle": RowShuffle(method="none", only_kept=True)},
                "stream": {"is_stream": True},
                "planned": {"shuffle": "full", "packing": HardPacking(max_length=4), "plan_packs": True},
            }.items()
        ),
    ],
)
def test_a_place_that_does_not_exist_is_refused_and_nothing_is_passed_over(path, tmp_path, knobs, place):
    knobs = {"batch_size": 2, **knobs}
    if knobs.pop("is_stream", False):
        path = tmp_path / "rows.jsonl.gz"
        path.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    with make(path, **knobs) as loader:
        next(iter(loader))
        state = loader.state_dict()
    state["position"] = list(place)

    with make(path, **knobs) as loader:
        loader.load_state_dict(state)
        with pytest.raises(SnapshotError, match=r"AD602 .*position"):
            next(iter(loader))
        loader.set_epoch(1)
        next(iter(loader))
        assert loader.statistics().epoch == 1


def test_a_state_does_not_change_any_more(path):
    with make(path) as loader:
        loader.add_samples([loader.get_next_batch(1)])
        state = loader.state_dict()
        copied = copy.deepcopy(state)
        loader.get_next_batch(30)
        loader.add_samples([loader.get_next_batch(1)])
    assert state == copied


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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
