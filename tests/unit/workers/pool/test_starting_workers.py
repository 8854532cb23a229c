"""The pool starts workers, changes their number, and closes."""

from __future__ import annotations

import base64
import gc
import itertools
import os
import random
import resource
import signal
import time

import anyio
import psutil
import pytest

from asyncdata import WorkerError
from asyncdata.core.framing import frame
from asyncdata.core.messages import Failed, Permuted, Ready, Scanned
from asyncdata.workers.base import NUM_SLOTS, Crashed
from asyncdata.workers.pool.process_pool import ProcessExecutor
from tests.support import worker_fns
from tests.support.executors import NEVER_S, Client, failure_of, ids_of, until, value_of
from tests.support.pools import all_ready, pids, states
from tests.support.tokenize_fns import row_id

# Starting

pytestmark = pytest.mark.asyncio


@pytest.mark.thorough
async def test_requests_wait_for_the_first_worker_to_be_ready(rows, tmp_path):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(200), worker_fns.Opening("waits", str(tmp_path)))
    window = client.unread_window()
    async with client.running():
        asked = [client.ask(scan) for scan in window.scans()]
        await until(lambda: states(executor) == ["starting"])

        (tmp_path / "open").touch()
        assert all(isinstance(reply, Scanned) for reply in await client.answers(asked))


@pytest.mark.thorough
async def test_a_scan_that_waits_for_a_worker_can_be_forgotten(rows, tmp_path):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(200), worker_fns.Opening("waits", str(tmp_path)), block_bytes=64)
    window = client.unread_window()
    async with client.running():
        forgotten = [client.ask(scan) for scan in window.scans()]
        executor.forget()
        (tmp_path / "open").touch()
        other = await client.window()
        assert ids_of(await client.tokenized(other)) == list(range(200))
        for slot in (window.slot, other.slot):
            executor.slots.release(slot)
        await until(lambda: [executor.slots.hold() for _ in range(NUM_SLOTS)] == list(range(NUM_SLOTS)))

    assert [client.replies[number] for number in forgotten] == [[]] * len(forgotten)


async def failure_to_run(client: Client) -> str:
    """Why the executor gave up."""
    client.executor.prepare(client.slot_bytes)
    with anyio.fail_after(NEVER_S), pytest.raises(WorkerError) as caught:
        await client.executor.run(client.job)
    return str(caught.value)


@pytest.mark.thorough
async def test_after_three_deaths_at_the_start_the_error_quotes_the_output_of_the_worker(rows, tmp_path):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(1), worker_fns.Opening("dies", str(tmp_path), times=1000))

    message = await failure_to_run(client)

    assert message.startswith("AD426 a worker died 3 times while starting (exit status 5)\n")
    assert "what I wanted to say" in message
    assert executor.statistics().num_restarts == 3


@pytest.mark.thorough
async def test_a_worker_that_dies_twice_at_its_start_is_started_again(rows, tmp_path):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(3), worker_fns.Opening("dies", str(tmp_path), times=2))
    async with client.running():
        assert ids_of(await client.tokenized(await client.window())) == [0, 1, 2]

    assert executor.statistics().num_restarts == 2


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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("request_id", "said", "reason"),
    [
        (99, Permuted(b""), "a worker answered request 99 out of turn"),
        (2, Ready(1), "a worker announced itself twice; it is out of step"),
    ],
)
async def test_a_reply_that_does_not_match_its_request_ends_the_run(rows, request_id, said, reason):
    """A function that writes to a foreign descriptor ends the run: no later reply can be trusted."""
    noise = base64.b64encode(frame(request_id, said)).decode()
    executor = ProcessExecutor(1)
    client = Client(executor, rows(2, {1: {"bytes": noise}}), worker_fns.writes_everywhere)
    with anyio.fail_after(NEVER_S), pytest.raises(BaseExceptionGroup) as caught:
        async with client.running():
            asked = client.ask((await client.window()).request(1, 2))
            assert asked == 1, "the second, so that its id is 2"
            await anyio.sleep_forever()

    (error,) = caught.value.exceptions
    assert isinstance(error, WorkerError)
    assert str(error) == reason
    assert not [reply for reply in client.replies[asked] if not isinstance(reply, Failed)]


