"""Stores: S3 on loopback by moto, a host of http that fails as it is told, and one that needs no network."""

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from asyncdata.core.identity import Address
from asyncdata.sources.remote.store import ObjectStamp
from tests.support.servers import HttpServer, Request, Response, ranged

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
    """Objects by http, with ranges, etags and If-Match. It answers reads and listings as Google's and Azure's stores
    do, too: a bucket is the first folder. ``answer`` may give another answer, in a thread of each request."""

    def __init__(self) -> None:
        super().__init__(self._answered)
        self.objects, self.requests = {}, []
        self.answer: Callable[[Request], Answer | None] = lambda _: None

    def put(self, path: str, data: bytes) -> str:
        self.objects[path] = data
        return self.url + quote(path)

    @property
    def google(self) -> dict[str, Any]:
        login = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        key = json.dumps({"gcs_base_url": self.url, **login})
        return {"service_account_key": key, "client_options": {"allow_http": True}, **FAST}

    @property
    def azure(self) -> dict[str, Any]:
        return {"account_name": "account", "endpoint": self.url, "skip_signature": True, **FAST}

    def _answered(self, request: Request) -> Response:
        self.requests.append(request)
        answer = self.answer(request) or Answer()
        page, data = listing(request.target, self.objects), self.objects.get(unquote(request.path))
        if page is not None:
            usual = Response(200, {}, page)
        elif data is None:
            return Response(404, {})
        else:
            usual = ranged(request, data, hashlib.md5(data).hexdigest())
        body = usual.body if answer.body is None else answer.body
        return Response(answer.status or usual.status, usual.headers | answer.headers, body, answer.cut_at)


# Listings as Google Cloud Storage and Azure answer them by XML, in pages

PAGE = 2
"""Objects of a page: so few that a listing of some objects has several pages."""


def listing(target: str, objects: Mapping[str, bytes]) -> bytes | None:
    """The page of a listing of ``/bucket/key`` that is asked for; None for a request for something else."""
    parts = urlsplit(target)
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
    is_google, is_azure = asked.get("list-type") == "2", asked.get("comp") == "list"
    if not (is_google or is_azure):
        return None

    root = parts.path.rstrip("/") + "/"
    keys = sorted(path.removeprefix(root) for path in objects if path.startswith(root))
    last = asked.get("continuation-token" if is_google else "marker", "")
    left = [key for key in keys if key.startswith(asked.get("prefix", "")) and key > last]
    page = [(key, objects[root + key]) for key in left[:PAGE]]
    following = left[PAGE - 1] if len(left) > PAGE else ""
    return (_google(page, following) if is_google else _azure(page, following)).encode()


def _google(page: Iterable[tuple[str, bytes]], following: str) -> str:
    found = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>&quot;{hashlib.md5(data).hexdigest()}&quot;"
        "</ETag><LastModified>2026-11-22T10:00:00Z</LastModified></Contents>"
        for key, data in page
    )
    token = f"<NextContinuationToken>{escape(following)}</NextContinuationToken>" if following else ""
    return f"<ListBucketResult>{found}{token}</ListBucketResult>"


def _azure(page: Iterable[tuple[str, bytes]], following: str) -> str:
    """Its listings have entity tags without the quotes that its headers have."""
    found = "".join(
        f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>Sun, 22 Nov 2026 10:00:00 GMT</Last-Modified>"
        f"<Etag>{hashlib.md5(data).hexdigest()}</Etag><Content-Length>{len(data)}</Content-Length>"
        "<Content-Type>text/plain</Content-Type></Properties></Blob>"
        for key, data in page
    )
    marker = f"<NextMarker>{escape(following)}</NextMarker>"
    return f"<EnumerationResults><Blobs>{found}</Blobs>{marker}</EnumerationResults>"


class S3:
    """A bucket by moto, in this process."""

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


class FakeStore:
    """Answers as it is told, and counts the requests and bytes in flight: now, and at most."""

    answer: ClassVar[Callable[[int, int], bytes]] = staticmethod(lambda start, stop: b"")
    in_flight = most = 0
    most_bytes = num_bytes = 0
    lock = threading.Lock()

    def __init__(self, url: str, options: dict[str, object]) -> None: ...

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        kind = FakeStore
        with self.lock:
            kind.in_flight += 1
            kind.num_bytes += stop - start
            kind.most, kind.most_bytes = max(kind.most, kind.in_flight), max(kind.most_bytes, kind.num_bytes)
        try:
            return kind.answer(start, stop)
        finally:
            with self.lock:
                kind.in_flight -= 1
                kind.num_bytes -= stop - start

    def head(self, key: str) -> ObjectStamp:
        return ObjectStamp(Address("s3", "bucket", key), 7, '"new"')

    def close(self) -> None: ...
