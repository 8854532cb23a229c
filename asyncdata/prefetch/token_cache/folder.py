"""The folder of one token cache: what it is named after, who writes to it, and how a segment becomes part of it.

All that has one key is in one folder; its segments say which files they are of. One process writes, the holder of a
lock; any number read. What a killed writer left behind, the next one removes.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.atomic_file import sync_folder
from asyncdata.core.cache_dir import cache_folder
from asyncdata.core.digest import canonical, digest
from asyncdata.core.file_owner import check_ours
from asyncdata.prefetch.token_cache.segment.layout import SUFFIX, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("ABOUT", "CacheFolder", "about_of", "default_root", "is_in_use", "key_of")

ABOUT = "about.json"
_LOCK = "writer.lock"
_RUN = ".run-"
_ELSEWHERE = frozenset({"data", "footers", "indices", "sizes", "stamps"})
"""Settings of readers that say where rows are, and not what they are."""


def default_root() -> str:
    """The folder of all token caches, where nothing else is said."""
    return os.path.join(cache_folder(), "tokens")


def about_of(function: Mapping[str, str], reader: str, settings: Mapping[str, Any], **limits: Any) -> dict[str, Any]:
    """What the samples of a cache follow from, beside the text of its files.

    :param function: the fingerprints of the tokenize function, and the versions of what it runs on.
    """
    of_rows = {name: value for name, value in settings.items() if name not in _ELSEWHERE}
    return {"version": VERSION, "function": dict(function), "reader": [reader, of_rows], "limits": limits}


def key_of(about: Mapping[str, Any]) -> str:
    """The name of the folder."""
    return digest(canonical(about))


class CacheFolder:
    """A folder that this process reads and, with the lock, writes.

    :param root: the folder of all token caches.
    :ivar path: that of this one.
    :ivar run: what of it this process writes to before it is whole, by its name there; empty while another one writes.
    :raises ConfigError: if what is in its place is not ours to use.
    :raises OSError: if it cannot be made.
    """

    def __init__(self, root: str, about: Mapping[str, Any]) -> None:
        self.path = os.path.join(os.path.abspath(root), key_of(about))
        self.run = ""
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self.path, mode=0o700)
        check_ours(self.path, "token_cache", is_folder=True)
        self._lock_fd = os.open(os.path.join(self.path, _LOCK), _OPEN_LOCK, 0o600)
        self._about = about

    def lock(self) -> bool:
        """Become the writer, if there is none; whether this process is it.

        :raises OSError: if the file system cannot lock, or the folder not be written.
        """
        if not self.run and _lock(self._lock_fd):
            self._remove_left_over()
            self._write_about()
            run = f"{_RUN}{secrets.token_hex(4)}"
            os.mkdir(os.path.join(self.path, run), mode=0o700)
            self.run = run
        return bool(self.run)

    def _remove_left_over(self) -> None:
        for name in os.listdir(self.path):
            if name.startswith(_RUN):
                shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)

    def _write_about(self) -> None:
        """For people, and ``asyncdata cache ls``: nothing depends on it."""
        path = os.path.join(self.path, ABOUT)
        if os.path.lexists(path):
            return

        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self._about)))

    def make_room(self, number: int) -> str:
        """A new folder for what a window writes before it is whole, by its name here.

        :raises OSError: if it cannot be made.
        """
        name = f"{self.run}/{number}"
        os.mkdir(os.path.join(self.path, name), mode=0o700)
        return name

    def write(self, name: str, value: Any) -> None:
        """Write what a request is too small for, in msgpack; it need not last.

        :raises OSError: if it cannot be written.
        """
        path = os.path.join(self.path, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            left = memoryview(msgspec.msgpack.encode(value))
            while left:
                left = left[file.write(left) :]

    def commit(self, unfinished: str) -> str:
        """Make a finished segment part of the cache, for good; its name there.

        :raises OSError: the segment is part of it then, or not.
        """
        before, name = os.path.join(self.path, unfinished), f"{secrets.token_hex(8)}{SUFFIX}"
        after = os.path.join(self.path, name)
        fd = os.open(before, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(before, after)
        sync_folder(after)
        return name

    def discard(self, room: str) -> None:
        """Remove what a window wrote."""
        shutil.rmtree(os.path.join(self.path, room), ignore_errors=True)

    def remove(self, name: str) -> None:
        """Remove a segment that is damaged."""
        with suppress(OSError):
            os.unlink(os.path.join(self.path, name))

    def close(self) -> None:
        """Let another process write."""
        if self.run:
            self.discard(self.run)
            self.run = ""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False

    return True


def is_in_use(path: str) -> bool:
    """Whether a process writes to the cache in the folder ``path``."""
    try:
        fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False

    try:
        return not _lock(fd)
    finally:
        os.close(fd)
