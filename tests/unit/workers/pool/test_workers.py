"""Workers of a pool: they start, share, talk, die, hang and end; lost requests are sent again, failures are named."""

import base64
import errno
import gc
import itertools
import os
import random
import resource
import signal
import socket
import sys
from typing import Any
from unittest.mock import Mock

import anyio
import anyio.to_thread
import psutil
import pytest
import structlog

from asyncdata.core.messages import frame
from asyncdata.errors import WorkerError
from tests.support import executors, parts, worker_fns
from tests.support.executors import NEVER_S, Client, events_of, fork_server, ids_of, pids, pool, process_pool, until
from tests.support.loading import kills_on_13, row_id
from tests.support.parts import change, real
from tests.support.worker_fns import Opening, tells_who, waits

pytestmark = pytest.mark.asyncio


@pytest.mark.thorough
@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_a_dead_workers_slot_and_requests_wait_until_it_is_reaped(rows, gate, monkeypatch, is_forgotten):
    """Its socket has ended, but it may still write: no slot is free before, and no other worker has its rows."""
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

    assert [type(reply) for reply in told] == [parts.Crashed]
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
    assert all(isinstance(reply, parts.Crashed) for reply in again_and_again[:-1])
    assert executors.failure_of(again_and_again[-1]).message == str(error), "the last is told what everybody is told"


@pytest.mark.thorough
async def test_slow_rows_are_not_hung_and_a_stopped_fork_server_does_not_prevent_closing(rows):
    path = rows(8, dict.fromkeys(range(8), {"sleep_s": 0.8}))
    async with pool(path, tells_who, row_timeout_s=5.0) as (executor, client, window):
        assert ids_of(await client.tokenized(window)) == list(range(8))
    assert executor.statistics().num_restarts == 0
    async with pool(rows(20), row_id, 2):
        stopped = fork_server()
        stopped.suspend()
    assert not stopped.is_running()


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
async def test_the_tokenize_function_is_opened_once_for_all_workers_including_later_ones(rows, tmp_path):
    async with pool(rows(5), Opening("is counted", str(tmp_path)), 3) as (executor, client, window):
        before = pids(executor)
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: pids(executor)[0] not in {None, before[0]})
        executor.set_num_workers(4)
        await executors.all_ready(executor)
        assert ids_of(await client.tokenized(window)) == [0, 1, 2, 3, 4]
        assert {psutil.Process(pid).ppid() for pid in pids(executor)} == {fork_server().pid}
    assert len(list(tmp_path.glob("start *"))) == 1


@pytest.mark.thorough
async def test_every_forked_worker_has_its_own_random_numbers(rows):
    path = rows(40, dict.fromkeys(range(40), {"sleep_s": 0.005}))
    async with pool(path, Opening("dice"), 2) as (_, client, window):
        asked = [client.ask(window.request(row, row + 1)) for row in range(40)]
        found = [executors.value_of(reply, "extra") for reply in await client.answers(asked)]
    one, other = {each["pid"]: each for each in reversed(found)}.values()  # the first of each
    assert one["python"] != other["python"]
    assert one["numpy"] != other["numpy"]


