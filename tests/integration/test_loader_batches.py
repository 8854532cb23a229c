"""Batches and loops are slices of the order, epoch by epoch, to the end; bad rows in them, and what closing ends."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from asyncdata import BadRows, JsonlSource, Position, Sample, SourceLocation, Status
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import ConfigError, EndOfData, NoSamplesError, TooManyBadRowsError, WorkerError
from asyncdata.read_ahead.source import ReadAhead
from tests.support import worker_fns
from tests.support.faults import until
from tests.support.loaders import FACES, gated, is_alive, service_of
from tests.support.loaders import make as open_loader
from tests.support.loading import NEVER_S, NUM_ROWS, fails_on_13, ids, line_of, order_of, waits_for_a_file, write_rows
from tests.support.sources import jsonl, write

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(params=FACES.values(), ids=FACES)
def face(request: pytest.FixtureRequest) -> Callable[..., Any]:
    opened: Callable[..., Any] = request.param
    return opened


def test_a_sample_says_what_it_is_and_where_it_comes_from(face, path):
    with face(path, n_samples_per_prompt=2) as loader:
        loader.get_next_batch(4)
        first, second = loader.get_next_batch(2)

    row = int(first.tokens[0])
    line, offset = line_of(path, row)
    assert (first.index, second.index) == (4, 5)
    assert (first.group_index, second.group_index) == (2, 2)
    assert first.position == second.position == Position(0, 0, 2)
    assert first.source == SourceLocation(str(path), offset, len(path.read_bytes().splitlines()[row]))
    assert first.source.line_number() == line
    assert (first.label, first.prompt, first.metadata, first.extra) == (row, None, {}, {})
    assert first.tokens.dtype == np.int32
    assert not first.tokens.flags.writeable
    assert np.shares_memory(first.tokens, second.tokens)
    assert first.status is Status.PENDING


def test_samples_of_a_group_share_no_value_that_a_trainer_may_change(face, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 1)
    fn = lambda row: {"input_ids": [1], "metadata": {"list": []}, "label": [5]}  # noqa: E731
    with face(path, fn, n_samples_per_prompt=2) as loader:
        first, second = loader.get_next_batch(2)
    first.metadata["list"].append(1)
    first.label.append(2)
    assert (second.metadata, second.label) == ({"list": []}, [5])


def test_a_batch_must_be_whole_groups_and_a_number_of_groups_a_number(face, path):
    with face(path, n_samples_per_prompt=2) as loader:
        for number in (0, -1, 3, "2", 2.0, None):
            with pytest.raises(ConfigError, match=f"^AD440 num_samples must be a positive multiple.* got {number!r}$"):
                loader.get_next_batch(number)
            if number not in (0, 3):
                with pytest.raises(ConfigError, match="^AD440 num_groups"):
                    loader.get_samples(number)
        assert loader.get_samples(0) == []
        assert ids(loader.get_next_batch(np.int64(2))) == [order_of(path)[0]] * 2
        assert len(loader.get_samples(np.int32(2))) == 2
        with pytest.raises(ConfigError, match="iterating needs batch_size"):
            iter(loader)


def test_nothing_is_asked_before_the_first_batch_is_wanted(face, path):
    with face(path, batch_size=64) as loader:
        loop = iter(loader)
        loader.get_next_batch(150)
        assert [number for batch in loop for number in ids(batch)] == order_of(path)[150:]
        assert next(loop, None) is None, "the end is the end"


def test_an_epoch_of_less_than_a_batch_under_drop_last_is_an_error_each_time(face, path):
    with face(path, batch_size=NUM_ROWS + 1, drop_last=True) as loader:
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            with pytest.raises(NoSamplesError, match=f"AD406 epoch {epoch} has fewer samples than one batch"):
                next(iter(loader))


@pytest.mark.parametrize(
    "knobs",
    [{}, *(pytest.param(k, marks=pytest.mark.thorough) for k in ({"commit": "on_ack"}, {"buffer_size": 3}))],
    ids=str,
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_whose_collate_fn_raises_is_not_consumed(face, path, size, knobs):
    """Wherever it came from: the middle of what is ready, its edge, or a wait."""
    chance, num_calls = random.Random(1), 0

    def collate(samples: list[Sample]) -> list[int]:
        nonlocal num_calls
        num_calls += 1
        if chance.random() < 0.5:
            raise RuntimeError("out of memory")
        return ids(samples)

    with face(path, batch_size=10, collate_fn=collate, n_samples_per_prompt=size, **knobs) as loader:
        seen, loop = [], iter(loader)
        while len(seen) < 2 * size * NUM_ROWS:
            try:
                seen += next(loop)
            except RuntimeError:
                num_calls -= 1
            except StopIteration:
                loop = iter(loader)

    assert seen == [number for number in order_of(path, 2) for _ in range(size)]
    assert num_calls == len(seen) // 10, "every batch is collated once"


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_tokenizer_that_cannot_be_opened_is_an_error_at_every_call(face, path, num_workers):
    with face(path, worker_fns.Opening("raises"), num_workers=num_workers) as loader:
        for epoch in (0, 0, 3):
            loader.set_epoch(epoch)
            with pytest.raises(WorkerError, match="^AD426 the tokenize function cannot be opened: FileNotFoundError"):
                loader.get_next_batch(1)


def test_a_source_is_a_path_a_list_a_folder_a_glob_or_a_description(path):
    folder = str(path.parent)
    sources: list[Any] = [str(path), path, [str(path)], [path], (path,), folder, f"{folder}/*.jsonl"]
    for source in (*sources, JsonlSource(str(path))):
        with open_loader(source) as loader:
            assert ids(loader.get_next_batch(3)) == order_of(path)[:3]


ROWS: list[tuple[Any, str]] = [([{"id": 0}], "list"), (({"id": number} for number in range(3)), "generator")]


class Tokenizer:
    """As a tokenizer of transformers, which can be called too."""

    name_or_path = "Qwen/Qwen3-0.6B"

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return tokens

    def __call__(self, text: Any) -> Any:
        return {"input_ids": [1]}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        *((given, "^a source is a path") for given in (7, None, b"rows.jsonl", {"rows.jsonl"})),
        *((given, rf"^a {kind} of rows .*IterableSource\(make\)") for given, kind in ROWS),
    ],
)
def test_anything_else_is_no_source(source, told):
    with pytest.raises(ConfigError, match=told):
        open_loader(source)


@pytest.mark.parametrize("given", [str(tokenizer_folder()), "Qwen/Qwen3-0.6B", Tokenizer()])
def test_a_tokenizer_alone_is_no_tokenize_function(path, given):
    with pytest.raises(ConfigError, match=r"^AD420 '\S+' is a tokenizer.* pass ChatTokenizeFn\('\S+'\) for chats"):
        open_loader(path, given)


def test_threads_that_restore_and_exclude_do_not_wait_for_each_other(path):
    with open_loader(path) as loader, ThreadPoolExecutor(2) as threads:
        state, rows = loader.state_dict(), loader.get_next_batch(1)
        calls = [partial(loader.load_state_dict, state), partial(loader.exclude, rows)]
        assert len(list(threads.map(lambda call: [call() for _ in range(200)], calls))) == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_statistics_may_be_asked_for_whenever_and_count_what_was_delivered(tmp_path, num_workers):
    path, gate = gated(tmp_path, 0)
    with open_loader(path, waits_for_a_file, shuffle=False, n_samples_per_prompt=2, num_workers=num_workers) as loader:
        assert loader.statistics().ready_samples == 0
        loader.start()
        until(lambda: loader.statistics().to_dict()["asyncdata_workers_busy"] == 1)
        with ThreadPoolExecutor() as threads:
            batch = threads.submit(loader.get_next_batch, 20)
            until(lambda: loader.statistics().data_wait_seconds_total > 0)
            gate.touch()
            batch.result()
    now = loader.statistics()

    assert (now.samples_total, now.groups_total, now.tokens_total) == (20, 10, 10)
    assert (now.epoch, now.window, now.waits_total) == (0, 0, 1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_may_close_whatever_the_parents_threads_were_doing(path):
    """Here the lock is held for ever in the child, as the thread that holds it is not there."""
    with open_loader(path) as loader:
        loader.get_next_batch(1)
        lock = loader._engine.coordinator._lock  # noqa: SLF001 - to be in the middle of a delivery
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                done.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                loader.close()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        done.set()
        holder.join()
        assert status == 0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:unclosed DataLoader:ResourceWarning")
def test_a_loader_may_be_collected_by_its_own_thread_whatever_that_is_doing(path, monkeypatch):
    start = ReadAhead.start
    monkeypatch.setattr(ReadAhead, "start", lambda *arguments: gc.collect() and None or start(*arguments))
    loader = open_loader(path, num_workers=1)
    loader.get_next_batch(1)
    thread = next(thread for thread in threading.enumerate() if thread.name == "asyncdata-service")
    gc.disable()
    try:
        cycle: list[Any] = [loader]
        cycle.append(cycle)
        loader.set_epoch(3)  # its thread is to begin anew, and collects
        del loader, cycle
        thread.join(NEVER_S / 2)
    finally:
        gc.enable()

    assert not thread.is_alive()


def test_a_close_that_was_interrupted_is_finished_by_the_next(path, monkeypatch):
    loader = open_loader(path)
    loader.get_next_batch(1)
    with monkeypatch.context() as patch:
        patch.setattr(service_of(loader), "close", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loader.close()
    loader.close()
    assert not is_alive(loader)


def test_closing_while_workers_start_is_closing_and_before_the_start_it_is_not_needed(path):
    for _ in range(3):
        loader = open_loader(path, num_workers=2)
        loader.start()
        loader.close()
    del loader
    open_loader(path)  # what was never used need not be closed


def test_closing_does_not_wait_for_a_row_that_never_ends(tmp_path):
    """Inline, the thread is left; it ends here with its gate."""
    path, gate = gated(tmp_path, 0)
    loader = open_loader(path, waits_for_a_file, shuffle=False)
    loader.start()
    until(lambda: loader.statistics().workers[0].state == "busy")
    loader.close()
    gate.touch()


def test_bad_rows_beyond_the_budget_are_told_once_however_often_calls_fail(path, tmp_path):
    told = tmp_path / "told"
    policy = {"policy": "quarantine", "path": str(told), "max": 0}
    with open_loader(path, fails_on_13, shuffle=False, bad_rows=policy) as loader:
        for _ in range(2):
            with pytest.raises(TooManyBadRowsError):
                loader.get_next_batch(14)
    assert len(told.read_bytes().splitlines()) == 1


def test_a_bad_row_is_passed_with_the_sample_after_it_and_not_with_fewer_than_were_asked_for(face, tmp_path):
    (path := tmp_path / "rows.jsonl").write_text('{"id": 0}\n{"id":\n{"id":\n{"id": 3}\n')
    with face(path, shuffle=False, bad_rows=BadRows(policy="skip", max=1)) as loader:
        assert ids(loader.get_samples(2, at_least=1)[0]) == [0]
        assert loader.statistics().bad_rows_total == 0
        state = loader.state_dict()
    with face(path, shuffle=False, bad_rows=BadRows(policy="skip", max=2)) as loader:
        loader.load_state_dict(state)
        assert ids(loader.get_samples(1)[0]) == [3]
        assert loader.statistics().bad_rows_total == 2


def test_an_epoch_of_which_a_batch_was_trained_may_end_after_a_restart_without_one(face, tmp_path):
    knobs = {"shuffle": False, "batch_size": 3, "drop_last": True, "commit": "on_ack"}
    with face(write_rows(tmp_path / "rows.jsonl", 5), **knobs) as loader:
        (batch,) = loader
        loader.ack(batch[1:])
        state = loader.state_dict()
    with face(tmp_path / "rows.jsonl", **knobs) as loader:
        loader.load_state_dict(state)
        assert [ids(batch) for batch in loader] == [[0, 1, 2]]
        assert loader.epoch == 2


@pytest.mark.thorough
def test_a_row_that_kills_workers_does_so_a_few_times_and_no_more(tmp_path):
    """Here it is one of the fixed rows, too, that are to show whether the tokens are the same after a resume."""
    path = write_rows(tmp_path / "rows.jsonl", 1000, {0: {"do": "die"}})
    with open_loader(path, worker_fns.as_told, num_workers=2, bad_rows="skip", buffer_size=50, epochs=1) as loader:
        assert sorted(ids(loader.get_next_batch(999))) == list(range(1, 1000))
        assert loader.statistics().worker_restarts_total <= 2 + 3 * 2


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["dies", "hangs"])
def test_a_row_that_kills_a_batch_is_told_from_the_row_that_was_read_last(path, what):
    """A tokenizer reads row by row, and says so, and then encodes all at once."""
    expected = order_of(path)
    knobs = {"num_workers": 1, "bad_rows": "skip", "epochs": 1, "limits": {"row_timeout_s": 0.5}}
    with open_loader(path, worker_fns.ReadsThenEncodes(what), **knobs) as loader:
        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == [number for number in expected if number != 13]
        assert loader.statistics().bad_rows_total == 1


@pytest.mark.parametrize(
    "poison",
    [(0, 17, 39), *(pytest.param(poison, marks=pytest.mark.thorough) for poison in ((16, 17), (0, 1, 2, 38, 39)))],
    ids=str,
)
def test_a_row_that_kills_workers_is_skipped_and_its_neighbours_are_not(jsonl_file, poison):
    path = jsonl_file({"id": number, "do": "die" if number in poison else "id"} for number in range(40))
    good = [number for number in range(40) if number not in poison]
    knobs = {"shuffle": False, "num_workers": 1, "bad_rows": "skip", "epochs": 1}
    with open_loader(path, worker_fns.as_told, **knobs, buffer_size=100) as loader:
        start = loader.state_dict()
        assert ids(loader.get_next_batch(len(good))) == good
        with pytest.raises(EndOfData):
            loader.get_next_batch(1)
        state, now = loader.state_dict(), loader.statistics()

    starts = [len(b"".join(path.read_bytes().splitlines(keepends=True)[:number])) for number in poison]
    assert state["journal"] == [[0, offset] for offset in starts]
    assert (now.bad_rows_total, now.dropped_total) == (len(poison), {"bad row AD423": len(poison)})
    with open_loader(path, worker_fns.as_told, **knobs) as loader:
        loader.load_state_dict({**start, "journal": [*state["journal"], [0, 5], [9, 0]]})  # and what begins no row
        assert ids(loader.get_next_batch(len(good))) == good
        assert loader.statistics().dropped_total.get("journal", 0) >= len(poison) - (39 in poison)
        assert loader.statistics().bad_rows_total == 0


ROOT = Path(__file__).parents[2]
WITHOUT = """
import ctypes, errno, os, signal, sys

