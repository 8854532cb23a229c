"""Where the redirections of a web server lead: looked at before they are followed.

obstore follows each of them by itself. So every host that was not looked at is, for obstore, behind a proxy at which
nothing listens: it connects to the hosts of :class:`Redirects` only.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncdata.core.object_address import HTTP
from asyncdata.sources.remote.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("Redirects", "proxy_of", "was_redirected")

_NOWHERE = "127.0.0.1:0"
_TIMEOUT_S = 30.0
_PUBLIC, _PRIVATE, _LINK_LOCAL = range(3)


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for this address; then it decides where requests may go."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    return None if urllib.request.proxy_bypass(parts.hostname or "") else proxy


def was_redirected(text: str) -> bool:
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
