"""The folder for what can be made again (row indexes, blocks of objects, proofs), and what is removed first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def cache_folder() -> str:
    """``$XDG_CACHE_HOME/asyncdata``, or ``~/.cache/asyncdata``."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "asyncdata")


class CacheEntry(NamedTuple):
    """Something in a cache that is removed as a whole. Entries are ordered by their time of use.

    :ivar used_ns: when it was last used, Unix time in nanoseconds.
    :ivar num_bytes: its size on disk.
    :ivar name: what identifies it in its cache, such as a path.
    """

    used_ns: int
    num_bytes: int
    name: str


def evict(entries: Iterable[CacheEntry], excess_bytes: int, remove: Callable[[str], bool]) -> list[CacheEntry]:
    """Remove the least recently used entries until at least ``excess_bytes`` are gone, or no entry is left.

    :param entries: the entries that may be removed, in any order.
    :param remove: removes the entry of this name; returns False if it must stay, as it is in use.
    :returns: the removed entries, the least recently used first.
    :raises OSError: what ``remove`` raises.
    """
    removed: list[CacheEntry] = []
    for entry in sorted(entries):
        if excess_bytes <= 0:
            break

        if remove(entry.name):
            excess_bytes -= entry.num_bytes
            removed.append(entry)
    return removed
