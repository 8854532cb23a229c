"""The folder of one token cache: its key, its writer lock, and how a finished segment is added.

All segments with the same key are in one folder; each segment names the files that its rows come from. One process
writes, the holder of a lock; any number of processes read. The next writer removes what a killed writer left.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.atomic_file import sync_folder
from asyncdata.core.cache_dir import cache_folder
from asyncdata.core.digest import canonical, digest
from asyncdata.core.file_lock import lock
from asyncdata.core.file_owner import check_ours
from asyncdata.prefetch.token_cache.segment.layout import SUFFIX, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ("ABOUT", "CacheFolder", "about_of", "default_root", "is_in_use", "key_of")

ABOUT = "about.json"
_LOCK = "writer.lock"
_RUN = ".run-"
_ELSEWHERE = frozenset({"data", "footers", "indices", "sizes", "stamps"})
"""Settings of readers that tell where rows are, but do not change their content."""


def default_root() -> str:
    """The default folder of all token caches."""
    return os.path.join(cache_folder(), "tokens")


def about_of(function: Mapping[str, str], reader: str, settings: Mapping[str, Any], **limits: Any) -> dict[str, Any]:
    """All that the samples of a cache depend on, except the text of the files.

    :param function: the fingerprints of the tokenize function, and the versions of what it runs on.
    """
    of_rows = {name: value for name, value in settings.items() if name not in _ELSEWHERE}
    return {"version": VERSION, "function": dict(function), "reader": [reader, of_rows], "limits": limits}


def key_of(about: Mapping[str, Any]) -> str:
    """The name of the folder."""
    return digest(canonical(about))


class CacheFolder:
    """A folder that this process reads and, if it holds the lock, writes.

    :param root: the folder of all token caches.
    :param suffix: of its segments.
    :ivar path: the path of this folder.
    :ivar run: the name of the subfolder for this process's unfinished files; empty if it is not the writer.
    :raises ConfigError: if another user may have written to the folder.
    :raises OSError: if the folder cannot be made.
    """

    def __init__(self, root: str, about: Mapping[str, Any], suffix: str = SUFFIX) -> None:
        self.path = os.path.join(os.path.abspath(root), key_of(about))
        self.run = ""
        self._suffix = suffix
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self.path, mode=0o700)
        check_ours(self.path, "Cache(tokens=...)", is_folder=True)
        self._lock_fd = os.open(os.path.join(self.path, _LOCK), _OPEN_LOCK, 0o600)
        self._about = about

    def lock(self) -> bool:
        """Become the writer, if there is none; return whether this process is the writer.

        :raises OSError: if the file system cannot lock, or the folder cannot be written.
        """
        if not self.run and lock(self._lock_fd):
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
        """Write a description for people and ``asyncdata cache ls``; no code depends on it."""
        path = os.path.join(self.path, ABOUT)
        if os.path.lexists(path):
            return

        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self._about)))

    def make_room(self, number: int) -> str:
        """Make a subfolder for the unfinished files of a window; return its name, relative to ``path``.

        :raises OSError: if it cannot be made.
        """
        name = f"{self.run}/{number}"
        os.mkdir(os.path.join(self.path, name), mode=0o700)
        return name

    def write(self, name: str, value: Any) -> None:
        """Write a value that is too large for a request, in msgpack. It is not synced to disk.

        :raises OSError: if it cannot be written.
        """
        path = os.path.join(self.path, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            left = memoryview(msgspec.msgpack.encode(value))
            while left:
                left = left[file.write(left) :]

    def commit(self, unfinished: str) -> str:
        """Add a finished segment to the cache, durably; return its name there.

        :raises OSError: if that fails; the segment may or may not be added then.
        """
        before, name = os.path.join(self.path, unfinished), f"{secrets.token_hex(8)}{self._suffix}"
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
        """Remove the unfinished files of a window."""
        shutil.rmtree(os.path.join(self.path, room), ignore_errors=True)

    def discard_files(self, names: Iterable[str]) -> None:
        """Remove unfinished files."""
        for name in names:
            self.remove(name)

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


def is_in_use(path: str) -> bool:
    """Whether a process writes to the cache in the folder ``path``."""
    try:
        fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False

    try:
        return not lock(fd)
    finally:
        os.close(fd)
