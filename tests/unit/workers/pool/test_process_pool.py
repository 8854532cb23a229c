"""Worker processes that die, hang, stop, or never start: lost requests are sent again, the row to blame is found."""

from __future__ import annotations

import os
import random
import signal
from array import array

import anyio
import numpy as np
import pytest

from asyncdata.core.messages import NO_SLOT, OrderPacks, Overflow, Permuted, Tokenize
from asyncdata.workers.base import NUM_SLOTS, Crashed
from asyncdata.workers.pool.process_pool import ProcessExecutor
from asyncdata.workers.pool.processes import Forked
from tests.support import worker_fns
from tests.support.executors import Client, ids_of, until
from tests.support.pools import all_ready, pids, states
from tests.support.tokenize_fns import kills_on_13, kills_on_13_in_batches, row_id

pytestmark = pytest.mark.asyncio


# Death


async def test_after_random_kills_of_workers_every_row_comes_once_and_in_order(rows):
    executor = ProcessExecutor(2)
    path = rows(400, {i: {"sleep_s": 0.0005} for i in range(400)})
    client = Client(executor, path, worker_fns.takes_its_time)
    chance = random.Random(7)
    async with client.running():
        window = await client.window()
        asked = {client.ask(window.request(first, first + 2)): first for first in range(0, 400, 2)}
        hit: list[int] = []
        for number in range(8):
            await until(lambda: "starting" not in states(executor))
            # The requests of the last killed worker are done: a request that is hit twice would be blamed.
            await client.until(lambda hit=hit: all(client.replies[one] for one in hit))
            await anyio.sleep(chance.random() * 0.01)
            hit = [one for one in asked if not client.replies[one]][:4]  # two workers have two each, the first ones
            os.kill(chance.choice(pids(executor)), signal.SIGKILL)
            await until(lambda number=number: executor.statistics().num_restarts == number + 1)
        await client.until(lambda: all(client.replies[number] for number in asked))

    assert {number: [ids_of(reply) for reply in client.replies[number]] for number in asked} == {
        number: [[first, first + 1]] for number, first in asked.items()
    }


@pytest.mark.thorough
async def test_a_request_larger_than_the_socket_buffer_arrives_whole(rows):
    """The request for a plan of packs has some bytes for every row."""
    executor = ProcessExecutor(1)
    client = Client(executor, rows(5), row_id)
    costs = np.arange(500_000, dtype=np.float64)
    request = OrderPacks(costs.tobytes(), None, False, 1, 1, 0, 0)
    async with client.running():
        window = await client.window()
        asked = [client.ask(request), client.ask(window.request(0, 5)), client.ask(request)]
        plan, reply, again = await client.answers(asked)

    assert ids_of(reply) == [0, 1, 2, 3, 4]
    for found in (plan, again):
        assert isinstance(found, Permuted)
        assert np.frombuffer(found.rows, np.uint32).tolist() == list(range(500_000))


@pytest.mark.thorough
async def test_a_worker_killed_while_idle_is_replaced(rows):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(5), row_id)
    async with client.running():
        window = await client.window()
        await all_ready(executor)
        before = pids(executor)
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: pids(executor) != before)
        reply = await client.tokenized(window)

    assert ids_of(reply) == [0, 1, 2, 3, 4]
    assert executor.statistics().num_restarts == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGRTMIN + 3])
async def test_a_worker_is_replaced_whichever_signal_kills_it(rows, number):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(5), row_id)
    async with client.running():
        window = await client.window()
        await all_ready(executor)
        os.kill(pids(executor)[0], number)
        assert ids_of(await client.tokenized(window)) == [0, 1, 2, 3, 4]


@pytest.mark.thorough
async def test_slots_outlive_the_workers_that_wrote_them(rows):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(50), row_id)
    async with client.running():
        window = await client.window()
        await all_ready(executor)
        before = pids(executor)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not set(pids(executor)) & set(before))
        reply = await client.tokenized(window)

    assert ids_of(reply) == list(range(50))


