"""A bucket of S3, Google Cloud Storage, Azure, or a host of http, by obstore.

obstore makes one try of each request. Its own retries are not counted, do not keep to Retry-After, and continue a cut
body without the pin.
"""

from __future__ import annotations

import base64
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from asyncdata.core.errors import ConfigError, redacted
from asyncdata.core.extras import from_clone
from asyncdata.core.import_path import resolve_path
from asyncdata.core.object_address import HTTP, Address
from asyncdata.sources.remote.address import GivenAddress
from asyncdata.sources.remote.redirects import Redirects, proxy_of, was_redirected
from asyncdata.sources.remote.store import ObjectStamp, StoreError, is_throttled, kind_of_status, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ("ObstoreStore",)

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


class ObstoreStore:
    """See :class:`~asyncdata.sources.remote.store.Store`.

    :param url: the bucket's address, or that of an http host, with user, password and query if it has them.
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

    def pinned(self, key: str) -> str:
        """As the protocol says: there are none."""
        return key

    def list(self, prefix: str) -> Iterator[ObjectStamp]:
        """As the protocol says."""
        with self._refusing():
            # obstore lists whole folders only
            for page in self._obstore.list(self._store, prefix.rpartition("/")[0] or None):
                yield from (self._stamp(meta) for meta in page if meta["path"].startswith(prefix))

    def head(self, key: str) -> ObjectStamp:
        """As the protocol says."""
        return self._asked(key, lambda store: self._stamp(self._obstore.head(store, key)))

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        """As the protocol says."""
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
        """As the protocol says."""
        self._asked(key, lambda store: self._obstore.put(store, key, data, use_multipart=False))

    def copy(self, key: str, to: str) -> None:
        """As the protocol says."""
        with self._refusing():
            self._obstore.copy(self._store, key, to)

    def close(self) -> None:
        """As the protocol says: obstore closes connections that are idle."""

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
                if self._redirects is None or not was_redirected(str(error)):
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

    if was_redirected(text):
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
    if "proxy_url" not in client_options and (proxy := proxy_of(url)):
        client_options["proxy_url"] = proxy
    return "proxy_url" in client_options


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
