"""``AsyncDataLoader``: what an ``await``-based rollout loop does with it, on every event loop, and when cancelled."""

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

from asyncdata import (
    AsyncDataLoader,
    BadRowError,
    ConfigError,
    EndOfData,
    LoaderClosedError,
    NoSamplesError,
    PrefetchTimeoutError,
    Sample,
)
from tests.support.closing import is_alive, num_closing, slow_to_close
from tests.support.combinations import each_value
from tests.support.loading import NEVER_S, SHUFFLE, ids, line_of, order_of, write_rows
from tests.support.tokenize_fns import all_dropped, fails_on_13, kills_on_13, row_id, waits_for_a_file

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
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


@pytest.fixture
def gated(tmp_path) -> tuple[Path, Path]:
    """Rows of which the first waits for a file, and the file."""
    gate = tmp_path / "gate"
    return write_rows(tmp_path / "gated.jsonl", NUM_ROWS, {0: {"gate": str(gate)}}), gate


async def until(condition: Callable[[], object]) -> None:
    """Until another thread has done its part; polled, as there is nothing to wait for."""
    with anyio.fail_after(NEVER_S):
        while not condition():  # noqa: ASYNC110 - as above
            await anyio.sleep(0.002)


async def on(caller: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """What ``main`` returns, on a loop of the caller's kind, in a thread of its own."""
    backend, options = CALLERS[caller]
    return await anyio.to_thread.run_sync(partial(anyio.run, main, backend=backend, backend_options=options))


def num_waiting(loader: AsyncDataLoader) -> int:
    return len(loader._engine.coordinator._requests)  # noqa: SLF001 - nothing public counts them


# The same names, awaited


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1, 2])
async def test_a_batch_is_a_slice_of_the_order_across_epochs(path, num_workers):
    sizes = [1, 7, 64, 200, 250]

    async with make(path, num_workers=num_workers) as loader:
        batches = [await loader.get_next_batch(size) for size in sizes]

    assert list(map(len, batches)) == sizes
    assert ids(sample for batch in batches for sample in batch) == order_of(path, 3)[: sum(sizes)]


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


async def test_a_rollout_loop_gives_back_what_it_could_not_finish(path):
    expected = order_of(path, 2)
    finished: list[int] = []

    async with make(path, n_samples_per_prompt=2, num_workers=1) as loader:
        for step in range(20):
            groups = await loader.get_samples(8)
            unfinished = [group for number, group in enumerate(groups) if (number + step) % 3 == 0]
            for group in unfinished:
                group[0].response += "partly "
            loader.add_samples(unfinished)
            finished += [group[0].group_index for group in groups if group not in unfinished]
        statistics = loader.statistics()

    assert sorted(finished) == sorted(set(finished)), "no group was finished twice"
    assert len(finished) + statistics.buffered_groups == statistics.groups_total
    assert statistics.groups_total <= len(expected)


async def test_get_samples_serves_the_buffer_first(path):
    async with make(path, n_samples_per_prompt=3) as loader:
        groups = await loader.get_samples(4)
        loader.add_samples([groups[2], groups[0]])
        again = await loader.get_samples(3)

    assert again[:2] == [groups[2], groups[0]]
    assert ids(again[2]) == [order_of(path)[4]] * 3


async def test_async_for_is_one_epoch_and_the_next_the_next(path):
    async with make(path, batch_size=64) as loader:
        epochs = [[ids(batch) async for batch in loader] for _ in range(3)]

    assert [list(map(len, batches)) for batches in epochs] == [[64, 64, 64, 8]] * 3
    assert [number for batches in epochs for batch in batches for number in batch] == order_of(path, 3)


async def test_an_async_for_that_is_left_goes_on_in_the_same_epoch(path):
    async with make(path, batch_size=60) as loader:
        async for batch in loader:
            seen = ids(batch)
            break
        seen += [number async for batch in loader for number in ids(batch)]

    assert seen == order_of(path)


async def test_drop_last_and_epochs_end_a_loop(path):
    async with make(path, batch_size=64, drop_last=True, epochs=2) as loader:
        assert [len([batch async for batch in loader]) for _ in range(4)] == [3, 3, 0, 0]


