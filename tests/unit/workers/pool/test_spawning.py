"""The fork server: what its workers share, when they share nothing, and what happens when it dies."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from typing import TYPE_CHECKING, Any

import anyio
import psutil
import pytest
import structlog

from asyncdata import WorkerError
from asyncdata.core.framing import frame
from asyncdata.core.messages import Permute, Permuted, Ready, decode_reply
from asyncdata.workers.pool import lost_workers, spawning
from asyncdata.workers.pool.forkserver import descriptors, why_not_shared
from asyncdata.workers.pool.process_pool import ProcessExecutor
from asyncdata.workers.pool.processes import SharedResources
from asyncdata.workers.pool.spawning import WorkerFactory
from tests.support import worker_fns
from tests.support.executors import NEVER_S, Client, ids_of, until, value_of
from tests.support.tokenize_fns import kills_on_13, row_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncdata.workers.pool.processes import WorkerProcess


@pytest.fixture
def rows(jsonl_file) -> Callable[..., Path]:
    """A function that writes rows 0 to n-1, each with what is given for it."""

    def write(number: int, special: dict[int, dict[str, Any]] | None = None) -> Path:
        return jsonl_file([{"id": i, **(special or {}).get(i, {})} for i in range(number)])

    return write


def fork_server() -> psutil.Process:
    """The only child of this process."""
    (child,) = psutil.Process().children()
    return child


def pids(executor: ProcessExecutor) -> list[int]:
    return [worker.pid for worker in executor.statistics().workers if worker.pid is not None]


async def all_ready(executor: ProcessExecutor) -> None:
    await until(lambda: [state.state for state in executor.statistics().workers] == ["idle"] * executor.num_workers)


def events_of(events: Any, name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


# What is shared


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_the_tokenize_function_is_opened_once_for_all_workers_including_later_ones(rows, tmp_path):
    executor = ProcessExecutor(3)
    client = Client(executor, rows(5), worker_fns.Opening("is counted", str(tmp_path)))
    async with client.running():
        window = await client.window()
        await all_ready(executor)
        before = pids(executor)
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: pids(executor)[0] not in {None, before[0]})
        executor.set_num_workers(4)
        await all_ready(executor)
        assert ids_of(await client.tokenized(window)) == [0, 1, 2, 3, 4]
        assert {psutil.Process(pid).ppid() for pid in pids(executor)} == {fork_server().pid}

    assert len(list(tmp_path.glob("start *"))) == 1


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_every_forked_worker_has_its_own_random_numbers(rows):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(40, {i: {"sleep_s": 0.005} for i in range(40)}), worker_fns.RollsDice())
    async with client.running():
        window = await client.window()
        await all_ready(executor)
        asked = [client.ask(window.request(row, row + 1)) for row in range(40)]
        said = [value_of(reply, "extra") for reply in await client.answers(asked)]

    first_of_each = {one["pid"]: (one["python"], one["numpy"]) for one in reversed(said)}
    assert len(first_of_each) == 2
    for rolls in zip(*first_of_each.values(), strict=True):
        assert len(set(rolls)) == 2


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_output_that_was_buffered_before_a_fork_is_printed_once(rows):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(1), worker_fns.Opening("prints without a newline"))
    with structlog.testing.capture_logs() as events:
        async with client.running():
            await all_ready(executor)
            await until(lambda: "half a line" in said(events))

    assert said(events).count("half a line") == 2, "once from Python and once from C"
    assert {event["worker"] for event in events_of(events, "worker.output")} == {"forkserver"}


def said(events: Any) -> str:
    return "".join(event["text"] for event in events_of(events, "worker.output"))


# When nothing is shared


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("lingers", "the tokenize function has started threads: there are 2"),
        ("keeps a file open", "the tokenize function keeps open descriptor "),
    ],
)
@pytest.mark.asyncio
async def test_a_function_with_threads_or_open_files_is_opened_by_every_worker_itself(rows, tmp_path, what, reason):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(200), worker_fns.Opening(what, str(tmp_path)))
    with structlog.testing.capture_logs() as events:
        async with client.running():
            window = await client.window()
            await all_ready(executor)
            before = pids(executor)
            assert sorted(before) == sorted(child.pid for child in psutil.Process().children())
            os.kill(before[0], signal.SIGKILL)
            await until(lambda: executor.statistics().num_restarts == 1)
            await all_ready(executor)
            assert ids_of(await client.tokenized(window)) == list(range(200))

    (event,) = events_of(events, "workers.not_shared")
    assert event["reason"].startswith(reason)
    assert len(list(tmp_path.glob("start *"))) == 3
    assert events_of(events, "forkserver.lost") == []


def test_where_pidfds_are_forbidden_workers_share_nothing(monkeypatch):
    before = descriptors()

    def forbidden(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    assert why_not_shared(before).startswith("a process cannot be identified by a pidfd here: ")
    monkeypatch.delattr(os, "pidfd_open")
    assert why_not_shared(before).startswith("a process cannot be identified by a pidfd here: ")


# The death of the fork server


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_a_killed_fork_server_is_replaced_with_its_workers(rows, tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    executor = ProcessExecutor(2)
    client = Client(executor, rows(8, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    with structlog.testing.capture_logs() as events:
        async with client.running():
            window = await client.window()
            asked = [client.ask(window.request(row, row + 1)) for row in range(8)]
            await until(lambda: began.exists() and len(pids(executor)) == 2)
            before = {fork_server().pid, *pids(executor)}
            fork_server().kill()
            await until(lambda: executor.statistics().num_restarts == 3)
            gate.touch()
            assert [ids_of(reply) for reply in await client.answers(asked)] == [[row] for row in range(8)]
            await all_ready(executor)
            assert not before & {fork_server().pid, *pids(executor)}

    (event,) = events_of(events, "forkserver.lost")
    assert (event["pid"] in before, event["how"]) == (True, "SIGKILL")
    assert executor.statistics().num_restarts == 3, "two workers and the fork server"


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_a_request_is_not_blamed_for_the_death_of_the_fork_server(rows, tmp_path):
    """Its worker died with the fork server, four times."""
    began, gate = tmp_path / "began", tmp_path / "gate"
    executor = ProcessExecutor(1)
    client = Client(executor, rows(1, {0: {"began": str(began), "gate": str(gate)}}), worker_fns.waits)
    async with client.running():
        window = await client.window()
        asked = client.ask(window.request(0, 1))
        for _ in range(4):
            await until(began.exists)
            began.unlink()
            fork_server().kill()
        gate.touch()
        assert ids_of(await client.answer(asked)) == [0]


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_fork_server_and_workers_may_be_killed_together(rows):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(400, {i: {"sleep_s": 0.0005} for i in range(400)}), worker_fns.takes_its_time)
    async with client.running():
        window = await client.window()
        asked = [client.ask(window.request(first, first + 4)) for first in range(0, 400, 4)]
        for number in range(4):
            # A process that dies three times while it starts is given up, as it should be.
            await until(lambda: [worker.state for worker in executor.statistics().workers].count("starting") == 0)
            victims = [fork_server().pid, *pids(executor)]
            for pid in victims if number % 2 else reversed(victims):
                with contextlib.suppress(ProcessLookupError):  # it has died with its fork server
                    os.kill(pid, signal.SIGKILL)
            await until(lambda victims=victims: not set(pids(executor)) & set(victims))
        replies = await client.answers(asked)

    assert [ids_of(reply) for reply in replies] == [list(range(first, first + 4)) for first in range(0, 400, 4)]


@pytest.mark.asyncio
async def test_a_stopped_fork_server_is_replaced_once_it_is_needed(rows, monkeypatch):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(20), row_id)
    with structlog.testing.capture_logs() as events:
        async with client.running():
            window = await client.window()
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
@pytest.mark.asyncio
async def test_a_stopped_fork_server_does_not_prevent_the_loader_from_closing(rows):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(20), row_id)
    async with client.running():
        await all_ready(executor)
        stopped = fork_server()
        stopped.suspend()

    assert not stopped.is_running()


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_a_row_that_kills_forked_workers_is_found(rows):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(20), kills_on_13)
    async with client.running():
        window = await client.window()
        reply = await client.answer(client.ask(window.request(10, 15)))
        server = fork_server()
        assert ids_of(await client.tokenized(window, 0, 10)) == list(range(10))
        assert fork_server() == server, "the fork server survives its workers"

    assert (reply.code, reply.reason, reply.row) == ("AD423", "its worker died (SIGSEGV)", 3)  # type: ignore[union-attr]


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_no_zombie_is_left_while_the_pool_runs(rows):
    executor = ProcessExecutor(2)
    client = Client(executor, rows(5), row_id)
    async with client.running():
        await client.window()
        for number in range(3):
            await all_ready(executor)
            os.kill(pids(executor)[number % 2], signal.SIGKILL)
            await until(lambda number=number: executor.statistics().num_restarts == number + 1)
        executor.set_num_workers(1)
        await until(lambda: len(pids(executor)) == 1)
        await all_ready(executor)
        family = psutil.Process().children(recursive=True)
        assert {process.pid for process in family} == {fork_server().pid, *pids(executor)}


# How workers end, and failures to start


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_the_fork_server_ends_its_workers_when_its_socket_ends(rows):
    """Without an executor: only the factory, and a worker whose own socket stays open."""
    client = Client(ProcessExecutor(1), rows(1), row_id)
    with SharedResources(1, 0, 1) as shared, anyio.fail_after(NEVER_S):
        factory = WorkerFactory(shared)
        async with anyio.create_task_group() as group:
            factory.begin(group, client.job)
            worker = await factory.start_worker(0)
            group.cancel_scope.cancel()
        factory.close()
        await worker.handle.ended()
        worker.kill()
        worker.wait()

    assert psutil.Process().children(recursive=True) == []


async def exit_after_an_answer(worker: WorkerProcess) -> str:
    """How a worker ends if it answers one request, and its socket is then closed."""
    _, said = await worker.connection.receive()
    assert decode_reply(said) == Ready(worker.pid)
    worker.connection.send(frame(7, Permute(5, 3)))
    number, reply = await worker.connection.receive()
    assert (number, type(decode_reply(reply))) == (7, Permuted)
    worker.connection.close()
    await worker.handle.ended()
    await worker.handle.ask_status()
    worker.kill()
    worker.wait()
    return worker.how_it_ended()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "function", [worker_fns.Opening(), worker_fns.RollsDice(), worker_fns.Opening("lingers")], ids=lambda fn: fn.what
)
@pytest.mark.asyncio
async def test_a_worker_exits_when_its_socket_ends_however_it_was_started(rows, function):
    """Forked, or a fork server itself; with threads of the user, or without."""
    client = Client(ProcessExecutor(1), rows(1), function)
    with SharedResources(3, 0, 1) as shared, anyio.fail_after(NEVER_S):
        factory = WorkerFactory(shared)
        async with anyio.create_task_group() as group:
            factory.begin(group, client.job)
            ends = [await exit_after_an_answer(await factory.start_worker(number)) for number in range(3)]
            group.cancel_scope.cancel()
        factory.close()

    assert ends == ["exit status 0"] * 3


async def failure_to_run(client: Client) -> str:
    with anyio.fail_after(NEVER_S), pytest.raises(BaseExceptionGroup) as caught:
        async with client.running():
            await anyio.sleep_forever()
    (error,) = caught.value.exceptions
    assert isinstance(error, WorkerError)
    return str(error)


@pytest.mark.asyncio
async def test_without_room_for_one_more_process_the_error_says_so(rows):
    message = await failure_to_run(Client(ProcessExecutor(1), rows(1), worker_fns.LeavesNoRoom()))

    assert message.startswith("AD426 workers cannot be started: Resource temporarily unavailable; raise the limit")


@pytest.mark.asyncio
async def test_a_fork_server_that_is_out_of_step_starts_no_worker(rows):
    message = await failure_to_run(Client(ProcessExecutor(1), rows(1), worker_fns.OpensLoudly()))

    assert message == "the fork server answered a fork with Loaded; it is out of step"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "AD426 workers cannot be started: Too many open files; raise"),
        (ProcessLookupError(errno.ESRCH, "No such process"), "AD426 a worker died 3 times while starting (SIGKILL)"),
    ],
    ids=["no descriptor left", "dead before its pidfd was opened"],
)
@pytest.mark.asyncio
async def test_a_worker_without_a_pidfd_is_not_used(rows, monkeypatch, error, message):
    """Without a pidfd, its pid could belong to another process by the time that the worker is killed."""

    def refuse(pid: int) -> int:
        raise error

    client = Client(ProcessExecutor(1), rows(1), row_id)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(lost_workers, "_PATIENCE_S", 0)  # otherwise kills from outside are tolerated for that long

    assert (await failure_to_run(client)).startswith(message)


@pytest.mark.thorough
@pytest.mark.asyncio
async def test_a_worker_whose_fork_server_died_before_its_pidfd_was_opened_is_not_used(rows, monkeypatch):
    """Its pid may belong to another process by then."""
    opened, really = [], os.pidfd_open

    def kill_the_fork_server_first(pid: int) -> int:
        opened.append(pid)
        if len(opened) == 1:
            os.kill(server := fork_server().pid, signal.SIGKILL)
            os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        return really(pid)

    executor = ProcessExecutor(1)
    client = Client(executor, rows(5), row_id)
    monkeypatch.setattr(os, "pidfd_open", kill_the_fork_server_first)
    async with client.running():
        assert ids_of(await client.tokenized(await client.window())) == [0, 1, 2, 3, 4]
        assert pids(executor) == [opened[1]]
    assert executor.statistics().num_restarts == 1, "the fork server"


@pytest.mark.asyncio
async def test_no_worker_starts_before_prepare_and_begin(rows):
    client = Client(ProcessExecutor(1), rows(1), row_id)

    with pytest.raises(WorkerError, match=r"prepare\(\) has not been called"):
        await client.executor.run(client.job)
    with pytest.raises(WorkerError, match=r"prepare\(\) has not been called"):
        client.executor.memory(0)
    with SharedResources(1, 0, 1) as shared:
        factory = WorkerFactory(shared)
        with pytest.raises(WorkerError, match=r"begin\(\) has not been called"):
            await factory.start_worker(0)
        factory.close()


@pytest.mark.asyncio
async def test_while_others_work_the_start_of_a_worker_is_retried_until_there_is_room(rows):
    executor = ProcessExecutor(1)
    client = Client(executor, rows(60), row_id)
    with structlog.testing.capture_logs() as logs:
        async with client.running():
            await all_ready(executor)
            pid = fork_server().pid
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 4096))
            executor.set_num_workers(2)
            await until(lambda: any(log["event"] == "worker.not_started" for log in logs))
            assert ids_of(await client.tokenized(await client.window())) == list(range(60))

            resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))
            await all_ready(executor)

    assert limits[0] > 3
    assert executor.statistics().num_restarts == 0


@pytest.mark.asyncio
async def test_without_room_for_a_fork_and_without_a_worker_the_error_says_so(rows, monkeypatch):
    """The fork server may open too few descriptors to receive those of a worker."""
    monkeypatch.setattr(lost_workers, "_PATIENCE_S", 0.1)
    executor = ProcessExecutor(1)
    client = Client(executor, rows(1), row_id)
    with anyio.fail_after(NEVER_S), pytest.raises(BaseExceptionGroup) as caught:
        async with client.running():
            await all_ready(executor)
            resource.prlimit(fork_server().pid, resource.RLIMIT_NOFILE, (3, 3))
            os.kill(executor.statistics().workers[0].pid, signal.SIGKILL)
            await anyio.sleep_forever()

    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, WorkerError)
    assert str(error).startswith("AD426 workers cannot be started: Too many open files; raise the limit")
