"""A snapshot meets other data: what is left out is said; the same rows under another name lose nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from asyncdata import (
    DataLoader,
    HardPacking,
    IterableSource,
    JsonlSource,
    Outcomes,
    PassRate,
    RowShuffle,
    Shuffle,
    SourceLocation,
)
from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.errors import SnapshotMismatchError
from tests.support.loaders import make as make_loader
from tests.support.loading import ids, write_rows
from tests.support.parts import main
from tests.support.tokenize_fns import every_third_dropped

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 100
ONE_WINDOW = Shuffle()
MANY_WINDOWS = Shuffle(block_bytes=300, window_blocks=3)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "other.jsonl", 120)


def make(source: Any, **knobs: Any) -> DataLoader:
    return make_loader(source, **{"shuffle": True} | knobs)


def state_after(source: Any, number: int, **knobs: Any) -> dict[str, Any]:
    with make(source, **knobs) as loader:
        loader.get_next_batch(number)
        return loader.state_dict()


def left_out(source: Any, state: dict[str, Any], allowed: str = "data", **knobs: Any) -> list[dict[str, Any]]:
    with capture_logs() as events, make(source, **knobs) as loader:
        loader.load_state_dict(state, allow_changed={allowed})
        assert loader.epoch == 1
    return [event for event in events if event["event"] == "snapshot.rows_left_out"]


@pytest.mark.parametrize("shuffle", [ONE_WINDOW, "full", False, RowShuffle(method="slime", only_kept=True)], ids=str)
def test_other_data_or_another_seed_in_the_middle_of_an_epoch_warns_with_the_number_of_rows_left_out(
    path, other, shuffle
):
    state = state_after(path, 10, shuffle=shuffle)
    expected = {"event": "snapshot.rows_left_out", "log_level": "warning", "epoch": 0}
    expected |= {"num_delivered": 10, "num_left_out": 90}

    assert left_out(other, state, shuffle=shuffle) == [expected | {"changed": ["data"]}]
    if shuffle is not False:
        assert left_out(path, state, "seed", shuffle=shuffle, seed=7) == [expected | {"changed": ["seed"]}]


@pytest.mark.parametrize("number", [1, 50, 99])
def test_with_many_windows_the_number_is_of_the_right_size(path, other, number):
    # A loader knows only the sizes of the windows that it read last. With a large buffer, the current one is older.
    state = state_after(path, number, shuffle=MANY_WINDOWS, buffer_size=8)
    (event,) = left_out(other, state, shuffle=MANY_WINDOWS, buffer_size=8)

    assert event["num_delivered"] == number
    assert abs(event["num_left_out"] - (NUM_ROWS - number)) <= 30  # windows of equal bytes have about as many rows


def test_what_is_left_out_is_still_known_after_a_resume_that_delivered_nothing_and_unknown_to_an_older_version(
    path, other
):
    state = state_after(path, 10)
    with make(path) as loader:
        loader.load_state_dict(state)
        again = loader.state_dict()

    assert again == {**state, "canaries": again["canaries"]}
    assert [event["num_left_out"] for event in left_out(other, again)] == [90]
    del state["rows_left"]
    assert [event["num_left_out"] for event in left_out(other, state)] == [None]


def test_rows_that_gave_no_sample_and_an_epoch_that_had_not_begun_are_not_left_out(path, other):
    knobs: dict[str, Any] = {"tokenize_fn": every_third_dropped, "shuffle": False}
    (event,) = left_out(other, state_after(path, 20, **knobs), **knobs)
    assert event["num_delivered"] == 20
    assert NUM_ROWS - event["num_left_out"] in {29, 30, 31}  # a dropped row may lie between two samples
    state = state_after(path, NUM_ROWS)
    with make(other) as loader:
        order = loader.state_dict()["order"]
    assert left_out(other, {**state, "order": order}) == []


def test_packs_are_counted_as_such_and_their_rows_are_not_known(path, other):
    knobs: dict[str, Any] = {"packing": HardPacking(max_length=4), "batch_size": 1}
    with make(path, **knobs) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    (event,) = left_out(other, state, **knobs)
    assert (event["epoch"], event["num_delivered"], event["num_left_out"]) == (0, 5, None)


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


@pytest.mark.parametrize("new", ["renamed.jsonl", "moved/rows.jsonl"])
def test_groups_that_were_given_back_or_out_are_of_the_rows_of_the_files_as_they_are_now(path, tmp_path, new):
    settings = {"outcomes": Outcomes(policy=PassRate(drop_above=0.9)), "commit": "on_ack"}
    with make(path, **settings) as loader:
        loader.add_samples(loader.get_samples(4))
        loader.get_samples(1)
        state = loader.state_dict()
    (tmp_path / new).parent.mkdir(exist_ok=True)
    path = path.rename(tmp_path / new)
    for _ in range(2):  # also of groups that nothing has asked for since
        with make(path, **settings) as loader:
            loader.load_state_dict(state, same_rows=True)
            state = loader.state_dict()
    with make(path, **settings) as loader:
        loader.load_state_dict(state)
        first, second = loader.get_samples(2)
        assert loader.report([first, second], [1.0, 1.0]) == 2
        assert {sample.source.path for sample in (*first, *second)} == {str(path)}
        assert loader.exclude([SourceLocation(str(path), sample.source.byte_offset, -1) for sample in second]) == 1
        loader.add_samples([second])
        assert loader.statistics().dropped_groups_total == {"excluded": 1}


def rows(epoch: int) -> Any:
    return ({"id": number} for number in range(50))


def other_rows(epoch: int) -> Any:
    return rows(epoch)


def test_data_that_is_not_known_by_its_content_cannot_be_said_to_be_the_same():
    state = state_after(IterableSource(rows), 10)
    with make(IterableSource(other_rows)) as loader:
        with pytest.raises(SnapshotMismatchError, match="not known by its content"):
            loader.load_state_dict(state, same_rows=True)


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
