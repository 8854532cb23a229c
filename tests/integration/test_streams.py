"""Loaders over sources read from front to back: one order, exact resume in one window, errors at their turn."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog

from asyncdata import (
    BadRowError,
    DataLoader,
    EndOfData,
    IterableSource,
    PrefetchTimeoutError,
    Shuffle,
    SnapshotMismatchError,
    SourceError,
)
from asyncdata.cli.inspection.window_view import OpenedOrder
from tests.support.faults import until
from tests.support.loading import NEVER_S, ids
from tests.support.streams import ListStream, jsonl, members, stream_order_of, windows_of, write
from tests.support.tokenize_fns import fails_on_13, kills_on_13, row_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_ROWS = 400
SHUFFLE = Shuffle(block_bytes=1024, window_blocks=2)
ROWS = [{"id": number, "pad": "x" * (number * 37 % 90)} for number in range(NUM_ROWS)]
LINES = jsonl(ROWS).splitlines()


@pytest.fixture
def path(tmp_path) -> Path:
    """A gzip file of several members, which begin in the middle of rows."""
    text = jsonl(ROWS)
    return write(tmp_path / "rows.jsonl.gz", members(text[n : n + 5000] for n in range(0, len(text), 5000)))


def make(source: Any, tokenize_fn: Any = row_id, **knobs: Any) -> DataLoader:
    """A loader that fails rather than hangs, inline where nothing else is asked for."""
    return DataLoader(
        source, tokenize_fn=tokenize_fn, **{"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240} | knobs
    )


def expected_ids(num_epochs: int, shuffle: Shuffle = SHUFFLE, seed: int = 42) -> list[int]:
    return stream_order_of(list(map(len, LINES)), shuffle, seed, num_epochs)


def windows_before(number: int) -> list[list[int]]:
    """The rows of the first windows."""
    return windows_of(list(map(len, LINES)), 2048)[:number]


class Watched(msgspec.Struct, frozen=True):
    """A source whose stream a test keeps hold of."""

    stream: Any

    def open(self, block_bytes: int) -> Any:
        return self.stream


# One order


@pytest.mark.thorough
@pytest.mark.parametrize("shuffle", [SHUFFLE, Shuffle(enabled=False, block_bytes=1024, window_blocks=2), True, False])
def test_the_order_follows_from_seed_and_rows_alone(path, shuffle):
    settings = shuffle if isinstance(shuffle, Shuffle) else Shuffle(enabled=shuffle)
    expected = expected_ids(2, settings, seed=3)

    for num_workers, buffer_size, event_loop in ((0, 1000, "asyncio"), (2, 7, "trio"), (1, 100, "uvloop")):
        knobs = {"num_workers": num_workers, "buffer_size": buffer_size, "event_loop": event_loop, "seed": 3}
        with make(path, shuffle=shuffle, **knobs) as loader:
            assert ids(loader.get_next_batch(2 * NUM_ROWS)) == expected, knobs


@pytest.mark.thorough
def test_it_does_not_depend_on_how_the_rows_are_packed(tmp_path):
    packings = {
        "one.jsonl.gz": members([jsonl(ROWS)]),
        "many.jsonl.gz": members(line + b"\n" for line in LINES),
        "blank.jsonl.gz": members([jsonl(ROWS).replace(b"\n", b"\n \n")]),
        "array.json": b"[ " + b" ,\n\n".join(LINES) + b"]",
        "array.json.gz": members([b"[", b",".join(LINES), b"\n]"]),
    }

    for name, data in packings.items():
        with make(str(write(tmp_path / name, data))) as loader:
            assert ids(loader.get_next_batch(NUM_ROWS)) == expected_ids(1), name


# Exact resume


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
def test_restored_at_every_batch_it_is_the_uninterrupted_run_and_reads_no_row_again(path, num_workers):
    expected = expected_ids(3)
    states = []
    with make(path, num_workers=num_workers) as loader:
        for _ in range(2 * NUM_ROWS // 57):
            states.append(json.loads(json.dumps(loader.state_dict())))
            loader.get_next_batch(57)

    with structlog.testing.capture_logs() as logs:
        for number, state in enumerate(states[:: 4 if num_workers else 1]):
            first = number * 57 * (4 if num_workers else 1)
            with make(path, num_workers=num_workers) as loader:
                loader.load_state_dict(state)
                assert loader.state_dict() == {**state, "library": state["library"]} | {"canaries": []}
                assert ids(loader.get_next_batch(100)) == expected[first : first + 100]
    assert "stream.replayed" not in {log["event"] for log in logs}


def test_a_restart_reads_its_window_and_not_what_comes_before():
    stream = ListStream(LINES, at_once=5)
    with make(Watched(stream)) as loader:
        loader.get_next_batch(300)
        state = loader.state_dict()
    again = ListStream(LINES, at_once=5)

    with make(Watched(again), buffer_size=1) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(1)) == expected_ids(1)[300:301]

    *others, (epoch, at) = again.reads
    assert others in ([], [(0, None)])  # reading from the start may have begun before the state was loaded
    first = windows_before(state["position"][1] + 1)[-1][0]
    assert epoch == 0
    assert first - 5 < at["row"] <= first
    until(lambda: again.num_open == 0)  # by its thread, if that was reading when the loader was closed


def test_a_state_of_an_epochs_start_needs_nothing_of_the_stream(path):
    with make(path) as loader:
        loader.get_next_batch(NUM_ROWS)
        state = loader.state_dict()

    assert state["position"] == [1, 0, 0]
    assert "stream" not in state
    with make(path) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(50)) == expected_ids(2)[NUM_ROWS : NUM_ROWS + 50]


def test_a_state_without_the_streams_part_is_replayed(path):
    with make(path) as loader:
        loader.get_next_batch(250)
        state = loader.state_dict()
    del state["stream"]

    with structlog.testing.capture_logs() as logs, make(path) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(50)) == expected_ids(1)[250:300]
    (replayed,) = [log["num_rows"] for log in logs if log["event"] == "stream.replayed"]
    # reading from the start may have begun before the state was loaded
    assert 0 < replayed <= sum(map(len, windows_before(state["position"][1])))


def test_a_stream_has_no_canaries_and_waits_for_none(path):
    with make(path) as loader:
        loader.get_next_batch(250)
        state = loader.state_dict()
    assert state["canaries"] == []

    with make(path) as loader:
        loader.load_state_dict({**state, "canaries": ["of", "another", "source"]})
        assert ids(loader.get_next_batch(50)) == expected_ids(1)[250:300]


def test_requests_that_are_not_acknowledged_are_served_again_from_their_own_window():
    stream = ListStream(LINES, at_once=5)
    with make(Watched(stream), commit="on_ack") as loader:
        batches = [loader.get_next_batch(60) for _ in range(6)]
        loader.ack([sample for batch in batches[:2] for sample in batch])
        state = loader.state_dict()
    again = ListStream(LINES, at_once=5)

    with make(Watched(again), commit="on_ack") as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(240)) == expected_ids(1)[120:360]
    *others, at = [at for epoch, at in again.reads if epoch == 0]  # the next epoch may be read ahead
    assert others in ([], [None])  # reading from the start may have begun before the state was loaded
    assert at["row"] > 0


def test_another_epoch_is_gone_to_at_once(path):
    with make(path) as loader:
        loader.get_next_batch(30)
        loader.set_epoch(2)
        assert ids(loader.get_next_batch(50)) == expected_ids(3)[2 * NUM_ROWS : 2 * NUM_ROWS + 50]


def test_a_snapshot_of_other_data_or_another_order_is_refused(tmp_path, path):
    with make(path) as loader:
        loader.get_next_batch(250)
        state = loader.state_dict()

    with make(path, shuffle=Shuffle(block_bytes=1024, window_blocks=3)) as loader:
        with pytest.raises(SnapshotMismatchError, match=r"order\.window_blocks"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, allow_changed={"order"})
        assert loader.statistics().epoch == 1
        assert len(set(ids(loader.get_next_batch(NUM_ROWS)))) == NUM_ROWS
    write(path, members([jsonl(ROWS[::-1])]))
    with make(path) as loader, pytest.raises(SnapshotMismatchError, match=r"data: rows\.jsonl\.gz"):
        loader.load_state_dict(state)


# What is wrong


def test_a_file_that_is_cut_off_is_an_error_behind_all_rows_before(path):
    path.write_bytes(path.read_bytes()[:-200])
    with make(path, shuffle=False) as loader:
        found: list[int] = []
        with pytest.raises(SourceError, match=f"^AD121 {path}: the gzip member that begins at byte"):
            while True:
                found += ids(loader.get_next_batch(1))
        assert found == list(range(len(found)))
        assert len(found) > 300
        with pytest.raises(SourceError, match="^AD121"):
            loader.get_next_batch(1)
        state = loader.state_dict()

    with make(path, shuffle=False) as loader:
        loader.load_state_dict(state)
        with pytest.raises(SourceError, match="^AD121"):
            loader.get_next_batch(1)


def test_an_error_that_passes_costs_no_row(tmp_path):
    """A network's, say: shuffled, the window that it interrupts is delivered whole after the restart."""
    fault = ConnectionError("reset by peer")
    with make(Watched(ListStream(LINES, fault=fault, fault_at=250))) as loader:
        found: list[int] = []
        with pytest.raises(SourceError, match="^AD304 cannot read list: reset by peer"):
            while True:
                found += ids(loader.get_next_batch(1))
        state = loader.state_dict()

    with make(Watched(ListStream(LINES))) as loader:
        loader.load_state_dict(state)
        found += ids(loader.get_next_batch(NUM_ROWS - len(found)))
    assert found == expected_ids(1)


