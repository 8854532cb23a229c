"""A restored loader goes on with exactly the sample that would have come next; what was given back is not lost."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from asyncdata import (
    AsyncDataLoader,
    BadRowError,
    ConfigError,
    DataLoader,
    EndOfData,
    HardPacking,
    RowShuffle,
    Sample,
    Shuffle,
    SnapshotError,
    SnapshotMismatchError,
    Status,
)
from asyncdata.delivery.coordinator import Coordinator
from tests.support import worker_fns
from tests.support.loading import NEVER_S, SHUFFLE, ids, line_of, order_of, write_rows
from tests.support.tokenize_fns import every_third_dropped, fails_on_13, in_batches, kills_on_13, row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NUM_ROWS = 100
PASSAGES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda state: state,
    "json": lambda state: json.loads(json.dumps(state)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),  # noqa: S301 - as torch.save does it; ours
    "msgpack": lambda state: msgspec.msgpack.decode(msgspec.msgpack.encode(state)),
}


def make(path: Path, tokenize_fn: Any = row_id, **knobs: Any) -> DataLoader:
    """A loader that fails rather than hangs, inline where nothing else is asked for."""
    return DataLoader(path, tokenize_fn=tokenize_fn, **{"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 30} | knobs)


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


def state_after(path: Path, number: int, tokenize_fn: Any = row_id, **knobs: Any) -> dict[str, Any]:
    """The state of a run that has delivered so many samples."""
    with make(path, tokenize_fn, **knobs) as loader:
        if number:
            loader.get_next_batch(number)
        return loader.state_dict()


def resumed(path: Path, state: dict[str, Any], number: int, tokenize_fn: Any = row_id, **knobs: Any) -> list[int]:
    """The ids of so many samples of a run that resumes from ``state``."""
    with make(path, tokenize_fn, **knobs) as loader:
        loader.load_state_dict(state)
        return ids(loader.get_next_batch(number))


# Where it goes on


def test_restored_at_every_batch_of_two_epochs_it_is_the_uninterrupted_run(path):
    expected = order_of(path, 3)
    states, ends = [], []
    with make(path, batch_size=7) as loader:
        for _ in range(2):
            for batch in loader:
                ends.append((ends[-1] if ends else 0) + len(batch))
                states.append(loader.state_dict())

    assert ends[-1] == 2 * NUM_ROWS
    for state, end in zip(states, ends, strict=True):
        assert resumed(path, state, 60) == expected[end : end + 60], f"after {end}"


@pytest.mark.parametrize("shuffle", [True, False, Shuffle(block_bytes=300, window_blocks=3)])
@pytest.mark.parametrize("tokenize_fn", [row_id, in_batches, every_third_dropped])
def test_restored_after_any_number_of_samples_it_goes_on_with_the_next(path, shuffle, tokenize_fn):
    with make(path, tokenize_fn, shuffle=shuffle) as loader:
        seen = []
        states = []
        for _ in range(150):
            states.append(loader.state_dict())
            seen += ids(loader.get_next_batch(1))
        seen += ids(loader.get_next_batch(20))

    for number in range(0, 150, 11):
        assert resumed(path, states[number], 20, tokenize_fn, shuffle=shuffle) == seen[number : number + 20]


def test_a_state_may_be_taken_before_anything_else(path):
    loader = make(path)
    state = loader.state_dict()
    loader.close()

    assert resumed(path, state, 5) == order_of(path)[:5]
    assert resumed(path, state_after(path, 0), 5) == order_of(path)[:5]


def test_resuming_again_and_again_is_one_run(path):
    seen: list[int] = []
    state = None
    for _ in range(12):
        with make(path) as loader:
            if state is not None:
                loader.load_state_dict(state)
            seen += ids(loader.get_next_batch(23))
            state = loader.state_dict()

    assert seen == order_of(path, 3)[: 12 * 23]


def test_a_state_may_be_restored_many_times_and_in_any_order(path):
    expected = order_of(path, 2)
    with make(path) as loader:
        early = loader.state_dict()
        loader.get_next_batch(130)
        late = loader.state_dict()
        for state, start in ((early, 0), (late, 130), (late, 130), (early, 0), (late, 130)):
            loader.load_state_dict(state)
            assert ids(loader.get_next_batch(20)) == expected[start : start + 20]


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


def until(condition: Callable[[], object]) -> None:
    """Until another thread has done its part: looked at again and again, as nobody tells us."""
    deadline = time.monotonic() + NEVER_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


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


def test_at_an_epochs_end_it_means_the_next(path):
    expected = order_of(path, 3)
    with make(path, batch_size=30) as loader:
        list(loader)
        state = loader.state_dict()

    with make(path, batch_size=30) as loader:
        loader.load_state_dict(state)
        assert loader.epoch == 1
        epochs = [[ids(batch) for batch in loader] for _ in range(2)]

    assert [list(map(len, batches)) for batches in epochs] == [[30, 30, 30, 10]] * 2
    assert [number for batches in epochs for batch in batches for number in batch] == expected[NUM_ROWS:]


@pytest.mark.parametrize("drop_last", [True, False])
def test_behind_the_last_batch_the_loop_goes_on_with_the_next_epoch(path, drop_last):
    """Also where the short batch is yet to be dropped, and nobody has asked for more than the last whole one."""
    expected = order_of(path, 2)
    with batches_of(path, drop_last=drop_last) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()

    with batches_of(path, drop_last=drop_last) as loader:
        loader.load_state_dict(state)
        first = ids(next(iter(loader)))

    assert first == (expected[NUM_ROWS : NUM_ROWS + 30] if drop_last else expected[90:NUM_ROWS])


def batches_of(path: Path, **knobs: Any) -> DataLoader:
    return make(path, batch_size=30, **knobs)


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


def test_the_end_is_the_end_after_a_resume_too(path):
    state = state_after(path, NUM_ROWS, epochs=1)

    with make(path, epochs=1) as loader:
        loader.load_state_dict(state)
        with pytest.raises(EndOfData):
            loader.get_next_batch(1)
    assert resumed(path, state, 5, epochs=2) == order_of(path, 2)[NUM_ROWS : NUM_ROWS + 5]


# Elastic


@pytest.mark.parametrize(
    "knobs",
    [
        {"num_workers": 1},
        {"num_workers": 2},
        {"dp_size": 8},
        {"buffer_size": 1},
        {"buffer_size": 5000, "dp_size": 3},
        {"batch_size": 17},
        {"max_ready_bytes": 100},
        {"backend": "trio"},
        {"backend": "uvloop", "num_workers": 2, "buffer_size": 3, "timeout_s": 60},
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


# Refused


def refused(path: Path, state: dict[str, Any], tokenize_fn: Any = row_id, **knobs: Any) -> SnapshotMismatchError:
    """Why the state is refused; the loader goes on as if nothing had been."""
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


def test_what_may_change_is_named_exactly(path):
    state = state_after(path, 20)
    with make(path) as loader:
        for names in ({"everything"}, "seed", {"Seed"}):
            with pytest.raises(ConfigError, match="^allow_changed must be a set of names"):
                loader.load_state_dict(state, allow_changed=names)


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


@pytest.mark.parametrize("state", [None, {}, [], "state", {"position": [0, 0, 0]}, {"format": "asyncdata.snapshot"}])
def test_what_is_no_state_is_refused_and_changes_nothing(path, state):
    with make(path) as loader:
        seen = ids(loader.get_next_batch(5))
        with pytest.raises(SnapshotError, match="^AD602 "):
            loader.load_state_dict(state)
        assert seen + ids(loader.get_next_batch(5)) == order_of(path)[:10]


# What a state is


BEYOND = {"row": (0, 0, 10_000), "window": (0, 10_000, 0), "far": (0, 1 << 46, 1 << 46)}


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


@pytest.mark.parametrize("passage", PASSAGES)
def test_a_state_survives_whatever_carries_it(path, passage):
    with make(path, n_samples_per_prompt=2) as loader:
        groups = loader.get_samples(9)
        loader.add_samples([groups[3]])
        state = PASSAGES[passage](loader.state_dict())

    with make(path, n_samples_per_prompt=2) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(6)) == [
            number for number in (order_of(path)[3], *order_of(path)[9:11]) for _ in range(2)
        ]


def test_a_state_is_of_plain_builtins_and_its_own(path):
    with make(path) as loader:
        loader.add_samples([loader.get_next_batch(1)])
        state = loader.state_dict()
        copied = copy.deepcopy(state)
        loader.get_next_batch(30)
        loader.add_samples([loader.get_next_batch(1)])

    assert state == copied, "what was taken does not change any more"
    assert plain(state)


def plain(value: Any) -> bool:
    """Whether all of it is builtins, exactly."""
    if type(value) is dict:
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)


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


def test_counters_go_on(path):
    with make(path, every_third_dropped, n_samples_per_prompt=2) as loader:
        loader.load_state_dict(state_after(path, 50, every_third_dropped, n_samples_per_prompt=2))
        batch = loader.get_next_batch(50)
        statistics = loader.statistics()
    with make(path, every_third_dropped, n_samples_per_prompt=2) as loader:
        uninterrupted = loader.get_next_batch(100)
        expected = loader.statistics()

    assert [sample.index for sample in batch] == list(range(50, 100))
    assert [sample.group_index for sample in batch] == [sample.group_index for sample in uninterrupted[50:]]
    for name in ("samples_total", "groups_total", "tokens_total", "dropped_total", "epoch", "window", "row"):
        assert getattr(statistics, name) == getattr(expected, name), name


def test_dropped_rows_at_the_position_are_counted_once(path):
    """A state may lie just before rows that yield nothing."""
    with make(path, every_third_dropped, epochs=1) as loader:
        state = loader.state_dict()
        for _ in range(66):
            loader.load_state_dict(state)
            loader.get_next_batch(1)
            state = loader.state_dict()
        with pytest.raises(EndOfData):
            loader.get_next_batch(1)
        assert loader.statistics().dropped_total == {"tokenize_fn": 34}


# Files


def test_a_saved_state_is_restored_from_its_file_and_the_last_three_are_kept(path, tmp_path):
    file = tmp_path / "snapshot"
    with make(path) as loader:
        for _ in range(5):
            loader.get_next_batch(10)
            loader.save(file)

    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name.startswith("snap")) == [
        "snapshot",
        "snapshot.1",
        "snapshot.2",
    ]
    for name, start in (("snapshot", 50), ("snapshot.1", 40), ("snapshot.2", 30)):
        with make(path) as loader:
            loader.restore(str(tmp_path / name))
            assert ids(loader.get_next_batch(10)) == order_of(path)[start : start + 10]


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


def test_a_file_that_is_not_there_is_a_snapshot_error(path, tmp_path):
    with make(path) as loader, pytest.raises(SnapshotError, match="^AD602 .* cannot be read"):
        loader.restore(tmp_path / "nothing")


@pytest.mark.asyncio
async def test_the_async_face_saves_and_restores_the_same(path, tmp_path):
    settings: dict[str, Any] = {"tokenize_fn": row_id, "shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 30}
    async with AsyncDataLoader(path, **settings) as loader:
        await loader.get_next_batch(15)
        loader.save(tmp_path / "snapshot")
        state = loader.state_dict()

    async with AsyncDataLoader(path, **settings) as loader:
        loader.load_state_dict(state)
        assert ids(await loader.get_next_batch(5)) == order_of(path)[15:20]
        loader.restore(tmp_path / "snapshot")
        assert ids(await loader.get_next_batch(5)) == order_of(path)[15:20]


# What the trainer gave back


def test_groups_given_back_are_in_the_state_whole(path):
    knobs = {"n_samples_per_prompt": 2}
    with make(path, **knobs) as loader:
        groups = loader.get_samples(5)
        first, second = groups[1]
        first.response, first.response_length, first.reward = "so far", 2, {"math": 0.5}
        first.loss_mask, first.rollout_log_probs, first.status = [1, 0], [-0.25, -1.5], Status.TRUNCATED
        first.tokens = np.array([7, 8, 9], np.int32)
        first.metadata["tool"] = ["search", 1]
        second.extra["reward_model"] = {"version": 3}
        loader.add_samples([groups[3], groups[1]])
        state = json.loads(json.dumps(loader.state_dict()))

    with make(path, **knobs) as loader:
        loader.load_state_dict(state)
        restored = loader.get_samples(3)

    assert [[sample.group_index for sample in group] for group in restored] == [[3, 3], [1, 1], [5, 5]]
    for before, after in zip([*groups[3], *groups[1]], [*restored[0], *restored[1]], strict=True):
        assert msgspec.to_builtins(before.to_dict()) == msgspec.to_builtins(after.to_dict())
    assert restored[1][0].tokens.tolist() == [7, 8, 9]
    assert restored[1][0].status is Status.TRUNCATED


def test_a_group_that_was_served_again_is_no_more_in_the_state(path):
    with make(path) as loader:
        groups = loader.get_samples(4)
        loader.add_samples(groups[:2])
        loader.get_samples(1)
        state = loader.state_dict()

    with make(path) as loader:
        loader.load_state_dict(state)
        assert [group[0].group_index for group in loader.get_samples(3)] == [1, 4, 5]


def test_groups_of_another_size_are_refused_and_change_nothing(path):
    with make(path) as loader:
        loader.add_samples(loader.get_samples(1))
        state = loader.state_dict()

    with make(path, n_samples_per_prompt=2) as loader:
        with pytest.raises(ConfigError, match="groups of 1 samples, and n_samples_per_prompt is 2"):
            loader.load_state_dict(state)
        assert ids(loader.get_next_batch(2)) == [order_of(path)[0]] * 2


# Acknowledging


def groups_of(groups: list[list[Sample]]) -> list[int | None]:
    return [group[0].group_index for group in groups]


def test_what_was_not_acknowledged_is_delivered_again_in_order(path):
    expected = order_of(path)
    with make(path, commit="on_ack") as loader:
        first, second, third = (loader.get_samples(4) for _ in range(3))
        loader.ack(first)
        loader.ack([second[1], second[2][0]])  # a group, and a sample that stands for its group
        state = loader.state_dict()
        following = loader.get_samples(2)  # within a run nothing comes twice

    assert groups_of(following) == [12, 13]
    with make(path, commit="on_ack") as loader:
        loader.load_state_dict(state)
        again = loader.get_samples(6)
        then = loader.get_samples(2)

    unacknowledged = [second[0], second[3], *third]
    assert groups_of(again) == groups_of(unacknowledged)
    assert [ids(group) for group in again] == [ids(group) for group in unacknowledged]
    assert groups_of(then) == [12, 13]
    assert [number for group in then for number in ids(group)] == expected[12:14]


def test_what_is_all_acknowledged_is_not_delivered_again(path):
    with make(path, commit="on_ack") as loader:
        loader.get_samples(7)
        loader.ack()
        state = loader.state_dict()

    assert state["leases"] == []
    assert resumed(path, state, 3, commit="on_ack") == order_of(path)[7:10]


def test_acknowledging_is_enough_once_and_in_any_order(path):
    with make(path, commit="on_ack") as loader:
        groups = loader.get_samples(6)
        for group in groups[::-1]:
            loader.ack([group])
            loader.ack([group])
        assert loader.statistics().leased_requests == 0


def test_a_group_from_the_buffer_is_delivered_again_as_it_was_given_back(path):
    with make(path, commit="on_ack") as loader:
        groups = loader.get_samples(2)
        groups[1][0].response = "half"
        loader.add_samples([groups[1]])
        loader.ack([groups[0]])
        loader.get_samples(3)  # the one from the buffer, and two of the stream
        state = json.loads(json.dumps(loader.state_dict()))

    with make(path, commit="on_ack") as loader:
        loader.load_state_dict(state)
        again = loader.get_samples(4)

    assert groups_of(again) == [1, 2, 3, 4]
    assert again[0][0].response == "half"


def test_leases_survive_a_second_resume(path):
    with make(path, commit="on_ack") as loader:
        groups = loader.get_samples(5)
        loader.ack([groups[2]])
        state = loader.state_dict()
    for _ in range(2):
        with make(path, commit="on_ack") as loader:
            loader.load_state_dict(state)
            state = loader.state_dict()

    with make(path, commit="on_ack") as loader:
        loader.load_state_dict(state)
        assert groups_of(loader.get_samples(6)) == [0, 1, 3, 4, 5, 6]


def test_acknowledging_over_an_epochs_end_counts_every_epoch_once(path):
    expected = order_of(path, 3)
    seen: list[int] = []
    state = None
    for _ in range(30):
        with make(path, commit="on_ack") as loader:
            if state is not None:
                loader.load_state_dict(state)
            batch = loader.get_next_batch(13)
            loader.get_next_batch(5)  # lost with the run
            loader.ack(batch)
            seen += ids(batch)
            state = loader.state_dict()

    assert seen[:300] == expected


# Bad rows


def test_a_bad_row_is_raised_again_after_a_resume_and_skipped_rows_stay_counted(path):
    turn = order_of(path).index(13)

    with make(path, fails_on_13) as loader:
        loader.load_state_dict(state_after(path, turn, fails_on_13))
        with pytest.raises(BadRowError):
            loader.get_next_batch(1)
    with make(path, fails_on_13, on_bad_row="skip") as loader:
        loader.load_state_dict(state_after(path, turn + 3, fails_on_13, on_bad_row="skip"))
        loader.get_next_batch(1)
        assert loader.statistics().bad_rows_total == 1


def test_a_row_that_killed_workers_is_not_tried_again_after_a_resume(path):
    expected = [number for number in order_of(path) if number != 13]
    with make(path, kills_on_13, num_workers=1, on_bad_row="skip") as loader:
        before = loader.state_dict()
        seen = ids(loader.get_next_batch(NUM_ROWS - 1))
        state = loader.state_dict()
    assert seen == expected
    assert state["journal"] == [[0, line_of(path, 13)[1]]]

    before["journal"] = state["journal"]  # a run that goes through the row a second time, and knows of it
    with make(path, kills_on_13, num_workers=1, on_bad_row="skip") as loader:
        loader.load_state_dict(before)
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == expected
        assert loader.statistics().worker_restarts_total == 0
        assert loader.statistics().dropped_total == {"journal": 1}
