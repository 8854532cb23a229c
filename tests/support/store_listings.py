"""Listings as Google Cloud Storage and Azure answer them by XML, in pages, over the objects of a host on loopback."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ("PAGE", "listing")

PAGE = 2
"""Objects of a page: so few that a listing of some objects has several pages."""
_TIME = {"google": "2026-11-22T10:00:00Z", "azure": "Sun, 22 Nov 2026 10:00:00 GMT"}


def listing(target: str, objects: Mapping[str, bytes]) -> bytes | None:
    """The answer to a request for a page of a listing; None if it is a request for something else.

    :param objects: ``/bucket/key`` -> bytes.
    """
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
        f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{_etag(data)}</ETag>"
        f"<LastModified>{_TIME['google']}</LastModified></Contents>"
        for key, data in page
    )
    token = f"<NextContinuationToken>{escape(following)}</NextContinuationToken>" if following else ""
    return f"<ListBucketResult>{found}{token}</ListBucketResult>"


def _azure(page: Iterable[tuple[str, bytes]], following: str) -> str:
    """Its listings have entity tags without the quotes that its headers have."""
    found = "".join(
        f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{_TIME['azure']}</Last-Modified>"
        f"<Etag>{_etag(data).strip(chr(34))}</Etag><Content-Length>{len(data)}</Content-Length>"
        "<Content-Type>text/plain</Content-Type></Properties></Blob>"
        for key, data in page
    )
    return (
        f"<EnumerationResults><Blobs>{found}</Blobs><NextMarker>{escape(following)}</NextMarker></EnumerationResults>"
    )


def _etag(data: bytes) -> str:
    """As the host gives it with the object."""
    return f'"{hashlib.md5(data).hexdigest()}"'
