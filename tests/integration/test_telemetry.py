"""``telemetry="folder"``: what is recorded is what was delivered, and nothing that happens to it reaches the run."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import (
    BadRows,
    DataLoader,
    LoaderClosedError,
    Mix,
    Outcomes,
    Part,
    PassRate,
    PrefetchTimeoutError,
    PromptTokenizeFn,
    SoftPacking,
    Telemetry,
    TextTokenizeFn,
)
from asyncdata.core.log import get_logger
from asyncdata.demo import tokenizer_folder
from asyncdata.loader import service
from asyncdata.telemetry import record_file, recorder
from asyncdata.telemetry.chunk_watch import keys_of
from asyncdata.telemetry.reader import read
from asyncdata.telemetry.records import EDGES, Place
from tests.support.faults import until
from tests.support.loaders import make, state_after
from tests.support.loading import write_rows
from tests.support.ranks import settled
from tests.support.tokenize_fns import fails_on_13, kills_on_13

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from asyncdata import Sample
    from asyncdata.telemetry.reader import Run

NUM_ROWS = 200
CLOSE_TIMEOUT_S = recorder._CLOSE_TIMEOUT_S  # noqa: SLF001 - as it is; each test makes it longer


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "runs/a"


def smallest(samples: Iterable[Sample], most: int) -> list[Place]:
    """The places of the samples with the smallest keys."""
    import numpy as np

    keys = {}
    for sample in samples:
        at = sample.position
        assert at is not None
        keys[Place(at.epoch, at.window, at.row)] = int(keys_of(at, np.zeros(1, np.int64))[0])
    return sorted(sorted(keys, key=keys.__getitem__)[:most])


def records_lengths(run: Run, samples: Iterable[Sample]) -> bool:
    """Whether the histogram has the lengths of these samples."""
    counts: dict[int, int] = {}
    for sample in samples:
        edge = max(edge for edge in EDGES if edge <= len(sample.tokens))
        counts[edge] = counts.get(edge, 0) + 1
    return run.lengths() == dict(sorted(counts.items()))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_is_recorded_as_it_was_delivered(path, folder, num_workers):
    with make(path, num_workers=num_workers, telemetry=Telemetry(folder=str(folder), samples=8)) as loader:
        samples = [sample for _ in range(30) for sample in loader.get_next_batch(5)]
        statistics = loader.statistics()

    run = read(folder)
    (start,) = run.starts
    assert run.totals is not None
    assert (run.totals.samples, run.totals.tokens) == (150, statistics.tokens_total)
    assert (run.totals.calls, run.totals.waits) == (30, statistics.waits_total)
    assert sum(run.totals.wait_s.values()) == pytest.approx(statistics.data_wait_seconds_total)
    assert [sample.place for sample in run.samples()] == smallest(samples, 8)
    assert records_lengths(run, samples)
    assert start.end is not None and "with" in start.end.reason
    assert start.intervals[0].begins
    assert statistics.telemetry_lost_total == {}


def test_how_much_a_pack_holds_is_recorded(path, folder):
    packing = SoftPacking(max_length=128)

    with make(
        path, TextTokenizeFn(tokenizer_folder(), text_key="pad"), packing=packing, batch_size=1, telemetry=folder
    ) as loader:
        next(iter(loader))

    header = read(folder).starts[0].header
    assert (header.pack_length, header.packing["kind"]) == (128, "SoftPacking")


def test_a_sample_is_recorded_with_its_tokens_its_place_and_its_line(tmp_path, folder):
    path = tmp_path / "prompts.jsonl"
    rows = [{"input": f"How many are {n}? \N{GRINNING FACE}", "label": str(n), "metadata": {"n": n}} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    function = PromptTokenizeFn(tokenizer=tokenizer_folder(), label_key="label")

    with make(path, function, epochs=1, batch_size=5, telemetry=folder) as loader:
        samples = {sample.position: sample for batch in loader for sample in batch}

    recorded = read(folder).samples()
    assert len(recorded) == 20
    for record in recorded:
        sample = next(each for at, each in samples.items() if (at.epoch, at.window, at.row) == record.place)
        assert sample.source is not None
        assert "".join(piece.text for piece in record.pieces) == sample.prompt
        assert (record.ids, record.num_tokens) == (sample.tokens.tolist(), len(sample.tokens))
        assert (record.path, record.byte_offset) == (sample.source.path, sample.source.byte_offset)
        assert record.line == sample.source.line_number()
        assert json.loads(record.label) == sample.label
        assert json.loads(record.metadata) == sample.metadata
        assert not record.is_cut


def test_a_run_that_resumes_is_recorded_as_one(path, folder):
    state = state_after(path, 60, telemetry=Telemetry(folder=str(folder), samples=8))
    with make(path, telemetry=Telemetry(folder=str(folder), samples=8)) as loader:
        loader.load_state_dict(state)
        rest = loader.get_next_batch(50)
    with make(path) as loader:
        samples = loader.get_next_batch(110)

    run = read(folder)
    assert [start.origin[0] for start in run.starts] == [0, 60]
    assert run.totals is not None
    assert run.totals.samples == 110
    assert len(rest) == 50
    assert [sample.place for sample in run.samples()] == smallest(samples, 8)


def test_a_state_that_is_loaded_in_the_middle_counts_what_it_repeats_once(path, folder):
    with make(path, telemetry=folder) as loader:
        loader.get_next_batch(40)
        state = loader.state_dict()
        loader.get_next_batch(60)
        loader.load_state_dict(state)
        loader.get_next_batch(20)

    run = read(folder)
    steps = [step.samples for step in run.starts[0].differences()]
    counted = [step.samples for step in run.starts[0].differences(only_counted=True)]
    assert run.totals is not None
    assert (sum(steps), run.totals.samples) == (120, 60)
    assert counted == [20]


def test_the_parts_of_a_mixture_are_recorded_with_their_targets(tmp_path, folder):
    weights = {"a": 3, "b": 1}
    parts = {name: Part(write_rows(tmp_path / f"{name}.jsonl", 100), weight=weights[name]) for name in weights}

    with make(Mix(parts, quota=4), telemetry=Telemetry(folder=str(folder), samples=8)) as loader:
        samples = loader.get_next_batch(40)

    run = read(folder)
    assert run.totals is not None
    assert {name: (part.samples, part.target) for name, part in run.totals.by_source.items()} == {
        "a": (30, 0.75),
        "b": (10, 0.25),
    }
    assert run.header.sources == ["a", "b"]
    for name in ("a", "b"):
        places = [sample.place for sample in run.samples() if sample.source == name]
        assert places == smallest([sample for sample in samples if sample.source_name == name], 4)
    assert records_lengths(run, samples)


def test_groups_given_back_and_scores_are_counted(path, folder):
    outcomes = Outcomes(policy=PassRate(drop_above=0.9))
    with make(path, n_samples_per_prompt=2, outcomes=outcomes, telemetry=folder) as loader:
        groups = loader.get_samples(10)
        loader.report(groups, [[1.0, 1.0] if number < 3 else [0.0, 1.0] for number in range(10)])
        loader.add_samples(groups[:2])

    totals = read(folder).totals
    assert totals is not None
    assert (totals.returned, totals.staleness) == (2, {8: 2})
    assert (totals.group_sizes, totals.degenerate) == ({2: 10}, 3)


def test_bad_rows_and_events_are_recorded(path, folder):
    with make(path, fails_on_13, bad_rows="skip", epochs=1, batch_size=10, telemetry=folder) as loader:
        assert sum(map(len, loader)) == NUM_ROWS - 1

    (start,) = read(folder).starts
    (bad,) = start.bad_rows
    assert (bad.code, bad.path, bad.line) == ("AD421", str(path), 14)
    assert "thirteen" in bad.reason
    assert "row.bad" in [event.name for event in start.events]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_bad_rows_of_a_mixture_have_their_part(tmp_path, folder, shuffle):
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", 20) for name in ("one", "two")}
    mix = Mix({name: Part(path, when_done="leave") for name, path in paths.items()})
    with make(mix, fails_on_13, bad_rows="skip", epochs=1, batch_size=10, telemetry=folder, shuffle=shuffle) as loader:
        assert sum(map(len, loader)) == 38

    (start,) = read(folder).starts
    assert {bad.source: bad.path for bad in start.bad_rows} == {name: str(path) for name, path in paths.items()}


def events_of(folder: Path) -> list[str]:
    return [event.name for start in read(folder).starts for event in start.events]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_loaders_of_a_process_record_their_own_events_only(path, tmp_path, num_workers):
    knobs: dict[str, Any] = {"bad_rows": "skip", "num_workers": num_workers, "buffer_size": 1000}  # not tuned
    with (
        make(path, fails_on_13, telemetry=tmp_path / "train", **knobs) as train,
        make(path, telemetry=tmp_path / "eval", **knobs) as evaluation,
    ):
        for _ in range(NUM_ROWS // 10):  # their deliveries alternate in one thread
            assert len(train.get_next_batch(10)) == len(evaluation.get_next_batch(10))
        with pytest.raises(PrefetchTimeoutError):
            train.get_next_batch(1_000_000, timeout_s=0)
        evaluation.load_state_dict(evaluation.state_dict())
        get_logger("test").warning("of.no_loader")

    assert events_of(tmp_path / "train") == ["row.bad", "loader.timeout", "of.no_loader"]
    assert events_of(tmp_path / "eval") == ["snapshot.restored", "of.no_loader"]


def test_a_lost_worker_is_an_event_of_its_own_loader_only(path, tmp_path):
    knobs: dict[str, Any] = {"bad_rows": "skip", "num_workers": 1, "buffer_size": 1000, "batch_size": 10, "epochs": 1}
    with (
        make(path, kills_on_13, telemetry=tmp_path / "train", **knobs) as train,
        make(path, telemetry=tmp_path / "eval", **knobs) as evaluation,
    ):
        assert (sum(map(len, train)), sum(map(len, evaluation))) == (NUM_ROWS - 1, NUM_ROWS)

    assert "worker.lost" in events_of(tmp_path / "train")
    assert events_of(tmp_path / "eval") == []


# What a file must not have


def test_no_text_of_a_row_is_recorded_where_rows_are_not_shown(tmp_path, folder):
    path = tmp_path / "rows.jsonl"
    rows = [{"input": f"SECRET words {n}", "label": "SECRET", "metadata": {"k": "SECRET"}} for n in range(50)]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"input": "SECRET", \n'
    path.write_text(text, encoding="utf-8")
    function = PromptTokenizeFn(tokenizer=tokenizer_folder(), label_key="label")
    bad_rows = BadRows(policy="skip", excerpts=False)

    with make(path, function, bad_rows=bad_rows, epochs=1, batch_size=10, telemetry=folder) as loader:
        assert sum(map(len, loader)) == 50

    (file,) = folder.iterdir()
    run = read(folder)
    assert b"SECRET" not in file.read_bytes()
    assert b'"ids"' not in file.read_bytes()
    assert not run.header.shows_rows
    assert len(run.samples()) == 50
    assert len(run.starts[0].bad_rows) == 1


def test_a_part_whose_rows_are_not_shown_is_recorded_without_text_and_the_others_with_it(tmp_path, folder):
    for name in ("hidden", "shown"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"input": f"{name} words"}) + "\n")
    parts = {
        "hidden": Part(tmp_path / "hidden.jsonl", bad_rows=BadRows(excerpts=False)),
        "shown": Part(tmp_path / "shown.jsonl"),
    }

    with make(Mix(parts), PromptTokenizeFn(tokenizer=tokenizer_folder()), telemetry=folder) as loader:
        loader.get_next_batch(20)

    (file,) = folder.iterdir()
    assert b"hidden words" not in file.read_bytes()
    assert b"shown" in b"".join("".join(p.text for p in each.pieces).encode() for each in read(folder).samples())


# What may happen to it


def deliver(path: Path, folder: Path, **settings: Any) -> dict[str, int]:
    """Deliver two epochs; return what was not recorded."""
    telemetry = Telemetry(folder=str(folder), interval_s=0.001, **settings)
    with make(path, epochs=2, batch_size=10, telemetry=telemetry) as loader:
        assert sum(len(batch) for _ in range(2) for batch in loader) == 2 * NUM_ROWS
    return loader.statistics().telemetry_lost_total


@pytest.fixture
def warned(caplog):
    return lambda: [record.event for record in caplog.records if getattr(record, "event", "") == "telemetry.lost"]


def test_a_folder_that_cannot_be_made_is_a_warning_and_a_number(path, tmp_path, warned):
    (tmp_path / "file").write_text("")

    lost = deliver(path, tmp_path / "file/runs")

    assert lost["disk"] > 0
    assert len(warned()) == 1


def test_a_full_disk_is_a_warning_and_a_number_and_leaves_whole_lines(path, folder, monkeypatch, warned):
    """It is full after a thousand bytes, and again after each that is freed."""
    write, room = os.write, [1000]

    def full(fd: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder)):
            return write(fd, data)

        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(record_file.os, "write", full)

    lost = deliver(path, folder)

    assert lost["disk"] > 0
    assert len(warned()) == 1
    (start,) = read(folder).starts
    assert start.num_unread == 0


def test_a_folder_that_is_removed_is_a_warning_and_a_number(path, folder, warned):
    telemetry = Telemetry(folder=str(folder), interval_s=0.001)
    with make(path, epochs=1, batch_size=10, telemetry=telemetry) as loader:
        loop = iter(loader)
        next(loop)
        while not (folder.exists() and list(folder.iterdir())):
            pass
        (file,) = folder.iterdir()
        file.unlink()
        folder.rmdir()
        assert sum(map(len, loop)) == NUM_ROWS - 10

    assert loader.statistics().telemetry_lost_total["disk"] > 0
    assert len(warned()) == 1


def test_the_docstring_of_close_says_its_limits():
    said = DataLoader.close.__doc__
    assert f"{2 * CLOSE_TIMEOUT_S:g} seconds" in said
    assert f"{service._CLOSE_TIMEOUT_S:g} seconds" in said  # noqa: SLF001 - said there


def test_close_does_not_wait_for_a_disk_that_hangs(path, folder, monkeypatch):
    """Longer than its docstring says, that is; here the limit is short."""
    write, is_hanging, may_go_on = os.write, threading.Event(), threading.Event()
    monkeypatch.setattr(recorder, "_CLOSE_TIMEOUT_S", 0.01)

    def hang(fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder)):
            is_hanging.set()
            may_go_on.wait()
        return write(fd, data)

    monkeypatch.setattr(record_file.os, "write", hang)
    loader = make(path, telemetry=Telemetry(folder=str(folder), interval_s=0.001))
    try:
        loader.get_next_batch(10)
        is_hanging.wait()
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "asyncdata-telemetry")
        loader.close()
        assert thread.is_alive()
        with pytest.raises(LoaderClosedError):
            loader.get_next_batch(10)
    finally:
        may_go_on.set()
    thread.join()


def test_a_recorder_that_dies_is_a_number(path, folder):
    # Without samples it has no helper process, which would be left if the thread died as it starts it.
    telemetry = Telemetry(folder=str(folder), interval_s=0.001, samples=0)
    with make(path, epochs=1, batch_size=10, telemetry=telemetry) as loader:
        loop = iter(loader)
        next(loop)
        while not list(folder.glob("*")):
            pass
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "asyncdata-telemetry")
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        thread.join()
        assert sum(map(len, loop)) == NUM_ROWS - 10

    assert loader.statistics().telemetry_lost_total == {"error": 1}


def test_a_fault_in_a_hook_is_a_number(path, folder, monkeypatch):
    monkeypatch.setattr("asyncdata.telemetry.chunk_watch.mix", lambda *_: 1 / 0)

    lost = deliver(path, folder)

    assert lost["error"] > 0


def test_a_limit_of_bytes_is_kept_and_what_is_over_it_is_counted(path, folder):
    telemetry = Telemetry(folder=str(folder), max_bytes=1 << 16, samples=1000)
    with make(path, epochs=4, batch_size=10, telemetry=telemetry) as loader:
        for _ in range(4):
            assert sum(map(len, loader)) == NUM_ROWS

    (file,) = folder.iterdir()
    (start,) = read(folder).starts
    assert file.stat().st_size <= 1 << 16
    assert loader.statistics().telemetry_lost_total["size"] > 0
    assert start.end is not None
    assert start.intervals[-1].samples == 4 * NUM_ROWS


_SCRIPT = """
import os, sys
from asyncdata import DataLoader
loader = DataLoader(sys.argv[1], tokenize_fn="tests.support.tokenize_fns:row_id", num_workers=1, telemetry=sys.argv[2])
loader.get_next_batch(50)
if sys.argv[3] == "kill":
    os.kill(os.getpid(), 9)
