"""A bucket of S3, Google Cloud Storage, Azure, or a host of http, by obstore.

obstore makes one try of each request. Its own retries are not counted, do not keep to Retry-After, and continue a cut
body without the pin.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from asyncdata.core.errors import ConfigError, redacted
from asyncdata.core.identity import HTTP, Address
from asyncdata.core.settings import from_clone, resolve_path
from asyncdata.sources.paths import GivenAddress
from asyncdata.sources.remote.store import ObjectStamp, Store, StoreError, is_throttled, kind_of_status, quoted

ResultT = TypeVar("ResultT")

_STATUS = re.compile(r"non-2xx status code: (\d+)([^:\n]*)")
_REQUEST_ID = re.compile(r"<RequestId>([^<]{1,200})</RequestId>", re.IGNORECASE)
_CODE = re.compile(r"<Code>(\w{1,80})</Code>")
_CONNECTION = re.compile(
    r"Requested [0-9.]+, got |kind: (Connect|Request|Timeout|Interrupted|Decode)\b|\bIncompleteBody\b"
)
_METADATA = re.compile(r"//(169\.254\.169\.254|metadata\.google\.internal)/")
"""Where a cloud's machine gets its credentials: elsewhere nothing is there, and no credentials were given."""
_URL = re.compile(r"\b\w+://\S+")
_MAX_REASON = 300
_NOWHERE = "127.0.0.1:0"
_TIMEOUT_S = 30.0
_PUBLIC, _PRIVATE, _LINK_LOCAL = range(3)