@pytest.mark.thorough
async def test_requests_under_way_are_answered_when_no_worker_can_start(rows, tmp_path):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(20), worker_fns.Opening("waits and raises", str(tmp_path)), block_bytes=64)
    window = client.unread_window()
    with anyio.fail_after(NEVER_S), pytest.raises(BaseExceptionGroup):
        async with client.running():
            asked = [client.ask(scan) for scan in window.scans()]
            (tmp_path / "open").touch()
            await anyio.sleep_forever()

    for number in asked:
        (reply,) = client.replies[number]
        assert failure_of(reply).message.startswith("AD426 the tokenize function cannot be opened: ")
    executor.slots.release(window.slot)
    assert [executor.slots.hold() for _ in range(NUM_SLOTS)] == list(range(NUM_SLOTS))


@pytest.mark.thorough
async def test_a_function_that_no_worker_can_import_is_named(rows):
    import msgspec

    from asyncdata.core.specs import TokenizeSpec

    client = Client(ProcessExecutor(1), rows(1), row_id)
    client.job = msgspec.structs.replace(client.job, tokenize=TokenizeSpec("tests.support.nowhere:fn"))

    message = await failure_to_run(client)

    assert message.startswith("AD426 the tokenize function cannot be opened: ")
    assert "cannot import 'tests.support.nowhere:fn'" in message


async def test_without_room_for_workers_the_error_says_so_and_no_descriptor_stays_open(rows):
    """Whichever descriptor is the one too many."""
    path, told = rows(1), []
    gc.collect()  # what earlier tests left may hold descriptors
    before = sorted(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for room in itertools.count(4):
        executor = ProcessExecutor(2)
        client = Client(executor, path, row_id)
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, limits[1]))
        try:
            executor.prepare(client.slot_bytes)
            break
        except WorkerError as error:
            told.append(str(error).partition(";")[0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert sorted(os.listdir("/proc/self/fd")) == before

    with anyio.move_on_after(0):
        await executor.run(client.job)
    assert set(told) == {"AD426 workers cannot be started: Too many open files"}
    assert len(told) > 5
    assert sorted(os.listdir("/proc/self/fd")) == before


# More workers and fewer


@pytest.mark.thorough
async def test_workers_that_are_added_answer_requests(rows):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(60, {i: {"sleep_s": 0.002} for i in range(60)}), worker_fns.tells_who)
    async with client.running():
        window = await client.window()
        executor.set_num_workers(3)
        await all_ready(executor)
        asked = [client.ask(window.request(first, first + 2)) for first in range(0, 60, 2)]
        replies = await client.answers(asked)

    assert len({value_of(reply, "extra")["pid"] for reply in replies}) == 3
    assert [ids_of(reply) for reply in replies] == [[first, first + 1] for first in range(0, 60, 2)]


@pytest.mark.thorough
async def test_a_worker_that_is_removed_finishes_its_requests(rows, tmp_path):
    gates = {i: {"began": str(tmp_path / f"began {i}"), "gate": str(tmp_path / f"gate {i}")} for i in range(2)}
    executor = ProcessExecutor(2)
    client = Client(executor, rows(9, gates), worker_fns.waits)
    async with client.running():
        window = await client.window()
        await all_ready(executor)
        asked = [client.ask(window.request(row, row + 1)) for row in range(2)]
        await until(lambda: all((tmp_path / f"began {row}").exists() for row in range(2)))
        going = psutil.Process(pids(executor)[1])
        executor.set_num_workers(1)
        behind = [client.ask(window.request(row, row + 1)) for row in range(2, 9)]
        assert len(pids(executor)) == 2

        for row in range(2):
            (tmp_path / f"gate {row}").touch()
        assert [ids_of(reply) for reply in await client.answers([*asked, *behind])] == [[row] for row in range(9)]
        await until(lambda: len(pids(executor)) == 1)
        assert not going.is_running()

    assert executor.statistics().num_restarts == 0


@pytest.mark.thorough
async def test_the_requests_of_a_worker_that_dies_while_it_is_removed_go_to_the_others(rows, tmp_path):
    gates = {i: {"began": str(tmp_path / f"began {i}"), "gate": str(tmp_path / "gate")} for i in range(2)}
    executor = ProcessExecutor(2)
    client = Client(executor, rows(4, gates), worker_fns.waits)
    async with client.running():
        window = await client.window()
        await all_ready(executor)
        asked = [client.ask(window.request(row, row + 1)) for row in range(4)]
        await until(lambda: all((tmp_path / f"began {row}").exists() for row in range(2)))
        executor.set_num_workers(1)
        os.kill(pids(executor)[1], signal.SIGKILL)
        await until(lambda: len(pids(executor)) == 1)
        (tmp_path / "gate").touch()
        assert [ids_of(reply) for reply in await client.answers(asked)] == [[row] for row in range(4)]

    assert executor.statistics().num_restarts == 0


async def test_adding_a_worker_back_at_once_loses_no_request(rows):
    executor = ProcessExecutor(3)
    client = Client(executor, rows(200), row_id)
    chance = random.Random(11)
    async with client.running():
        window = await client.window()
        asked = {}
        for first in range(0, 200, 2):
            executor.set_num_workers(chance.randint(-1, 4))
            asked[client.ask(window.request(first, first + 2))] = [first, first + 1]
            executor.set_num_workers(chance.randint(1, 4))
            await anyio.sleep(chance.choice([0, 0, 0.001, 0.01]))
        replies = await client.answers(asked)
        executor.set_num_workers(2)
        await all_ready(executor)

    assert [ids_of(reply) for reply in replies] == list(asked.values())
    assert executor.statistics().num_restarts == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("wanted", "got"), [(-3, 1), (0, 1), (2, 2), (9, 3)])
