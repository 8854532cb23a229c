"""What a call that waits says and costs, how long it may wait and how it is cancelled, on every event loop."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata import AsyncDataLoader, DataLoader, Limits, Sample, Telemetry
from asyncdata.errors import ConfigError, LoaderClosedError, PrefetchTimeoutError, WorkerError
from asyncdata.telemetry.reader import read
from tests.support import worker_fns
from tests.support.faults import until
from tests.support.loaders import FACES, Awaited, gated, is_alive, make, num_closing, num_waiting, slow_to_close
from tests.support.loading import NEVER_S, NUM_ROWS, ids, line_of, order_of, waits_for_a_file, write_rows
from tests.support.pages import read_page
from tests.support.telemetry_files import page_of

each_face = pytest.mark.parametrize("face", FACES.values(), ids=FACES)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_timeout_says_why_and_consumes_nothing(tmp_path, num_workers):
    first = order_of(write_rows(tmp_path / "gated.jsonl", NUM_ROWS))[40]
    path, gate = gated(tmp_path, first)
    expected = order_of(path)
    turn = expected.index(first)

    with make(path, waits_for_a_file, num_workers=num_workers, buffer_size=4) as loader:
        seen = ids(loader.get_next_batch(turn))
        until(lambda: loader.statistics().workers[0].state == "busy")
        with capture_logs() as logs, pytest.raises(PrefetchTimeoutError) as caught:
            loader.get_next_batch(5, timeout_s=0.3)
        gate.touch()
        seen += ids(loader.get_next_batch(50))

    line, offset = line_of(path, first)
    message, diagnosis = str(caught.value), caught.value.diagnosis
    for part in (
        r"^AD510 no data for \d+\.\d s: 0 samples are ready, 5 more are needed",
        r"stage: tokenize: the workers have \d+ rows and cannot keep up, or one hangs \(busy for ",
        r"workers: busy \d+\.\d",
        rf"oldest row in flight: {path}:{line} \(byte {offset}\)",
        "try: more num_workers, a larger buffer_size",
    ):
        assert re.search(part, message)
    json.dumps(diagnosis)
    assert diagnosis["oldest_row"]["byte_offset"] == offset
    assert diagnosis["statistics"]["workers"][0]["state"] == "busy"
    assert isinstance(caught.value, TimeoutError)
    (event,) = [log for log in logs if log["event"] == "loader.timeout"]
    assert event.pop("workers") in message and event.pop("waited_s") >= 0.3
    told = {"stage": "tokenize", "missing": 5, "row": f"{path}:{line} (byte {offset})", "setting": "num_workers"}
    assert event == {"event": "loader.timeout", "log_level": "warning", **told}
    assert seen == expected[: turn + 50]


@each_face
def test_a_timeout_of_the_loader_holds_for_every_call(tmp_path, face):
    path, gate = gated(tmp_path, 0)
    with face(path, waits_for_a_file, shuffle=False, timeout_s=0.1, batch_size=2) as loader:
        loop = iter(loader)
        for call in (lambda: loader.get_next_batch(1), lambda: loader.get_samples(1), lambda: next(loop)):
            with pytest.raises(PrefetchTimeoutError):
                call()
        gate.touch()
        assert ids(loader.get_next_batch(2, timeout_s=240)) == [0, 1]
        assert ids(next(loop)) == [2, 3], "a loop goes on after it"


def test_a_timeout_while_workers_start_says_so(path, tmp_path):
    slow = worker_fns.Opening("waits", str(tmp_path))
    with make(path, slow, num_workers=2) as loader:
        with pytest.raises(PrefetchTimeoutError, match="stage: start: the workers are "):
            loader.get_next_batch(1, timeout_s=0.5)
        (tmp_path / "open").touch()
        assert ids(loader.get_next_batch(3)) == order_of(path)[:3]


@each_face
@pytest.mark.parametrize("value", [float("inf"), 1e300, np.float32("inf")])
def test_a_call_may_wait_for_ever_by_infinity(path, face, value):
    with face(path, timeout_s=value, shuffle="full") as loader:
        assert len(loader.get_next_batch(3)) == 3
        loader.set_epoch(3)
        assert len(loader.get_next_batch(3, timeout_s=value)) == 3
        assert loader.num_rows(timeout_s=value) == NUM_ROWS


@each_face
@pytest.mark.parametrize("value", ["1", float("nan"), True])
def test_a_calls_timeout_that_is_no_number_is_named_and_nothing_is_consumed(path, face, value):
    with face(path, shuffle="full") as loader:
        expected = ids(loader.get_next_batch(10))
    with face(path, shuffle="full") as loader:
        for num_done in (0, 5):  # with nothing ready, and with rows that are
            for call in (lambda: loader.get_next_batch(5, timeout_s=value), lambda: loader.num_rows(timeout_s=value)):
                with pytest.raises(ConfigError, match="^`timeout_s` is a number of seconds"):
                    call()
            assert ids(loader.get_next_batch(5)) == expected[num_done : num_done + 5]


@pytest.mark.thorough
def test_a_call_that_waits_is_counted_by_what_it_waits_for_while_it_lasts(tmp_path):
    path, gate = gated(tmp_path, 0)
    telemetry = Telemetry(folder=str(tmp_path / "run"), interval_s=0.05)
    knobs = {"shuffle": False, "num_workers": 1, "telemetry": telemetry}
    with make(path, waits_for_a_file, **knobs) as loader, ThreadPoolExecutor(1) as pool:
        call = pool.submit(loader.get_next_batch, 1)
        try:
            until(lambda: loader.statistics().data_wait_seconds_total > 0.1)
            waits = loader.statistics().waits_total
            until(lambda: (now := read(tmp_path / "run").totals) is not None and now.wait_s.get("tokenize", 0.0) > 0.1)
        finally:
            gate.touch()
        assert len(call.result()) == waits == 1
        seconds = loader.statistics().data_wait_seconds_total

    totals = read(tmp_path / "run").totals
    assert totals is not None
    assert (totals.waits, totals.first_s) == (1, totals.wait_s)
    assert sum(totals.wait_s.values()) == pytest.approx(seconds)


def test_it_reads_ahead_from_the_start_and_no_further_than_it_may_and_a_timeout_of_nothing_takes_what_is_there(path):
    with make(path, buffer_size=10, dp_size=3) as loader:
        until(lambda: loader.statistics().ready_samples == 30)
        now = loader.statistics()
        assert (now.capacity_samples, now.in_flight_rows, now.samples_total, now.waits_total) == (30, 0, 0, 0)
        assert ids(loader.get_next_batch(30, timeout_s=0)) == order_of(path)[:30]
    with make(path, limits=Limits(max_ready_bytes=1)) as loader:
        assert ids(loader.get_next_batch(300)) == order_of(path, 2)[:300], "a budget of bytes stops nothing"


def test_waiting_threads_are_served_in_the_order_in_which_they_came_and_one_that_gives_up_lets_the_next_pass(tmp_path):
    path, gate = gated(tmp_path, 0)
    taken: dict[int, list[int]] = {}

    def work(loader: DataLoader, number: int) -> None:
        taken[number] = ids(loader.get_next_batch(4))

    with make(path, waits_for_a_file, shuffle=False) as loader:
        with pytest.raises(PrefetchTimeoutError):
            loader.get_next_batch(1, timeout_s=0.05)
        threads = []
        for number in range(4):
            threads.append(threading.Thread(target=work, args=(loader, number)))
            threads[-1].start()
            until(lambda number=number: num_waiting(loader) == number + 1)
        gate.touch()
        for thread in threads:
            thread.join()

    assert taken == {number: list(range(4 * number, 4 * number + 4)) for number in range(4)}


def test_loaders_may_be_used_side_by_side_inside_a_running_loop(path):
    async def main() -> list[list[int]]:
        with make(path) as loader, make(path, seed=3) as another:
            return [ids(one.get_next_batch(20)) for one in (loader, another)]

    assert asyncio.run(main()) == [order_of(path)[:20], order_of(path, seed=3)[:20]]


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on the system has no room for one more of the threads that the loop starts; their names."""
    refused, start = [], threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if "AnyIO" not in thread.name:
            return start(thread)
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return refused


