"""``AsyncDataLoader`` on every event loop, and cancelled calls. What it delivers is in ``test_loader_batches.py``."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asyncdata import AsyncDataLoader, LoaderClosedError, PrefetchTimeoutError, Sample
from tests.support.closing import is_alive, num_closing, slow_to_close
from tests.support.combinations import each_value
from tests.support.loaders import gated as gated_rows
from tests.support.loaders import num_waiting
from tests.support.loading import NEVER_S, SHUFFLE, ids, order_of, write_rows
from tests.support.tokenize_fns import row_id, waits_for_a_file

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.asyncio

NUM_ROWS = 200
CALLERS = {"asyncio": ("asyncio", {}), "uvloop": ("asyncio", {"use_uvloop": True}), "trio": ("trio", {})}


def make(path: Path, tokenize_fn: Any = row_id, **knobs: Any) -> AsyncDataLoader:
    """A loader that fails rather than hangs, inline where nothing else is asked for."""
    settings = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240} | knobs
    return AsyncDataLoader(path, tokenize_fn=tokenize_fn, **settings)


@pytest.fixture
def path(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", NUM_ROWS)


class Gated:
    """Rows of which the first waits for a file."""

    def __init__(self, folder: Path) -> None:
        self.path, self.gate = gated_rows(folder, 0)

    def open(self) -> None:
        self.gate.touch()

    def make(self, **knobs: Any) -> AsyncDataLoader:
        return make(self.path, waits_for_a_file, shuffle=False, **knobs)


@pytest.fixture
def gated(tmp_path) -> Gated:
    return Gated(tmp_path)


async def until(condition: Callable[[], object]) -> None:
    """Until another thread has done its part; polled, as there is nothing to wait for."""
    with anyio.fail_after(NEVER_S):
        while not condition():  # noqa: ASYNC110 - as above
            await anyio.sleep(0.002)


async def on(caller: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """What ``main`` returns, on a loop of the caller's kind, in a thread of its own."""
    backend, options = CALLERS[caller]
    return await anyio.to_thread.run_sync(partial(anyio.run, main, backend=backend, backend_options=options))


# Loops


@pytest.mark.thorough
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
async def test_any_loop_may_wait_for_any_service(path, caller, backend):
    async def main() -> list[int]:
        async with make(path, event_loop=backend, num_workers=1, batch_size=64, buffer_size=16) as loader:
            seen = ids(await loader.get_next_batch(30))
            seen += [number async for batch in loader for number in ids(batch)]
            loader.set_epoch(2)
            return seen + ids(await loader.get_next_batch(5))

    expected = order_of(path, 3)
    assert await on(caller, main) == expected[:NUM_ROWS] + expected[2 * NUM_ROWS : 2 * NUM_ROWS + 5]


async def test_a_wait_does_not_hold_up_the_loop(gated):
    turns = 0
    async with gated.make() as loader, anyio.create_task_group() as group:

        async def wait() -> None:
            assert ids(await loader.get_next_batch(3)) == [0, 1, 2]
            group.cancel_scope.cancel()

        group.start_soon(wait)
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1
            if turns == 1000:
                gated.open()

    assert turns >= 1000


@pytest.mark.thorough
async def test_tasks_on_several_loops_and_threads_share_one_loader_and_are_served_as_they_asked(path):
    """One face in its loop, the other's waits in threads: the same order for all."""
    expected = order_of(path, 10)
    taken: list[list[int]] = []

    async def take(loader: AsyncDataLoader, size: int) -> None:
        for _ in range(30):
            taken.append(ids(await loader.get_next_batch(size)))  # noqa: PERF401 - several tasks append

    async with make(path, num_workers=2, buffer_size=16) as loader:
        in_order = await asyncio.gather(*(loader.get_next_batch(7) for _ in range(50)))
        async with anyio.create_task_group() as group:
            group.start_soon(take, loader, 3)
            for caller in CALLERS:
                group.start_soon(on, caller, partial(take, loader, 5))

    assert [number for batch in in_order for number in ids(batch)] == expected[:350]
    rest = expected[350 : 350 + 30 * 3 + 3 * 30 * 5]
    assert sorted(number for batch in taken for number in batch) == sorted(rest)
    slices = {tuple(rest[i : i + size]) for size in (3, 5) for i in range(len(rest))}
    assert {tuple(batch) for batch in taken} <= slices


# Cancellation


async def scope(loader: AsyncDataLoader, size: int, seconds: float) -> list[int]:
    found: list[int] = []
    with anyio.move_on_after(seconds):
        found += ids(await loader.get_next_batch(size))
    return found


async def task_cancel(loader: AsyncDataLoader, size: int, seconds: float) -> list[int]:
    task = asyncio.create_task(loader.get_next_batch(size))
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait({task})
    return [] if task.cancelled() else ids(task.result())


async def wait_for(loader: AsyncDataLoader, size: int, seconds: float) -> list[int]:
    try:
        return ids(await asyncio.wait_for(loader.get_next_batch(size), seconds))
    except TimeoutError:
        return []


async def timeout_of_ours(loader: AsyncDataLoader, size: int, seconds: float) -> list[int]:
    try:
        return ids(await loader.get_next_batch(size, timeout_s=seconds))
    except PrefetchTimeoutError:
        return []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("give_up", "caller"),
    [
        *[(give_up, caller) for give_up in (scope, timeout_of_ours) for caller in CALLERS],
        *[(give_up, caller) for give_up in (task_cancel, wait_for) for caller in ("asyncio", "uvloop")],
    ],
)
async def test_what_is_given_up_is_not_lost(path, give_up, caller):
    """Calls that are waited for some time, often too short."""

    async def main() -> tuple[list[int], int]:
        chance, seen, num_given_up = random.Random(1), [], 0
        async with make(path, num_workers=1, buffer_size=4) as loader:
            for _ in range(400):
                seconds = chance.choice([0.0, 0.0001, 0.001, 0.01]) * chance.random()
                found = await give_up(loader, chance.choice([1, 5, 30]), seconds)
                num_given_up += not found
                seen += found
        return seen, num_given_up

    seen, num_given_up = await on(caller, main)
    assert num_given_up > 50
    assert seen == order_of(path, 60)[: len(seen)]


