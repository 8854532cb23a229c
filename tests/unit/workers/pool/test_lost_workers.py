"""Workers and fork servers that die, hang or stop: lost requests are sent again, and the row to blame is found."""

from __future__ import annotations

import os
import random
import signal
from array import array

import anyio
import psutil
import pytest
import structlog

from asyncdata import WorkerError
from asyncdata.core.messages import (
    NO_SLOT,
    Overflow,
    Tokenize,
)
from asyncdata.workers.base import MAX_LOSSES, Crashed, error_of
from asyncdata.workers.pool import spawning
from asyncdata.workers.pool.deadlines import MAX_WAIT_S, Patience, pause
from asyncdata.workers.pool.process_pool import ProcessExecutor
from asyncdata.workers.pool.processes import Forked
from tests.support import worker_fns
from tests.support.executors import NEVER_S, Client, failure_of, ids_of, tokenized, until
from tests.support.pools import all_ready, events_of, fork_server, pids, states
from tests.support.tokenize_fns import kills_on_13, kills_on_13_in_batches, row_id

pytestmark = pytest.mark.asyncio


# Workers that die


async def test_after_random_kills_of_workers_every_row_comes_once_and_in_order(rows):
    executor = ProcessExecutor(2)
    path = rows(400, {i: {"sleep_s": 0.0005} for i in range(400)})
    client = Client(executor, path, worker_fns.takes_its_time)
    chance = random.Random(7)
    async with client.reading() as window:
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
        await all_ready(executor)
        family = {process.pid for process in psutil.Process().children(recursive=True)}
        assert family == {fork_server().pid, *pids(executor)}, "no zombie is left"

    assert {number: [ids_of(reply) for reply in client.replies[number]] for number in asked} == {
        number: [[first, first + 1]] for number, first in asked.items()
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGRTMIN + 3])
async def test_a_worker_is_replaced_whichever_signal_kills_it(rows, number):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(5), row_id)
    async with client.reading() as window:
        await all_ready(executor)
        os.kill(pids(executor)[0], number)
        assert ids_of(await client.tokenized(window)) == [0, 1, 2, 3, 4], "of the slot that the first one filled"

    assert executor.statistics().num_restarts == 1


@pytest.mark.thorough
async def test_the_requests_of_a_worker_that_dies_while_it_is_removed_go_to_the_others(rows, tmp_path):
    gates = {i: {"began": str(tmp_path / f"began {i}"), "gate": str(tmp_path / "gate")} for i in range(2)}
    executor = ProcessExecutor(2)
    client = Client(executor, rows(4, gates), worker_fns.waits)
    async with client.reading() as window:
        await all_ready(executor)
        asked = [client.ask(window.request(row, row + 1)) for row in range(4)]
        await until(lambda: all((tmp_path / f"began {row}").exists() for row in range(2)))
        executor.set_num_workers(1)
        os.kill(pids(executor)[1], signal.SIGKILL)
        await until(lambda: len(pids(executor)) == 1)
        (tmp_path / "gate").touch()
        assert [ids_of(reply) for reply in await client.answers(asked)] == [[row] for row in range(4)]

    assert executor.statistics().num_restarts == 0


# Their slots, and requests that are not wanted


async def test_a_slot_is_not_free_while_a_dead_workers_request_waits_to_be_sent_again(rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    executor = ProcessExecutor(1)
    client = Client(executor, rows(1, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    freed = []
    executor.slots.on_free = lambda: freed.append(True)
    async with client.reading() as window:
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

    async with client.reading() as window:
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


async def test_a_forgotten_request_is_not_sent_again_when_its_worker_dies_and_there_is_room_for_another(rows, tmp_path):
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
        began.unlink()
        await until(lambda: before + 1 in seen)

    assert client.replies == [[]]
    assert not began.exists(), "it is not sent again"


# Which request is to blame


@pytest.mark.thorough
async def test_a_request_that_brings_down_two_workers_is_returned_as_crashed(rows):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(30), kills_on_13)
    async with client.reading() as window:
        asked = {client.ask(window.request(first, first + 5)): first for first in range(0, 30, 5)}
        replies = dict(zip(asked, await client.answers(asked), strict=True))

    for number, first in asked.items():
        if first == 10:
            assert replies[number] == Crashed("AD423", "its worker died (SIGSEGV)", row=3)
        else:
            assert ids_of(replies[number]) == list(range(first, first + 5))
    assert executor.statistics().num_restarts == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "special", "reason", "row"),
    [
        (kills_on_13_in_batches, {}, "its worker died (SIGSEGV)", None),
        (worker_fns.as_told, {"do": "die"}, "its worker died (exit status 3)", 3),
    ],
    ids=["a batched function does not tell the row", "an exit has a status"],
)
async def test_a_crash_says_how_the_worker_ended_and_the_row_if_it_is_known(rows, function, special, reason, row):
    client = Client(ProcessExecutor(1), rows(20, {13: special}), function)
    async with client.reading() as window:
        reply = await client.answer(client.ask(window.request(10, 15), max_losses=2))

    assert reply == Crashed("AD423", reason, row=row)