@pytest.mark.thorough
async def test_the_end_comes_with_the_partial_batch(path):
    async with make(path, epochs=2, num_workers=1) as loader:
        seen = ids(await loader.get_next_batch(390))
        with pytest.raises(EndOfData) as caught:
            await loader.get_next_batch(64)

    assert seen + ids(caught.value.samples) == order_of(path, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
async def test_a_bad_row_is_raised_at_its_turn_at_every_call(path, num_workers):
    expected = order_of(path)
    turn = expected.index(13)

    async with make(path, fails_on_13, num_workers=num_workers) as loader:
        for _ in range(2):
            with pytest.raises(BadRowError, match=f"^AD421 {path}:{line_of(path, 13)[0]} "):
                await loader.get_next_batch(turn + 1)
        assert ids(await loader.get_next_batch(turn)) == expected[:turn]


@pytest.mark.thorough
async def test_a_row_that_kills_workers_costs_nothing_but_itself(path):
    async with make(path, kills_on_13, num_workers=2, bad_rows="skip", batch_size=50) as loader:
        seen = [number async for batch in loader for number in ids(batch)]

    assert seen == [number for number in order_of(path) if number != 13]


async def test_an_epoch_that_yields_nothing_is_an_error(path):
    async with make(path, all_dropped) as loader:
        with pytest.raises(NoSamplesError, match="^AD401 "):
            await loader.get_next_batch(1)


async def test_a_batch_whose_collate_fn_raises_is_not_consumed(path):
    failures = iter([False, True, False, False, False, False])

    def collate(samples: list[Sample]) -> list[int]:
        if next(failures):
            raise RuntimeError("out of memory")
        return ids(samples)

    async with make(path, batch_size=50, collate_fn=collate) as loader:
        batches = aiter(loader)
        seen = await anext(batches)
        with pytest.raises(RuntimeError, match="out of memory"):
            await anext(batches)
        seen += [number async for batch in batches for number in batch]

    assert seen == order_of(path)


async def test_wrong_numbers_are_refused(path):
    async with make(path, n_samples_per_prompt=2) as loader:
        for number in (0, -2, 3, "2"):
            with pytest.raises(ConfigError, match="^AD440 "):
                await loader.get_next_batch(number)
        with pytest.raises(ConfigError, match="iterating needs batch_size"):
            aiter(loader)


# Waiting


async def test_a_wait_does_not_hold_up_the_loop(gated):
    path, gate = gated
    turns = 0

    async with make(path, waits_for_a_file, shuffle=False) as loader:
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                assert ids(await loader.get_next_batch(3)) == [0, 1, 2]
                group.cancel_scope.cancel()

            group.start_soon(wait)
            while True:
                await anyio.lowlevel.checkpoint()
                turns += 1
                if turns == 1000:
                    gate.touch()

    assert turns >= 1000


@pytest.mark.thorough
@pytest.mark.parametrize("caller", CALLERS)
async def test_a_timeout_says_why_and_consumes_nothing(gated, caller):
    path, gate = gated

    async def main() -> list[int]:
        async with make(path, waits_for_a_file, shuffle=False, num_workers=1) as loader:
            with pytest.raises(PrefetchTimeoutError) as caught:
                await loader.get_next_batch(5, timeout_s=0.5)
            assert isinstance(caught.value, TimeoutError)
            assert "stage: " in str(caught.value)
            assert "workers: " in str(caught.value)
            with pytest.raises(PrefetchTimeoutError):
                await loader.get_samples(1, timeout_s=0.01)
            gate.touch()
            return ids(await loader.get_next_batch(5))

    assert await on(caller, main) == [0, 1, 2, 3, 4]


@pytest.mark.thorough
async def test_many_tasks_get_disjoint_slices_in_the_order_in_which_they_asked(path):
    expected = order_of(path, 10)
    taken: dict[int, list[int]] = {}

    async def take(loader: AsyncDataLoader, number: int) -> None:
        taken[number] = ids(await loader.get_next_batch(7))

    async with make(path, num_workers=2, buffer_size=16) as loader, anyio.create_task_group() as group:
        for number in range(200):
            group.start_soon(take, loader, number)

    assert [number for _, batch in sorted(taken.items()) for number in batch] == expected[:1400]


@pytest.mark.thorough
async def test_tasks_on_several_loops_and_threads_share_one_loader(path):
    """One face in its loop, the other's waits in threads: the same order for all."""
    expected = order_of(path, 10)
    taken: list[list[int]] = []

    async def take(loader: AsyncDataLoader, size: int) -> None:
        for _ in range(30):
            taken.append(ids(await loader.get_next_batch(size)))  # noqa: PERF401 - several tasks append

    async with make(path, num_workers=2, buffer_size=16) as loader, anyio.create_task_group() as group:
        group.start_soon(take, loader, 3)
        for caller in CALLERS:
            group.start_soon(on, caller, partial(take, loader, 5))

    total = 30 * 3 + 3 * 30 * 5
    assert sorted(number for batch in taken for number in batch) == sorted(expected[:total])
    slices = {tuple(expected[i : i + size]) for size in (3, 5) for i in range(total)}
    assert {tuple(batch) for batch in taken} <= slices


# Cancellation


def cancellations(seed: int, number: int) -> Iterator[tuple[int, float]]:
    """Sizes of batches, and how long each is waited for: often too short."""
    chance = random.Random(seed)
    for _ in range(number):
        yield chance.choice([1, 5, 30]), chance.choice([0.0, 0.0001, 0.001, 0.01]) * chance.random()


@pytest.mark.thorough
@pytest.mark.parametrize("caller", CALLERS)
async def test_what_a_scope_cancels_is_not_lost(path, caller):
    async def main() -> tuple[list[int], int]:
        seen, num_cancelled = [], 0
        async with make(path, num_workers=1, buffer_size=4) as loader:
            for size, seconds in cancellations(1, 400):
                with anyio.move_on_after(seconds) as scope:
                    seen += ids(await loader.get_next_batch(size))
                num_cancelled += scope.cancelled_caught
        return seen, num_cancelled

    seen, num_cancelled = await on(caller, main)
    assert num_cancelled > 50
    assert seen == order_of(path, 30)[: len(seen)]


@pytest.mark.thorough
@pytest.mark.parametrize("caller", ["asyncio", "uvloop"])
async def test_what_task_cancel_cancels_is_not_lost(path, caller):
    async def main() -> tuple[list[int], int]:
        seen, num_cancelled = [], 0
        async with make(path, num_workers=1, buffer_size=4) as loader:
            for size, seconds in cancellations(2, 400):
                task = asyncio.create_task(loader.get_next_batch(size))
                await asyncio.sleep(seconds)
                task.cancel()
                try:
                    seen += ids(await task)
                except asyncio.CancelledError:
                    num_cancelled += 1
        return seen, num_cancelled

    seen, num_cancelled = await on(caller, main)
    assert num_cancelled > 50
    assert seen == order_of(path, 30)[: len(seen)]


@pytest.mark.thorough
async def test_what_wait_for_gives_up_is_not_lost(path):
    seen, num_timeouts = [], 0

    async with make(path, num_workers=1, buffer_size=4) as loader:
        for size, seconds in cancellations(3, 400):
            try:
                seen += ids(await asyncio.wait_for(loader.get_next_batch(size), seconds))
            except TimeoutError:
                num_timeouts += 1

    assert num_timeouts > 50
    assert seen == order_of(path, 30)[: len(seen)]


@pytest.mark.thorough
async def test_timeouts_of_our_own_lose_nothing(path):
    seen, num_timeouts = [], 0

    async with make(path, num_workers=1, buffer_size=4) as loader:
        for size, seconds in cancellations(4, 400):
            try:
                seen += ids(await loader.get_next_batch(size, timeout_s=seconds))
            except PrefetchTimeoutError:
                num_timeouts += 1

    assert num_timeouts > 50
    assert seen == order_of(path, 30)[: len(seen)]


@pytest.mark.thorough
@pytest.mark.parametrize(("num_steps", "is_ready"), each_value(range(6), [True, False]))
async def test_cancelled_at_any_step_it_has_consumed_nothing(gated, num_steps, is_ready):
    """After so many turns of the loop, before and after the data has come."""
    path, gate = gated

    async with make(path, waits_for_a_file, shuffle=False) as loader:
        task = asyncio.create_task(loader.get_next_batch(3))
        await until(lambda: num_waiting(loader) == 1)
        if is_ready:
            gate.touch()
            await anyio.to_thread.run_sync(_until_ready, loader)
        for _ in range(num_steps):
            await asyncio.sleep(0)
        was_done = task.done()
        task.cancel()
        try:
            batch = ids(await task)
        except asyncio.CancelledError:
            batch = []
        gate.touch()
        batch += ids(await loader.get_next_batch(6))

    assert was_done <= is_ready
    assert batch[:6] == [0, 1, 2, 3, 4, 5]
    assert batch == list(range(len(batch)))


def _until_ready(loader: AsyncDataLoader) -> None:
    """In a thread; the task may be woken meanwhile, and is then some steps ahead."""
    while loader.statistics().ready_samples < 3 and loader.statistics().samples_total == 0:
        time.sleep(0.001)


async def test_a_cancelled_wait_lets_the_next_one_pass(gated):
    path, gate = gated

    async with make(path, waits_for_a_file, shuffle=False) as loader:
        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(loader.get_next_batch(2)))
            await until(lambda number=number: num_waiting(loader) == number + 1)
        tasks[0].cancel()
        tasks[2].cancel()
        await until(lambda: num_waiting(loader) == 2)
        gate.touch()

        assert ids(await tasks[1]) == [0, 1]
        assert ids(await tasks[3]) == [2, 3]
        assert [tasks[number].cancelled() for number in (0, 2)] == [True, True]


