"""Whether a file has changed since the start: by ``stat``, and if that differs, by its content.

A worker checks after it has read and before it answers, so its answer is from the unchanged file. Runs without numpy.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from asyncdata.core.errors import SourceError
from asyncdata.sources.fingerprint import WHOLE_BYTES, content_digest
from asyncdata.sources.reader import FileChangedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from asyncdata.core.messages import FileRef

__all__ = ("Looks", "OpenFiles", "SameFile", "edited", "is_same", "looks_of", "shrunk")

_MAX_OPEN_FILES = 64


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


class _Checked(Protocol):
    def check(self) -> None: ...

    def close(self) -> None: ...


FileT = TypeVar("FileT", bound=_Checked)


class OpenFiles(Generic[FileT]):
    """The files that a reader keeps open, and which of them it has read since they were checked last.

    Of a file that was read, only the process that has it open can tell whether it was the same. So it is checked before
    it is closed. There are 64 at most; beyond them the file that was opened first is closed.

    :param open_file: opens the file of a number.
    """

    def __init__(self, open_file: Callable[[int], FileT]) -> None:
        self._open_file = open_file
        self._open: dict[int, FileT] = {}
        self._read: set[int] = set()

    def find(self, file_id: int) -> FileT | None:
        """The file, if it is open."""
        return self._open.get(file_id)

    def to_read(self, file_id: int) -> FileT:
        """The file, opened if it is not yet; to be read now."""
        if file_id not in self._open:
            if len(self._open) >= _MAX_OPEN_FILES:
                self.close_file(next(iter(self._open)))
            self._open[file_id] = self._open_file(file_id)
        self._read.add(file_id)
        return self._open[file_id]

    def close_file(self, file_id: int) -> None:
        """Close the file, checked if it was read.

        :raises FileChangedError: if it has changed.
        """
        with closing(self._open.pop(file_id)) as file:
            if file_id in self._read:
                self._read.remove(file_id)
                file.check()

    def check(self) -> None:
        """Check the files that were read.

        :raises FileChangedError: if one has changed.
        """
        read, self._read = self._read, set()  # whatever is found: what comes next is judged by what it reads itself
        for file_id in read:
            self._open[file_id].check()

    def close(self) -> None:
        """Close all of them, unchecked."""
        self._read.clear()
        while self._open:
            self._open.popitem()[1].close()
