"""A file that is whole at every instant: replaced by a rename, after everything is on the disk; older ones are kept.

It holds any bytes; what they mean is ``snapshot``'s business.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
