"""Workers and fork servers that die, hang or stop: lost requests are sent again, and the row to blame is found."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest
import structlog

from asyncdata.errors import WorkerError
from tests.support import worker_fns
from tests.support.executors import NEVER_S, failure_of, ids_of, until
from tests.support.inner import change, real
from tests.support.parts import Crashed
from tests.support.pools import events_of, fork_server, pids, pool
from tests.support.tokenize_fns import kills_on_13, row_id
from tests.support.worker_fns import tells_who, waits

pytestmark = pytest.mark.asyncio


@pytest.mark.thorough
@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_a_dead_workers_slot_and_requests_wait_until_it_is_reaped(rows, gate, monkeypatch, is_forgotten):
    """Its socket has ended, but it may still write: no slot is free, and no other worker has its rows, before it has
    been waited for.
    """
    freed, seen, really, reaped = [], [], real("end_of_a_fork"), anyio.Event()

    async def ended(handle: Any) -> None:
        seen.append((list(freed), gate.began.exists(), executor.statistics().num_queued))
        await reaped.wait()
        await really(handle)

    async with pool(rows(1, {0: gate.special}), waits, 2) as (executor, client, window):
        executor.slots.on_free = lambda: freed.append(True)
        asked = client.ask(window.request(0, 1))
        executor.slots.release(window.slot)
        await until(gate.began.exists)
        pid = int(gate.began.read_text())
        gate.began.unlink()
        if is_forgotten:
            executor.forget()
        change(monkeypatch, end_of_a_fork=ended)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: seen)
        seen.append((list(freed), gate.began.exists(), executor.statistics().num_queued))
        reaped.set()  # before any assertion: the executor waits for it
        gate.open()
        assert seen[:2] == [([], False, 0)] * 2
        if is_forgotten:
            await until(lambda: freed)
        else:
            assert ids_of(await client.answer(asked)) == [0]
            assert gate.began.exists()
        assert freed == [True]


@pytest.mark.thorough
async def test_a_crashed_request_keeps_its_slot_until_its_callback_returns(rows):
    """Its rows can be requested again. One that only waited in the queue of two workers is not blamed."""
    told, asked, freed = [], [], []
    async with pool(rows(20), kills_on_13) as (executor, client, window):
        executor.slots.on_free = lambda: freed.append(list(told))

        def ask_again(reply: object) -> None:
            told.append(reply)
            asked.append(client.ask(window.request(0, 5)))

        executor.submit(window.request(10, 15)).then(ask_again)
        innocent = client.ask(window.request(0, 13), max_losses=1)
        executor.slots.release(window.slot)
        assert ids_of(await client.answer(innocent)) == list(range(13))
        assert ids_of(await client.answer(asked[0])) == [0, 1, 2, 3, 4]

    assert [type(reply) for reply in told] == [Crashed]
    assert freed == [told]


@pytest.mark.thorough
async def test_the_pool_gives_up_when_workers_never_finish_a_request(rows):
    again_and_again = []
    with pytest.raises(BaseExceptionGroup) as caught:
        async with pool(rows(1, {0: {"do": "print and die"}}), worker_fns.as_told) as (executor, client, window):
            request = window.request(0, 1)

            def ask_again(reply: object) -> None:
                again_and_again.append(reply)
                executor.submit(request).then(ask_again)

            executor.submit(request).then(ask_again)
            await anyio.sleep_forever()

    (error,) = caught.value.exceptions
    assert isinstance(error, WorkerError)
    assert str(error).startswith("AD426 14 workers died without finishing one request; the last exit status 3\n")
    assert "farewell" in str(error)
    assert all(isinstance(reply, Crashed) for reply in again_and_again[:-1])
    assert failure_of(again_and_again[-1]).message == str(error), "the last is told what everybody is told"


@pytest.mark.thorough
async def test_rows_that_are_slow_together_do_not_count_as_hung(rows):
    path = rows(8, dict.fromkeys(range(8), {"sleep_s": 0.8}))
    async with pool(path, tells_who, row_timeout_s=5.0) as (executor, client, window):
        assert ids_of(await client.tokenized(window)) == list(range(8))

    assert executor.statistics().num_restarts == 0


async def test_a_stopped_fork_server_is_replaced_once_it_is_needed(rows, monkeypatch):
    with structlog.testing.capture_logs() as events:
        async with pool(rows(20), row_id, 2) as (executor, client, window):
            stopped, workers = fork_server(), pids(executor)
            stopped.suspend()
            assert ids_of(await client.tokenized(window)) == list(range(20)), "its workers still work"
            change(monkeypatch, patience_with_a_fork_server_s=0.3)
            os.kill(workers[0], signal.SIGKILL)
            await until(lambda: events_of(events, "forkserver.lost"))
            change(monkeypatch, patience_with_a_fork_server_s=NEVER_S)  # the next one may be slow
            await until(lambda: len(pids(executor)) == 2 and not set(pids(executor)) & set(workers))
            assert ids_of(await client.tokenized(window)) == list(range(20))
            assert not stopped.is_running()

    (event,) = events_of(events, "forkserver.lost")
    assert (event["reason"], event["how"]) == ("no answer in 0.3 s; it was killed", "SIGKILL")


@pytest.mark.thorough
async def test_a_stopped_fork_server_does_not_prevent_the_loader_from_closing(rows):
    async with pool(rows(20), row_id, 2):
        stopped = fork_server()
        stopped.suspend()

    assert not stopped.is_running()