async def test_output_before_a_fork_is_printed_once_and_that_of_a_worker_goes_to_the_log(rows):
    with structlog.testing.capture_logs() as events:
        async with pool(rows(1), Opening("prints without a newline"), 2):
            await until(lambda: "half a line" in executors.said(events))

    assert executors.said(events).count("half a line") == 2, "once from Python and once from C"
    assert {event["worker"] for event in events_of(events, "worker.output")} == {"forkserver"}

    with structlog.testing.capture_logs() as events:
        async with pool(rows(1), worker_fns.talks) as (executor, client, window):
            await client.tokenized(window)
            (pid,) = pids(executor)
            await until(lambda: "hello from row 0" in executors.said(events))

    assert "a warning" in executors.said(events)
    first = events_of(events, "worker.output")[0]
    assert (first["worker"], first["pid"], first["log_level"]) == (0, pid, "info")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("lingers", "the tokenize function has started threads: there are 2"),
        ("keeps a file open", "the tokenize function keeps open descriptor "),
    ],
)
async def test_a_function_with_threads_or_open_files_is_opened_by_every_worker_itself(rows, tmp_path, what, reason):
    with structlog.testing.capture_logs() as events:
        async with pool(rows(200), Opening(what, str(tmp_path)), 2) as (executor, client, window):
            before = pids(executor)
            assert sorted(before) == sorted(child.pid for child in psutil.Process().children())
            os.kill(before[0], signal.SIGKILL)
            await until(lambda: executor.statistics().num_restarts == 1)
            await executors.all_ready(executor)
            assert ids_of(await client.tokenized(window)) == list(range(200))
    (event,) = events_of(events, "workers.not_shared")
    assert event["reason"].startswith(reason)
    assert (len(list(tmp_path.glob("start *"))), events_of(events, "forkserver.lost")) == (3, [])


async def test_where_pidfds_are_forbidden_workers_share_nothing(monkeypatch):
    before = parts.descriptors()
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    assert parts.why_not_shared(before).startswith("a process cannot be identified by a pidfd here: ")
    monkeypatch.delattr(os, "pidfd_open")
    assert parts.why_not_shared(before).startswith("a process cannot be identified by a pidfd here: ")


async def failure_to_run(client: Client) -> str:
    client.executor.prepare(client.slot_bytes)
    with anyio.fail_after(NEVER_S), pytest.raises(WorkerError) as caught:
        await client.executor.run(client.job)
    return str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("request_id", "reply", "reason"),
    [
        (99, parts.Permuted(b""), "a worker answered request 99 out of turn"),
        (2, parts.Ready(1), "a worker announced itself twice; it is out of step"),
    ],
)
async def test_a_reply_that_does_not_match_its_request_ends_the_run(rows, request_id, reply, reason):
    """A function that writes to a foreign descriptor ends the run: no later reply can be trusted."""
    noise = base64.b64encode(frame(request_id, reply)).decode()
    client = Client(process_pool(1), rows(2, {1: {"bytes": noise}}), worker_fns.writes_everywhere)
    with pytest.RaisesGroup(pytest.RaisesExc(WorkerError, match=f"^{reason}$")):
        async with client.reading() as window:
            asked = client.ask(window.request(1, 2))
            assert asked == 1, "the second, so that its id is 2"
            await anyio.sleep_forever()
    assert all(isinstance(reply, parts.Failed) for reply in client.replies[asked])


async def test_without_room_for_workers_the_error_says_so_and_no_descriptor_stays_open(rows):
    """Whichever descriptor is the one too many."""
    path, told = rows(1), []
    gc.collect()  # what earlier tests left may hold descriptors
    before = sorted(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for room in itertools.count(4):
        executor = process_pool(2)
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


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("leaves no room", "AD426 workers cannot be started: Resource temporarily unavailable; raise the limit"),
        ("answers everywhere", "the fork server answered a fork with Loaded; it is out of step"),
    ],
)
async def test_a_fork_server_that_starts_no_worker_says_why(rows, what, message):
    assert (await failure_to_run(Client(process_pool(1), rows(1), Opening(what)))).startswith(message)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "AD426 workers cannot be started: Too many open files; raise"),
        (ProcessLookupError(errno.ESRCH, "No such process"), "AD426 a worker died 3 times while starting (SIGKILL)"),
    ],
    ids=["no descriptor left", "dead before its pidfd was opened"],
)
async def test_a_worker_without_a_pidfd_is_not_used(rows, monkeypatch, error, message):
    """Without a pidfd, its pid could belong to another process by the time that the worker is killed."""
    monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=error))
    change(monkeypatch, patience_with_starts_s=0)  # otherwise kills from outside are tolerated for that long
    assert (await failure_to_run(Client(process_pool(1), rows(1), row_id))).startswith(message)


