"""Stores on loopback: S3 by moto, and a host of http that notes its requests and fails as it is told."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from tests.support.http_server import HttpServer, Request, Response, ranged
from tests.support.store_listings import listing

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKET = "test-bucket"
SECRET = "sEcReTkEyOfTheTests0123456789"
FAST = {"retry_timeout_s": 120.0}


class Answer(NamedTuple):
    """How an answer differs from the usual one: 0 and None leave a part of it as it is."""

    status: int = 0
    body: bytes | None = None
    headers: dict[str, str] = {}
    cut_at: int | None = None


class HttpHost(HttpServer):
    """Objects by http, with ranges, etags and If-Match.

    It answers reads and listings as Google's and Azure's stores do, too: a bucket is the first folder.

    :ivar objects: path -> bytes; may be changed at any time.
    :ivar requests: those so far.
    :ivar answer: called with each request, in a thread of its own; None for the usual answer.
    """

    def __init__(self) -> None:
        super().__init__(self._answered)
        self._thread.daemon = True  # that of :func:`http_host` is never closed
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.answer: Callable[[Request], Answer | None] = lambda _: None

    def put(self, path: str, data: bytes) -> str:
        """Write an object; its address."""
        self.objects[path] = data
        return self.url + quote(path)

    @property
    def google(self) -> dict[str, Any]:
        """The ``storage_options`` with which it is Google Cloud Storage."""
        login = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        key = json.dumps({"gcs_base_url": self.url, **login})
        return {"service_account_key": key, "client_options": {"allow_http": True}, **FAST}

    @property
    def azure(self) -> dict[str, Any]:
        """The ``storage_options`` with which it is Azure."""
        return {"account_name": "account", "endpoint": self.url, "skip_signature": True, **FAST}

    async def _answered(self, request: Request) -> Response:
        self.requests.append(request)
        answer = await asyncio.to_thread(self.answer, request) or Answer()
        page = listing(request.target, self.objects)
        data = self.objects.get(unquote(request.path))
        if page is None and data is None:
            return Response(404, {})

        usual = ranged(request, data or b"", hashlib.md5(data or b"").hexdigest())
        usual = usual if page is None else Response(200, {}, page)
        return Response(
            answer.status or usual.status,
            usual.headers | answer.headers,
            usual.body if answer.body is None else answer.body,
            answer.cut_at,
        )


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
    return HttpHost().__enter__()


def jsonl_of(num_rows: int) -> bytes:
    """Rows whose id is their number, of many lengths; some cross a block's end by far."""
    rows = ({"id": i, "pad": "x" * (9000 if i % 100 == 7 else i * 37 % 90)} for i in range(num_rows))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
