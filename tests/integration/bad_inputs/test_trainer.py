"""The catalogue of bad inputs, rows 59 to 75: what a trainer may do wrong, the disk, clocks, the system."""

import copy
import errno
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncdata import DataLoader, IterableSource, Limits, Sample, errors
from asyncdata.filters import ByStaleness
from tests.support.examples import each_value
from tests.support.loaders import FACES, PACKAGE, assert_is_ours, make, state_after
from tests.support.loading import NEVER_S, ids, order_of, write_rows

NUM_ROWS = 60


def groups_of(loader: DataLoader) -> list[Any]:
    return loader.get_samples(3)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (lambda buffer, number: [[]], "AD430 .*returned something that is no group of the buffer"),
        (lambda buffer, number: [list(buffer[0])], "AD430 .*returned something that is no group of the buffer"),
        (lambda buffer, number: buffer[0], "AD430 .*returned something that is no group of the buffer"),
        (lambda buffer, number: None, "AD430 .*returned NoneType; need a list of groups"),
        (lambda buffer, number: 7, "AD430 .*returned int; need a list of groups"),
        (lambda buffer, number: {}["reward"], r"AD431 .*raised KeyError\('reward'\); no group was taken"),
    ],
    ids=["foreign", "a copy", "wrong nesting", "nothing", "a number", "an error"],
)
def test_59_61_a_filter_that_returns_what_it_may_not_or_raises_takes_nothing(path, chosen, text):
    with make(path, buffer_filter=chosen) as loader:
        loader.add_samples(groups_of(loader))
        with pytest.raises(errors.FilterError, match=text) as caught:
            loader.get_samples(1)
        assert_is_ours(caught.value, text[:5])
        assert isinstance(caught.value.__cause__, KeyError) is (text[:5] == "AD431")
        assert loader.statistics().buffered_groups == 3


def test_59_60_what_a_filter_returns_twice_or_does_not_remove_is_capped_and_served_once(path):
    """AD430 is for what is no group."""
    with make(path, buffer_filter=lambda buffer, number: [*buffer, *buffer]) as loader:
        groups = groups_of(loader)
        loader.add_samples(groups)
        assert loader.get_samples(2) == groups[:2]
        assert loader.get_samples(1) == groups[2:]
        assert ids(loader.get_next_batch(3)) == order_of(path)[3:6]


def not_serialisable(groups: list[Any]) -> Any:
    groups[1][0].extra["images"] = [threading.Lock()]
    return groups


TWICE = "AD432 group {} is in the buffer already, or has a sample twice; it would be served twice"
NO_LIST = "AD432 add_samples takes a list of groups, got {}"
NO_GROUP = "AD432 group {} must be a list of Sample, got {}"
OF_ANOTHER_SIZE = "AD432 group {} has {} samples, and n_samples_per_prompt is 2"
UNKNOWN = (
    "AD432 group 1: $.extra.images[0] is a _thread.lock, which a snapshot cannot hold. Keep it elsewhere, or turn it "
    "into numbers, text, lists, dicts or numpy arrays"
)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda groups: [groups[0], groups[1][:1]], OF_ANOTHER_SIZE.format(1, 1)),
        (lambda groups: [[], groups[0]], OF_ANOTHER_SIZE.format(0, 0)),
        (lambda groups: [groups[0] + groups[1]], OF_ANOTHER_SIZE.format(0, 4)),
        (lambda groups: [groups[0], groups[1], groups[0]], TWICE.format(2)),
        (lambda groups: [groups[0][:1] * 2], TWICE.format(0)),
        (not_serialisable, UNKNOWN),
        (lambda groups: {"group": groups[0]}, NO_LIST.format("dict")),
        (iter, NO_LIST.format("list_iterator")),
        (lambda groups: [groups[0], Sample()], f"{NO_GROUP.format(1, 'Sample')}; a group of one sample is [sample]"),
        (lambda groups: [tuple(groups[0])], NO_GROUP.format(0, "tuple")),
        (lambda groups: [[Sample(), "text", 5]], NO_GROUP.format(0, "a list of Sample, int, str")),
    ],
)
def test_62_groups_that_cannot_be_kept_are_refused_before_any_is_and_buffered_ones_as_well(path, spoil, text):
    with make(path, n_samples_per_prompt=2) as loader:
        groups, more = groups_of(loader), groups_of(loader)
        with pytest.raises(errors.InvalidGroupError) as caught:
            loader.add_samples(spoil(groups))
        assert_is_ours(caught.value, "AD432")
        assert str(caught.value) == text
        loader.add_samples(more)
        for again in (more[1], [Sample(), more[1][1]]):
            with pytest.raises(errors.InvalidGroupError) as caught:
                loader.add_samples([again])
            assert str(caught.value) == TWICE.format(0)
        assert loader.statistics().buffered_groups == 3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (7, "a function of \\(buffer, num_groups\\), got int"),
        (ByStaleness, "got the class ByStaleness; make one of it"),
        ("asyncdata:__all__", "got tuple"),
        ("asyncdata.filters:ByStaleness", "got the class ByStaleness"),
        ("asyncdata.filters:nothing", "AD420 cannot import"),
    ],
)
def test_what_is_no_filter_is_refused_when_the_loader_is_made(path, what, message):
    with pytest.raises(errors.ConfigError, match=message):
        make(path, buffer_filter=what)