def test_workers_need_no_thread_and_without_workers_one_that_cannot_be_started_is_named(path, no_more_threads):
    with make(path, num_workers=1) as loader:
        assert ids(loader.get_next_batch(300)) == order_of(path, 2)[:300]
    assert not no_more_threads, "the trainer's process asked for no thread"
    with make(path) as loader:
        for _ in range(2):
            with pytest.raises(WorkerError, match="^AD426 the loader cannot continue: can't start new thread; raise"):
                loader.get_next_batch(3)
    assert no_more_threads


def test_an_awaited_loader_is_closed_without_a_thread(path, no_more_threads):
    with Awaited(path, num_workers=1) as loader:
        assert len(loader.get_next_batch(3)) == 3
        loader.close()
        assert no_more_threads
        with pytest.raises(LoaderClosedError):
            loader.get_next_batch(3)


def test_loaders_may_be_nested_in_one_anothers_callbacks(path, tmp_path):
    """A tokenize function, a collate function and a filter each use a loader of their own."""
    other = write_rows(tmp_path / "other.jsonl", 50)
    with make(other) as inner:

        def tokenize(row):
            return {"input_ids": [row["id"]], "label": ids(inner.get_next_batch(1))}

        def choose(buffer, number):
            inner.get_next_batch(1)
            return buffer[:number]

        def collate(samples):
            return ids(inner.get_next_batch(len(samples)))

        with make(path, tokenize, collate_fn=collate, buffer_filter=choose, batch_size=5, buffer_size=10) as outer:
            batch = outer.get_next_batch(5)
            outer.add_samples([[batch[0]]])
            assert outer.get_next_batch(1)[0] is batch[0]
            assert len(next(iter(outer))) == 5

        assert ids(batch) == order_of(path)[:5]
        assert [sample.label for sample in batch] == [[number] for number in order_of(other)[:5]]


