"""``AsyncDataLoader`` on every event loop, and cancelled calls. What it delivers is in ``test_loader_batches.py``."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asyncdata import AsyncDataLoader, Sample
from asyncdata.errors import LoaderClosedError
from tests.support.closing import is_alive, num_closing, slow_to_close
from tests.support.loaders import gated as gated_rows
from tests.support.loaders import num_waiting
from tests.support.loading import NEVER_S, SHUFFLE, ids, order_of
from tests.support.tokenize_fns import row_id, waits_for_a_file

pytestmark = pytest.mark.asyncio

CALLERS = {"asyncio": ("asyncio", {}), "uvloop": ("asyncio", {"use_uvloop": True}), "trio": ("trio", {})}


def make(path: Path, tokenize_fn: Any = row_id, **knobs: Any) -> AsyncDataLoader:
    settings = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240} | knobs
    return AsyncDataLoader(path, tokenize_fn=tokenize_fn, **settings)


@pytest.fixture
def gated(tmp_path) -> tuple[Callable[..., AsyncDataLoader], Callable[[], None]]:
    """Opens a loader over rows of which the first waits for a file; and what makes the file."""
    rows, gate = gated_rows(tmp_path, 0)
    return partial(make, rows, waits_for_a_file, shuffle=False), gate.touch


async def until(condition: Callable[[], object]) -> None:
    """Until another thread has done its part; polled, as there is nothing to wait for."""
    with anyio.fail_after(NEVER_S):
        while not condition():  # noqa: ASYNC110 - as above
            await anyio.sleep(0.002)


async def on(caller: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """What ``main`` returns, on a loop of the caller's kind, in a thread of its own."""
    backend, options = CALLERS[caller]
    return await anyio.to_thread.run_sync(partial(anyio.run, main, backend=backend, backend_options=options))


async def test_a_wait_does_not_hold_up_the_loop(gated):
    make, open_gate = gated
    async with make() as loader:
        task = asyncio.create_task(loader.get_next_batch(3))
        for _ in range(1000):
            await anyio.lowlevel.checkpoint()
        open_gate()
        assert ids(await task) == [0, 1, 2]


@pytest.mark.thorough
async def test_tasks_on_several_loops_and_threads_share_one_loader_and_are_served_as_they_asked(path):
    """One face in its loop, the other's waits in threads: the same order for all, also where others give up."""
    expected = order_of(path, 10)
    taken: list[list[int]] = []

    async def take(loader: AsyncDataLoader, size: int) -> None:
        for number in range(40):
            with anyio.move_on_after(0 if number % 4 == 0 else None):
                taken.append(ids(await loader.get_next_batch(size)))

    async with make(path, num_workers=2, buffer_size=16) as loader:
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


async def test_a_cancelled_wait_lets_the_next_one_pass(gated):
    make, open_gate = gated
    async with make() as loader:
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(loader.get_next_batch(2)))
            await until(lambda number=number: num_waiting(loader) == number + 1)
        tasks[0].cancel()
        tasks[2].cancel()
        await until(lambda: num_waiting(loader) == 2)
        open_gate()

        assert [ids(await tasks[number]) for number in (1, 3)] == [[0, 1], [2, 3]]
        assert [tasks[number].cancelled() for number in (0, 2)] == [True, True]


async def test_a_filters_choice_stays_in_the_buffer_when_its_call_is_cancelled(gated):
    make, open_gate = gated
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


async def test_the_loop_may_end_while_others_go_on_waiting(gated):
    """A loop that is gone is not woken, and disturbs no other."""
    make, open_gate = gated
    async with make() as loader:

        async def give_up() -> None:
            asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel)
            await loader.get_next_batch(1)

        with pytest.raises(asyncio.CancelledError):
            await anyio.to_thread.run_sync(asyncio.run, give_up())
        open_gate()
        assert ids(await loader.get_next_batch(3)) == [0, 1, 2]


@pytest.mark.parametrize("caller", CALLERS)
async def test_closing_ends_every_wait(gated, caller):
    make, open_gate = gated

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
                    await until(lambda: num_waiting(loader) == 3)
                    await loader.aclose()
        return told

    assert await on(caller, main) == ["AD502 the loader was closed by aclose()"] * 3
    open_gate()


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