sys.platform = "darwin"
for name in ("memfd_create", "eventfd", "pidfd_open", "sched_getaffinity", "sched_setscheduler", "P_PIDFD"):
    delattr(os, name)
del signal.pidfd_send_signal


def refuse(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args[0])
    if event == "ctypes.dlsym" and args[1] == "prctl":
        raise AttributeError(args[1])


sys.addaudithook(refuse)
"""
RUN = """
import asyncio, sys
from asyncdata import AsyncDataLoader, DataLoader, PackedCollator, PromptTokenizeFn, SoftPacking, TextTokenizeFn
from asyncdata.demo import tokenizer_folder

data, table, folder = sys.argv[1:]
prompts = PromptTokenizeFn(tokenizer_folder())
kept = {"shuffle": "full", "telemetry": folder, "cache": {"folder": folder}}
for source, more in ((data, {}), (data, kept), (table, {}), (table, kept)):
    with DataLoader(source, tokenize_fn=prompts, batch_size=16, num_workers=0, epochs=1, **more) as loader:
        print([(sample.index, sample.prompt) for batch in loader for sample in batch])
        loader.save(f"{folder}/state")
texts, packs = TextTokenizeFn(tokenizer_folder(), text_key="input"), SoftPacking(max_length=64)
knobs = {"packing": packs, "collate_fn": PackedCollator(max_length=64), "batch_size": 1, "num_workers": 0}
with DataLoader(data, tokenize_fn=texts, **knobs) as loader:
    print([batch["input_ids"].sum() for batch in loader])


async def rollouts():
    async with AsyncDataLoader(data, tokenize_fn=prompts, n_samples_per_prompt=2, num_workers=0) as loader:
        groups = await loader.get_samples(3)
        loader.add_samples(groups[1:])
        print([[sample.prompt for sample in group] for group in await loader.get_samples(3)])


asyncio.run(rollouts())
"""


def printed_by(program, *words):
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_loader_without_workers_needs_nothing_that_linux_alone_has(tmp_path):
    data = write(tmp_path / "data.jsonl", jsonl({"input": f"What is {number}?"} for number in range(100)))
    rows = [{"input": f"How much is {number}?"} for number in range(100)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), table := tmp_path / "table.parquet")
    (here := tmp_path / "here").mkdir()
    (there := tmp_path / "there").mkdir()
    assert printed_by(WITHOUT + RUN, data, table, there) == printed_by(RUN, data, table, here) != ""
