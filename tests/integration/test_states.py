"""What a state is made of, which ones are refused, how a run goes on from one; and what is read ahead."""

import copy
import gzip
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncdata import BadRows, HardPacking, LengthGrouping, RowShuffle, Sample, Shuffle, SoftPacking, errors
from asyncdata.xtuner import XTunerPacking
from tests.support import loading, worker_fns
from tests.support.examples import each_value
from tests.support.faults import until
from tests.support.loaders import make, resumed, state_after
from tests.support.loading import NUM_ROWS, fails_on_13, ids, in_batches, order_of, row_id, write_rows
from tests.support.parts import change, real
from tests.support.sources import jsonl, write


def refused(path: Path, state: dict[str, Any], tokenize_fn: Any = row_id, **knobs: Any) -> errors.SnapshotMismatchError:
    """Why the state is refused; the loader continues unchanged."""
    with make(path, tokenize_fn, **knobs) as loader:
        seen = ids(loader.get_next_batch(5))
        with pytest.raises(errors.SnapshotMismatchError) as caught:
            loader.load_state_dict(state)
        seen += ids(loader.get_next_batch(5))
    with make(path, tokenize_fn, **knobs) as loader:
        assert ids(loader.get_next_batch(10)) == seen
    return caught.value


def state_with_canaries(path: Path, tokenize_fn: Any = row_id, number: int = 20, **knobs: Any) -> dict[str, Any]:
    with make(path, tokenize_fn, **knobs) as loader:
        loader.get_next_batch(number)
        until(lambda: loader.state_dict()["canaries"])
        return loader.state_dict()


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
            with pytest.raises(errors.SnapshotMismatchError, match="^AD603 the tokenize function gives other tokens"):
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
        path = write(tmp_path / "rows.jsonl.gz", gzip.compress(path.read_bytes()))
    with make(path, **knobs) as loader:
        next(iter(loader))
        state = loader.state_dict()
    state["position"] = list(place)

    with make(path, **knobs) as loader:
        loader.load_state_dict(state)
        with pytest.raises(errors.SnapshotError, match=r"AD602 .*position"):
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
    path = write(tmp_path / "rows.jsonl", jsonl({"n": number} for number in range(400)))
    settings = {"batch_size": 2, "epochs": 3, "shuffle": True, "cache": {"folder": str(tmp_path)}}
    with ExitStack() as opened:
        yield lambda kind: opened.enter_context(make(path, ids_of, **settings | KINDS[kind]))


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
            except errors.SnapshotError:
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
    for other in wrong if kind == "grouped packs" else wrong[:1]:
        with pytest.raises(errors.SnapshotError, match="^AD602 "):
            loader_of(kind).load_state_dict({**state, "packing": state["packing"] | other})


IN_ORDER = Shuffle(enabled=False, block_bytes=64, window_blocks=4)


@pytest.fixture
def numbered(jsonl_file):
    """A function that writes rows of an id each; those of ``special`` have more."""
    return lambda num_rows, special=(): jsonl_file(
        ({"id": number, **dict(special).get(number, {})} for number in range(num_rows)), f"{num_rows}.jsonl"
    )


make_ahead = partial(make, shuffle=IN_ORDER)


def counting(tokenize_fn: Any, seen: list[int]) -> Any:
    def count(row: dict[str, Any]) -> Any:
        seen.append(row["id"])
        return tokenize_fn(row)

    return count


def fails(row: dict[str, Any]) -> list[int]:
    raise ValueError("no")


@pytest.mark.parametrize("epochs", [1, 2])
def test_nothing_is_read_beyond_the_last_epoch(numbered, epochs):
    seen: list[int] = []
    with make_ahead(numbered(20), counting(row_id, seen), epochs=epochs, buffer_size=1000) as loader:
        until(lambda: loader.statistics().ready_samples == 20 * epochs)
        until(lambda: loader.state_dict()["canaries"])
        assert loader.statistics().ready_samples == 20 * epochs
        assert ids(loader.get_next_batch(20 * epochs)) == [*range(20)] * epochs
        with pytest.raises(errors.EndOfData):
            loader.get_next_batch(1)
    assert len(seen) == 20 * epochs + 4, "and the fixed rows"


