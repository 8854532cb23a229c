"""Files: checked before they are used, locked, written whole or not at all; the folder of what can be made again."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import weakref
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable, Iterator, Sequence


def path_of(fd: int) -> str:
    """A path that opens the file of a descriptor again, for a library that takes paths alone."""
    return f"/proc/self/fd/{fd}" if sys.platform == "linux" else f"/dev/fd/{fd}"


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


_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP}
_STALE_S = 3600.0
_VERIFY_BYTES = 1 << 20
_LINK_ATTEMPTS = 100


def replace_file(path: str, pieces: Sequence[bytes], keep: int) -> None:
    """Make ``path`` (absolute) hold ``pieces``, end to end; its name survives a power loss after :func:`sync_folder`.

    At every instant ``path`` is the old file or the new one. Older ones become ``path.1``, ``path.2``; ``keep`` stay in
    all, with the new one.

    :raises OSError: the old files are as they were, but that the oldest may be gone; nothing half-written stays.
    """
    folder, name = os.path.split(path)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EINVAL, "a link, folder or device is in its place; give the name of a file")

    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        write_new(temporary, pieces, is_durable=True)
        _keep_older(path, f"{temporary[:-4]}.old.tmp", keep)
        os.replace(temporary, path)
    finally:
        _unlink(temporary)


def sync_folder(path: str) -> None:
    """Bring the names in ``path``'s folder to the disk, where the file system can.

    :raises OSError: if it fails.
    """
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def remove_left_over(path: str) -> None:
    """Remove what killed processes left half written: an hour older than ``path``, by the file system's own clock."""
    folder, name = os.path.split(path)
    remove_left_overs(folder, re.escape(name), path)


def remove_left_overs(folder: str, names: str, newest: str) -> None:
    """The same for all files of ``folder`` whose name matches ``names``, a regular expression.

    :param newest: a file that was just written; what is an hour older goes.
    """
    left_over = re.compile(rf"\.(?:{names})\.\d+\.[0-9a-f]{{8}}(\.old)?\.tmp")
    with suppress(OSError), os.scandir(folder) as entries:
        limit = os.stat(newest).st_mtime - _STALE_S
        for entry in entries:
            if left_over.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < limit:
                _unlink(entry.path)


def write_new(path: str, pieces: Sequence[bytes], *, is_durable: bool = False) -> None:
    """Make a file of ``pieces``, end to end.

    :param is_durable: return once they are on the disk, and were read back.
    :raises OSError: if there is such a file, or it cannot be written; then a part of it may be there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[os.write(fd, left) :]
        if is_durable:
            os.fsync(fd)
            _verify(fd, pieces)
    finally:
        os.close(fd)


def _verify(fd: int, pieces: Sequence[bytes]) -> None:
    """Read the file back and compare: a write that failed silently must not replace a good file."""
    begin = 0
    for piece in pieces:
        offset = 0
        while offset < len(piece):
            found = os.pread(fd, min(len(piece) - offset, _VERIFY_BYTES), begin + offset)
            # A slice, as memoryviews are compared byte by byte.
            if not found or found != piece[offset : offset + len(found)]:
                raise OSError(errno.EIO, f"what was written reads back otherwise after byte {begin + offset}")

            offset += len(found)
        begin += len(piece)


def _keep_older(path: str, spare: str, keep: int) -> None:
    """Make ``path`` known as ``path.1`` too, and so on: every name stays whole, as only a rename changes it."""
    names = [path, *(f"{path}.{number}" for number in range(1, keep))]
    if keep == 1 or not os.path.exists(path) or _is_same(path, names[1]):  # same: killed just before the last rename
        return

    for source, target in reversed(list(pairwise(names))):
        _link_over(source, target, spare)


def _is_same(path: str, other: str) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samefile(path, other)
    return False


def _link_over(source: str, target: str, spare: str) -> None:
    try:
        if _link(source, spare):
            os.replace(spare, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise

        with suppress(FileNotFoundError):  # another writer kept it first
            os.replace(source, target)  # without hard links `path` is missing for a moment, and whole as `path.1`
    finally:
        _unlink(spare)  # the rename leaves it where both were one file already


def _link(source: str, name: str) -> bool:
    """Give ``source`` another name; return False if there is no such file."""
    for attempt in range(1, _LINK_ATTEMPTS + 1):
        if not os.path.exists(source):
            break

        # If another writer replaces `source` after the kernel looked it up, the file that was found has no name left,
        # and `link` fails with ENOENT. `source` is a new file then: try again with that one.
        try:
            os.link(source, name)
            return True
        except FileNotFoundError:
            if attempt == _LINK_ATTEMPTS:
                raise
    return False


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


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


_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class TemporaryFolder:
    """A new folder in ``TMPDIR``, for this user alone. Those that a killed process left go when the next one is made.

    Its owner holds a lock on it, which ends with the process, however it ends.

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