def test_63_a_number_beyond_all_reason_is_not_capped_but_waited_for(path):
    with make(path, timeout_s=0.3) as loader:
        with pytest.raises(errors.PrefetchTimeoutError, match="^AD510 "):
            loader.get_next_batch(10**9)
        assert ids(loader.get_next_batch(5, timeout_s=240)) == order_of(path)[:5]


def test_64_threads_that_ask_at_the_same_time_get_disjoint_slices(path):
    with make(path) as loader, ThreadPoolExecutor(4) as threads:
        found = [threads.submit(lambda: ids(loader.get_next_batch(3))) for _ in range(NUM_ROWS // 3)]
        slices = sorted(future.result() for future in found)
    expected = order_of(path)
    assert slices == sorted(expected[first : first + 3] for first in range(0, NUM_ROWS, 3))


def test_65_closing_ends_a_wait_and_the_trainers_error_is_its_own(path):
    gate, began = threading.Event(), threading.Event()

    def waits(row: dict[str, Any]) -> list[int]:
        began.set()
        gate.wait(NEVER_S)
        return [row["id"]]

    loader = make(path, waits)
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(loader.get_next_batch, 1)
        began.wait(NEVER_S)
        loader.close()
        error = taken.exception(NEVER_S)
        gate.set()

    assert isinstance(error, errors.LoaderClosedError)
    assert str(error) == "AD502 the loader was closed by close()"
    with pytest.raises(KeyError, match="^'mine'$"), make(path) as loader:
        raise KeyError("mine")


@pytest.mark.parametrize("face", FACES.values(), ids=FACES)
def test_66_after_closing_every_use_says_so_and_the_state_is_that_of_the_last_delivery(face, path):
    with face(path, batch_size=2) as loader:
        batch = loader.get_next_batch(33)
        loader.close()
        loader.close()
        state = loader.state_dict()
        calls = [("get_next_batch", 1), ("get_samples", 1), ("add_samples", [batch]), ("ack",), ("start",)]
        for name, *arguments in (*calls, ("load_state_dict", state), ("set_epoch", 1), ("__iter__",)):
            with pytest.raises(errors.LoaderClosedError, match=r"^AD502 the loader was closed by a?close\(\)"):
                next(getattr(loader, name)(*arguments))
        assert loader.statistics().samples_total == 33

    with face(path, batch_size=2) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_next_batch(3)) == order_of(path)[33:36]
    assert [sample.label for sample in batch] == order_of(path)[:33], "samples outlive their loader"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_67_a_forked_child_is_refused_and_a_loader_cannot_be_copied(path):
    with make(path) as loader:
        loader.get_next_batch(1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            status = 1
            calls = [("get_next_batch", 1), ("get_samples", 1), ("__iter__",), ("add_samples", []), ("start",)]
            try:
                for name, *arguments in (*calls, ("load_state_dict", {}), ("set_epoch", 1)):
                    with pytest.raises(errors.LoaderForkedError, match="^AD503 the loader was made in process"):
                        next(getattr(loader, name)(*arguments))
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ids(loader.get_next_batch(1)) == order_of(path)[1:2]
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be copied or pickled: it owns a thread and processes"):
                copied(loader)


@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
def test_68_a_function_or_source_that_asks_its_own_loader_is_refused_and_does_not_wait_for_itself(path, backend):
    if backend != "asyncio":
        pytest.importorskip(backend)

    def rows(epoch: int) -> Iterator[dict[str, Any]]:
        yield {"id": loader.get_next_batch(1)[0].tokens[0]}

    asking = make(path, lambda row: [loader.get_next_batch(1)[0].tokens[0]], timeout_s=None, event_loop=backend)
    with asking as loader, pytest.raises(errors.BadRowError, match=r"^AD421 .*Error\('AD504 the loader is called"):
        loader.get_next_batch(1)
    with make(IterableSource(rows), timeout_s=None, event_loop=backend) as loader:
        with pytest.raises(errors.ConfigError, match="^AD504 the loader is called"):
            loader.get_next_batch(1)
    with make(path) as other, make(path, lambda row: [row["id"], *ids(other.get_next_batch(1))]) as loader:
        assert len(loader.get_next_batch(3)) == 3, "another loader may be asked, as the error says"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda loader, buffer: loader.get_next_batch(1), id="get_next_batch"),
        pytest.param(lambda loader, buffer: loader.get_samples(1), id="get_samples"),
        pytest.param(lambda loader, buffer: loader.add_samples([[copy.copy(buffer[0][0])]]), id="add_samples"),
        pytest.param(lambda loader, buffer: loader.ack(), id="ack"),
        pytest.param(lambda loader, buffer: loader.set_epoch(7), id="set_epoch"),
    ],
)
def test_68_so_is_a_filter_and_nothing_is_changed(path, call):
    calls = [call]

    def asks(buffer: list[Any], number: int) -> list[Any]:
        for each in calls:
            each(loader, buffer)
        return buffer[:number]

    with make(path, buffer_filter=asks, timeout_s=None) as loader:
        groups = groups_of(loader)
        loader.add_samples(groups)
        for number in (1, 5):  # the second one has to wait for the stream as well
            with pytest.raises(errors.FilterError, match=r"^AD431 .*Error\(.AD504 the buffer filter .* the loader"):
                loader.get_samples(number)
        calls.clear()
        assert loader.get_samples(3) == groups
        assert ids(loader.get_next_batch(3)) == order_of(path)[3:6]