@pytest.mark.thorough
def test_a_row_that_kills_its_workers_is_passed_and_stays_so_after_a_restart(path):
    knobs = {"num_workers": 1, "bad_rows": "skip"}
    good = [number for number in expected_ids(1) if number != 13]
    with make(path, kills_on_13, **knobs) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == good
        state = loader.state_dict()
    assert state["journal"] == [[0, 13]]


def test_a_bad_row_is_named_by_its_line_and_its_place_in_the_text(path):
    with make(path, fails_on_13, shuffle=False) as loader:
        loader.get_next_batch(13)
        with pytest.raises(BadRowError, match=r"rows\.jsonl\.gz:14 \(byte \d+\): ") as caught:
            loader.get_next_batch(1)
    offset = len(jsonl(ROWS[:13]))
    assert (caught.value.row_number, caught.value.line, caught.value.byte_offset) == (13, 14, offset)


def test_blank_lines_are_counted(tmp_path):
    path = write(tmp_path / "rows.jsonl.gz", members([jsonl(ROWS).replace(b"\n", b"\n\n")]))

    with make(str(path), epochs=1) as loader:
        loader.get_next_batch(NUM_ROWS)
        with pytest.raises(EndOfData):
            loader.get_next_batch(1)
        assert loader.statistics().blank_lines_total == NUM_ROWS


