"""Limits the size of row indexes and the rows copied for them: the least recently used are removed first.

An index is the file ``identity.index``, and the folder ``identity.rows`` if rows were copied. Its time of use is when
the file was last opened. An index is not removed while a run writes it or has its rows open. An index that is only read
may be removed, as a process can still read a removed file that it has open.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from asyncdata.core.eviction import CacheEntry, evict
from asyncdata.core.file_lock import lock, locked
from asyncdata.core.file_owner import refuse_foreign

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("hold_rows", "kept_indexes", "make_room", "remove_index")

_INDEX = re.compile(r"([0-9a-f]+)\.(index|rows)")
_COPY = re.compile(r"\d{12}\.rows")


def kept_indexes(folder: str) -> list[CacheEntry]:
    """The row indexes in ``folder``, the most recently used last. The name of each is its identity.

    The size of an index includes the copied rows.

    :raises OSError: if the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []

    identities = {found[1] for found in map(_INDEX.fullmatch, names) if found is not None}
    return sorted(_kept(folder, identity) for identity in identities)


def _kept(folder: str, identity: str) -> CacheEntry:
    path = os.path.join(folder, identity)
    (used_ns, size), (copied_ns, _) = _stat(f"{path}.index"), _stat(f"{path}.rows")
    return CacheEntry(used_ns or copied_ns, size + sum(_sizes(f"{path}.rows")), identity)


def _stat(path: str) -> tuple[int, int]:
    with suppress(OSError):
        found = os.stat(path, follow_symlinks=False)
        return found.st_atime_ns, found.st_size
    return 0, 0


def _sizes(folder: str) -> Iterator[int]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry.stat(follow_symlinks=False).st_size


def _remove_others(folder: str) -> None:
    if others := [name for name in os.listdir(folder) if not _COPY.fullmatch(name)]:
        with locked(folder) as is_free:
            for name in others if is_free else ():
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def hold_rows(folder: str) -> int:
    """A descriptor that keeps copied rows from being removed, until it is closed.

    Other files, such as a half-written copy of a killed worker, are removed if no other process has the folder open.

    :raises OSError: if the folder does not exist, or another user may have written it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        refuse_foreign(fd, folder)
        _remove_others(folder)
    except BaseException:
        os.close(fd)
        raise

    with suppress(OSError):  # a file system without locks: then no process can lock it for removal either
        lock(fd, is_shared=True)
    return fd


def make_room(folder: str, max_bytes: int, keep: str) -> list[CacheEntry]:
    """Remove the least recently used indexes until all take at most ``max_bytes``; return the removed ones.

    :param keep: the identity of an index that stays; its size counts.
    :raises OSError: if the folder cannot be read, or an index cannot be removed.
    """
    found = kept_indexes(folder)
    excess_bytes = sum(index.num_bytes for index in found) - max_bytes
    return evict([index for index in found if index.name != keep], excess_bytes, partial(remove_index, folder))


def remove_index(folder: str, identity: str) -> bool:
    """Remove an index if no process uses it; return whether it is gone.

    :raises OSError: if it cannot be removed.
    """
    path = os.path.join(folder, identity)
    with suppress(FileNotFoundError), locked(f"{path}.index") as is_free:
        if not is_free:
            return False

    with suppress(FileNotFoundError), locked(f"{path}.rows") as is_free:
        if not is_free:
            return False

        shutil.rmtree(f"{path}.rows")
    with suppress(FileNotFoundError):
        os.unlink(f"{path}.index")
    return True