async def test_a_filters_choice_stays_in_the_buffer_when_its_call_is_cancelled(gated):
    path, gate = gated

    async with make(path, waits_for_a_file, shuffle=False) as loader:
        mine = Sample(prompt="mine")
        loader.add_samples([[mine]])
        with anyio.move_on_after(0.05):
            await loader.get_next_batch(2)
        assert loader.statistics().buffered_groups == 1
        gate.touch()
        batch = await loader.get_next_batch(2)

    assert batch[0] is mine
    assert ids(batch[1:]) == [0]


# Closing


@pytest.mark.parametrize("caller", CALLERS)
async def test_closing_ends_every_wait(gated, caller):
    path, gate = gated

    async def main() -> list[str]:
        told: list[str] = []

        async def wait() -> None:
            try:
                await loader.get_next_batch(1, timeout_s=NEVER_S)
            except LoaderClosedError as error:
                told.append(str(error))

        async with make(path, waits_for_a_file, shuffle=False, num_workers=1) as loader:
            with anyio.fail_after(NEVER_S / 2):
                async with anyio.create_task_group() as group:
                    for _ in range(3):
                        group.start_soon(wait)
                    await until(lambda: num_waiting(loader) == 3)
                    await loader.aclose()
        return told

    assert await on(caller, main) == ["AD502 the loader was closed by aclose()"] * 3
    gate.touch()