if sys.argv[3] == "fork":
    pid = os.fork()
    if not pid:
        sys.exit(0)
    os.waitpid(pid, 0)
    loader.get_next_batch(50)
"""


@pytest.mark.parametrize(("how", "num_samples"), [("exit", 50), ("fork", 100)])
def test_a_process_that_ends_without_close_leaves_a_whole_file(path, folder, how, num_samples):
    subprocess.run([sys.executable, "-W", "ignore", "-c", _SCRIPT, path, folder, how], check=True)

    (start,) = read(folder).starts
    assert start.end is not None
    assert (start.intervals[-1].samples, start.num_unread) == (num_samples, 0)


def test_a_process_that_is_killed_leaves_what_it_wrote(path, folder):
    assert subprocess.run([sys.executable, "-c", _SCRIPT, path, folder, "kill"], check=False).returncode == -9

    if list(folder.glob("*.jsonl")):  # the first line may not be written yet
        for file in folder.iterdir():
            assert file.read_bytes().count(b'"kind":"run"') <= 1


def test_the_first_record_is_written_at_once(path, folder, monkeypatch):
    monkeypatch.setattr(recorder, "_TICK_S", 3600.0)

    with make(path, telemetry=Telemetry(folder=str(folder), interval_s=3600.0)) as loader:
        loader.get_next_batch(5)
        until(lambda: any(file.stat().st_size for file in folder.glob("*.jsonl")))  # a file without a record is none
        until(lambda: read(folder).starts[0].intervals)


def test_a_loader_that_never_starts_writes_nothing(path, folder):
    make(path, telemetry=folder).close()

    assert not folder.exists()


def test_the_order_is_the_same_with_and_without_it(path, folder):
    with make(path) as plain, make(path, telemetry=folder) as recorded:
        for _ in range(3):
            assert [each.position for each in plain.get_next_batch(50)] == [
                each.position for each in recorded.get_next_batch(50)
            ]
        assert settled(plain.state_dict()) == settled(recorded.state_dict())