async def test_a_slot_is_not_free_while_a_dead_workers_request_waits_to_be_sent_again(rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    executor = ProcessExecutor(1)
    client = Client(executor, rows(1, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    freed = []
    executor.slots.on_free = lambda: freed.append(True)
    async with client.running():
        window = await client.window()
        freed.clear()
        asked = client.ask(window.request(0, 1))
        executor.slots.release(window.slot)
        await until(began.exists)
        began.unlink()
        os.kill(pids(executor)[0], signal.SIGKILL)
        await until(began.exists)
        assert freed == []

        gate.touch()
        await client.answer(asked)
        assert freed == [True]


@pytest.mark.thorough
@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_a_dead_workers_slot_and_requests_wait_until_it_is_reaped(rows, tmp_path, monkeypatch, is_forgotten):
    """Its socket has ended, but it may still write: no slot is free, and no other worker has its rows, before it has
    been waited for.
    """
    began, gate, reaped = tmp_path / "began", tmp_path / "gate", anyio.Event()
    executor = ProcessExecutor(2)
    client = Client(executor, rows(1, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    freed, seen, really = [], [], Forked.ended
    executor.slots.on_free = lambda: freed.append(True)

    async def ended(handle: Forked) -> None:
        seen.append((list(freed), began.exists(), executor.statistics().num_queued))
        await reaped.wait()
        await really(handle)

    async with client.running():
        window = await client.window()
        await all_ready(executor)
        freed.clear()
        asked = client.ask(window.request(0, 1))
        executor.slots.release(window.slot)
        await until(began.exists)
        pid = int(began.read_text())
        began.unlink()
        if is_forgotten:
            executor.forget()
        monkeypatch.setattr(Forked, "ended", ended)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: seen)
        now = list(freed), began.exists(), executor.statistics().num_queued
        reaped.set()  # before any assertion: the executor waits for it
        gate.touch()
        assert seen == [([], False, 0)]
        assert now == ([], False, 0)
        if is_forgotten:
            await until(lambda: freed)
        else:
            assert ids_of(await client.answer(asked)) == [0]
            assert began.exists()
        assert freed == [True]


@pytest.mark.thorough
async def test_a_forgotten_request_is_not_sent_again_when_its_worker_dies(rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    executor = ProcessExecutor(1)
    client = Client(executor, rows(2, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    async with client.running():
        window = await client.window()
        client.ask(window.request(0, 1))
        await until(began.exists)
        began.unlink()
        executor.forget()
        os.kill(pids(executor)[0], signal.SIGKILL)
        reply = await client.tokenized(window, 1, 2)
        executor.slots.release(window.slot)

    assert ids_of(reply) == [1]
    assert not began.exists()
    assert [executor.slots.hold() for _ in range(NUM_SLOTS)] == list(range(NUM_SLOTS))


async def test_on_change_is_called_when_a_worker_dies_of_a_forgotten_request(rows, tmp_path):
    began = tmp_path / "began"
    path = rows(1, {0: {"began": str(began), "gate": str(tmp_path / "gate")}})
    client = Client(ProcessExecutor(1), path, worker_fns.waits)
    async with client.running():
        executor = client.executor
        place, length = Overflow(0, 0, 0), len(path.read_bytes()) - 1
        client.ask(Tokenize(NO_SLOT, array("i", [-1]).tobytes(), array("i", [length]).tobytes(), [place]))
        await until(began.exists)
        executor.forget()
        before, seen = executor.num_wanted, []
        executor.watch(lambda: seen.append(executor.num_wanted))
        os.kill(int(began.read_text()), signal.SIGKILL)
        await until(lambda: before + 1 in seen)

    assert client.replies == [[]]


async def test_on_change_is_called_when_the_workers_change(rows):
    client = Client(ProcessExecutor(1), rows(3), row_id)
    async with client.running():
        seen: list[int] = []
        client.executor.watch(lambda: seen.append(client.executor.num_wanted))
        client.executor.set_num_workers(3)

    assert seen == [6]


# Which request is to blame


@pytest.mark.thorough
async def test_a_request_that_brings_down_two_workers_is_returned_as_crashed(rows):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(30), kills_on_13)
    async with client.running():
        window = await client.window()
        asked = {client.ask(window.request(first, first + 5)): first for first in range(0, 30, 5)}
        replies = dict(zip(asked, await client.answers(asked), strict=True))

    for number, first in asked.items():
        if first == 10:
            assert replies[number] == Crashed("AD423", "its worker died (SIGSEGV)", row=3)
        else:
            assert ids_of(replies[number]) == list(range(first, first + 5))
    assert executor.statistics().num_restarts == 2


@pytest.mark.thorough
async def test_a_batched_function_does_not_tell_which_row_crashed(rows):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(20), kills_on_13_in_batches)
    async with client.running():
        window = await client.window()
        reply = await client.answer(client.ask(window.request(10, 15), max_losses=2))

    assert reply == Crashed("AD423", "its worker died (SIGSEGV)", row=None)


@pytest.mark.thorough
async def test_a_crashed_request_keeps_its_slot_until_its_callback_returns(rows):
    """Its rows can be requested again."""
    executor = ProcessExecutor(1)
    client = Client(executor, rows(20), kills_on_13)
    told, asked, freed = [], [], []
    async with client.running():
        window = await client.window()
        executor.slots.on_free = lambda: freed.append(list(told))

        def ask_again(reply: object) -> None:
            told.append(reply)
            asked.append(client.ask(window.request(0, 5)))

        executor.submit(window.request(10, 15), ask_again)
        executor.slots.release(window.slot)
        await until(lambda: told)
        assert ids_of(await client.answer(asked[0])) == [0, 1, 2, 3, 4]

    assert len(told) == 1
    assert freed == [told]


@pytest.mark.thorough
async def test_a_request_that_may_lose_one_worker_is_returned_as_crashed_after_it(rows):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(20), kills_on_13)
    async with client.running():
        window = await client.window()
        reply = await client.answer(client.ask(window.request(13, 14), max_losses=1))

    assert isinstance(reply, Crashed)
    assert executor.statistics().num_restarts == 1


@pytest.mark.thorough
async def test_a_request_that_only_waited_in_the_queue_is_not_blamed(rows, tmp_path):
    """It waited in the queue of two workers, after a request that kills."""
    executor = ProcessExecutor(1)
    client = Client(executor, rows(20), kills_on_13)
    async with client.running():
        window = await client.window()
        killer = client.ask(window.request(13, 14))
        innocent = client.ask(window.request(0, 13), max_losses=1)
        assert isinstance(await client.answer(killer), Crashed)
        assert ids_of(await client.answer(innocent)) == list(range(13))


@pytest.mark.thorough
async def test_a_request_that_exits_the_process_reports_the_exit_status(rows):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(1, {0: {"do": "die"}}), worker_fns.as_told)
    async with client.running():
        window = await client.window()
        reply = await client.answer(client.ask(window.request(0, 1)))

    assert reply == Crashed("AD423", "its worker died (exit status 3)", row=0)


# Hanging


async def test_a_row_that_hangs_is_returned_as_crashed_and_its_worker_is_replaced(rows, tmp_path):
    began = tmp_path / "began"
    executor = ProcessExecutor(2, row_timeout_s=2.0)
    client = Client(executor, rows(12, {5: {"gate": "/never", "began": str(began)}}), worker_fns.waits)
    async with client.running():
        window = await client.window()
        asked = {client.ask(window.request(first, first + 3)): first for first in range(0, 12, 3)}
        replies = await client.answers(asked)

    hung = replies.pop(1)
    assert hung == Crashed("AD422", "no result in 2 s; its worker was killed (SIGKILL)", row=2)
    assert [ids_of(reply) for reply in replies] == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    assert executor.statistics().num_restarts == 2


@pytest.mark.thorough
async def test_rows_that_are_slow_together_do_not_count_as_hung(rows):
    executor = ProcessExecutor(1, row_timeout_s=5.0)
    client = Client(executor, rows(8, {i: {"sleep_s": 0.8} for i in range(8)}), worker_fns.takes_its_time)
    async with client.running():
        reply = await client.tokenized(await client.window())

    assert ids_of(reply) == list(range(8))
    assert executor.statistics().num_restarts == 0


@pytest.mark.thorough
async def test_an_idle_worker_never_counts_as_hung(rows):
    executor = ProcessExecutor(1, row_timeout_s=1.0)
    client = Client(executor, rows(5), row_id)
    async with client.running():
        window = await client.window()
        await all_ready(executor)
        before = pids(executor)
        await anyio.sleep(2.5)  # more than twice as long as a row may take
        assert ids_of(await client.tokenized(window)) == [0, 1, 2, 3, 4]
        assert pids(executor) == before


async def test_a_stopped_worker_is_replaced(rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    executor = ProcessExecutor(1, row_timeout_s=3.0)
    client = Client(executor, rows(1, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    async with client.running():
        window = await client.window()
        asked = client.ask(window.request(0, 1))
        await until(began.exists)
        gate.touch()
        os.kill(pids(executor)[0], signal.SIGSTOP)
        assert ids_of(await client.answer(asked)) == [0]