async def test_closing_twice_is_closing_and_every_use_afterwards_says_so(path):
    loader = make(path, batch_size=2)
    batch = await loader.get_next_batch(2)
    await loader.aclose()
    await loader.aclose()

    assert ids(batch) == order_of(path)[:2]
    with pytest.raises(LoaderClosedError):
        await loader.get_next_batch(1)
    with pytest.raises(LoaderClosedError):
        await loader.get_samples(1)
    with pytest.raises(LoaderClosedError):
        await anext(aiter(loader))
    with pytest.raises(LoaderClosedError):
        loader.add_samples([batch])


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


async def test_a_cancelled_block_is_closed_all_the_same(path):
    with anyio.CancelScope() as scope:
        async with make(path, num_workers=1) as loader:
            await loader.get_next_batch(1)
            scope.cancel()
            await anyio.lowlevel.checkpoint()

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


async def test_an_exception_in_the_block_is_the_users(path):
    with pytest.raises(ZeroDivisionError):
        async with make(path, num_workers=1) as loader:
            await loader.get_next_batch(1)
            raise ZeroDivisionError


async def test_the_loop_may_end_while_others_go_on_waiting(gated):
    """A loop that is gone is not woken, and disturbs no other."""
    path, gate = gated

    async with make(path, waits_for_a_file, shuffle=False) as loader:

        async def give_up() -> None:
            asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel)
            await loader.get_next_batch(1)

        with pytest.raises(asyncio.CancelledError):
            await anyio.to_thread.run_sync(asyncio.run, give_up())
        gate.touch()
        assert ids(await loader.get_next_batch(3)) == [0, 1, 2]
