"""Pictures on web servers that a user has allowed. Only the standard library reads them: it works in any process."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from asyncdata.tokenization.pictures.settings import Processor

_PORTS = {"http": ":80", "https": ":443"}
_TRIES, _PAUSE_S, _CHUNK = 3, 0.25, 1 << 18
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_AS_THEY_ARE = "!#$%&'()*+,/:;=?@[]~"
_FAILURES = (OSError, http.client.HTTPException)


def without_query(url: str) -> str:
    """The address for errors, without user, password and query: a query may be a signature that gives access."""
    scheme, _, rest = url.partition("?")[0].partition("#")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def allowed(url: str, name: str, settings: Processor) -> str:
    """The address as it is asked for, with what is not ASCII quoted.

    :raises RowFault: AD457, if it has a user, or its host is not one of ``allowed_hosts``.
    """
    url = quote(url, safe=_AS_THEY_ARE)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise RowFault("AD457", f"{name} has an address that cannot be read: {error}") from None

    what, port = f"{name} is remote ({without_query(url):.200})", _PORTS.get(parts.scheme)
    if port is None:
        raise RowFault("AD457", f"{what}: neither http nor https")

    if "@" in parts.netloc:
        raise RowFault("AD457", f"{what}, and its address has a user or a password, which are not sent: leave them out")

    host = parts.netloc.lower().removesuffix(port)
    if not {host, host + port} & {*settings.allowed_hosts}:
        raise RowFault(
            "AD457",
            f"{what}, and {host!r} is not in allowed_hosts={settings.allowed_hosts}: name it in "
            "Processor(allowed_hosts=...), or download pictures before, and name paths",
        )

    return url


def fetched(url: str, name: str, settings: Processor) -> bytes:
    """The bytes of a picture at an address that is :func:`allowed`.

    Failures of the network and of an overloaded server are tried again, three tries in all.

    :raises RowFault: AD457, if it cannot be had within ``timeout_s``, has too many bytes, or leads to another host.
    """
    what, end, number = f"{name} ({without_query(url):.200})", time.monotonic() + settings.timeout_s, 1
    opener = urllib.request.build_opener(_Follower(name, settings))
    while True:
        try:
            return _read(opener, url, what, end, settings)
        except _FAILURES as error:
            left = end - time.monotonic() - _PAUSE_S * number
            is_final = isinstance(error, HTTPError) and error.code not in _AGAIN
            if is_final or number == _TRIES or left <= 0:
                raise RowFault("AD457", f"{what} cannot be fetched: {_reason(error, settings)}; try {number}") from None

        threading.Event().wait(_PAUSE_S * number)
        number += 1


def _read(opener: urllib.request.OpenerDirector, url: str, what: str, end: float, settings: Processor) -> bytes:
    data = bytearray()
    with opener.open(url, timeout=max(end - time.monotonic(), _PAUSE_S)) as answer:
        announced = int(answer.headers.get("content-length") or 0)
        while len(data) <= settings.max_bytes and announced <= settings.max_bytes:
            chunk = answer.read1(_CHUNK)
            if not chunk:
                break

            data += chunk
            if time.monotonic() > end:
                raise TimeoutError
    num_bytes = max(announced, len(data))
    if num_bytes > settings.max_bytes:
        raise RowFault("AD457", f"{what} has {num_bytes:,} bytes or more; max_bytes={settings.max_bytes:,}")

    if len(data) < announced:  # a connection that was cut looks like an end to `read1`
        raise ConnectionError(f"{len(data):,} of {announced:,} bytes came")

    return bytes(data)


def _reason(error: Exception, settings: Processor) -> str:
    """What has happened, without the address."""
    cause = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
    if isinstance(cause, TimeoutError):
        return f"no whole answer within timeout_s={settings.timeout_s:g}"

    return f"status {cause.code}" if isinstance(cause, HTTPError) else f"{type(cause).__name__}: {cause!s:.200}"


class _Follower(urllib.request.HTTPRedirectHandler):
    """Follows redirections to allowed hosts only."""

    def __init__(self, name: str, settings: Processor) -> None:
        self._name, self._settings = name, settings

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        try:
            url = allowed(newurl, f"{self._name} is redirected, and", self._settings)
        except RowFault:
            fp.close()
            raise

        return super().redirect_request(req, fp, code, msg, headers, url)