def tells_that_it_hangs(row):
    """Makes a file beside the gate before it waits for that."""
    if "gate" in row:
        Path(row["gate"]).with_name("hangs").touch()
    return waits_for_a_file(row)


def test_the_time_for_which_a_worker_is_busy_does_not_fall_while_it_hangs(tmp_path):
    path, gate = gated(tmp_path, 7)
    seen: list[float] = []

    def is_over() -> bool:
        (worker,) = loader.statistics().workers
        seen.append(worker.busy_s)
        return worker.num_rows_done == 7 and worker.busy_s >= 1.5

    limits = Limits(row_timeout_s=4)  # its progress is looked at each second
    with make(path, tells_that_it_hangs, shuffle=False, num_workers=1, buffer_size=64, limits=limits) as loader:
        until((tmp_path / "hangs").exists)
        until(is_over)
        gate.touch()
    assert seen == sorted(seen)


# User code that holds the event loop: the samples are ready

HELD = r"the samples are ready, and your code has held the event loop for (\d+\.\d) s"
NUM_CALLS = 3


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_other_code_holds_is_named_and_is_no_wait_for_data(tmp_path, backend):
    path, gate = gated(tmp_path, 0)
    taken: list[list[int]] = []
    began = time.monotonic()

    async def main():
        knobs = {"shuffle": False, "num_workers": 0, "progress": "log", "telemetry": tmp_path / "run"}
        async with AsyncDataLoader(path, tokenize_fn=waits_for_a_file, **knobs) as loader:

            async def take():  # with a timeout that is over before the loop runs it
                taken.append(ids(await loader.get_next_batch(10, timeout_s=1.5)))

            async with anyio.create_task_group() as group:
                for _ in range(NUM_CALLS):
                    group.start_soon(take)
                while num_waiting(loader) < NUM_CALLS:
                    await anyio.lowlevel.checkpoint()
                gate.touch()
                until(lambda: any(float(held) >= 1.5 for held in told()))  # blocks: this is the fault
                waited_s = loader.statistics().data_wait_seconds_total
            return waited_s, loader.statistics()

    def told():
        return re.findall(HELD, " ".join(log["reason"] for log in logs if log["event"] == "loader.waiting"))

    with capture_logs() as logs:
        waited_s, now = anyio.run(main, backend=backend)
    elapsed_s = time.monotonic() - began

    assert sorted(taken) == [list(range(first, first + 10)) for first in range(0, 10 * NUM_CALLS, 10)]
    assert 1.5 <= now.loop_held_seconds_total <= elapsed_s, "a loop that three calls wait for counts once"
    assert now.data_wait_seconds_total <= NUM_CALLS * (elapsed_s - now.loop_held_seconds_total)
    assert (now.waits_total, now.data_wait_seconds_total) == (NUM_CALLS, waited_s), "it grew while the loop was held"
    (event,) = [log for log in logs if log["event"] == "loader.loop_held"]
    assert (event["log_level"], event["held_s"] >= 1.5) == ("warning", True)
    totals = read(tmp_path / "run").totals
    assert totals is not None and totals.held_s == now.loop_held_seconds_total
    assert sum(totals.wait_s.values()) == pytest.approx(now.data_wait_seconds_total)
    assert "Your code held the event loop for " in read_page(page_of(tmp_path / "run", tmp_path / "r.html")).text


