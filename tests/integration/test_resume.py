"""A restored loader continues with exactly the sample that would have come next."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, EndOfData, Shuffle
from asyncdata.delivery.coordinator import Coordinator
from tests.support.faults import until
from tests.support.loaders import make, resumed, state_after
from tests.support.loading import ids, order_of, write_rows
from tests.support.tokenize_fns import every_third_dropped, in_batches, row_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_ROWS = 100


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


# Where it continues


@pytest.mark.thorough
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


@pytest.mark.thorough
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
    """Also where the short batch is not dropped yet, because only the last whole one was asked for."""
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