@pytest.mark.parametrize(
    ("function", "knobs"),
    [
        (loading.all_dropped, {}),
        (fails_on_13, {"bad_rows": "raise"}),
        (fails, {"bad_rows": BadRows(policy="skip", max=5)}),
    ],
    ids=["an epoch without a sample", "a bad row that stops it", "one bad row too many"],
)
def test_nothing_is_read_beyond_what_stops_the_stream(numbered, function, knobs):
    """Or a wrong key would read a terabyte before anybody is told."""
    seen: list[int] = []
    path = numbered(100 if function is loading.all_dropped else 5000)
    with make_ahead(path, counting(function, seen), buffer_size=4, **knobs) as loader:
        for _ in range(3):
            with pytest.raises(errors.AsyncDataError):
                loader.get_next_batch(20)
    assert len(seen) < 300


def test_room_is_filled_again_and_a_batch_may_be_larger_than_all_of_it(numbered):
    with make_ahead(numbered(50), buffer_size=8) as loader:
        for taken, number in ((0, 4), (4, 30)):
            until(lambda: loader.statistics().ready_samples == 8)
            assert ids(loader.get_next_batch(number)) == list(range(taken, taken + number))
        until(lambda: loader.statistics().ready_samples == 8)


def test_rows_go_to_workers_between_the_scans_of_the_next_window(numbered, monkeypatch):
    """All scans of a window were once sent at once: the only worker did nothing else, and calls waited."""
    kinds, submit = "", real("submit")

    def noting(executor, request, *args):
        nonlocal kinds
        kinds += type(request).__name__[0]  # Scan or Tokenize
        return submit(executor, request, *args)

    change(monkeypatch, submit=noting)
    windows = Shuffle(enabled=False, block_bytes=64, window_blocks=512)  # of 8 scans each
    with make_ahead(numbered(9000), shuffle=windows, buffer_size=64) as loader:
        assert ids(loader.get_next_batch(9000)) == [*range(9000)]

    scans_between_rows = [len(scans) for scans in kinds.split("T")][1:200]  # while there is room for the rows behind
    assert sum(scans_between_rows) >= 16
    assert max(scans_between_rows) <= 2, "one, and the canaries'"


def test_a_file_that_is_gone_when_single_rows_are_read_is_an_error_at_every_call(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 300)
    with make_ahead(path, shuffle="full", buffer_size=4, cache={"folder": ""}) as loader:
        assert len(loader.get_next_batch(1)) == 1
        path.unlink()
        for _ in range(2):
            with pytest.raises(errors.SourceError, match=f"^AD304 .*{path}"):
                while True:
                    loader.get_next_batch(50)


def test_a_row_that_cannot_be_quarantined_is_not_passed(numbered, tmp_path):
    quarantine = tmp_path / "bad.jsonl"
    with make_ahead(numbered(20), fails_on_13, bad_rows=BadRows(policy="quarantine", path=str(quarantine))) as loader:
        assert ids(loader.get_next_batch(13)) == list(range(13))
        quarantine.unlink(missing_ok=True)
        quarantine.mkdir()
        with pytest.raises(errors.QuarantineError, match="^AD605"):
            loader.get_next_batch(2)
        assert loader.statistics().bad_rows_total == 0
        quarantine.rmdir()
        assert ids(loader.get_next_batch(2)) == [14, 15]
        assert loader.statistics().bad_rows_total == 1


def test_a_filter_is_asked_once_a_call_and_one_that_fails_consumes_nothing(numbered):
    faults: list[Any] = [[[]], RuntimeError("boom")]
    asked: list[int] = []

    def fails_twice(buffer: list[Any], num_groups: int) -> Any:
        asked.append(num_groups)
        before, fault = list(buffer), faults.pop() if faults else None
        buffer.clear()
        if isinstance(fault, Exception):
            raise fault
        return before if fault is None else fault

    with make_ahead(numbered(20), buffer_filter=fails_twice, buffer_size=1) as loader:
        mine = Sample(prompt="mine")
        loader.add_samples([[mine]])
        for code in ("AD431", "AD430"):
            with pytest.raises(errors.FilterError, match=code):
                loader.get_next_batch(2)
        batch = loader.get_next_batch(10)
    assert (batch[0], ids(batch[1:])) == (mine, list(range(9)))
    assert asked == [2, 2, 10], "however long the call waited"


# The fixed rows, whose digests are in every state


