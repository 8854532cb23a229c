"""Workers start, share what they can, come and go, and end; what cannot start says why."""

from __future__ import annotations

import base64
import errno
import gc
import itertools
import os
import resource
import signal

import anyio
import psutil
import pytest
import structlog

from asyncdata.core.messages import frame
from asyncdata.errors import WorkerError
from tests.support import worker_fns
from tests.support.executors import NEVER_S, Client, ids_of, until, value_of
from tests.support.inner import change
from tests.support.parts import Failed, Permuted, Ready, descriptors, why_not_shared
from tests.support.pools import all_ready, events_of, fork_server, pids, pool, process_pool, said
from tests.support.tokenize_fns import row_id
from tests.support.worker_fns import Opening

pytestmark = pytest.mark.asyncio


@pytest.mark.thorough
async def test_the_tokenize_function_is_opened_once_for_all_workers_including_later_ones(rows, tmp_path):
    async with pool(rows(5), Opening("is counted", str(tmp_path)), 3) as (executor, client, window):
        before = pids(executor)
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: pids(executor)[0] not in {None, before[0]})
        executor.set_num_workers(4)
        await all_ready(executor)
        assert ids_of(await client.tokenized(window)) == [0, 1, 2, 3, 4]
        assert {psutil.Process(pid).ppid() for pid in pids(executor)} == {fork_server().pid}

    assert len(list(tmp_path.glob("start *"))) == 1


@pytest.mark.thorough
async def test_every_forked_worker_has_its_own_random_numbers(rows):
    path = rows(40, dict.fromkeys(range(40), {"sleep_s": 0.005}))
    async with pool(path, Opening("dice"), 2) as (_, client, window):
        asked = [client.ask(window.request(row, row + 1)) for row in range(40)]
        found = [value_of(reply, "extra") for reply in await client.answers(asked)]

    first_of_each = {one["pid"]: (one["python"], one["numpy"]) for one in reversed(found)}
    assert len(first_of_each) == 2
    for rolls in zip(*first_of_each.values(), strict=True):
        assert len(set(rolls)) == 2


async def test_output_that_was_buffered_before_a_fork_is_printed_once(rows):
    with structlog.testing.capture_logs() as events:
        async with pool(rows(1), Opening("prints without a newline"), 2):
            await until(lambda: "half a line" in said(events))

    assert said(events).count("half a line") == 2, "once from Python and once from C"
    assert {event["worker"] for event in events_of(events, "worker.output")} == {"forkserver"}


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
            await all_ready(executor)
            assert ids_of(await client.tokenized(window)) == list(range(200))

    (event,) = events_of(events, "workers.not_shared")
    assert event["reason"].startswith(reason)
    assert len(list(tmp_path.glob("start *"))) == 3
    assert events_of(events, "forkserver.lost") == []


async def test_where_pidfds_are_forbidden_workers_share_nothing(monkeypatch):
    before = descriptors()
    refuse_pidfds(monkeypatch, PermissionError(1, "Operation not permitted"))
    assert why_not_shared(before).startswith("a process cannot be identified by a pidfd here: ")
    monkeypatch.delattr(os, "pidfd_open")
    assert why_not_shared(before).startswith("a process cannot be identified by a pidfd here: ")


def refuse_pidfds(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def refuse(pid: int) -> int:
        raise error

    monkeypatch.setattr(os, "pidfd_open", refuse)


async def failure_to_run(client: Client) -> str:
    client.executor.prepare(client.slot_bytes)
    with anyio.fail_after(NEVER_S), pytest.raises(WorkerError) as caught:
        await client.executor.run(client.job)
    return str(caught.value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("request_id", "reply", "reason"),
    [
        (99, Permuted(b""), "a worker answered request 99 out of turn"),
        (2, Ready(1), "a worker announced itself twice; it is out of step"),
    ],
)
async def test_a_reply_that_does_not_match_its_request_ends_the_run(rows, request_id, reply, reason):
    """A function that writes to a foreign descriptor ends the run: no later reply can be trusted."""
    noise = base64.b64encode(frame(request_id, reply)).decode()
    client = Client(process_pool(1), rows(2, {1: {"bytes": noise}}), worker_fns.writes_everywhere)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with client.reading() as window:
            asked = client.ask(window.request(1, 2))
            assert asked == 1, "the second, so that its id is 2"
            await anyio.sleep_forever()

    (error,) = caught.value.exceptions
    assert isinstance(error, WorkerError)
    assert str(error) == reason
    assert all(isinstance(reply, Failed) for reply in client.replies[asked])


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


NO_PROCESS = "AD426 workers cannot be started: Resource temporarily unavailable; raise the limit"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Opening("leaves no room"), NO_PROCESS),
        (Opening("answers everywhere"), "the fork server answered a fork with Loaded; it is out of step"),
    ],
    ids=["no room for one more process", "a fork server out of step"],
)
async def test_a_fork_server_that_starts_no_worker_says_why(rows, function, message):
    assert (await failure_to_run(Client(process_pool(1), rows(1), function))).startswith(message)


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
    refuse_pidfds(monkeypatch, error)
    change(monkeypatch, patience_with_starts_s=0)  # otherwise kills from outside are tolerated for that long
    client = Client(process_pool(1), rows(1), row_id)

    assert (await failure_to_run(client)).startswith(message)


async def test_while_others_work_the_start_of_a_worker_is_retried_until_there_is_room(rows):
    with structlog.testing.capture_logs() as logs:
        async with pool(rows(60), row_id) as (executor, client, window):
            pid = fork_server().pid
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 4096))
            executor.set_num_workers(2)
            await until(lambda: events_of(logs, "worker.not_started"))
            assert ids_of(await client.tokenized(window)) == list(range(60))

            resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))
            await all_ready(executor)

    assert executor.statistics().num_restarts == 0


async def test_without_room_for_a_fork_and_without_a_worker_the_error_says_so(rows, monkeypatch):
    """The fork server may open too few descriptors to receive those of a worker."""
    change(monkeypatch, patience_with_starts_s=0.1)
    refused = pytest.RaisesExc(
        WorkerError, match="^AD426 workers cannot be started: Too many open files; raise the limit"
    )
    with pytest.RaisesGroup(refused, flatten_subgroups=True):
        async with pool(rows(1), row_id) as (executor, _, _):
            resource.prlimit(fork_server().pid, resource.RLIMIT_NOFILE, (3, 3))
            os.kill(pids(executor)[0], signal.SIGKILL)
            await anyio.sleep_forever()
