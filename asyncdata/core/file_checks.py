"""Checks of a file or folder before it is used: that it is regular, that only this user can write to it, and that no
other process holds it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> io.BufferedReader:
    """The file, opened to read bytes.

    :param flags: more flags of ``os.open``.
    :raises OSError: if it cannot be opened, or is no regular file.
    """
    file = open(path, "rb", opener=lambda name, given: os.open(name, given | flags | os.O_NONBLOCK))
    try:
        refuse_others(file.fileno(), path)
    except OSError:
        file.close()
        raise

    return file


def refuse_others(fd: int, path: str | os.PathLike[str]) -> None:
    """Check that an open file is a regular one.

    :raises OSError: if it is a folder, a FIFO, a socket or a device.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def why_foreign(found: os.stat_result) -> str:
    """What is wrong with the owner or the mode of a file or folder; empty if nothing is."""
    if found.st_uid != os.geteuid():
        return f"belongs to another user (uid {found.st_uid})"

    return "can be written by every user" if found.st_mode & stat.S_IWOTH else ""


def refuse_foreign(fd: int, path: str) -> None:
    """Look at an open file or folder.

    :raises PermissionError: if another user may have written it.
    """
    if reason := why_foreign(os.fstat(fd)):
        raise PermissionError(errno.EPERM, f"it {reason}", path)


def check_ours(path: str, setting: str, *, is_folder: bool) -> None:
    """Look at what is in the place of a file or folder of a cache, if anything is.

    :param setting: the setting that chooses the place.
    :raises ConfigError: if it is a link or anything else, or another user may have written it.
    :raises OSError: if it cannot be looked at.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return

    is_kind = stat.S_ISDIR if is_folder else stat.S_ISREG
    reason = why_foreign(found) if is_kind(found.st_mode) else f"is no {'folder' if is_folder else 'file'}, or a link"
    if reason:
        raise ConfigError(f"AD611 {path} {reason}: remove it, or choose a folder of your own by {setting}")


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
