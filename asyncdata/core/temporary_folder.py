"""Folders in ``TMPDIR`` that go with their owner; those that a killed process left go when the next one is made.

A folder's owner holds a lock on it, which ends with the process, however it ends.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from contextlib import suppress
from hashlib import blake2b

from asyncdata.core.files import lock

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class TemporaryFolder:
    """A new folder for this user alone.

    :param kind: letters, a part of its name.
    :ivar path: where it is.
    :raises OSError: if it cannot be made.
    """

    def __init__(self, kind: str) -> None:
        machine = _machine()
        if machine:
            _remove_left_over(machine)
        self.path, fd = _made(kind, machine)
        self._remove = weakref.finalize(self, _remove, self.path, fd, os.getpid())

    def close(self) -> None:
        """Remove it and what is in it; calling this again does nothing."""
        self._remove()


def _machine() -> str:
    """This machine since it was started: a lock is seen by all of its processes. Empty where it has no name."""
    try:
        with open(_BOOT_ID, "rb") as file:
            return blake2b(file.read(), digest_size=4).hexdigest()
    except OSError:
        return ""


def _made(kind: str, machine: str) -> tuple[str, int]:
    """A folder, and the descriptor that locks it: it has its name as soon as it is locked, not before."""
    path = tempfile.mkdtemp(prefix=f"asyncdata-{kind}-")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if lock(fd) and machine:
            begin, _, end = path.rpartition("-")
            named = f"{begin}-{machine}-{end}"
            os.rename(path, named)
            path = named
    except OSError:  # a file system without locks: other processes cannot tell whether it is in use, and leave it
        pass
    return path, fd


def _remove_left_over(machine: str) -> None:
    """Remove what this user's processes on this machine left, and no longer hold."""
    left_over = re.compile(rf"asyncdata-[a-z]+-{machine}-\w{{8}}")
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if left_over.fullmatch(entry.name):
                _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid == os.geteuid() and lock(fd):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


def _remove(path: str, fd: int, pid: int) -> None:
    """Called when the owner ends; a forked child is not the owner."""
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
    os.close(fd)