class ObstoreStore(Store):
    """See :class:`~asyncdata.sources.remote.store.Store`.

    :param url: the address of the bucket, or of an http host, with user, password and query if it has them.
    :param options: the keyword arguments of obstore's ``from_url``, and ``allow_private_redirects``;
        ``credential_provider`` may be an import path.
    :raises ConfigError: if obstore is not installed, or refuses an option.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        try:
            import obstore
            from obstore import store
        except ImportError as error:
            raise ConfigError(
                f"AD321 object stores need the package obstore: pip install obstore, or {from_clone('remote')}"
            ) from error

        _refuse_fork()
        self._obstore = obstore
        self._errors = obstore.exceptions
        self._root = GivenAddress.parse(url).address
        self._has_answered = False
        settings = dict(options)
        provider = settings.get("credential_provider")
        if isinstance(provider, str):
            settings["credential_provider"] = resolve_path(provider)()
        is_http = self._root.scheme in HTTP
        self._url = _without_user(url) if is_http else url
        is_guarded = settings.pop("allow_private_redirects", False) is not True and is_http
        self._redirects = Redirects(url) if is_guarded else None
        self._open_bucket: Any = store.HTTPStore.from_url if is_http else store.from_url
        try:
            settings["retry_config"] = {**settings.get("retry_config", {}), "max_retries": 0}
            settings["client_options"] = _client_options(settings, url)
            if self._redirects is not None and _has_proxy(settings["client_options"], url):
                self._redirects = None
            self._settings = settings
            self._store = self._opened()
        except Exception as error:  # whatever it says of a setting may show its value
            raise ConfigError(
                f"AD321 the store of {self._root.root} cannot be opened: {type(error).__name__}; check the names and "
                f"values of storage_options ({', '.join(sorted(options)) or 'none given'})"
            ) from None

    def list(self, prefix: str) -> Iterator[ObjectStamp]:
        with self._refusing():
            # obstore lists whole folders only
            for page in self._obstore.list(self._store, prefix.rpartition("/")[0] or None):
                yield from (self._stamp(meta) for meta in page if meta["path"].startswith(prefix))

    def head(self, key: str) -> ObjectStamp:
        return self._asked(key, lambda store: self._stamp(self._obstore.head(store, key)))

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        options: dict[str, Any] = {"range": (start, stop)}
        if found.version:
            options["version"] = found.version
        if found.etag and not found.etag.startswith("W/"):  # a weak one never matches
            options["if_match"] = found.etag

        def ask(store: Any) -> tuple[ObjectStamp, tuple[int, int], bytes]:
            result = self._obstore.get(store, found.address.key, options=options)
            return self._stamp(result.meta), tuple(result.range), result.bytes().to_bytes()

        now, place, data = self._asked(found.address.key, ask)
        if _is_other(found, now):
            raise StoreError("changed", f"it is now another object: {now.identity}")

        if place != (start, stop) or len(data) != stop - start:
            raise StoreError(
                "transient", f"the answer has {len(data)} bytes of range {place[0]}-{place[1]}, not {start}-{stop}"
            )

        return data

    def write(self, key: str, data: bytes) -> None:
        self._asked(key, lambda store: self._obstore.put(store, key, data, use_multipart=False))

    def copy(self, key: str, to: str) -> None:
        with self._refusing():
            self._obstore.copy(self._store, key, to)

    def _opened(self) -> Any:
        settings = dict(self._settings)
        if self._redirects is not None:
            settings["client_options"] = {**settings["client_options"], **self._redirects.client_options()}
        return self._open_bucket(self._url, **settings)

    def _asked(self, key: str, ask: Callable[[Any], ResultT]) -> ResultT:
        """What obstore answers. If it is redirected to a host that was not looked at, it is asked again after that."""
        with self._refusing():
            try:
                return ask(self._store)
            except self._errors.BaseError as error:
                if self._redirects is None or not _was_redirected(str(error)):
                    raise

            address = Address(self._root.scheme, urlsplit(self._url).netloc, key)
            query = urlsplit(self._url).query
            headers = self._settings["client_options"].get("default_headers", {})
            self._redirects.look(f"{address}?{query}" if query else str(address), headers)
            self._store = self._opened()
            return ask(self._store)

    def _stamp(self, meta: Any) -> ObjectStamp:
        version = meta["version"] or ""
        return ObjectStamp(
            Address(self._root.scheme, self._root.bucket, meta["path"]),
            meta["size"],
            quoted(meta["e_tag"] or ""),
            "" if version == "null" else version,
            int(meta["last_modified"].timestamp() * 1e6) * 1000,
        )

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise what has happened, without the addresses and signatures that obstore's own message has."""
        try:
            yield
            self._has_answered = True
        except (self._errors.BaseError, FileNotFoundError, ValueError) as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        text = str(error)
        status = _STATUS.search(text)
        number = int(status.group(1)) if status else 0
        request_id = _REQUEST_ID.search(text)
        raise StoreError(
            self._kind(error, text, number),
            _reason(text, status),
            request_id=request_id.group(1) if request_id else "",
            is_throttled=is_throttled(number),
        ) from None

    def _kind(self, error: Exception, text: str, status: int) -> str:
        if isinstance(error, self._errors.PreconditionError):
            return "changed"

        if isinstance(error, self._errors.NotFoundError | FileNotFoundError):
            return "missing"

        is_denied = isinstance(error, self._errors.PermissionDeniedError | self._errors.UnauthenticatedError)
        if is_denied or (not self._has_answered and _METADATA.search(text)):
            return "denied"

        if status:
            return kind_of_status(status)

        return "transient" if _CONNECTION.search(text) else "permanent"


_first_user: list[int] = []
"""The process that has opened a store first."""


def _refuse_fork() -> None:
    """obstore's threads are not in a fork of a process that has used it: a request there would wait for ever."""
    if not _first_user:
        _first_user.append(os.getpid())
    if _first_user[0] != os.getpid():
        raise ConfigError(
            "AD321 this process is a fork of one that has read from a store, which obstore does not survive: start it "
            "by spawn or forkserver, or open the loader in the parent only"
        )


def _is_other(before: ObjectStamp, now: ObjectStamp) -> bool:
    if before.etag and now.etag:
        return before.etag != now.etag or before.num_bytes != now.num_bytes

    return (before.num_bytes, before.mtime_ns) != (now.num_bytes, now.mtime_ns)


