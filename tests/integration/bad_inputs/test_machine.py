"""The catalogue of bad inputs, rows 70 to 75: the disk, snapshots, clocks, and what the system may run out of."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncdata import Limits
from asyncdata.errors import SnapshotError, SnapshotMismatchError, SnapshotVersionError
from tests.support.bad_inputs import PACKAGE, assert_is_ours
from tests.support.combinations import each_value
from tests.support.loaders import make
from tests.support.loading import NEVER_S, ids, order_of, write_rows

NUM_ROWS = 100


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_70_a_snapshot_that_cannot_be_written_costs_neither_the_last_one_nor_the_run(path, tmp_path, monkeypatch, code):
    snapshot = tmp_path / "state" / "run.snapshot"
    snapshot.parent.mkdir()

    def fail(*args: Any, **kwargs: Any) -> int:
        raise OSError(code, os.strerror(code))

    with make(path) as loader:
        loader.get_next_batch(5)
        loader.save(snapshot)
        before = snapshot.read_bytes()
        loader.get_next_batch(5)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", fail)
            with pytest.raises(SnapshotError) as caught:
                loader.save(snapshot)
        assert_is_ours(caught.value, "AD601")
        assert f"{snapshot} was not written: {os.strerror(code)}" in str(caught.value)
        assert (snapshot.read_bytes(), os.listdir(snapshot.parent)) == (before, [snapshot.name])
        assert ids(loader.get_next_batch(5)) == order_of(path)[10:15]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: bytes(value ^ (place == len(data) // 2) for place, value in enumerate(data)),
        lambda data: b"",
        lambda data: pickle.dumps({"state": 1}),
        lambda data: b'{"id": 1}\n',
    ],
    ids=["cut", "flipped", "nothing", "pickled", "another file"],
)
def test_71_a_snapshot_that_is_none_is_refused_and_an_older_one_that_is_valid_is_named(path, tmp_path, spoil):
    snapshot = tmp_path / "run.snapshot"
    with make(path) as loader:
        for _ in range(2):
            loader.get_next_batch(5)
            loader.save(snapshot)
    snapshot.write_bytes(spoil(snapshot.read_bytes()))

    with make(path) as loader:
        with pytest.raises(SnapshotError) as caught:
            loader.restore(snapshot)
        assert_is_ours(caught.value, "AD602")
        assert str(snapshot) in str(caught.value)
        assert "; run.snapshot.1 is valid: restore it instead" in str(caught.value)
        loader.restore(f"{snapshot}.1")
        assert ids(loader.get_next_batch(3)) == order_of(path)[5:8]


def test_71_a_snapshot_of_a_later_version_is_refused(path):
    with make(path) as loader:
        state = loader.state_dict()
        with pytest.raises(SnapshotVersionError) as caught:
            loader.load_state_dict(state | {"schema": 99})
    assert_is_ours(caught.value, "AD602")
    assert "99" in str(caught.value)


@pytest.mark.parametrize("what", ["data", "seed"])
def test_72_a_snapshot_of_other_data_or_settings_is_refused_and_says_what_differs(path, tmp_path, what):
    with make(path) as loader:
        loader.get_next_batch(5)
        state = loader.state_dict()
    other = write_rows(tmp_path / "other.jsonl", NUM_ROWS + 1)

    with make(other) if what == "data" else make(path, seed=7) as loader:
        with pytest.raises(SnapshotMismatchError, match=what) as caught:
            loader.load_state_dict(state)
    assert_is_ours(caught.value, "AD603")
    assert any(name.startswith(what) for name in caught.value.differences), caught.value.differences


@pytest.mark.thorough
def test_73_two_who_save_to_one_file_never_leave_a_broken_one(path, tmp_path):
    """There is no lock: each writes a file of its own name, and the last rename is the snapshot."""
    snapshot = tmp_path / "state" / "run.snapshot"
    snapshot.parent.mkdir()
    with make(path) as first, make(path) as second, make(path) as reader, ThreadPoolExecutor(2) as threads:
        first.get_next_batch(5)
        second.get_next_batch(9)
        first.save(snapshot)
        saving = [threads.submit(lambda one: [one.save(snapshot) for _ in range(20)], one) for one in (first, second)]
        while not all(future.done() for future in saving):
            reader.restore(snapshot)
            assert reader.position().row in {5, 9}
        assert [len(future.result()) for future in saving] == [20, 20]
    assert {name.split(".tmp")[0].removesuffix(".1").removesuffix(".2") for name in os.listdir(snapshot.parent)} == {
        snapshot.name
    }


def test_74_a_clock_that_jumps_changes_nothing(path, monkeypatch):
    clock = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: clock.uniform(-1e9, 1e10))

    with make(path, num_workers=1, timeout_s=240, limits=Limits(row_timeout_s=30)) as loader:
        batch = loader.get_next_batch(2 * NUM_ROWS)
        state = loader.state_dict()
    with make(path) as loader:
        loader.load_state_dict(state)
        assert ids(batch) == order_of(path, 2)
        assert ids(loader.get_next_batch(5)) == order_of(path, 3)[2 * NUM_ROWS :][:5]


STARVED = """
import json, resource, sys
from asyncdata import DataLoader
from asyncdata.errors import AsyncDataError
from tests.support.tokenize_fns import row_id

path, room, num_workers = json.loads(sys.argv[1])
import asyncdata.loader.engine, asyncdata.tokenization.user_function, asyncdata.workers.process_pool, asyncio
resource.setrlimit(resource.RLIMIT_NOFILE, (room, room))
try:
    with DataLoader(path, tokenize_fn=row_id, num_workers=num_workers, timeout_s=240, shuffle=False) as loader:
        said = [int(sample.tokens[0]) for sample in loader.get_next_batch(3)]
except AsyncDataError as error:
    said = [type(error).__name__, str(error)]
resource.setrlimit(resource.RLIMIT_NOFILE, (room, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(json.dumps(said))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("room", "num_workers"), each_value([5, 7, 10, 16, 24], [2, 0]))
def test_75_a_system_without_free_file_descriptors_is_named_and_nothing_hangs(path, room, num_workers):
    """What Python itself writes to stderr of a loop that it could not make is no concern of ours."""
    done = subprocess.run(
        [sys.executable, "-c", STARVED, json.dumps([str(path), room, num_workers])],
        capture_output=True,
        text=True,
        timeout=NEVER_S,
        cwd=Path(PACKAGE).parent,
    )

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    if said != [0, 1, 2]:
        assert said[0] in {"WorkerError", "SourceError"}
        assert said[1].startswith(("AD426 ", "AD304 "))
        assert "Too many open files" in said[1]
        assert "please report" not in said[1]