def test_a_call_that_a_free_loop_runs_at_once_is_a_wait_for_data(tmp_path):
    path, gate = gated(tmp_path, 0)

    async def main():
        async with AsyncDataLoader(path, tokenize_fn=waits_for_a_file, shuffle=False, num_workers=0) as loader:
            async with anyio.create_task_group() as group:
                group.start_soon(loader.get_next_batch, 10)
                while loader.statistics().data_wait_seconds_total < 1.5:
                    await anyio.lowlevel.checkpoint()
                gate.touch()
            return loader.statistics()

    with capture_logs() as logs:
        now = anyio.run(main)
    assert now.data_wait_seconds_total >= 1.5
    assert [log for log in logs if log["event"] == "loader.loop_held"] == []


CALLERS = {"asyncio": ("asyncio", {}), "uvloop": ("asyncio", {"use_uvloop": True}), "trio": ("trio", {})}


make_async = partial(make, face=AsyncDataLoader)


@pytest.fixture
def gated_loader(tmp_path) -> tuple[Callable[..., AsyncDataLoader], Callable[[], None]]:
    """Opens a loader over rows of which the first waits for a file; and what makes the file."""
    rows, gate = gated(tmp_path, 0)
    return partial(make_async, rows, waits_for_a_file, shuffle=False), gate.touch


async def until_async(condition: Callable[[], object]) -> None:
    """Until another thread has done its part; polled, as there is nothing to wait for."""
    with anyio.fail_after(NEVER_S):
        while not condition():  # noqa: ASYNC110 - as above
            await anyio.sleep(0.002)