def digests_of(path: Any, function: Any = row_id, **knobs: Any) -> list[str]:
    settings = {"shuffle": Shuffle(enabled=False, block_bytes=64, window_blocks=64), **knobs}
    with make_ahead(path, function, **settings) as loader:
        loader.get_next_batch(3)
        until(lambda: loader.state_dict()["canaries"])
        found = loader.state_dict()["canaries"]
        loader.get_next_batch(40)
        assert loader.state_dict()["canaries"] == found
    return found


def other_from_50(row: dict[str, Any]) -> list[int]:
    return [row["id"] + (row["id"] >= 50)]


def empty_instead_of_dropped(row: dict[str, Any]) -> list[int]:
    return [] if row["id"] % 3 == 0 else [row["id"]]


def test_eight_rows_are_digested_by_their_tokens_alone_and_their_digests_are_pinned_for_ever(numbered):
    """They are in snapshots: with another digest every one of those would be refused."""
    path = numbered(100)
    digests = digests_of(path)
    assert len(digests) == len(set(digests)) == 8
    assert all(len(digest) == 16 for digest in digests)
    assert digests[:3] == ["4e842f2f50cc089e", "9483a4cbbd3a6648", "9d444357aed1e872"]
    for knobs in ({"num_workers": 1, "buffer_size": 1}, {"seed": 7, "n_samples_per_prompt": 1}):
        assert digests_of(path, **knobs) == digests
    assert digests_of(path, shuffle=Shuffle(block_bytes=64, window_blocks=64)) == digests

    other = digests_of(path, other_from_50)
    assert digests[:4] == other[:4]
    assert not set(digests[5:]) & set(other[5:])
    dropped = digests_of(path, loading.every_third_dropped)
    assert dropped == digests_of(path, empty_instead_of_dropped) != digests
    assert set(dropped) & set(digests)
    assert len(digests_of(path, shuffle=Shuffle(enabled=False, block_bytes=64, window_blocks=3))) == 3
    assert len(digests_of(path, shuffle=Shuffle(enabled=False, block_bytes=10_000, window_blocks=3))) == 1


SHIFT = {"from": 1000}


def as_told_by_a_variable(row: dict[str, Any]) -> list[int]:
    """Its name and version stay, whatever it gives."""
    return [row["id"] + (row["id"] >= SHIFT["from"])]


@pytest.mark.parametrize(("first", "number", "told"), [(50, 8, "[34] of 8"), (0, 8, "8 of 8"), (1000, 5, "some of 5")])
def test_other_digests_refuse_the_state_before_anything_is_delivered(numbered, monkeypatch, first, number, told):
    path, knobs = numbered(100), {"shuffle": Shuffle(enabled=False, block_bytes=64, window_blocks=64)}
    state = state_with_canaries(path, as_told_by_a_variable, 3, **knobs)
    assert resumed(path, state, 3, as_told_by_a_variable, **knobs) == [3, 4, 5]
    state["canaries"] = state["canaries"][:number]

    monkeypatch.setitem(SHIFT, "from", first)
    with make_ahead(path, as_told_by_a_variable, **knobs) as loader:
        loader.load_state_dict(state)
        for _ in range(3):
            with pytest.raises(
                errors.SnapshotMismatchError, match=f"^AD603 .*{told} fixed rows differ.*allow_changed"
            ) as told_by:
                loader.get_next_batch(1)
        assert loader.statistics().samples_total == 3
    assert told_by.value.differences["canaries"][0] == state["canaries"]


def test_rows_that_bring_down_their_workers_cannot_be_compared_and_none_at_all_need_not_be(numbered, tmp_path):
    with make_ahead(numbered(40, {0: {"do": "die"}}), worker_fns.as_told, num_workers=1, bad_rows="skip") as loader:
        state = {**loader.state_dict(), "canaries": ["0" * 16] * 8}
        loader.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(errors.WorkerError, match="^AD423 .*its worker died"):
                loader.get_next_batch(1)

    with make_ahead(write(tmp_path / "blank.jsonl", b"\n \n")) as loader:
        loader.load_state_dict({**loader.state_dict(), "canaries": []})
        with pytest.raises(errors.NoSamplesError, match="^AD401 epoch 0: 0 rows read, 0 kept: there was no row$"):
            loader.get_next_batch(1)
        assert loader.state_dict()["canaries"] == []
