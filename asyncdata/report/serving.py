"""The report on an address of this machine alone, made anew when the telemetry has grown: ``report RUN --serve``."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

LOOPBACK = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Serves one page, on loopback only.

    :param port: 0 for any that is free.
    :param page: makes the page; it is called when ``state`` has changed since, one call at a time.
    :raises OSError: if the port is in use.
    """

    daemon_threads = True

    def __init__(self, port: int, page: Callable[[], bytes], state: Callable[[], Hashable]) -> None:
        self._make, self._state, self._making = page, state, Lock()
        self._made: tuple[Hashable, bytes] | None = None
        super().__init__((LOOPBACK, port), _Handler)
        self.address = f"{LOOPBACK}:{self.server_port}"

    def page(self) -> bytes:
        """The page of the present telemetry."""
        with self._making:
            state = self._state()
            if self._made is None or self._made[0] != state:
                self._made = state, self._make()
            return self._made[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that has gone away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """The page; the name of the host is checked, so that no page of another server can read it."""
        if self.headers["Host"] not in (self.server.address, f"localhost:{self.server.server_port}"):
            self.send_error(403)
        elif self.path != "/":
            self.send_error(404)
        else:
            try:
                page = self.server.page()
            except Exception as error:
                self.send_error(500, explain=f"The report cannot be made: {error}")
                return

            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Nothing: the page is read by its user alone."""
