"""Whether a file is still what it was at the start: by what ``stat`` says, and where that differs, by its content.

A worker asks after it has read, before it answers: what it read is that of the start then. Runs without numpy.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from asyncdata.core.errors import SourceError
from asyncdata.sources.fingerprint import WHOLE_BYTES, content_digest
from asyncdata.sources.reader import FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from asyncdata.core.messages import FileRef

__all__ = ("Looks", "SameFile", "edited", "is_same", "looks_of", "shrunk")


class Looks(NamedTuple):
    """What ``stat`` says of a file."""

    num_bytes: int
    inode: int
    mtime_ns: int
    ctime_ns: int


def looks_of(found: os.stat_result) -> Looks:
    """The part of it that is compared."""
    return Looks(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def is_same(file: FileRef, now: Looks, content: Callable[[], str]) -> bool:
    """Whether a file that is no shorter than at the start has the rows of the start; it may have grown.

    Another time of change alone says little: chmod, link and rename set it too. The sampled content decides then, where
    it was looked at at the start. Where it was not, and of what the sample leaves out, another time of the last
    modification is an edit, unless the file has grown.

    :param content: gives the digest of the content now.
    """
    before = Looks(file.num_bytes, file.inode, file.mtime_ns, file.ctime_ns)
    if now == before:
        return True

    is_known = bool(file.digest)
    if is_known and content() != file.digest:
        return False

    if is_known and file.num_bytes <= WHOLE_BYTES:  # all of it was compared
        return True

    if now.num_bytes > before.num_bytes:
        return is_known or now.inode == before.inode

    if now.mtime_ns != before.mtime_ns:
        return False

    # Some file systems make up inodes; a copy that kept its time has another time of change.
    return is_known or now.inode == before.inode or now.ctime_ns == before.ctime_ns


def edited(path: str) -> str:
    """The message for a file that is no longer what it was."""
    return (
        f"AD303 {path} was replaced or edited while it was read. Start a new run, or put the file back; if only its "
        "time has changed, restore the last state in a new process."
    )


def shrunk(file: FileRef, num_bytes: int) -> str:
    """The message for a file that ends at byte ``num_bytes`` now, and was longer."""
    return f"AD302 {file.path} shrank: it had {file.num_bytes} bytes at the start, and ends at byte {num_bytes} now"


class SameFile:
    """A file of the start, open for reading; not looked at yet.

    :ivar fd: its descriptor.
    :raises OSError: if it cannot be opened.
    """

    def __init__(self, file: FileRef) -> None:
        self._file = file
        self._looks = Looks(file.num_bytes, file.inode, file.mtime_ns, file.ctime_ns)
        self.fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def checked(cls, file: FileRef) -> Self:
        """The same, looked at.

        :raises FileChangedError: if another file has its name by now.
        :raises OSError: if it cannot be opened.
        """
        found = cls(file)
        try:
            found.check()
        except BaseException:
            found.close()
            raise

        return found

    def check(self) -> None:
        """Look whether all that was read until now is what was there at the start.

        :raises FileChangedError: if it may be anything else.
        :raises OSError: if that cannot be found out.
        """
        now = looks_of(os.fstat(self.fd))
        if now == self._looks:
            return

        if now.num_bytes < self._file.num_bytes:
            raise FileChangedError(shrunk(self._file, now.num_bytes))

        if self._file.inode and not is_same(self._file, now, self._content):
            raise FileChangedError(edited(self._file.path))

        self._looks = now

    def _content(self) -> str:
        try:
            return content_digest(self.fd, self._file.path, self._file.num_bytes)
        except SourceError as error:
            raise FileChangedError(str(error)) from error

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)
