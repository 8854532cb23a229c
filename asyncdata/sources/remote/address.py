"""Addresses of objects in stores. What is printed of an address, or stored, gives no access."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from asyncdata.core.errors import ConfigError, redacted
from asyncdata.core.object_address import HTTP, Address

if TYPE_CHECKING:
    from typing import Self

__all__ = ("GivenAddress", "is_address", "without_secrets")

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_WITH_CONTAINER = frozenset({"abfs", "abfss"})  # of container@account; the container is no user


def is_address(path: str) -> bool:
    """Whether ``path`` begins as ``s3://`` does."""
    return _ADDRESS.match(path) is not None


class GivenAddress(NamedTuple):
    """An address as a user gives it.

    :ivar url: the bucket's address with user, password and query: secret, for the store only.
    """

    address: Address
    url: str

    def __repr__(self) -> str:
        return f"GivenAddress({self.address})"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take an address apart. Only http has queries: in other stores, ``?`` and ``#`` are parts of a key.

        :raises ConfigError: if it names no bucket or host, or has credentials that its store does not read there.
        """
        found = _ADDRESS.match(text)
        if found is None:
            raise ConfigError("AD320 this is not an address of an object, as s3://bucket/key is")

        scheme, rest = found.group(1).lower(), text[found.end() :]
        query = ""
        if scheme in HTTP:
            rest, _, _ = rest.partition("#")
            rest, mark, query = rest.partition("?")
            query = mark + query
        authority, _, key = rest.partition("/")
        user, at, host = authority.rpartition("@")
        if scheme in _WITH_CONTAINER and ":" not in user:
            user, at, host = "", "", authority
        signature = "" if scheme in HTTP else key.partition("?")[2]
        if (user and scheme not in HTTP) or _is_cut_login(host) or redacted(signature) != signature:
            raise ConfigError(
                f"AD320 an address of {scheme}:// has credentials in it, which are not read there: pass them by "
                "storage_options, or by the environment, as the store's own tools read them"
            )

        if not host:
            raise ConfigError(f"AD320 {scheme}://... names no bucket or host: an address is {scheme}://bucket/key")

        address = Address(scheme, host.lower() if scheme in HTTP else host, unquote(key) if scheme in HTTP else key)
        return cls(address, f"{scheme}://{user}{at}{host}{query}")


def _is_cut_login(host: str) -> bool:
    """Whether this is what stands before a ``/`` in a password, and no host with a port."""
    _, colon, port = host.rpartition("]")[2].rpartition(":")
    return bool(colon) and not port.isdigit()


def without_secrets(path: str) -> str:
    """The path, or the address without user, password and query, and without what else may be a secret."""
    if not is_address(path):
        return path

    try:
        return redacted(str(GivenAddress.parse(path).address))
    except ConfigError:
        return "(an address)"
