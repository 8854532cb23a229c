"""A small HTTP/1.1 server on loopback, with its own thread and event loop: a test says what it answers."""

from __future__ import annotations

import asyncio
import threading
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

__all__ = ("HttpServer", "Request", "Response", "byte_range", "head_of", "ranged")

_MAX_HEAD_BYTES = 1 << 18


class Request(NamedTuple):
    """What a client sent; the names of headers are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]


class Response(NamedTuple):
    """What it is answered.

    :ivar cut_at: the connection is closed after so many bytes of the body, whatever its length says.
    """

    status: int
    headers: dict[str, str]
    body: bytes = b""
    cut_at: int | None = None


def byte_range(request: Request, num_bytes: int) -> tuple[int, int] | None:
    """The range [start, stop) that is asked for; None: the whole."""
    given = request.headers.get("range", "")
    if not given.startswith("bytes=") or "," in given:
        return None

    first, _, last = given.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, num_bytes - int(last)), num_bytes

    return int(first), min(num_bytes, int(last) + 1) if last else num_bytes


def ranged(request: Request, data: bytes, etag: str) -> Response:
    """The answer to a GET or HEAD of ``data``: whole, or the range that is asked for; 412 for another ``If-Match``.

    :param etag: empty: none is told.
    """
    headers = {"accept-ranges": "bytes", "last-modified": "Sun, 22 Nov 2026 10:00:00 GMT"}
    headers |= {"etag": f'"{etag}"'} if etag else {}
    if request.headers.get("if-match", f'"{etag}"') not in {f'"{etag}"', "*"}:
        return Response(412, headers)

    wanted = byte_range(request, len(data))
    if wanted is None:
        return Response(200, headers, data)

    start, stop = wanted
    if start >= len(data):
        return Response(416, headers | {"content-range": f"bytes */{len(data)}"})

    return Response(206, headers | {"content-range": f"bytes {start}-{stop - 1}/{len(data)}"}, data[start:stop])


async def head_of(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]] | None:
    """The first line and the headers of a message; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None

    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return first, {name.strip().lower(): value.strip() for name, _, value in pairs}


class HttpServer:
    """Serves until it is closed.

    :param answer: gives the response to a request; it runs in the server's loop.
    :ivar url: where it is: ``http://127.0.0.1:PORT``.
    :ivar num_requests: how many requests it has read.
    :ivar in_flight: how many of them are not answered yet.
    :ivar max_in_flight: the most that there were at once.
    :ivar num_sent_bytes: bytes of all bodies.
    """

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer
        self.url = ""
        self.num_requests = self.in_flight = self.max_in_flight = self.num_sent_bytes = 0
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._transports: set[asyncio.WriteTransport] = set()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), name="http-server")

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await self._loop.create_server(self._connection, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stopped.wait()
        for listening in server.sockets:
            self._loop.remove_reader(listening)
        # Also of connections that are being accepted, whose tasks have not begun, or whose clients read no more. The
        # server is open for that long: it leaves the socket open of one that is being accepted when it is closed.
        while self._transports or asyncio.all_tasks() - {asyncio.current_task()}:
            for task in list(self._tasks):
                task.cancel()
            for transport in list(self._transports):
                transport.abort()
            await asyncio.sleep(0)
        server.close()

    def _connection(self) -> asyncio.Protocol:
        reader = asyncio.StreamReader(limit=_MAX_HEAD_BYTES)
        return _Connection(reader, self._connected, self._transports)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (head := await head_of(reader)) is not None:
                method, target, _ = head[0].split(" ", 2)
                body = await reader.readexactly(int(head[1].get("content-length", 0)))
                if not await self._reply(Request(method, target, head[1], body), writer):
                    break
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left, or the server closes
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _reply(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Answer it; whether the connection can be used further."""
        self.num_requests += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            found = await self._answer(request)
            body = b"" if request.method == "HEAD" else found.body
            headers = {"content-length": str(len(found.body))} | found.headers
            lines = [f"HTTP/1.1 {found.status} {HTTPStatus(found.status).phrase}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            sent = body if found.cut_at is None else body[: found.cut_at]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + sent)
            self.num_sent_bytes += len(sent)
            await writer.drain()
        finally:
            self.in_flight -= 1
        return found.cut_at is None and request.headers.get("connection", "").lower() != "close"


class _Connection(asyncio.StreamReaderProtocol):
    """That of ``asyncio.start_server``. Python 3.11's server does not know its own connections."""

    def __init__(
        self, reader: asyncio.StreamReader, connected: Callable[..., Any], transports: set[asyncio.WriteTransport]
    ) -> None:
        super().__init__(reader, connected)
        self._all = transports

    def connection_made(self, transport: Any) -> None:
        self._all.add(transport)
        self._own = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self._own)
        super().connection_lost(exc)