async def test_the_number_of_workers_stays_between_one_and_the_maximum(rows, wanted, got):
    executor = ProcessExecutor(2, max_workers=3)
    client = Client(executor, rows(3), row_id)
    async with client.running():
        executor.set_num_workers(wanted)
        assert executor.num_workers == got
        await until(lambda: states(executor) == ["idle"] * got)
        assert executor.num_wanted == 2 * got


async def test_the_number_of_workers_may_change_before_prepare_and_before_run(rows):
    executor = ProcessExecutor(4)
    client = Client(executor, rows(3), row_id)
    executor.set_num_workers(3)
    executor.prepare(client.slot_bytes)
    executor.set_num_workers(1)
    async with anyio.create_task_group() as group:
        group.start_soon(executor.run, client.job)
        with anyio.fail_after(NEVER_S):
            await until(lambda: states(executor) == ["idle"])
            assert ids_of(await client.tokenized(await client.window())) == [0, 1, 2]
        group.cancel_scope.cancel()


# Cleanup


@pytest.mark.thorough
async def test_no_descriptor_stays_open(rows):
    for _ in range(2):  # the first round opens what is opened only once
        gc.collect()  # what earlier tests left may hold descriptors
        before = sorted(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))
        executor = ProcessExecutor(2)
        client = Client(executor, rows(5), row_id)
        async with client.running():
            await client.tokenized(await client.window())
            os.kill(pids(executor)[0], signal.SIGKILL)
            await until(lambda executor=executor: executor.statistics().num_restarts == 1)
        after = sorted(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))

    assert after == before


async def test_closing_does_not_wait_for_a_row(rows, tmp_path):
    began = tmp_path / "began"
    executor = ProcessExecutor(1)
    client = Client(executor, rows(1, {0: {"began": str(began)}}), worker_fns.stuck_in_c)
    async with client.running():
        client.ask((await client.window()).request(0, 1))
        await until(began.exists)
        busy = psutil.Process(int(began.read_text()))
        before = time.monotonic()

    await until(lambda: not busy.is_running() or busy.status() == psutil.STATUS_ZOMBIE)
    assert time.monotonic() - before < NEVER_S
