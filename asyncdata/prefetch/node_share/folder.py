"""The folder of a job in the memory of a node: who takes part, who has claimed which chunk, and the replies.

Each member has a folder in it, ``m-ID``, which it locks: the lock ends with its process, however that ends. A claim is
a symbolic link to where the reply will be, ``m-ID/CHUNK``. Only one process can make it, so there is one answer to who
tokenizes the chunk; a claim that leads nowhere has no reply yet. A reply gets its name when it is complete.

Member ids are never used again. So what a dead member left may be removed by any process, at any time.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import stat
import struct
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from asyncdata.core.file_lock import lock
from asyncdata.core.file_owner import refuse_foreign

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.messages import Data

__all__ = ("NodeFolder", "Place", "place_of", "root_of_node")

Place = tuple[int, int, int]
"""Epoch, window, and row in the window's order."""

SHARED_MEMORY = "/dev/shm"
_PLACE = struct.Struct("<qqq")
_FOLDER = re.compile(r"asyncdata-ranks-[0-9a-f]{16}")
_MAX_TRIES = 100
_MAX_DEAD = 16
"""So many dead members may leave replies that others still read; then they are removed."""


def root_of_node() -> str:
    """The folder of this node's shared memory; the one for temporary files where there is none."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else tempfile.gettempdir()


def place_of(memory: mmap.mmap) -> Place:
    """The place that a member has reached, from its file ``at``."""
    place: Place = _PLACE.unpack_from(memory)
    return place


class NodeFolder:
    """One member's view of the folder, from its joining to its leaving.

    :param root: where the folder is; see :func:`root_of_node`.
    :param job: a digest of all that the replies depend on.
    :ivar path: the folder.
    :ivar member: the name of this member's folder in it.
    :raises OSError: if it cannot be made, belongs to another user, or has no locks. All methods raise it, too.
    """

    def __init__(self, root: str, job: str) -> None:
        self.path = os.path.join(root, f"asyncdata-ranks-{job[:16]}")  # short: a socket's path has 107 bytes at most
        _remove_left_over(root)
        self.member, self._fd = self._join()
        try:
            self._at = self._reached_file()
        except OSError:
            os.close(self._fd)
            _sweep(self.path)
            raise

    def _join(self) -> tuple[str, int]:
        for _ in range(_MAX_TRIES):  # each failed try means that another member has just left, as the last one
            with suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            with suppress(FileNotFoundError):
                _check_ours(self.path)
                number = secrets.token_hex(4)
                fd = _locked(f"{self.path}/t-{number}", f"{self.path}/m-{number}")
                if fd is not None:
                    return f"m-{number}", fd

        raise OSError(errno.EAGAIN, "it is removed again and again", self.path)

    def _reached_file(self) -> mmap.mmap:
        with open(f"{self.path}/{self.member}/at", "xb+", buffering=0) as file:
            file.write(bytes(_PLACE.size))  # in a full file system this is an error, and a later write a SIGBUS
            return mmap.mmap(file.fileno(), _PLACE.size)

    @property
    def own(self) -> str:
        """The path of this member's folder."""
        return f"{self.path}/{self.member}"

    def room(self) -> int:
        """Bytes that are free where the folder is."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def others(self) -> list[str]:
        """The members besides this one. Some may be dead."""
        return [name for name in os.listdir(self.path) if name.startswith("m-") and name != self.member]

    def reach(self, place: Place) -> None:
        """Tell the others that all chunks before ``place`` are not needed here any more."""
        _PLACE.pack_into(self._at, 0, *place)

    def reached_by(self, member: str) -> mmap.mmap:
        """Where the place of another member is, for :func:`place_of`."""
        with open(f"{self.path}/{member}/at", "rb", buffering=0) as file:
            return mmap.mmap(file.fileno(), _PLACE.size, access=mmap.ACCESS_READ)

    def claim(self, name: str, what: str | None = None) -> str:
        """Claim ``name``, unless another member has: what stands there then, ``m-ID/NAME``; empty if it is claimed now.

        :param what: stands in place of the name.
        """
        for _ in range(_MAX_TRIES):
            try:
                os.symlink(f"{self.member}/{what or name}", f"{self.path}/{name}")
            except FileExistsError:
                with suppress(FileNotFoundError):  # it was dropped just now
                    return os.readlink(f"{self.path}/{name}")
            else:
                return ""
        raise OSError(errno.EAGAIN, "it is dropped again and again", f"{self.path}/{name}")

    def publish(self, name: str, pieces: Sequence[Data | bytearray]) -> int:
        """Store the reply of a chunk that is claimed here; return its number of bytes."""
        temporary, path = f"{self.own}/.{name}", f"{self.own}/{name}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            num_bytes = sum(map(len, pieces))
            if pieces and os.writev(fd, pieces) != num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)

            os.rename(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        return num_bytes

    def read(self, name: str) -> memoryview | None:
        """The reply that the claim ``name`` leads to; None if it is not there."""
        try:
            fd = os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None

        import numpy as np  # as in Connection: memory that is not filled with zeros first

        try:
            body, num_read = np.empty(os.fstat(fd).st_size, np.uint8).data, 0
            while num_read < len(body) and (number := os.readv(fd, [body[num_read:]])):
                num_read += number
        finally:
            os.close(fd)
        return body[:num_read].toreadonly()

    def drop(self, name: str) -> None:
        """Remove a claim of this member, and then its reply. Who finds neither tokenizes the chunk again."""
        for path in (f"{self.path}/{name}", f"{self.own}/{name}"):
            with suppress(FileNotFoundError):
                os.unlink(path)

    def leave(self) -> None:
        """End the membership. Replies stay for the others; the last one removes everything."""
        self._at.close()
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # not only closed here: a forked child may have it open, too
        os.close(self._fd)
        _sweep(self.path)


def _locked(path: str, name: str) -> int | None:
    """Make a folder that has its ``name`` as soon as it is locked, and what locks it; None if another looked at it.

    :raises FileNotFoundError: if another process has removed it.
    """
    os.mkdir(path, 0o700)
    fd = _opened(path)
    try:
        if lock(fd):
            os.rename(path, name)
            return fd

        os.rmdir(path)
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _check_ours(path: str) -> None:
    fd = _opened(path)
    try:
        refuse_foreign(fd, path)
    finally:
        os.close(fd)


def _opened(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_left_over(root: str) -> None:
    """Remove the folders of this user's jobs that no process uses any more."""
    with suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False) if _FOLDER.fullmatch(entry.name) else None
            if found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                _sweep(entry.path)


def _sweep(path: str) -> None:
    """Remove what dead members left, if no other can need it; and the folder, if it is empty then."""
    with suppress(OSError):
        names = os.listdir(path)
        members = [name for name in names if name[:2] in ("m-", "t-")]
        dead = {name for name in members if _is_dead(f"{path}/{name}")}
        if len(dead) < len(members) and len(dead) <= _MAX_DEAD:
            return

        for name in names:
            _remove_claim(f"{path}/{name}", dead)
        for name in dead:
            shutil.rmtree(f"{path}/{name}", ignore_errors=True)
        os.rmdir(path)


def _is_dead(path: str) -> bool:
    """Whether no process holds the member's lock. A member that is just joining may seem dead, and joins again."""
    try:
        fd = _opened(path)
    except FileNotFoundError:
        return True

    try:
        return lock(fd, is_shared=True)  # several processes may look at the same time
    finally:
        os.close(fd)


def _remove_claim(path: str, dead: set[str]) -> None:
    with suppress(OSError):  # a member, or removed by another process
        if os.readlink(path).partition("/")[0] in dead:
            os.unlink(path)
