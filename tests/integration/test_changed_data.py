"""A snapshot meets other data: what is left out is said; the same rows under another name lose nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import (
    AsyncDataLoader,
    DataLoader,
    HardPacking,
    IterableSource,
    JsonlSource,
    RowShuffle,
    Shuffle,
    SnapshotMismatchError,
)
from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.cli.main import main
from tests.support.loading import ids, order_of, write_rows
from tests.support.tokenize_fns import every_third_dropped, row_id

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 100
ONE_WINDOW = Shuffle()
MANY_WINDOWS = Shuffle(block_bytes=300, window_blocks=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "other.jsonl", 120)


def make(source: Any, tokenize_fn: Any = row_id, **knobs: Any) -> DataLoader:
    return DataLoader(source, tokenize_fn=tokenize_fn, **{"num_workers": 0, "timeout_s": 240} | knobs)


def state_after(source: Any, number: int, tokenize_fn: Any = row_id, **knobs: Any) -> dict[str, Any]:
    with make(source, tokenize_fn, **knobs) as loader:
        if number:
            loader.get_next_batch(number)
        return loader.state_dict()


def left_out(source: Any, state: dict[str, Any], allowed: str = "data", **knobs: Any) -> dict[str, Any]:
    """The one event about rows that are left out."""
    with capture_logs() as events, make(source, **knobs) as loader:
        loader.load_state_dict(state, allow_changed={allowed})
    (event,) = (event for event in events if event["event"] == "snapshot.rows_left_out")
    assert event.pop("log_level") == "warning"
    return event


# What is left out is said


@pytest.mark.parametrize("shuffle", [ONE_WINDOW, "full", False, RowShuffle(method="slime", only_kept=True)], ids=str)
def test_other_data_or_another_seed_in_the_middle_of_an_epoch_warns_with_the_number_of_rows_left_out(
    path, other, shuffle
):
    state = state_after(path, 10, shuffle=shuffle)
    expected = {"event": "snapshot.rows_left_out", "epoch": 0, "num_delivered": 10, "num_left_out": 90}

    assert left_out(other, state, shuffle=shuffle) == expected | {"changed": ["data"]}
    if shuffle is not False:
        assert left_out(path, state, "seed", shuffle=shuffle, seed=7) == expected | {"changed": ["seed"]}


@pytest.mark.parametrize("number", [1, 50, 99, 101, 150])
def test_with_many_windows_the_number_is_of_the_right_size(path, other, number):
    # A loader knows only the sizes of the windows that it read last. With a large buffer, the current one is older.
    state = state_after(path, number, shuffle=MANY_WINDOWS, buffer_size=8)
    epoch, within = divmod(number, NUM_ROWS)
    event = left_out(other, state, shuffle=MANY_WINDOWS, buffer_size=8)

    assert (event["epoch"], event["num_delivered"]) == (epoch, within)
    assert abs(event["num_left_out"] - (NUM_ROWS - within)) <= 30  # windows of equal bytes have about as many rows


def test_rows_that_gave_no_sample_are_not_left_out(path, other):
    state = state_after(path, 20, every_third_dropped, shuffle=False)
    with make(path, every_third_dropped, shuffle=False) as loader:
        rows_taken = 1 + max(ids(loader.get_next_batch(20)))
        loader.get_next_batch(1)

    with capture_logs() as events, make(other, every_third_dropped, shuffle=False) as loader:
        loader.load_state_dict(state, allow_changed={"data"})
    (event,) = (event for event in events if event["event"] == "snapshot.rows_left_out")
    assert event["num_delivered"] == 20
    assert abs(NUM_ROWS - event["num_left_out"] - rows_taken) <= 1  # a dropped row may lie between two samples


def test_what_is_left_out_is_still_known_after_a_resume_that_delivered_nothing(path, other):
    state = state_after(path, 10)
    with make(path) as loader:
        loader.load_state_dict(state)
        again = loader.state_dict()

    assert again == {**state, "canaries": again["canaries"]}
    assert left_out(other, again)["num_left_out"] == 90


def test_a_snapshot_of_an_older_version_says_that_the_number_is_unknown(path, other):
    state = state_after(path, 10)
    del state["rows_left"]

    assert left_out(other, state)["num_left_out"] is None


def test_an_epoch_that_had_not_begun_is_not_left_out(path, other):
    state = state_after(path, NUM_ROWS)
    with capture_logs() as events, make(other, shuffle=False) as loader:
        loader.load_state_dict({**state, "order": loader.state_dict()["order"]}, allow_changed={"data"})
        assert loader.epoch == 1
        assert ids(loader.get_next_batch(3)) == [0, 1, 2]
    assert "snapshot.rows_left_out" not in [event["event"] for event in events]


def test_packs_are_counted_as_such_and_their_rows_are_not_known(path, other):
    knobs: dict[str, Any] = {"packing": HardPacking(max_length=4), "batch_size": 1}
    with make(path, **knobs) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    with capture_logs() as events, make(other, **knobs) as loader:
        loader.load_state_dict(state, allow_changed={"data"})
        assert loader.epoch == 1
    (event,) = (event for event in events if event["event"] == "snapshot.rows_left_out")
    assert (event["epoch"], event["num_delivered"], event["num_left_out"]) == (0, 5, None)


# The same rows elsewhere


def test_the_refusal_of_a_renamed_file_names_the_way_to_stay_and_other_changes_are_refused_as_ever(
    path, other, tmp_path
):
    state = state_after(path, 10)
    first, second = other.read_bytes()[:1000], other.read_bytes()[1000:]
    (tmp_path / "1.jsonl").write_bytes(first)
    (tmp_path / "2.jsonl").write_bytes(second)
    both = state_after(JsonlSource([tmp_path / "1.jsonl", tmp_path / "2.jsonl"]), 10)
    renamed = path.rename(tmp_path / "renamed.jsonl")
    with make(other) as loader, pytest.raises(SnapshotMismatchError) as of_others:
        loader.load_state_dict(state)
    with make(renamed) as loader, pytest.raises(SnapshotMismatchError, match="same_rows=True") as of_renamed:
        loader.load_state_dict(state)
    with make(renamed, seed=7) as loader, pytest.raises(SnapshotMismatchError) as of_seed:
        loader.load_state_dict(state, same_rows=True)
    with make(other) as loader, pytest.raises(SnapshotMismatchError, match="2 -> 1 files"):  # put together
        loader.load_state_dict(both, same_rows=True)
    renamed.write_bytes(renamed.read_bytes().replace(b'"id": 55', b'"id": 99'))
    with make(renamed) as loader, pytest.raises(SnapshotMismatchError, match="other content"):
        loader.load_state_dict(state, same_rows=True)

    assert "same_rows" not in str(of_others.value)
    assert "renamed.jsonl is new" in str(of_renamed.value)
    assert set(of_seed.value.differences) == {"seed"}


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", [ONE_WINDOW, MANY_WINDOWS, "full", False])
def test_a_renamed_file_goes_on_at_its_place_when_the_rows_are_said_to_be_the_same(path, tmp_path, shuffle):
    with make(path, shuffle=shuffle) as loader:
        loader.get_next_batch(30)
        state = loader.state_dict()
        expected = ids(loader.get_next_batch(150))
    renamed = path.rename(tmp_path / "renamed.jsonl")

    with capture_logs() as events, make(renamed, shuffle=shuffle) as loader:
        loader.load_state_dict(state, same_rows=True)
        assert loader.epoch == 0
        assert ids(loader.get_next_batch(150)) == expected
    assert "snapshot.rows_left_out" not in [event["event"] for event in events]


@pytest.mark.thorough
@pytest.mark.parametrize("allowed", [(), ("data",)])
def test_other_rows_that_are_said_to_be_the_same_are_refused_by_name_and_nothing_is_changed(path, other, allowed):
    state = state_after(path, 10)
    with make(other) as loader:
        seen = ids(loader.get_next_batch(5))
        with pytest.raises(SnapshotMismatchError, match=r"^AD603 same_rows=True.*(?s:.*)other\.jsonl") as caught:
            loader.load_state_dict(state, allow_changed=allowed, same_rows=True)
        assert set(caught.value.differences) == {"data"}
        assert seen + ids(loader.get_next_batch(5)) == order_of(other, shuffle=ONE_WINDOW)[:10]


def test_files_under_new_names_are_the_same_rows_only_in_the_same_order(tmp_path):
    first, second = write_rows(tmp_path / "a.jsonl", 30), write_rows(tmp_path / "b.jsonl", 40)
    state = state_after(JsonlSource([first, second]), 10, shuffle=False)
    first, second = first.rename(tmp_path / "2.jsonl"), second.rename(tmp_path / "1.jsonl")

    with make(JsonlSource([second, first]), shuffle=False) as loader:
        with pytest.raises(SnapshotMismatchError, match=r"file 1"):
            loader.load_state_dict(state, same_rows=True)
    with make(JsonlSource([first, second]), shuffle=False) as loader:
        loader.load_state_dict(state, same_rows=True)
        assert ids(loader.get_next_batch(3)) == [10, 11, 12]


def rows(epoch: int) -> Any:
    return ({"id": number} for number in range(50))


def other_rows(epoch: int) -> Any:
    return rows(epoch)


def test_data_that_is_not_known_by_its_content_cannot_be_said_to_be_the_same():
    state = state_after(IterableSource(rows), 10)
    with make(IterableSource(other_rows)) as loader:
        with pytest.raises(SnapshotMismatchError, match="not known by its content"):
            loader.load_state_dict(state, same_rows=True)


@pytest.mark.asyncio
async def test_every_face_and_a_file_take_it(path, tmp_path):
    async with AsyncDataLoader(path, tokenize_fn=row_id, num_workers=0) as loader:
        await loader.get_next_batch(10)
        state = loader.state_dict()
        loader.save(tmp_path / "snapshot")
        expected = ids(await loader.get_next_batch(5))
    renamed = path.rename(tmp_path / "renamed.jsonl")
    async with AsyncDataLoader(renamed, tokenize_fn=row_id, num_workers=0) as loader:
        loader.load_state_dict(state, same_rows=True)
        assert ids(await loader.get_next_batch(5)) == expected
        loader.restore(tmp_path / "snapshot", same_rows=True)
        assert ids(await loader.get_next_batch(5)) == expected


@pytest.mark.thorough
def test_a_loader_for_torch_takes_it(path, tmp_path):
    pytest.importorskip("torch")
    from asyncdata.integrations.torch import StatefulDataLoader

    def loader_of(source: Path) -> StatefulDataLoader:
        return StatefulDataLoader(make(source, batch_size=5, collate_fn=ids))

    with loader_of(path) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        loader.save(tmp_path / "snapshot")
        expected = next(batches)
    renamed = path.rename(tmp_path / "renamed.jsonl")
    with loader_of(renamed) as loader:
        loader.load_state_dict(state, same_rows=True)
        assert next(iter(loader)) == expected
        loader.restore(tmp_path / "snapshot", same_rows=True)
        assert next(iter(loader)) == expected


def test_the_command_line_takes_it(path, tmp_path, capsys):
    def run(source: Path, *options: str) -> int:
        fn = "tests.support.tokenize_fns:row_id"
        snapshot = str(tmp_path / "run.snapshot")
        return main(["run", str(source), "--tokenize-fn", fn, "--batch-size", "10", "--num-workers", "0",
                     "--snapshot", snapshot, "--progress", "none", *options])  # fmt: skip

    assert run(path, "--num-batches", "3") == 0
    renamed = path.rename(tmp_path / "renamed.jsonl")
    assert run(renamed, "--num-batches", "5", "--resume") != 0
    assert "--same-rows" in capsys.readouterr().err
    assert run(renamed, "--num-batches", "5", "--resume", "--same-rows") == 0
    assert snapshots.load(tmp_path / "run.snapshot").counters["epoch_groups"] == 50
