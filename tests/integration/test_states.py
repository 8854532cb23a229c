"""What a state is made of, which states a loader refuses, and how a run goes on from one."""

from __future__ import annotations

import copy
import gzip
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    AsyncDataLoader,
    DataLoader,
    HardPacking,
    RowShuffle,
    Shuffle,
    SnapshotError,
    SnapshotMismatchError,
)
from asyncdata.delivery.coordinator import Coordinator
from tests.support import worker_fns
from tests.support.faults import until
from tests.support.loaders import make, resumed, state_after
from tests.support.loading import SHUFFLE, ids, order_of, write_rows
from tests.support.tokenize_fns import in_batches, row_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_ROWS = 100


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


# Refused


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


def test_another_seed_is_refused_or_begins_the_next_epoch(path):
    state = state_after(path, 20)

    error = refused(path, state, seed=7)
    assert str(error).startswith("AD603 ")
    assert "seed: saved 42, present 7" in str(error)
    assert error.differences == {"seed": (42, 7)}
    with make(path, seed=7) as loader:
        loader.load_state_dict(state, allow_changed={"seed"})
        assert ids(loader.get_next_batch(5)) == order_of(path, 2, seed=7)[NUM_ROWS : NUM_ROWS + 5]


def test_other_data_is_refused_or_begins_the_next_epoch(path, tmp_path):
    state = state_after(path, 20)
    path = write_rows(tmp_path / "other.jsonl", 120)

    error = refused(path, state)
    assert set(error.differences) == {"data"}
    assert "other.jsonl is new" in str(error)
    with make(path) as loader:
        loader.load_state_dict(state, allow_changed=["data"])
        assert ids(loader.get_next_batch(5)) == order_of(path, 2)[120:125]


def test_one_byte_of_other_data_is_refused(path):
    state = state_after(path, 20)
    path.write_bytes(path.read_bytes().replace(b'"id": 55', b'"id": 99'))

    assert "rows.jsonl has other content" in str(refused(path, state))


def test_a_file_of_the_same_content_elsewhere_is_the_same_data(path, tmp_path):
    state = state_after(path, 20)
    moved = tmp_path / "elsewhere" / path.name
    moved.parent.mkdir()
    path.rename(moved)

    assert resumed(moved, state, 5) == order_of(moved)[20:25]


def test_another_function_is_refused_or_goes_on(path):
    state = state_after(path, 20)

    error = refused(path, state, in_batches)
    assert set(error.differences) == {"tokenize_fn"}
    assert "row_id" in str(error)
    assert "in_batches" in str(error)
    with make(path, in_batches) as loader:
        loader.load_state_dict(state, allow_changed={"tokenize_fn"})
        assert ids(loader.get_next_batch(5)) == order_of(path)[20:25]


@pytest.mark.parametrize(
    "shuffle", [False, Shuffle(block_bytes=512, window_blocks=4), Shuffle(block_bytes=1024, window_blocks=9)]
)
def test_another_order_is_refused_or_begins_the_next_epoch(path, shuffle):
    with make(path) as loader:
        loader.get_next_batch(20)
        until(lambda: loader.state_dict()["canaries"])
        state = loader.state_dict()

    assert all(name.startswith("order.") for name in refused(path, state, shuffle=shuffle).differences)
    with make(path, shuffle=shuffle) as loader:
        loader.load_state_dict(state, allow_changed={"order"})
        described = shuffle if isinstance(shuffle, Shuffle) else Shuffle(enabled=False)
        assert ids(loader.get_next_batch(5)) == order_of(path, 2, shuffle=described)[NUM_ROWS : NUM_ROWS + 5]


def test_other_tokens_of_the_same_function_are_found_by_canaries(path, tmp_path):
    """Its path, settings and version are the same; what it calls is not."""
    function = worker_fns.Shifted(str(tmp_path / "shift"))
    with make(path, function) as loader:
        loader.get_next_batch(10)
        until(lambda: loader.state_dict()["canaries"])
        state = loader.state_dict()
    assert resumed(path, state, 5, function) == order_of(path)[10:15]

    (tmp_path / "shift").write_text("1000")
    with make(path, function) as loader:
        loader.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(SnapshotMismatchError, match="^AD603 the tokenize function gives other tokens"):
                loader.get_next_batch(1)
        loader.load_state_dict(state, allow_changed={"tokenize_fn"})
        assert ids(loader.get_next_batch(5)) == [number + 1000 for number in order_of(path)[10:15]]