async def test_while_others_work_the_start_of_a_worker_is_retried_until_there_is_room(rows):
    with structlog.testing.capture_logs() as logs:
        async with pool(rows(60), row_id) as (executor, client, window):
            pid = fork_server().pid
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 4096))
            executor.set_num_workers(2)
            await until(lambda: events_of(logs, "worker.not_started"))
            assert ids_of(await client.tokenized(window)) == list(range(60))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))
            await executors.all_ready(executor)
    assert executor.statistics().num_restarts == 0


async def test_without_room_for_a_fork_and_without_a_worker_the_error_says_so(rows, monkeypatch):
    """The fork server may open too few descriptors to receive those of a worker."""
    change(monkeypatch, patience_with_starts_s=0.1)
    refused = pytest.RaisesExc(WorkerError, match="^AD426 workers cannot be started: Too many open files; raise the")
    with pytest.RaisesGroup(refused, flatten_subgroups=True):
        async with pool(rows(1), row_id) as (executor, _, _):
            resource.prlimit(fork_server().pid, resource.RLIMIT_NOFILE, (3, 3))
            os.kill(pids(executor)[0], signal.SIGKILL)
            await anyio.sleep_forever()


HEAVY = {"datasets", "jinja2", "numpy", "pyarrow", "pytest", "structlog", "torch", "transformers", "anyio", "asyncio"}


async def test_a_worker_has_the_modules_the_environment_and_the_parents_that_are_documented(rows, monkeypatch):
    given = {"ASYNCDATA_TEST_NAME": "inherited", "CUDA_VISIBLE_DEVICES": "0,1", "TOKENIZERS_PARALLELISM": "true"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = [*given, "RAYON_NUM_THREADS", "OMP_NUM_THREADS"]
    reply = await executors.tokenized(process_pool(1), rows(1, {0: {"names": names}}), worker_fns.surroundings)
    found = executors.value_of(reply, "extra")

    assert {*found["modules"]} & {*HEAVY, "msgspec"} == {"msgspec"}
    assert list(found["environment"].values()) == ["inherited", "", "false", "1", "1"]
    assert found["grandparent"] == os.getpid(), "the fork server is between them"
    assert found["group"] == os.getpgid(0), "Ray ends a trainer's process group"
    assert found["stdin"] == "/dev/null"
    assert found["main"] is None, "the trainer's script must not run again"
    assert found["path"] == [os.path.abspath(path) for path in sys.path]  # noqa: ASYNC240 - no file is looked at
    assert found["cwd"] == os.getcwd()
    assert found["sigint"]


@pytest.mark.thorough
async def test_much_output_does_not_block_a_worker_and_does_not_fill_the_log(rows):
    with structlog.testing.capture_logs() as events:
        assert ids_of(await executors.tokenized(process_pool(1), rows(20), worker_fns.noisy)) == list(range(20))
    assert 4096 <= len(executors.said(events)) <= 100 * 4096


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    connection = parts.Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


async def test_an_impossible_length_is_refused_before_memory_is_allocated(pair):
    connection, worker = pair
    worker.sendall(parts.HEADER.pack(parts.MAX_FRAME_BYTES + 1, 7))
    with pytest.raises(WorkerError, match=r"announced a reply of \d+ bytes; it is out of step"):
        await connection.receive()


@pytest.mark.parametrize("is_first", [True, False], ids=["the first message", "later ones"])
async def test_bytes_that_the_socket_does_not_take_at_once_are_sent_later_in_order(pair, is_first):
    connection, worker = pair
    sent = list(map(random.Random(3).randbytes, [3_000_000] if is_first else [1, 400_000] * 20))
    received = bytearray()

    def read() -> None:
        while len(received) < sum(map(len, sent)):
            received.extend(worker.recv(1 << 16))

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            group.start_soon(*(connection.send_first, sent[0]) if is_first else (connection.send_rest,))
            for number, data in enumerate([] if is_first else sent):
                connection.send(data)
                if number == 20:
                    await anyio.wait_all_tasks_blocked()  # no reader: the socket is full
            await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(read)
            group.cancel_scope.cancel()

    assert received == b"".join(sent)