# Who waits


def test_a_source_that_gives_nothing_is_named_and_does_not_hold_up_the_end():
    gate, began = threading.Event(), threading.Event()

    def rows(epoch: int) -> Iterator[dict[str, Any]]:
        yield from ROWS[:5]
        began.set()
        gate.wait(NEVER_S)
        yield from ROWS[5:]

    with make(IterableSource(rows), timeout_s=0.2) as loader:
        assert began.wait(NEVER_S)
        with pytest.raises(PrefetchTimeoutError, match="stage: read: the source has been giving the rows of a window"):
            while True:
                loader.get_next_batch(1)
    gate.set()


def test_rows_are_made_no_further_ahead_than_two_windows():
    stream = ListStream(LINES, at_once=1)
    with make(Watched(stream), buffer_size=1) as loader:
        loader.get_next_batch(1)
        assert stream.num_given <= sum(map(len, windows_before(3)))


# What a stream cannot do


def test_rows_in_the_middle_of_its_order_are_shown(path):
    with make(path) as loader:
        samples = loader.get_next_batch(NUM_ROWS)

    with OpenedOrder(str(path), row_id, shuffle=SHUFFLE) as opened:
        for sample in (samples[-1], samples[NUM_ROWS // 2], samples[0]):
            assert opened.at(sample.position).location == sample.source