async def on(caller: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """What ``main`` returns, on a loop of the caller's kind, in a thread of its own."""
    backend, options = CALLERS[caller]
    return await anyio.to_thread.run_sync(partial(anyio.run, main, backend=backend, backend_options=options))


@pytest.mark.asyncio
@pytest.mark.thorough
async def test_tasks_on_several_loops_and_threads_share_one_loader_and_are_served_as_they_asked(path):
    """One face in its loop, the other's waits in threads: the same order for all, also where others give up."""
    expected = order_of(path, 10)
    taken: list[list[int]] = []

    async def take(loader: AsyncDataLoader, size: int) -> None:
        for number in range(40):
            with anyio.move_on_after(0 if number % 4 == 0 else None):
                taken.append(ids(await loader.get_next_batch(size)))

    async with make_async(path, num_workers=2, buffer_size=16) as loader:
        in_order = await asyncio.gather(*(loader.get_next_batch(7) for _ in range(50)))
        async with anyio.create_task_group() as group:
            group.start_soon(take, loader, 3)
            for caller in CALLERS:
                group.start_soon(on, caller, partial(take, loader, 5))

    assert [number for batch in in_order for number in ids(batch)] == expected[:350]
    assert len(taken) >= 4 * 30
    rest = expected[350 : 350 + sum(map(len, taken))]
    assert sorted(number for batch in taken for number in batch) == sorted(rest)
    slices = {tuple(rest[i : i + size]) for size in (3, 5) for i in range(len(rest))}
    assert {tuple(batch) for batch in taken} <= slices


@pytest.mark.asyncio
async def test_a_cancelled_wait_lets_the_next_one_pass(gated_loader):
    make, open_gate = gated_loader
    async with make() as loader:
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(loader.get_next_batch(2)))
            await until_async(lambda number=number: num_waiting(loader) == number + 1)
        tasks[0].cancel()
        tasks[2].cancel()
        await until_async(lambda: num_waiting(loader) == 2)
        open_gate()

        assert [ids(await tasks[number]) for number in (1, 3)] == [[0, 1], [2, 3]]
        assert [tasks[number].cancelled() for number in (0, 2)] == [True, True]


@pytest.mark.asyncio
async def test_a_filters_choice_stays_in_the_buffer_when_its_call_is_cancelled(gated_loader):
    make, open_gate = gated_loader
    async with make() as loader:
        mine = Sample(prompt="mine")
        loader.add_samples([[mine]])
        with anyio.move_on_after(0.05):
            await loader.get_next_batch(2)
        assert loader.statistics().buffered_groups == 1
        open_gate()
        batch = await loader.get_next_batch(2)
    assert batch[0] is mine
    assert ids(batch[1:]) == [0]


@pytest.mark.asyncio
async def test_the_loop_may_end_while_others_go_on_waiting(gated_loader):
    """A loop that is gone is not woken, and disturbs no other."""
    make, open_gate = gated_loader
    async with make() as loader:

        async def give_up() -> None:
            asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel)
            await loader.get_next_batch(1)

        with pytest.raises(asyncio.CancelledError):
            await anyio.to_thread.run_sync(asyncio.run, give_up())
        open_gate()
        assert ids(await loader.get_next_batch(3)) == [0, 1, 2]


@pytest.mark.asyncio
@pytest.mark.parametrize("caller", CALLERS)
async def test_closing_ends_every_wait(gated_loader, caller):
    make, open_gate = gated_loader

    async def main() -> list[str]:
        told: list[str] = []

        async def wait() -> None:
            with pytest.raises(LoaderClosedError) as caught:
                await loader.get_next_batch(1, timeout_s=NEVER_S)
            told.append(str(caught.value))

        async with make(num_workers=1) as loader:
            with anyio.fail_after(NEVER_S / 2):
                async with anyio.create_task_group() as group:
                    for _ in range(3):
                        group.start_soon(wait)
                    await until_async(lambda: num_waiting(loader) == 3)
                    await loader.aclose()
        return told

    assert await on(caller, main) == ["AD502 the loader was closed by aclose()"] * 3
    open_gate()


@pytest.mark.asyncio
async def test_a_second_aclose_waits_for_the_first(path, monkeypatch):
    loader = make_async(path)
    await loader.get_next_batch(1)
    should, may = slow_to_close(loader, monkeypatch)
    was_alive: list[bool] = []

    async def close() -> None:
        await loader.aclose()
        was_alive.append(is_alive(loader))

    first = asyncio.create_task(close())
    await until_async(should.is_set)
    second = asyncio.create_task(close())
    await until_async(lambda: second.done() or num_closing() == 2)
    may.set()
    await asyncio.gather(first, second)

    assert was_alive == [False, False]