# What a state is


BEYOND = {"row": (0, 0, 10_000), "window": (0, 10_000, 0), "far": (0, 1 << 46, 1 << 46)}


@pytest.mark.thorough
@pytest.mark.parametrize("place", BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("kind", ["blocks", "full", "growing", "kept", "stream", "planned"])
def test_a_place_that_does_not_exist_is_refused_and_nothing_is_passed_over(path, tmp_path, kind, place):
    knobs: dict[str, Any] = {"blocks": {}, "full": {"shuffle": "full"}, "stream": {}}.get(kind) or {}
    if kind in ("growing", "kept"):
        knobs = {"shuffle": RowShuffle(method="none", only_kept=kind == "kept")}
    if kind == "planned":
        knobs = {
            "shuffle": "full",
            "packing": HardPacking(max_length=4, across_epochs=False),
            "plan_packs": True,
            "batch_size": 2,
        }
    if kind == "stream":
        packed = tmp_path / "rows.jsonl.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    with make(path, **knobs) as loader:
        take_one(loader, kind)
        state = loader.state_dict()
    state["position"] = list(place)

    with make(path, **knobs) as loader:
        loader.load_state_dict(state)
        with pytest.raises(SnapshotError, match=r"AD602 .*position"):
            take_one(loader, kind)
        loader.set_epoch(1)
        take_one(loader, kind)
        assert loader.statistics().epoch == 1


def take_one(loader: DataLoader, kind: str) -> None:
    if kind == "planned":
        next(iter(loader))
    else:
        loader.get_next_batch(1)


def test_a_state_does_not_change_any_more(path):
    with make(path) as loader:
        loader.add_samples([loader.get_next_batch(1)])
        state = loader.state_dict()
        copied = copy.deepcopy(state)
        loader.get_next_batch(30)
        loader.add_samples([loader.get_next_batch(1)])

    assert state == copied


@pytest.mark.thorough
def test_states_taken_by_another_thread_are_of_one_moment_each(path):
    expected = order_of(path, 6)
    states: list[dict[str, Any]] = []
    with make(path, num_workers=1, buffer_size=20) as loader:
        done = threading.Event()

        def take_states() -> None:
            while not done.is_set():
                states.append(loader.state_dict())

        taking = threading.Thread(target=take_states)
        taking.start()
        for _ in range(50):
            loader.get_next_batch(7)
        done.set()
        taking.join()

    for state in states[:: max(1, len(states) // 15)]:
        start = state["counters"]["num_samples"]
        assert start % 7 == 0
        assert resumed(path, state, 10) == expected[start : start + 10]


# Files


def test_a_file_holds_no_code_and_code_is_not_run(path, tmp_path):
    class Malicious:
        def __reduce__(self) -> Any:
            return (tmp_path.joinpath("pwned").touch, ())

    file = tmp_path / "snapshot"
    with make(path) as loader:
        loader.get_next_batch(3)
        loader.save(file)
        assert file.read_bytes().startswith(b"ADSNAP1\n")
        file.write_bytes(pickle.dumps({"state": Malicious()}))
        with pytest.raises(SnapshotError, match="a pickle"):
            loader.restore(file)
        assert ids(loader.get_next_batch(3)) == order_of(path)[3:6]

    assert not tmp_path.joinpath("pwned").exists()


@pytest.mark.asyncio
async def test_the_async_face_saves_and_restores_the_same(path, tmp_path):
    settings: dict[str, Any] = {"tokenize_fn": row_id, "shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240}
    async with AsyncDataLoader(path, **settings) as loader:
        await loader.get_next_batch(15)
        loader.save(tmp_path / "snapshot")
        state = loader.state_dict()

    async with AsyncDataLoader(path, **settings) as loader:
        loader.load_state_dict(state)
        assert ids(await loader.get_next_batch(5)) == order_of(path)[15:20]
        loader.restore(tmp_path / "snapshot")
        assert ids(await loader.get_next_batch(5)) == order_of(path)[15:20]


# Where it continues


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_restoring_many_times_without_a_call_between_is_restoring_the_last(path, num_workers):
    """While what was asked for before is still under way, and each with canaries to compare."""
    expected = order_of(path, 2)
    with make(path, num_workers=num_workers) as loader:
        states = [loader.state_dict()]
        loader.get_next_batch(10)
        until(lambda: loader.state_dict()["canaries"])
        states += [loader.state_dict()]
        for _ in range(20):
            for _ in range(4):
                loader.load_state_dict(states[0])
                loader.load_state_dict(states[1])
            assert ids(loader.get_next_batch(20)) == expected[10:30]
            loader.load_state_dict(states[1])
            loader.set_epoch(1)
            assert ids(loader.get_next_batch(5)) == expected[NUM_ROWS : NUM_ROWS + 5]


@pytest.mark.thorough
def test_a_restore_that_is_held_up_half_way_delivers_nothing_twice(path, monkeypatch):
    """The service may begin to read between any two lines of it."""
    restart = Coordinator.restart

    def slowly(coordinator: Coordinator, change: Any) -> None:
        restart(coordinator, change)
        deadline = time.monotonic() + 0.2
        while coordinator.channel.num_produced == 0 and time.monotonic() < deadline:
            time.sleep(0.001)

    with make(path, batch_size=5) as loader:
        loader.get_next_batch(10)
        state = loader.state_dict()
        loader.get_next_batch(10)
        monkeypatch.setattr(Coordinator, "restart", slowly)
        for _ in range(3):
            loader.load_state_dict(state)
            loader.load_state_dict(state)
            assert ids(loader.get_next_batch(400)) == order_of(path, 5)[10:410]


def test_it_is_restored_as_well_before_it_starts_as_in_its_middle(path):
    state = state_after(path, 40)
    expected = order_of(path)[40:50]

    loader = make(path)
    loader.load_state_dict(state)
    assert loader.statistics().samples_total == 40
    assert ids(loader.get_next_batch(10)) == expected
    loader.close()
    with make(path) as loader:
        loader.load_state_dict(state)  # while it starts
        assert ids(loader.get_next_batch(10)) == expected
    with make(path) as loader:
        loader.get_next_batch(77)
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(10)) == expected


# Epochs


def test_the_usual_trainers_loop_goes_on_where_it_was_killed(path):
    def train(state: dict[str, Any] | None, num_batches: int) -> Iterator[tuple[list[int], dict[str, Any]]]:
        with make(path, batch_size=9, epochs=3) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for epoch in range(loader.epoch, 3):
                loader.set_epoch(epoch)
                for batch in loader:
                    yield ids(batch), loader.state_dict()
                    num_batches -= 1
                    if num_batches == 0:
                        return

    seen: list[int] = []
    state: dict[str, Any] | None = None
    for num_batches in (1, 5, 11, 12, 4, 99):
        for batch, after in train(state, num_batches):
            seen += batch
            state = after

    assert seen == order_of(path, 3)


# Elastic


@pytest.mark.thorough
@pytest.mark.parametrize(
    "knobs",
    [
        {"num_workers": 1},
        {"num_workers": 2},
        {"dp_size": 8},
        {"buffer_size": 1},
        {"buffer_size": 5000, "dp_size": 3},
        {"batch_size": 17},
        {"limits": {"max_ready_bytes": 100}},
        {"event_loop": "trio"},
        {"event_loop": "uvloop", "num_workers": 2, "buffer_size": 3, "timeout_s": 240},
    ],
    ids=str,
)
def test_what_does_not_make_the_order_may_change_at_a_restart(path, knobs):
    expected = order_of(path, 3)

    with make(path, **knobs) as loader:
        loader.load_state_dict(state_after(path, 43))
        assert ids(loader.get_next_batch(40)) == expected[43:83]
        state = loader.state_dict()
    assert resumed(path, state, 150) == expected[83:233]
