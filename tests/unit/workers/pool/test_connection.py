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
from asyncdata.workers.pool.worker_main import send_pieces
from tests.support.executors import NEVER_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.asyncio

CHANCE = random.Random(3)
FRAMES = [
    (7, b""),
    *((number, bytes([number]) * (number * 7)) for number in range(100)),
    (1, CHANCE.randbytes(5_000_000)),  # larger than any buffer
    *((number, CHANCE.randbytes(CHANCE.choice([0, 1, 17, 5000, 70_000]))) for number in range(60)),
]


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


async def test_frames_of_any_size_that_are_split_anywhere_arrive_whole(pair):
    connection, worker = pair
    data = b"".join(framed(*frame) for frame in FRAMES)

    def write() -> None:
        start = 0
        while start < len(data):
            stop = start + CHANCE.choice([1, 2, 11, 12, 13, 4096, 100_000])
            worker.sendall(data[start:stop])
            start = stop

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, write)
            assert [await connection.receive() for _ in FRAMES] == FRAMES


@pytest.mark.parametrize("cut", [1, HEADER.size - 1, HEADER.size, HEADER.size + 3])
async def test_half_a_frame_is_waited_for_without_blocking_the_loop(pair, cut):
    """A worker may be stopped in the middle of a reply."""
    connection, worker = pair
    data, received = framed(7, b"body"), []

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


@pytest.mark.parametrize("left", [b"", HEADER.pack(4, 7)[:5], HEADER.pack(4, 7), HEADER.pack(4, 7) + b"bo"])
async def test_a_socket_that_ends_inside_a_frame_is_an_eof_error(pair, left):
    connection, worker = pair
    worker.sendall(framed(1, b"whole") + left)
    worker.close()

    with anyio.fail_after(NEVER_S):
        assert await connection.receive() == (1, b"whole")
        with pytest.raises(EOFError):
            await connection.receive()


async def test_a_reset_connection_is_an_eof_error_and_an_os_error_for_who_sends(pair):
    connection, worker = pair
    connection.send(b"never read")
    worker.close()  # with bytes unread: the other end sees ECONNRESET

    with anyio.fail_after(NEVER_S), pytest.raises(EOFError):
        await connection.receive()
    with pytest.raises(OSError):
        connection.send(b"x")


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


async def test_send_rest_ends_when_the_worker_closes_its_socket(pair):
    connection, worker = pair

    with anyio.fail_after(NEVER_S):
        async with anyio.create_task_group() as group:
            connection.send(bytes(1_000_000))
            group.start_soon(connection.send_rest)
            await anyio.wait_all_tasks_blocked()
            worker.close()


class Narrow:
    """A socket whose ``sendmsg`` takes only a part of the data, as an interrupted call does."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.sent = b""

    def sendmsg(self, data: Sequence[bytes]) -> int:
        self.sent += b"".join(data)[: self.num_bytes]
        return len(self.sent)

    def sendall(self, data: bytes) -> None:
        self.sent += data


@pytest.mark.parametrize("num_bytes", range(8))
async def test_a_workers_reply_is_sent_completely_after_a_partial_send(num_bytes):
    sock = Narrow(num_bytes)

    send_pieces(sock, [b"on", b"", memoryview(b"etw"), b"o"])

    assert sock.sent == b"onetwo"
