"""Locks on files and folders, between processes. The operating system releases a lock when its owner ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("lock", "locked")


def lock(fd: int, *, is_shared: bool = False, waits: bool = False) -> bool:
    """Lock an open file or folder until ``fd`` is closed; return whether it is locked now.

    :param is_shared: several processes may hold the lock; it only excludes one that is not shared.
    :param waits: wait until the lock is free.
    :returns: False if another process holds the lock; never with ``waits``.
    :raises OSError: if the file system has no locks.
    """
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, kind if waits else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False

    return True


@contextmanager
def locked(path: str) -> Iterator[bool]:
    """Lock an existing file or folder for a ``with`` block; gives whether it is locked.

    :returns: False also where the file system has no locks: then it is not known whether another process uses it.
    :raises OSError: if it cannot be opened, or is a link.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            is_free = lock(fd)
        except OSError:
            is_free = False
        yield is_free
    finally:
        os.close(fd)