def _reason(text: str, status: re.Match[str] | None) -> str:
    if status is not None:
        code = _CODE.search(text)
        return f"status {status.group(1)}{status.group(2)}" + (f" ({code.group(1)})" if code else "")

    if _was_redirected(text):
        return "it is redirected to a host that cannot be looked at; allow_private_redirects=True follows it unseen"

    return redacted(_URL.sub("...", text.partition("\n\nDebug source")[0]))[:_MAX_REASON]


def _client_options(settings: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The user's, with plain http where an address asks for it, and user and password as a header."""
    options = dict(settings.get("client_options", {}))
    endpoints = [value for name, value in settings.items() if "endpoint" in name and isinstance(value, str)]
    if any(address.startswith("http://") for address in [url, *endpoints]):
        options.setdefault("allow_http", True)
    parts = urlsplit(url)
    if parts.username is not None and parts.scheme in HTTP:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        header = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
        options["default_headers"] = {**header, **options.get("default_headers", {})}
    return options


def _has_proxy(client_options: dict[str, Any], url: str) -> bool:
    """Whether requests go through a proxy, which then decides where redirections may lead. That of the environment is
    named to obstore: otherwise what ``NO_PROXY`` lists, often link-local addresses, would be reached beside it.
    """
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        client_options.setdefault("proxy_url", proxy)
    return "proxy_url" in client_options


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


# Where the redirections of a web server lead is looked at before they are followed. obstore follows each of them by
# itself. So every host that was not looked at is, for obstore, behind a proxy at which nothing listens: it connects to
# the hosts of `Redirects` only.


def _was_redirected(text: str) -> bool:
    """Whether obstore says with ``text`` that it was redirected to a host that was not looked at."""
    return _NOWHERE in text


class Redirects:
    """The hosts to which requests for objects of ``url`` may go. Any thread may call any method."""

    def __init__(self, url: str) -> None:
        self._origin = urlsplit(url).hostname or ""
        self._hosts = {self._origin}
        self._lock = threading.Lock()

    def client_options(self) -> dict[str, Any]:
        """What makes obstore connect to these hosts only."""
        return {"proxy_url": f"http://{_NOWHERE}", "proxy_excludes": ",".join(sorted(self._hosts))}

    def look(self, url: str, headers: Mapping[str, str]) -> None:
        """Follow the redirections of ``url``, and take in their hosts.

        :raises StoreError: AD346, if one leads to a private address and ``url`` does not, or to a link-local one.
        """
        with self._lock, suppress(OSError, http.client.HTTPException):  # of these, obstore's own request will tell
            opener = urllib.request.build_opener(_Follower(self))
            request = urllib.request.Request(url, headers={"range": "bytes=0-0", **headers})
            opener.open(request, timeout=_TIMEOUT_S).close()

    def take_in(self, url: str) -> None:
        """A redirection to ``url`` is about to be followed."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme not in HTTP or _kind(host) > _kind(self._origin):
            raise StoreError(
                "elsewhere",
                f"{parts.scheme}://{host} is in a nearer network than {self._origin}, and may be one that only this "
                "machine should reach",
            )

        self._hosts.add(host)


class _Follower(urllib.request.HTTPRedirectHandler):
    def __init__(self, redirects: Redirects) -> None:
        self._redirects = redirects

    def redirect_request(self, *args: Any) -> urllib.request.Request:
        try:
            self._redirects.take_in(args[-1])
        except StoreError:
            args[1].close()  # the answer
            raise

        return urllib.request.Request(args[-1], headers={"range": "bytes=0-0"})


def _kind(host: str) -> int:
    """How near the host is; the nearest, if its name has several addresses."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return _PUBLIC  # there is no such host, so nothing can be sent to it

    addresses = [ipaddress.ip_address(text) for text in found]
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    return max(_LINK_LOCAL if one.is_link_local else _PUBLIC if one.is_global else _PRIVATE for one in plain)
