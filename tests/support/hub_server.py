"""A hub on loopback: data sets and buckets as ``huggingface_hub`` asks for them, in pages, by redirects and ranges."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from tests.support.http_server import HttpServer, Request, Response, ranged

__all__ = ("HubServer",)

_PAGE = 3
"""Entries of a page of a listing: so few that every listing has several."""


class HubServer(HttpServer):
    """A hub. ``HF_ENDPOINT`` or ``endpoint=`` is its :attr:`url`.

    :param token: what each request must bear; empty: nothing.
    :ivar asked: method and path of each request, in order.
    """

    def __init__(self, token: str = "") -> None:
        super().__init__(self._serve_hub)
        self.asked: list[str] = []
        self._token = token
        self._commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self._heads: dict[str, str] = {}
        self._buckets: dict[str, dict[str, bytes]] = {}
        self._signature = 0

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
            wanted = set(json.loads(request.body)["paths"]) if request.body.startswith(b"{") else _form(request.body)
            return _json([_file(path, data) for path, data in files.items() if path in wanted])

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
    if not is_repo_there:
        return _error(404, "RepoNotFound", "Repository not found")

    return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")


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


def _form(body: bytes) -> set[str]:
    return set(parse_qs(body.decode()).get("paths", []))


def _json(value: Any) -> Response:
    return Response(200, {"content-type": "application/json"}, json.dumps(value).encode())


def _error(status: int, code: str, message: str) -> Response:
    headers = {"x-error-code": code, "x-error-message": message, "content-type": "application/json"}
    return Response(status, headers, json.dumps({"error": message}).encode())
