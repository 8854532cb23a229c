"""Frames arrive whole or not at all, however the socket splits them."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from asyncdata import WorkerError
from asyncdata.core.framing import HEADER
from asyncdata.core.messages import MAX_FRAME_BYTES
from asyncdata.workers.pool.connection import Connection
from tests.support.executors import NEVER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.asyncio


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the worker's end of it."""
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def framed(request_id: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), request_id) + body


async def receive(connection: Connection) -> tuple[int, bytes]:
    with anyio.fail_after(NEVER_S):
        return await connection.receive()


async def test_a_frame_arrives_as_it_was_sent(pair):
    connection, worker = pair
    worker.sendall(framed(7, b"body"))

    assert await receive(connection) == (7, b"body")


async def test_an_empty_body_is_received(pair):
    connection, worker = pair
    worker.sendall(framed(7, b"") + framed(8, b"x"))

    assert await receive(connection) == (7, b"")
    assert await receive(connection) == (8, b"x")


async def test_frames_that_arrive_together_are_separated(pair):
    connection, worker = pair
    sent = [(i, bytes([i]) * (i * 7)) for i in range(100)]
    worker.sendall(b"".join(framed(*frame) for frame in sent))

    assert [await receive(connection) for _ in sent] == sent


@pytest.mark.thorough
@pytest.mark.parametrize("cut", range(1, HEADER.size + 4))
async def test_a_frame_split_at_any_byte_is_waited_for(pair, cut):
    connection, worker = pair
    data = framed(7, b"body")
    received = []

    async def read() -> None:
        received.append(await connection.receive())

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            worker.sendall(data[:cut])
            group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            assert received == []
            worker.sendall(data[cut:])

    assert received == [(7, b"body")]


async def test_frames_split_at_random_arrive_whole(pair):
    connection, worker = pair
    chance = random.Random(3)
    sent = [(i, chance.randbytes(chance.choice([0, 1, 17, 5000, 70_000]))) for i in range(60)]
    data = b"".join(framed(*frame) for frame in sent)

    def write() -> None:
        start = 0
        while start < len(data):
            stop = start + chance.choice([1, 2, 11, 12, 13, 4096, 100_000])
            worker.sendall(data[start:stop])
            start = stop

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, write)
            assert [await connection.receive() for _ in sent] == sent


async def test_a_frame_larger_than_the_buffer_arrives_whole(pair):
    connection, worker = pair
    body = random.Random(5).randbytes(5_000_000)

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, worker.sendall, framed(1, body) + framed(2, b"small"))
            assert await connection.receive() == (1, body)
            assert await connection.receive() == (2, b"small")


async def test_half_a_frame_does_not_block_the_loop(pair):
    """A worker may be stopped in the middle of a reply."""
    connection, worker = pair
    data = framed(1, bytes(1_000_000))

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            group.start_soon(connection.receive)
            await anyio.to_thread.run_sync(worker.sendall, data[:500_000])
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            await anyio.to_thread.run_sync(worker.sendall, data[500_000:])


@pytest.mark.parametrize("left", [b"", HEADER.pack(4, 7)[:5], HEADER.pack(4, 7), HEADER.pack(4, 7) + b"bo"])
async def test_a_socket_that_ends_inside_a_frame_is_an_eof_error(pair, left):
    connection, worker = pair
    worker.sendall(framed(1, b"whole") + left)
    worker.close()

    assert await receive(connection) == (1, b"whole")
    with pytest.raises(EOFError):
        await receive(connection)


async def test_a_reset_connection_is_an_eof_error(pair):
    connection, worker = pair
    connection.send(b"never read")
    worker.close()  # with bytes unread: the other end sees ECONNRESET

    with pytest.raises(EOFError):
        await receive(connection)


async def test_an_impossible_length_is_refused_before_memory_is_allocated(pair):
    connection, worker = pair
    worker.sendall(HEADER.pack(MAX_FRAME_BYTES + 1, 7))

    with pytest.raises(WorkerError, match=r"announced a reply of \d+ bytes; it is out of step"):
        await receive(connection)


async def test_sending_to_a_closed_socket_is_an_os_error(pair):
    connection, worker = pair
    worker.close()

    with pytest.raises(OSError):
        connection.send(b"x")


async def test_bytes_that_the_socket_does_not_take_at_once_are_sent_later_in_order(pair):
    connection, worker = pair
    chance = random.Random(4)
    sent = [chance.randbytes(chance.choice([1, 100, 400_000])) for _ in range(40)]
    received = bytearray()

    def read() -> None:
        while len(received) < sum(map(len, sent)):
            received.extend(worker.recv(1 << 16))

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            group.start_soon(connection.send_rest)
            for number, data in enumerate(sent):
                connection.send(data)
                if number == 20:
                    await anyio.wait_all_tasks_blocked()  # no reader: the socket is full
            await anyio.to_thread.run_sync(read)
            group.cancel_scope.cancel()

    assert received == b"".join(sent)


async def test_send_rest_ends_when_the_worker_closes_its_socket(pair):
    connection, worker = pair

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            connection.send(bytes(1_000_000))
            group.start_soon(connection.send_rest)
            await anyio.wait_all_tasks_blocked()
            worker.close()


async def test_the_first_message_may_be_longer_than_the_socket_buffer(pair):
    connection, worker = pair
    data = random.Random(1).randbytes(3_000_000)
    received = bytearray()

    def read() -> None:
        while len(received) < len(data):
            received.extend(worker.recv(1 << 16))

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            group.start_soon(connection.send_first, data)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(anyio.to_thread.run_sync, read)

    assert received == data
