"""A small HTTP/1.1 server on loopback, with a thread for each connection: a test says what it answers."""

import asyncio
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

__all__ = ("HttpServer", "Request", "Response", "byte_range", "ranged")


class Request(NamedTuple):
    """What a client sent; the names of headers are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Response(NamedTuple):
    """What it is answered; after ``cut_at`` bytes of the body the connection is closed, whatever its length says."""

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


class HttpServer(ThreadingHTTPServer):
    """Serves until it is closed.

    :param answer: gives the response to a request, in the thread of its connection.
    :ivar is_closing: set when it is closed; an answer that waits has to look at it.
    :ivar in_flight: how many requests are not answered yet; ``max_in_flight``: the most that there were at once.
    """

    request_queue_size = 1024

    def __init__(self, answer: Callable[[Request], Response | Awaitable[Response]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.respond = answer
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.is_closing = threading.Event()
        self.num_requests = self.in_flight = self.max_in_flight = self.num_sent_bytes = 0
        self.lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), name="http-server", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closing.set()
        self.shutdown()
        for connection, thread in list(self._connections.items()):
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread that :meth:`__exit__` waits for, and the interpreter does not."""
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        self._connections[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        del self._connections[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client has left
            super().handle_error(request, client_address)


async def _result(answer: Awaitable[Response]) -> Response:
    return await answer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HttpServer

    def do_GET(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        with server.lock:
            server.num_requests += 1
            server.in_flight += 1
            server.max_in_flight = max(server.max_in_flight, server.in_flight)
        answer = server.respond(Request(self.command, self.path, headers, body))
        found = answer if isinstance(answer, Response) else asyncio.run(_result(answer))
        sent = b"" if self.command == "HEAD" else found.body[: found.cut_at]
        self.close_connection |= found.cut_at is not None
        lines = [f"HTTP/1.1 {found.status} {HTTPStatus(found.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in ({"content-length": len(found.body)} | found.headers).items()]
        with server.lock:
            server.in_flight -= 1
            server.num_sent_bytes += len(sent)
        self.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1") + sent)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the names of the standard library

    def log_message(self, *_: object) -> None: ...
