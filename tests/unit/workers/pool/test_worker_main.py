"""A worker process: it is small, logs its output, and ends with its socket, whose frames arrive whole or not at all."""

from __future__ import annotations

import os
import random
import socket
import sys

import anyio
import anyio.to_thread
import pytest
import structlog

from asyncdata.errors import WorkerError
from tests.support import worker_fns
from tests.support.executors import NEVER_S, ids_of, tokenized, until, value_of
from tests.support.parts import (
    HEADER,
    MAX_FRAME_BYTES,
    Connection,
)
from tests.support.pools import events_of, pids, pool, process_pool, said

pytestmark = pytest.mark.asyncio

HEAVY = {"datasets", "jinja2", "numpy", "pyarrow", "pytest", "structlog", "torch", "transformers", "anyio", "asyncio"}


async def test_a_worker_has_the_modules_the_environment_and_the_parents_that_are_documented(rows, monkeypatch):
    given = {"ASYNCDATA_TEST_NAME": "inherited", "CUDA_VISIBLE_DEVICES": "0,1", "TOKENIZERS_PARALLELISM": "true"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = [*given, "RAYON_NUM_THREADS", "OMP_NUM_THREADS"]
    reply = await tokenized(process_pool(1), rows(1, {0: {"names": names}}), worker_fns.surroundings)
    found = value_of(reply, "extra")

    assert set(found["modules"]) & HEAVY == set()
    assert "msgspec" in found["modules"]
    assert list(found["environment"].values()) == ["inherited", "", "false", "1", "1"]
    assert found["grandparent"] == os.getpid(), "the fork server is between them"
    assert found["group"] == os.getpgid(0), "Ray ends a trainer's process group"
    assert found["stdin"] == "/dev/null"
    assert found["main"] is None, "the trainer's script must not run again"
    assert found["path"] == [os.path.abspath(path) for path in sys.path]  # noqa: ASYNC240 - no file is looked at
    assert found["cwd"] == os.getcwd()
    assert found["sigint"]


async def test_the_output_of_a_worker_goes_to_the_log(rows):
    with structlog.testing.capture_logs() as events:
        async with pool(rows(1), worker_fns.talks) as (executor, client, window):
            await client.tokenized(window)
            (pid,) = pids(executor)
            await until(lambda: "hello from row 0" in said(events))

    assert "a warning" in said(events)
    first = events_of(events, "worker.output")[0]
    assert (first["worker"], first["pid"], first["log_level"]) == (0, pid, "info")


@pytest.mark.thorough
async def test_much_output_does_not_block_a_worker_and_does_not_fill_the_log(rows):
    with structlog.testing.capture_logs() as events:
        assert ids_of(await tokenized(process_pool(1), rows(20), worker_fns.noisy)) == list(range(20))

    assert 4096 <= len(said(events)) <= 100 * 4096


CHANCE = random.Random(3)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


async def test_an_impossible_length_is_refused_before_memory_is_allocated(pair):
    connection, worker = pair
    worker.sendall(HEADER.pack(MAX_FRAME_BYTES + 1, 7))

    with pytest.raises(WorkerError, match=r"announced a reply of \d+ bytes; it is out of step"):
        await connection.receive()


@pytest.mark.parametrize("is_first", [True, False], ids=["the first message", "later ones"])
async def test_bytes_that_the_socket_does_not_take_at_once_are_sent_later_in_order(pair, is_first):
    connection, worker = pair
    sent = [CHANCE.randbytes(3_000_000)] if is_first else [CHANCE.randbytes(size) for size in [1, 400_000] * 20]
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
