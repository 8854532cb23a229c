"""Small files in stores, such as snapshots: each is written in one step, and the older ones are kept beside it."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from asyncdata.sources.remote.address import GivenAddress
from asyncdata.sources.remote.reads import Reads
from asyncdata.sources.remote.store import store_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("read_stored", "write_stored")


def write_stored(path: str, data: bytes, keep: int, storage_options: Mapping[str, Any]) -> None:
    """Write the object; what it was becomes ``path.1``, and so on: ``keep`` stay in all.

    At every instant the object is the old one or the new one, whole: a store shows a PUT when it is complete. The older
    ones are copied before that, from the oldest on.

    :raises SourceError: if it cannot be written; the object is as it was.
    """
    given = GivenAddress.parse(path)
    with closing(Reads([store_spec(given, storage_options)])) as store:
        names = [given.address] + [given.address.with_key(f"{given.address.key}.{n}") for n in range(1, keep)]
        for newer, older in reversed(list(pairwise(names))):
            store.copy(0, newer, older)
        store.write(0, given.address, data)


def read_stored(path: str, storage_options: Mapping[str, Any]) -> bytes:
    """The object as it is now.

    :raises SourceError: if it cannot be read.
    """
    given = GivenAddress.parse(path)
    with closing(Reads([store_spec(given, storage_options)])) as store:
        found = store.head(0, given.address)
        return store.fetch(found, 0, found.num_bytes) if found.num_bytes else b""
