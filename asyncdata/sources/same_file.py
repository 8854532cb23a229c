"""Whether a file has changed since the start: by ``stat``, and if that differs, by its content.

A worker checks after it has read and before it answers, so its answer is from the unchanged file. Runs without numpy.
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
    """The fields that are compared."""
    return Looks(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def is_same(file: FileRef, now: Looks, content: Callable[[], str]) -> bool:
    """Whether a file that is not shorter than at the start still has the same rows; it may have grown.

    A different ctime alone is no proof of an edit: chmod, link and rename change it, too. Then the sampled content
    decides, if it was digested at the start. Otherwise, and for bytes outside of the sample, a different mtime is an
    edit, unless the file has grown.

    :param content: computes the digest of the current content.
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

    # Some file systems invent inodes; a copy that kept its mtime has another ctime.
    return is_known or now.inode == before.inode or now.ctime_ns == before.ctime_ns


def edited(path: str) -> str:
    """The message for a file that has changed."""
    return (
        f"AD303 {path} was replaced or edited while it was read. Start a new run, or put the file back; if only its "
        "time has changed, restore the last state in a new process."
    )


def shrunk(file: FileRef, num_bytes: int) -> str:
    """The message for a file that was truncated to ``num_bytes``."""
    return f"AD302 {file.path} shrank: it had {file.num_bytes} bytes at the start, and ends at byte {num_bytes} now"


class SameFile:
    """A file from the start, opened for reading but not checked yet.

    :ivar fd: its descriptor.
    :raises OSError: if it cannot be opened.
    """

    def __init__(self, file: FileRef) -> None:
        self._file = file
        self._looks = Looks(file.num_bytes, file.inode, file.mtime_ns, file.ctime_ns)
        self.fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def checked(cls, file: FileRef) -> Self:
        """Open the file, and check it.

        :raises FileChangedError: if its name belongs to another file now.
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
        """Check that all bytes that were read until now are those of the start.

        :raises FileChangedError: if they may have changed.
        :raises OSError: if the check fails.
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
