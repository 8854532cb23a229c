"""HTTP servers on loopback: one that answers as a test says, a proxy that spoils answers by a plan, and a hub."""

import asyncio
import hashlib
import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import closing, suppress
from functools import lru_cache
from hashlib import blake2b
from http import HTTPStatus
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlencode, urlsplit


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
    """The answer to a GET or HEAD of ``data``: whole, or the range that is asked for; 412 for another ``If-Match``. No
    etag is told that is empty."""
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
    """Serves what ``answer`` gives, in the thread of a connection; one that waits has to look at ``is_closing``."""

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
        found = answer if isinstance(answer, Response) else asyncio.run(answer)
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


STATUSES = (403, 404, 408, 412, 429, 500, 503)
SPOILED = ("cut", "short", "shifted", "relabelled", "whole", "etag")
KINDS = (*map(str, STATUSES), *SPOILED, "other_bytes")
"""All that it can do to an answer:

a status: that one, without asking the origin; ``cut``: the connection ends in the middle of the body; ``short``: a part
of the body, whose length is told truly; ``shifted``: another range, told truly; ``relabelled``: the right bytes, told
as another range; ``whole``: the whole object, as from a server that knows no ranges; ``etag``: that of another version;
``other_bytes``: those of another range, told as the right ones. Only a checksum in the data can find it.
"""


class Faults(NamedTuple):
    """A plan: which of :data:`KINDS` is done to which share of the requests; to the same one ``repeats`` times at most.

    :ivar only_ranges: leave requests without a range alone: listings and looks at an object.
    :ivar delay_s: seconds before each answer.
    :ivar retry_after_s: what 429 and 503 say.
    """

    kinds: tuple[str, ...] = ()
    share: float = 0.0
    seed: int = 0
    repeats: int = 1
    only_ranges: bool = True
    delay_s: float = 0.0
    retry_after_s: int = 0