def test_69_ranks_that_are_fed_only_say_how_far_to_read_ahead(path):
    found = []
    for knobs in ({}, {"dp_size": 1}, {"dp_size": 8, "buffer_size": 2}):
        with make(path, **knobs) as loader:
            found.append(ids(loader.get_next_batch(NUM_ROWS)))
    assert found == [order_of(path)] * 3


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
            with pytest.raises(errors.SnapshotError) as caught:
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
        with pytest.raises(errors.SnapshotError) as caught:
            loader.restore(snapshot)
        assert_is_ours(caught.value, "AD602")
        assert str(snapshot) in str(caught.value)
        assert "; run.snapshot.1 is valid: restore it instead" in str(caught.value)
        loader.restore(f"{snapshot}.1")
        assert ids(loader.get_next_batch(3)) == order_of(path)[5:8]


@pytest.mark.parametrize("what", ["data", "seed"])
def test_72_a_snapshot_of_other_data_or_settings_is_refused_and_says_what_differs(path, tmp_path, what):
    state = state_after(path, 5)
    other = write_rows(tmp_path / "other.jsonl", NUM_ROWS + 1)
    with make(other) if what == "data" else make(path, seed=7) as loader:
        with pytest.raises(errors.SnapshotMismatchError, match=what) as caught:
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
from tests.support.loading import row_id

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
    command = [sys.executable, "-c", STARVED, json.dumps([str(path), room, num_workers])]
    settings = {"capture_output": True, "text": True, "timeout": NEVER_S, "cwd": Path(PACKAGE).parent}
    done = subprocess.run(command, **settings)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    if said != [0, 1, 2]:
        assert said[0] in {"WorkerError", "SourceError"}
        assert said[1].startswith(("AD426 ", "AD304 "))
        assert "Too many open files" in said[1]
        assert "please report" not in said[1]