@pytest.mark.parametrize(
    ("num_steps", "is_ready"),
    [
        (1, False),
        *[pytest.param(*case.values, marks=pytest.mark.thorough) for case in each_value(range(6), [True, False])],
    ],
)
async def test_cancelled_at_any_step_it_has_consumed_nothing(gated, num_steps, is_ready):
    """After so many turns of the loop, before and after the data has come."""
    async with gated.make() as loader:
        task = asyncio.create_task(loader.get_next_batch(3))
        await until(lambda: num_waiting(loader) == 1)
        if is_ready:
            gated.open()
            await anyio.to_thread.run_sync(_until_ready, loader)
        for _ in range(num_steps):
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        await asyncio.wait({task})
        batch = [] if task.cancelled() else ids(task.result())
        gated.open()
        batch += ids(await loader.get_next_batch(6))

    assert was_done <= is_ready
    assert batch[:6] == [0, 1, 2, 3, 4, 5]
    assert batch == list(range(len(batch)))


def _until_ready(loader: AsyncDataLoader) -> None:
    """In a thread; the task may be woken meanwhile, and is then some steps ahead."""
    while loader.statistics().ready_samples < 3 and loader.statistics().samples_total == 0:
        time.sleep(0.001)


async def test_a_cancelled_wait_lets_the_next_one_pass(gated):
    async with gated.make() as loader:
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(loader.get_next_batch(2)))
            await until(lambda number=number: num_waiting(loader) == number + 1)
        tasks[0].cancel()
        tasks[2].cancel()
        await until(lambda: num_waiting(loader) == 2)
        gated.open()

        assert [ids(await tasks[number]) for number in (1, 3)] == [[0, 1], [2, 3]]
        assert [tasks[number].cancelled() for number in (0, 2)] == [True, True]


async def test_a_filters_choice_stays_in_the_buffer_when_its_call_is_cancelled(gated):
    async with gated.make() as loader:
        mine = Sample(prompt="mine")
        loader.add_samples([[mine]])
        with anyio.move_on_after(0.05):
            await loader.get_next_batch(2)
        assert loader.statistics().buffered_groups == 1
        gated.open()
        batch = await loader.get_next_batch(2)

    assert batch[0] is mine
    assert ids(batch[1:]) == [0]


async def test_the_loop_may_end_while_others_go_on_waiting(gated):
    """A loop that is gone is not woken, and disturbs no other."""
    async with gated.make() as loader:

        async def give_up() -> None:
            asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel)
            await loader.get_next_batch(1)

        with pytest.raises(asyncio.CancelledError):
            await anyio.to_thread.run_sync(asyncio.run, give_up())
        gated.open()
        assert ids(await loader.get_next_batch(3)) == [0, 1, 2]


# Closing


@pytest.mark.parametrize("caller", CALLERS)
async def test_closing_ends_every_wait(gated, caller):
    async def main() -> list[str]:
        told: list[str] = []

        async def wait() -> None:
            try:
                await loader.get_next_batch(1, timeout_s=NEVER_S)
            except LoaderClosedError as error:
                told.append(str(error))

        async with gated.make(num_workers=1) as loader:
            with anyio.fail_after(NEVER_S / 2):
                async with anyio.create_task_group() as group:
                    for _ in range(3):
                        group.start_soon(wait)
                    await until(lambda: num_waiting(loader) == 3)
                    await loader.aclose()
        return told

    assert await on(caller, main) == ["AD502 the loader was closed by aclose()"] * 3
    gated.open()


async def test_a_second_aclose_waits_for_the_first(path, monkeypatch):
    loader = make(path)
    await loader.get_next_batch(1)
    should, may = slow_to_close(loader, monkeypatch)
    was_alive: list[bool] = []

    async def close() -> None:
        await loader.aclose()
        was_alive.append(is_alive(loader))

    first = asyncio.create_task(close())
    await until(should.is_set)
    second = asyncio.create_task(close())
    await until(lambda: second.done() or num_closing() == 2)
    may.set()
    await asyncio.gather(first, second)

    assert was_alive == [False, False]


@pytest.mark.parametrize("way", ["cancelled", "an error"])
async def test_a_block_that_does_not_end_well_is_closed_all_the_same(path, way):
    with anyio.CancelScope() as outer:
        try:
            async with make(path, num_workers=1) as loader:
                await loader.get_next_batch(1)
                if way == "an error":
                    raise ZeroDivisionError
                outer.cancel()
                await anyio.lowlevel.checkpoint()
        except ZeroDivisionError:
            assert way == "an error", "it is the user's"

    with pytest.raises(LoaderClosedError):
        await loader.get_next_batch(1)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
async def test_a_task_that_is_cancelled_while_it_closes_has_closed(path, num_steps):
    loader = make(path)
    await loader.get_next_batch(1)
    task = asyncio.create_task(loader.aclose())
    for _ in range(num_steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})

    if num_steps:  # before its first step it was never called
        assert not is_alive(loader)
        with pytest.raises(LoaderClosedError, match="AD502"):
            loader.start()
    await loader.aclose()