class FaultProxy(HttpServer):
    """Passes requests on to ``origin``, an ``http://`` address, as ``faults`` say; they may be replaced at any time."""

    def __init__(self, origin: str, faults: Faults | None = None) -> None:
        super().__init__(self._pass_on)
        self._origin = urlsplit(origin).netloc
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        self._tries: Counter[tuple[str, ...]] = Counter()

    @property
    def num_faults(self) -> int:
        return self.counts.total()

    def _pass_on(self, request: Request) -> Response:
        plan = self.faults
        kind = self._kind(plan, request)
        self.is_closing.wait(plan.delay_s)
        if kind and kind.isdigit():
            headers = {"retry-after": str(plan.retry_after_s)} if kind in {"429", "503"} else {}
            return Response(int(kind), headers, f"fault {kind}".encode())

        return self._spoiled(kind, request)

    def _kind(self, plan: Faults, request: Request) -> str:
        has_range = byte_range(request, 1) is not None
        if not plan.kinds or (plan.only_ranges and not has_range):
            return ""

        key = request.method, request.target, request.headers.get("range", "")
        with self.lock:
            number = self._tries[key]
            self._tries[key] += 1
        word = blake2b(repr((plan.seed, *key, number // (plan.repeats + 1))).encode(), digest_size=16).digest()
        chance, choice = int.from_bytes(word[:8]) / 2**64, int.from_bytes(word[8:])
        if number % (plan.repeats + 1) == plan.repeats or chance >= plan.share:
            return ""

        kind = plan.kinds[choice % len(plan.kinds)]
        if kind in {"shifted", "relabelled", "whole", "other_bytes"} and not has_range:
            return ""

        with self.lock:
            self.counts[kind] += 1
        return kind

    def _spoiled(self, kind: str, request: Request) -> Response:
        if kind in {"shifted", "other_bytes"}:
            honest, found = self._ask(request), self._ask(_moved(request))
            label = found if kind == "shifted" else honest
            return found._replace(status=label.status, headers=label.headers, body=found.body[: len(honest.body)])

        dropped = "range" if kind == "whole" else ""
        kept = {name: value for name, value in request.headers.items() if name != dropped}
        found = self._ask(request._replace(headers=kept))
        match kind:
            case "cut":
                return found._replace(cut_at=len(found.body) // 2)
            case "short":
                return found._replace(body=found.body[: len(found.body) // 2])
            case "relabelled":
                first, _, num_bytes = found.headers.get("content-range", "bytes 0-0/1").partition("/")
                begin, _, end = first.removeprefix("bytes ").partition("-")
                label = f"bytes {int(begin) + 1}-{int(end) + 1}/{num_bytes}"
                return found._replace(headers=found.headers | {"content-range": label})
            case "etag":
                return found._replace(headers=found.headers | {"etag": '"another-version"'})
        return found

    def _ask(self, request: Request) -> Response:
        with closing(HTTPConnection(self._origin)) as connection:
            connection.request(request.method, request.target, request.body or None, request.headers)
            found = connection.getresponse()
            body = found.read()
        dropped = {"connection", "keep-alive", "transfer-encoding"}
        dropped |= set() if request.method == "HEAD" else {"content-length"}
        kept = {name.lower(): value for name, value in found.getheaders()}
        return Response(found.status, {name: kept[name] for name in kept if name not in dropped}, body)


def _moved(request: Request) -> Request:
    """The same for a range elsewhere: before it, or from the front."""
    start, stop = byte_range(request, 1 << 62) or (0, 1)
    length = min(stop - start, 1 << 30)
    begin = max(0, start - length) if start else 1
    return request._replace(headers=request.headers | {"range": f"bytes={begin}-{begin + length - 1}"})


_PAGE = 3
"""Entries of a page of a listing: so few that every listing has several."""


class HubServer(HttpServer):
    """A hub. ``HF_ENDPOINT`` or ``endpoint=`` is its :attr:`url`; each request must bear the token, if there is one."""

    def __init__(self, token: str = "") -> None:
        super().__init__(self._serve_hub)
        self.asked: list[str] = []
        self._token = token
        self._commits, self._heads, self._buckets, self._signature = {}, {}, {}, 0

    def commit(self, name: str, files: Mapping[str, bytes]) -> str:
        """Make these files the newest commit of the data set's ``main``; return the commit's name."""
        sha = hashlib.sha1(repr((name, len(self._commits.get(name, {})), sorted(files.items()))).encode()).hexdigest()
        self._commits.setdefault(name, {})[sha] = dict(files)
        self._heads[name] = sha
        return sha

    def put(self, bucket: str, files: Mapping[str, bytes]) -> None:
        """Put these files into the bucket; a file that is there is replaced."""
        self._buckets.setdefault(bucket, {}).update(files)

    def end_signatures(self) -> None:
        """Let the addresses end that were given out until now."""
        self._signature += 1

    def _serve_hub(self, request: Request) -> Response:
        self.asked.append(f"{request.method} {request.path}")
        parts = [unquote(part) for part in request.path.strip("/").split("/")]
        if parts[0] == "cdn":  # has no token: what is signed is its address
            return self._stored(request, parts[1])

        if self._token and request.headers.get("authorization") != f"Bearer {self._token}":
            return _error(401, "RepoNotFound", "Invalid credentials")

        match parts:
            case ["api", "datasets", user, name, *rest]:
                return self._dataset(request, f"{user}/{name}", rest)
            case ["datasets", user, name, "resolve", revision, *path]:
                return self._resolve(request, f"{user}/{name}", revision, "/".join(path))
            case ["api", "buckets", user, name, "paths-info"]:
                listed = self._buckets.get(f"{user}/{name}", {}).items()
                return _json([_bucket_entry(*item) for item in listed if item[0] in json.loads(request.body)["paths"]])
            case ["api", "buckets", user, name, *rest]:
                return self._bucket(request, f"{user}/{name}", rest)
            case ["buckets", user, name, "resolve", *path]:
                return self._bucket_file(request, f"{user}/{name}", "/".join(path))
            case _:
                return _error(404, "EntryNotFound", "no such address")

    def _dataset(self, request: Request, repo: str, rest: list[str]) -> Response:
        revision = rest[1] if len(rest) > 1 else "main"
        sha, files = self._files(repo, revision)
        if files is None:
            return _missing(repo in self._commits, revision)

        if not rest or rest[0] == "revision":
            return _json({"id": repo, "sha": sha, "private": bool(self._token), "tags": [], "siblings": []})

        if rest[0] == "paths-info":
            asked = json.loads(request.body) if request.body.startswith(b"{") else parse_qs(request.body.decode())
            return _json([_file(path, data) for path, data in files.items() if path in asked.get("paths", ())])

        return self._tree(request, [_file(*item) for item in files.items()], "/".join(rest[2:]))

    def _tree(self, request: Request, files: list[dict[str, Any]], folder: str) -> Response:
        """A page of the listing of a folder, in no order that a reader may trust."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(request.target).query).items()}
        found = [file for file in files if not folder or file["path"].startswith(f"{folder}/")]
        if not found:
            return _error(404, "EntryNotFound", f"{folder} does not exist")

        found += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in _above(found, folder)]
        if query.get("recursive", "false").lower() != "true":
            depth = folder.count("/") + 1 if folder else 0
            found = [entry for entry in found if entry["path"].count("/") == depth]
        found.sort(key=lambda entry: hashlib.sha1(entry["path"].encode()).digest())
        stop = int(query.get("cursor", "0")) + _PAGE
        page = _json(found[stop - _PAGE : stop])
        if stop >= len(found):
            return page

        following = urlencode(query | {"cursor": stop})
        link = f'<http://{request.headers["host"]}{request.path}?{following}>; rel="next"'
        return page._replace(headers=page.headers | {"link": link})

    def _resolve(self, request: Request, repo: str, revision: str, path: str) -> Response:
        sha, files = self._files(repo, revision)
        if files is None:
            return _missing(repo in self._commits, revision)

        return self._redirect(request, files, path, {"x-repo-commit": sha})

    def _bucket(self, request: Request, bucket: str, rest: list[str]) -> Response:
        files = self._buckets.get(bucket)
        if files is None:
            return _error(404, "BucketNotFound", "Bucket not found")

        if rest:
            listed = [_bucket_entry(path, data) for path, data in files.items()]
            return self._tree(request, listed, "/".join(rest[1:]))

        size = sum(map(len, files.values()))
        made = "2026-03-10T00:00:00.000Z"
        return _json({"id": bucket, "private": False, "createdAt": made, "size": size, "totalFiles": len(files)})

    def _bucket_file(self, request: Request, bucket: str, path: str) -> Response:
        files = self._buckets.get(bucket, {})
        return self._redirect(request, files, path, {"x-xet-hash": _sha256(files.get(path, b""))})

    def _stored(self, request: Request, digest: str) -> Response:
        commits = [files for commits in self._commits.values() for files in commits.values()]
        known = {_sha256(data): data for files in (*self._buckets.values(), *commits) for data in files.values()}
        is_signed = request.target.endswith(f"?Signature=secret{self._signature}")
        is_there = is_signed and digest in known
        return ranged(request, known[digest], digest) if is_there else _error(403, "", "signature")

    def _files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes] | None]:
        """The name of a revision's commit, and its files; None: it is not there."""
        sha = self._heads.get(repo, "") if revision == "main" else revision
        return sha, self._commits.get(repo, {}).get(sha)

    def _redirect(self, request: Request, files: Mapping[str, bytes], path: str, headers: dict[str, str]) -> Response:
        """Where the bytes are, as the hub answers for all but small files."""
        if path not in files:
            return _error(404, "EntryNotFound", f"{path} does not exist")

        digest = _sha256(files[path])
        linked = {"x-linked-etag": f'"{digest}"', "x-linked-size": str(len(files[path]))}
        place = f"http://{request.headers['host']}/cdn/{digest}?Signature=secret{self._signature}"
        return Response(302, {**headers, **linked, "location": place})


def _missing(is_repo_there: bool, revision: str) -> Response:
    code, what = ("Revision", f"Invalid rev id: {revision}") if is_repo_there else ("Repo", "Repository not found")
    return _error(404, f"{code}NotFound", what)


def _file(path: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return {"type": "file", "path": path, "oid": oid, "size": len(data)}


def _bucket_entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "xetHash": _sha256(data), "mtime": None}


def _above(files: Iterable[dict[str, Any]], top: str) -> set[str]:
    """All folders of the files below ``top``."""
    parts = (file["path"].split("/") for file in files)
    found = {"/".join(names[:depth]) for names in parts for depth in range(1, len(names))}
    return {path for path in found if not top or path.startswith(f"{top}/")}


@lru_cache(maxsize=1024)
def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json(value: Any) -> Response:
    return Response(200, {"content-type": "application/json"}, json.dumps(value).encode())


def _error(status: int, code: str, message: str) -> Response:
    headers = {"x-error-code": code, "x-error-message": message, "content-type": "application/json"}
    return Response(status, headers, json.dumps({"error": message}).encode())
