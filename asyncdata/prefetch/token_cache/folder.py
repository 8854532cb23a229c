"""The folder of one token cache: its key, the lock of its writer, and how much room all caches have together.

All segments with the same key are in one folder; each block in them names the file that it comes from. The workers of
one run write, that of the process which holds the lock; any number of processes read.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.cache_dir import CacheEntry, cache_folder, evict
from asyncdata.core.digest import canonical, digest
from asyncdata.core.file_checks import check_ours, lock
from asyncdata.prefetch.token_cache.segment import INDEX_SUFFIX, SUFFIX, VERSION, index_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncdata.core.cache_messages import CacheJob

__all__ = (
    "ABOUT",
    "CacheFolder",
    "about_of",
    "default_root",
    "is_in_use",
    "key_of",
    "make_room",
    "remove_segment",
    "segment_files",
    "segments_in",
)

ABOUT = "about.json"
_LOCK = "writer.lock"
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
    :ivar path: the path of this folder.
    :ivar since_ns: the time of the file system when it was opened here.
    :ivar is_ours: whether this process is the writer.
    :raises ConfigError: if another user may have written to the folder.
    :raises OSError: if the folder cannot be made.
    """

    def __init__(self, root: str, about: Mapping[str, Any]) -> None:
        self.path = os.path.join(os.path.abspath(root), key_of(about))
        self.is_ours = False
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(self.path, mode=0o700)
        check_ours(self.path, "Cache(tokens=...)", is_folder=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock_fd = os.open(os.path.join(self.path, _LOCK), flags, 0o600)
        os.utime(self._lock_fd)
        self.since_ns = os.fstat(self._lock_fd).st_mtime_ns
        self._about = about

    def lock(self) -> bool:
        """Become the writer, if there is none; return whether this process is the writer.

        :raises OSError: if the file system cannot lock, or the folder cannot be written.
        """
        if not self.is_ours and self._lock_fd >= 0 and lock(self._lock_fd):
            self._remove_left_over()
            self._write_about()
            self.is_ours = True
        return self.is_ours

    def _remove_left_over(self) -> None:
        """Remove indexes without a segment: who made or removed it was killed."""
        names = set(os.listdir(self.path))
        segments = {index_of(name) for name in names if name.endswith(SUFFIX)}
        for name in names - segments:
            if name.endswith(INDEX_SUFFIX):
                os.unlink(os.path.join(self.path, name))

    def _write_about(self) -> None:
        """Write a description for people and ``asyncdata cache ls``; no code depends on it."""
        path = os.path.join(self.path, ABOUT)
        if os.path.lexists(path):
            return

        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self._about)))

    def close(self) -> None:
        """Let another process write."""
        self.is_ours = False
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


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


def segments_in(folder: str) -> Iterator[tuple[str, int]]:
    """The segments in a folder, without links: the path of each, and the bytes of its index.

    :raises OSError: if the folder cannot be read.
    """
    with os.scandir(folder) as files:
        for file in files:
            if file.name.endswith(SUFFIX) and file.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # it is being made, or removed
                    yield file.path, os.stat(index_of(file.path), follow_symlinks=False).st_size


def segment_files(root: str) -> Iterator[CacheEntry]:
    """The segments of all caches in ``root``. The name of each is its path."""
    with suppress(FileNotFoundError), os.scandir(root) as folders:
        for folder in folders:
            if folder.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    for path, index_bytes in segments_in(folder.path):
                        found = os.stat(path, follow_symlinks=False)
                        yield CacheEntry(found.st_mtime_ns, found.st_size + index_bytes, path)


def remove_segment(path: str) -> bool:
    """Remove a segment. A process that has it open can still read it; others tokenize its rows."""
    for each in (path, index_of(path)):
        with suppress(FileNotFoundError):
            os.unlink(each)
    return True


def make_room(cache: CacheJob, num_bytes: int, num_storing: int) -> tuple[int, int]:
    """Make room for one of ``num_storing`` scans that may be stored at the same time.

    Removes the least recently used segments of all caches, except those that were used since this run began. Nothing is
    removed if that is not enough.

    :param num_bytes: what each of the scans needs.
    :returns: the bytes that there are for this scan, and the bytes that were removed.
    :raises OSError: if the folder cannot be read, or a segment cannot be removed.
    """
    assert cache.max_bytes is not None, "there is a limit"
    files = list(segment_files(os.path.dirname(cache.folder)))
    left = cache.max_bytes - sum(file.num_bytes for file in files)
    excess, num_removed = num_bytes * num_storing - left, 0
    spare = [file for file in files if file.used_ns < cache.since_ns]
    if 0 < excess <= sum(file.num_bytes for file in spare):
        num_removed = sum(file.num_bytes for file in evict(spare, excess, remove_segment))
    return (left + num_removed) // num_storing, num_removed