@pytest.mark.thorough
@pytest.mark.parametrize(("max_losses", "deaths"), [(1, 9), (2, 9), (MAX_LOSSES, 99), (MAX_LOSSES, MAX_LOSSES - 1)])
async def test_a_request_is_sent_again_until_a_worker_answers_it_or_its_caller_allows_no_more(
    rows, tmp_path, max_losses, deaths
):
    executor = ProcessExecutor(1)
    path = rows(3, dict.fromkeys(range(3), {"deaths": deaths, "tally": str(tmp_path / "tally")}))
    client = Client(executor, path, worker_fns.kills_several_workers)
    async with client.reading() as window:
        reply = await client.answer(client.ask(window.request(0, 3), max_losses))

    assert executor.statistics().num_restarts == min(deaths, max_losses)
    if deaths < max_losses:
        assert ids_of(reply) == [0, 1, 2]
    else:
        assert reply == Crashed("AD423", "its worker died (SIGKILL)")
        assert str(error_of(reply)).endswith("each was lost: its worker died (SIGKILL)")


@pytest.mark.thorough
async def test_a_crashed_request_keeps_its_slot_until_its_callback_returns(rows):
    """Its rows can be requested again."""
    executor = ProcessExecutor(1)
    client = Client(executor, rows(20), kills_on_13)
    told, asked, freed = [], [], []
    async with client.reading() as window:
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
async def test_a_request_that_only_waited_in_the_queue_is_not_blamed(rows, tmp_path):
    """It waited in the queue of two workers, after a request that kills."""
    executor = ProcessExecutor(1)
    client = Client(executor, rows(20), kills_on_13)
    async with client.reading() as window:
        killer = client.ask(window.request(13, 14))
        innocent = client.ask(window.request(0, 13), max_losses=1)
        assert isinstance(await client.answer(killer), Crashed)
        assert ids_of(await client.answer(innocent)) == list(range(13))


@pytest.mark.thorough
async def test_the_pool_gives_up_when_workers_never_finish_a_request(rows):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(1, {0: {"do": "print and die"}}), worker_fns.as_told)
    client.executor.prepare(client.slot_bytes)
    again_and_again = []

    def ask_again(reply: object) -> None:
        again_and_again.append(reply)
        executor.submit(request, ask_again)

    with anyio.fail_after(NEVER_S), pytest.raises(BaseExceptionGroup) as caught:
        async with anyio.create_task_group() as group:
            group.start_soon(executor.run, client.job)
            request = (await client.window()).request(0, 1)
            executor.submit(request, ask_again)

    (error,) = caught.value.exceptions
    assert isinstance(error, WorkerError)
    assert str(error).startswith("AD426 14 workers died without finishing one request; the last exit status 3\n")
    assert "farewell" in str(error)
    assert all(isinstance(reply, Crashed) for reply in again_and_again[:-1])
    assert failure_of(again_and_again[-1]).message == str(error), "the last is told what everybody is told"


# Workers that hang or stop


async def test_a_row_that_hangs_is_returned_as_crashed_and_its_worker_is_replaced(rows, tmp_path):
    began = tmp_path / "began"
    executor = ProcessExecutor(2, row_timeout_s=2.0)
    client = Client(executor, rows(12, {5: {"gate": "/never", "began": str(began)}}), worker_fns.waits)
    async with client.reading() as window:
        asked = {client.ask(window.request(first, first + 3)): first for first in range(0, 12, 3)}
        replies = await client.answers(asked)

    hung = replies.pop(1)
    assert hung == Crashed("AD422", "no result in 2 s; its worker was killed (SIGKILL)", row=2)
    assert [ids_of(reply) for reply in replies] == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    assert executor.statistics().num_restarts == 2


@pytest.mark.thorough
async def test_rows_that_are_slow_together_do_not_count_as_hung(rows):
    executor = ProcessExecutor(1, row_timeout_s=5.0)
    reply = await tokenized(executor, rows(8, {i: {"sleep_s": 0.8} for i in range(8)}), worker_fns.takes_its_time)

    assert ids_of(reply) == list(range(8))
    assert executor.statistics().num_restarts == 0


