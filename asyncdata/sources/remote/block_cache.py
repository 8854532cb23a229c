"""A cache of blocks of pinned objects on the local disk, which the processes of a machine share.

A block's name is a digest of the object's address and identity and of the range, so what is found is never a block of
another version. A file is written under another name and renamed, and has a checksum. So a killed writer, a damaged
disk or two writers of one block only cost a read of the store.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

from asyncdata.core.files import CacheEntry, evict, lock, refuse_foreign, write_new
from asyncdata.core.identity import digest
from asyncdata.core.threads import no_op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.sources.remote.store import ObjectStamp

_SUM_BYTES = 16
_PAGE_BYTES = 4096
_TALLY = "used"
_TALLY_BYTES = 8
_SHARES = 512
"""The limit is given out to processes in so many parts, so that they rarely meet. With 64 processes that have a part
each, an eighth of the limit is given out and not written.
"""


class BlockCache:
    """The cache in a folder.

    It never raises: where it cannot read or write, blocks are read from the store.

    :param folder: made if it is not there.
    :param max_bytes: of all files in it; the least recently used blocks are removed.
    :ivar on_failure: called for each file that was damaged, or could not be read or written.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = folder
        self._limit = max_bytes - max_bytes // 8
        self._share = max(_PAGE_BYTES, max_bytes // _SHARES)
        self._left = self._owed = 0
        self._lock = threading.Lock()
        self.on_failure: Callable[[], object] = no_op

    def find(self, found: ObjectStamp, start: int, stop: int) -> bytes | None:
        """The bytes ``[start, stop)`` of the object; None if they are not here."""
        path = self._path(found, start, stop)
        try:
            with open(path, "rb", opener=_without_links) as file:
                refuse_foreign(file.fileno(), path)
                data = file.read(_SUM_BYTES + stop - start + 1)
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError:
            self.on_failure()
            return None

        block = data[_SUM_BYTES:]
        if len(block) == stop - start and data[:_SUM_BYTES] == _checksum(path, block):
            return block

        self.on_failure()
        with suppress(OSError):
            os.unlink(path)
        return None

    def keep(self, found: ObjectStamp, start: int, stop: int, data: bytes) -> None:
        """Keep the bytes ``[start, stop)`` of the object, if there is room."""
        try:
            if self._may_write(_on_disk(_SUM_BYTES + len(data))):
                self._write(self._path(found, start, stop), data)
        except OSError:
            self.on_failure()

    def _path(self, found: ObjectStamp, start: int, stop: int) -> str:
        identity = (found.num_bytes, found.etag, found.version, found.mtime_ns)
        name = digest(str(found.address), *map(str, identity), str(start), str(stop))
        return os.path.join(self._folder, name[:2], name)

    def _write(self, path: str, data: bytes) -> None:
        temporary = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
            write_new(temporary, [_checksum(path, data), data])
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _may_write(self, num_bytes: int) -> bool:
        """Whether so much may be written: taken from this process's part of the limit, or from a new part."""
        with self._lock:
            if self._left < num_bytes <= self._limit // 8:
                self._left += self._reserve(max(num_bytes, self._share))
            if self._left < num_bytes:
                return False

            self._left -= num_bytes
            return True

    def _reserve(self, num_bytes: int) -> int:
        """Take so much of the limit for this process, and remove blocks for it.

        If another process does the same now, one part is taken all the same, and tallied later; then 0.

        What is on the disk and what processes have taken is tallied in a file. A process that ends takes the rest of
        its part with it, until the files are counted again.
        """
        os.makedirs(self._folder, 0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(os.path.join(self._folder, _TALLY), flags, 0o600)
        try:
            refuse_foreign(fd, self._folder)
            if not lock(fd):
                part = 0 if self._owed else num_bytes
                self._owed += part
                return part

            num_bytes += self._owed
            tally = os.pread(fd, _TALLY_BYTES, 0)
            used = int.from_bytes(tally, "little") if len(tally) == _TALLY_BYTES else self._limit
            if used + num_bytes > self._limit:
                used = self._make_room(num_bytes)
            os.pwrite(fd, (used + num_bytes).to_bytes(_TALLY_BYTES, "little"), 0)
            num_bytes, self._owed = num_bytes - self._owed, 0
        finally:
            os.close(fd)
        return num_bytes

    def _make_room(self, num_bytes: int) -> int:
        """Count what is on the disk, and remove blocks if that is too much; return what is left.

        An eighth more than needed is removed, so that the files are not counted for every part.
        """
        entries = list(self._entries())
        used = sum(entry.num_bytes for entry in entries)
        if used + num_bytes <= self._limit:
            return used

        removed = evict(entries, used + num_bytes - self._limit + self._limit // 8, _remove)
        return used - sum(entry.num_bytes for entry in removed)

    def _entries(self) -> Iterator[CacheEntry]:
        """All files, with those that are being written and those that a killed process has left."""
        with os.scandir(self._folder) as folders:
            paths = [folder.path for folder in folders if folder.is_dir(follow_symlinks=False)]
        for path in paths:
            with suppress(FileNotFoundError), os.scandir(path) as files:
                for file in files:
                    with suppress(FileNotFoundError):
                        looks = file.stat(follow_symlinks=False)
                        yield CacheEntry(looks.st_mtime_ns, _on_disk(looks.st_size), file.path)


def _checksum(path: str, data: bytes) -> bytes:
    """With the block's name: a file that was renamed is not whole either."""
    return blake2b(data, digest_size=_SUM_BYTES, key=os.path.basename(path).encode()).digest()


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _remove(path: str) -> bool:
    with suppress(FileNotFoundError):
        os.unlink(path)
    return True
