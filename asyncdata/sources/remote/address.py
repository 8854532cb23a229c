"""Addresses of objects in stores. What is printed of an address, or stored, gives no access."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self
from urllib.parse import unquote

import msgspec

from asyncdata.core.errors import ConfigError, redacted
from asyncdata.core.file_refs import HTTP, Address

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_CUT_ADDRESS = re.compile(r"(?:s3a?|gs|az|abfss?|https?|hf):/[^/]")
_AT_COMMIT = re.compile(r"(hf:/{2}[^@]+)@([0-9a-f]{40})/")
_WITH_CONTAINER = frozenset({"abfs", "abfss"})  # of container@account; the container is no user


def is_address(path: str) -> bool:
    """Whether ``path`` begins as ``s3://`` does."""
    return _ADDRESS.match(path) is not None


def names_objects(paths: str | Sequence[str]) -> bool:
    """Whether ``paths`` are addresses of objects.

    :raises ConfigError: if only some of them are, or if they are no paths, or none.
    """
    are_addresses = {is_address(path) for path in texts_of(paths)}
    if len(are_addresses) > 1:
        raise ConfigError("AD320 some paths are addresses of objects, and others are files; a source reads one kind")

    return True in are_addresses


def texts_of(paths: str | Sequence[str]) -> list[str]:
    """The paths of a source, or its addresses, as a list.

    :raises ConfigError: if they are no paths, or none, or an address that lacks a slash.
    """
    listed = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(listed, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in listed):
        raise ConfigError(f"the paths of a source are a path or a list of paths; got {paths!r}")

    if not listed:
        raise ConfigError("the list of a source's paths is empty: name at least one file, folder or glob")

    texts = [os.fspath(path) for path in listed]
    for text in texts:
        if _CUT_ADDRESS.match(text) and not os.path.lexists(text):
            raise ConfigError(f"AD320 {text!r} lacks a slash, as a Path leaves it out: give an address as text")

    return texts


def commits_in(paths: Iterable[str]) -> dict[str, str]:
    """The commits that addresses name: ``{"hf://datasets/user/name": commit}``."""
    found = filter(None, map(_AT_COMMIT.match, paths))
    return {match[1]: match[2] for match in found}


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


def shown(source: msgspec.Struct) -> str:
    """The ``repr`` of a source, with the names of its storage options only, and paths without secrets."""
    values = msgspec.structs.asdict(source)
    options = values.pop("storage_options")
    if options:
        values["storage_options"] = f"{{{', '.join(sorted(options))}}}"
    paths = values.pop("paths")
    texts = [without_secrets(str(path)) for path in (paths if isinstance(paths, list | tuple) else [paths])]
    fields = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"{type(source).__name__}({(texts if isinstance(paths, list | tuple) else texts[0])!r}, {fields})"