async def test_a_stopped_worker_is_replaced(rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    executor = ProcessExecutor(1, row_timeout_s=3.0)
    client = Client(executor, rows(1, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    async with client.reading() as window:
        asked = client.ask(window.request(0, 1))
        await until(began.exists)
        gate.touch()
        os.kill(pids(executor)[0], signal.SIGSTOP)
        assert ids_of(await client.answer(asked)) == [0]


# The fork server


@pytest.mark.thorough
async def test_a_request_is_not_blamed_for_the_death_of_the_fork_server(rows, tmp_path):
    """Its worker died with the fork server, four times."""
    began, gate = tmp_path / "began", tmp_path / "gate"
    executor = ProcessExecutor(1)
    client = Client(executor, rows(1, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    with structlog.testing.capture_logs() as events:
        async with client.reading() as window:
            asked = client.ask(window.request(0, 1))
            for _ in range(4):
                await until(began.exists)
                began.unlink()
                fork_server().kill()
            gate.touch()
            assert ids_of(await client.answer(asked)) == [0]

    assert [event["how"] for event in events if event["event"] == "forkserver.lost"] == ["SIGKILL"] * 4
    assert executor.statistics().num_restarts == 8, "the worker and the fork server"


async def test_a_stopped_fork_server_is_replaced_once_it_is_needed(rows, monkeypatch):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(20), row_id)
    with structlog.testing.capture_logs() as events:
        async with client.reading() as window:
            await all_ready(executor)
            stopped, workers = fork_server(), pids(executor)
            stopped.suspend()
            assert ids_of(await client.tokenized(window)) == list(range(20)), "its workers still work"
            monkeypatch.setattr(spawning, "_PATIENCE_S", 0.3)
            os.kill(workers[0], signal.SIGKILL)
            await until(lambda: events_of(events, "forkserver.lost"))
            monkeypatch.setattr(spawning, "_PATIENCE_S", NEVER_S)  # the next one may be slow
            await until(lambda: len(pids(executor)) == 2 and not set(pids(executor)) & set(workers))
            assert ids_of(await client.tokenized(window)) == list(range(20))
            assert not stopped.is_running()

    (event,) = events_of(events, "forkserver.lost")
    assert (event["reason"], event["how"]) == ("no answer in 0.3 s; it was killed", "SIGKILL")


@pytest.mark.thorough
async def test_a_stopped_fork_server_does_not_prevent_the_loader_from_closing(rows):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(20), row_id)
    async with client.running():
        await all_ready(executor)
        stopped = fork_server()
        stopped.suspend()

    assert not stopped.is_running()


# Patience


class Clock:
    """A clock whose time the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


YES, NO = True, False


@pytest.mark.parametrize(
    ("max_failures", "failures", "waits"),
    [
        pytest.param(3, [(0, NO)] * 3, [0.0, 0.05, None], id="permanent failures are given up after max_failures"),
        pytest.param(
            3,
            [*[(0, YES)] * 20, (29.9, YES), (0.2, YES)],
            [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, *[MAX_WAIT_S] * 15, None],
            id="transient failures are not given up before the time limit",
        ),
        pytest.param(3, [(0, YES), (1000, YES)], [0.0, 0.05], id="the time limit alone does not give up"),
        pytest.param(
            2,
            [(0, NO), *[(0, YES)] * 5, (0, NO)],
            [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, None],
            id="permanent failures count between transient ones",
        ),
        pytest.param(
            3,
            [(0, NO), (0, NO), None, (1000, NO), (0, YES), (0, YES)],
            [0.0, 0.05, 0.0, 0.05, 0.1],
            id="a success resets the count and the time",
        ),
    ],
)
async def test_patience_ends(max_failures, failures, waits):
    """``failures``: the seconds until each, and whether it may pass; None is a success."""
    clock = Clock()
    patience = Patience(max_failures, 30.0, clock)
    found = []
    for failure in failures:
        if failure is None:
            patience.succeeded()
        else:
            clock.now += failure[0]
            found.append(patience.failed(may_pass=failure[1]))

    assert found == waits


async def test_other_tasks_run_during_a_pause():
    seen = []
    async with anyio.create_task_group() as group:
        group.start_soon(seen_by, seen)
        await pause(0)
        seen.append("pause")

    assert seen == ["other", "pause"]


async def seen_by(seen: list[str]) -> None:
    seen.append("other")
