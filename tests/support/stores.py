"""Stores on loopback: S3 by moto, and a host of http that counts its requests and fails as it is told."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from tests.support.store_listings import listing

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKET = "test-bucket"
SECRET = "sEcReTkEyOfTheTests0123456789"
FAST = {"retry_timeout_s": 120.0}


class Request(NamedTuple):
    """A request to :class:`HttpHost`: its range is ``[start, stop)``, or the whole object."""

    method: str
    path: str
    start: int
    stop: int
    headers: dict[str, str]


class Answer(NamedTuple):
    """How a request is answered in place of the usual way.

    :ivar body: None: what was asked for.
    :ivar cut_to: send so many bytes only, and close the connection.
    """

    status: int = 0
    body: bytes | None = None
    headers: dict[str, str] = {}
    cut_to: int | None = None


class HttpHost:
    """Objects by http, with ranges, etags and If-Match.

    It answers reads and listings as Google's and Azure's stores do, too: a bucket is the first folder.

    :ivar objects: path -> bytes; may be changed at any time.
    :ivar requests: those so far.
    :ivar answer: called with each request, in the server's threads; None for the usual answer.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.answer: Callable[[Request], Answer | None] = lambda _: None
        self._server = _Server(("127.0.0.1", 0), functools.partial(_Handler, self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def put(self, path: str, data: bytes) -> str:
        """Write an object; its address."""
        self.objects[path] = data
        return self.url + quote(path)

    @property
    def google(self) -> dict[str, Any]:
        """The ``storage_options`` with which it is Google Cloud Storage."""
        key = {
            "gcs_base_url": self.url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {"service_account_key": json.dumps(key), **FAST}

    @property
    def azure(self) -> dict[str, Any]:
        """The ``storage_options`` with which it is Azure."""
        return {"account_name": "account", "endpoint": self.url, "skip_signature": True, **FAST}

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that is killed, or has enough, cuts its connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, host: HttpHost, *args: Any) -> None:
        self.host = host
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        data = self.host.objects.get(path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        size = len(data or b"")
        start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, size)) if wanted else (0, size)
        request = Request(self.command, self.path, start, stop, {k.lower(): v for k, v in self.headers.items()})
        self.host.requests.append(request)
        answer = self.host.answer(request) or Answer()
        page = listing(self.path, self.host.objects)
        if page is not None:
            data, answer = page, answer if answer.status else Answer(200, page)
        etag = f'"{hashlib.md5(data or b"").hexdigest()}"'
        if data is None:
            answer = Answer(404, b"")
        elif not answer.status and self.headers.get("if-match", etag) != etag:
            answer = Answer(412, b"")
        body = (data or b"")[start:stop] if answer.body is None else answer.body
        headers = {"content-length": str(len(body)), "etag": etag, "last-modified": "Sun, 22 Nov 2026 10:00:00 GMT"}
        if wanted:
            headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
        self.send_response(answer.status or (206 if wanted else 200))
        for name, value in (headers | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: answer.cut_to])
        if answer.cut_to is not None:
            self.wfile.flush()
            self.close_connection = True


class S3:
    """A bucket by moto, in this process.

    :ivar options: the ``storage_options`` of the bucket.
    """

    def __init__(self) -> None:
        import boto3
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        login = {"aws_access_key_id": "AKIATEST", "aws_secret_access_key": SECRET}
        self.client: Any = boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1", **login)
        self.client.create_bucket(Bucket=BUCKET)
        self.options = {"endpoint": self.endpoint, "region": "us-east-1", **login, **FAST}

    def put(self, key: str, data: bytes) -> str:
        """Write an object; its address."""
        self.client.put_object(Bucket=BUCKET, Key=key, Body=data)
        return f"s3://{BUCKET}/{key}"


@functools.cache
def s3() -> S3:
    """The bucket that all tests of this process share."""
    return S3()


@functools.cache
def http_host() -> HttpHost:
    """The host that tests share which let it answer as usual."""
    return HttpHost()


def jsonl_of(num_rows: int) -> bytes:
    """Rows whose id is their number, of many lengths; some cross a block's end by far."""
    rows = ({"id": i, "pad": "x" * (9000 if i % 100 == 7 else i * 37 % 90)} for i in range(num_rows))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
