"""Limits the size of the folder of all token caches: the least recently used segments are removed first."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from asyncdata.core.cache_messages import Evicted
from asyncdata.core.eviction import CacheEntry, evict
from asyncdata.prefetch.token_cache.segment.layout import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdata.core.cache_messages import EvictTokens

__all__ = ("evict_segments", "segment_files")


def segment_files(root: str) -> Iterator[CacheEntry]:
    """The segments of all caches in ``root``, without links. The name of each is its path."""
    with suppress(FileNotFoundError), os.scandir(root) as folders:
        for folder in folders:
            if not folder.is_dir(follow_symlinks=False):
                continue

            with suppress(OSError), os.scandir(folder.path) as files:
                for file in files:
                    if file.name.endswith(SUFFIXES) and file.name[0] != "." and file.is_file(follow_symlinks=False):
                        found = file.stat(follow_symlinks=False)
                        yield CacheEntry(found.st_mtime_ns, found.st_size, file.path)


def evict_segments(request: EvictTokens, folder: str) -> Evicted:
    """Remove segments from the caches in the parent of ``folder``, to make room.

    A process that has a removed segment open can still read it; a process that does not find it tokenizes the rows.

    :raises OSError: if the folder cannot be read, or a segment cannot be removed.
    """
    with open(os.path.join(folder, request.keep), "rb") as names_file:
        kept = msgspec.msgpack.decode(names_file.read(), type=list[str])
    keep = {os.path.join(folder, name) for name in kept}
    files = list(segment_files(os.path.dirname(folder)))
    excess_bytes = sum(file.num_bytes for file in files) + request.num_bytes - request.max_bytes
    spare = [file for file in files if file.name not in keep]
    if excess_bytes > sum(file.num_bytes for file in spare):
        return Evicted(True, [], 0)

    removed = evict(spare, excess_bytes, _remove)
    names = [os.path.basename(file.name) for file in removed if os.path.dirname(file.name) == folder]
    return Evicted(False, names, sum(file.num_bytes for file in removed))


def _remove(path: str) -> bool:
    with suppress(FileNotFoundError):
        os.unlink(path)
    return True
