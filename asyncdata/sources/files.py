"""Files of a source as they were at the start: their digests, which must match when a snapshot is loaded, whether a
file has changed since, and who reads its blocks in a worker.

Tests pin the digests: a changed digest would make every existing snapshot unusable. A file is compared by ``stat``, and
if that differs, by its content. A worker checks after it has read and before it answers, so its answer is from the
unchanged file. Runs without numpy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

from asyncdata.core.errors import SourceChangedError, SourceError
from asyncdata.core.identity import FileRef, FileRefs, ListDigest, ObjectRefs, all_sizes, base_name, digest

if TYPE_CHECKING:
    from array import array

    from asyncdata.core.messages import Block, Overflow, ReadCounts


class FileChangedError(Exception):
    """A file has changed since the start."""


def unreadable(error: OSError, path: str, offset: int) -> OSError:
    """The same error with the file's name, which an error from a descriptor does not have."""
    return OSError(error.errno, f"{error.strerror or error}, at byte {offset}", path)


class BlockRows(NamedTuple):
    """The rows of one block.

    :ivar data: the bytes for the slot.
    :ivar starts: the start of each row in ``data``; -1 if it did not fit.
    :ivar lengths: the bytes of each row; -1 for a row that is too long.
    :ivar offsets: the position of each row in the file, relative to the block's start.
    """

    data: bytes | bytearray
    starts: array[int]
    lengths: array[int]
    offsets: array[int]
    num_blank: int


class BlockReader(Protocol):
    """Opened in a worker from a :class:`~asyncdata.core.messages.Job` and the settings of its ``ReaderSpec``.

    A reader of objects, which a job with ``stores`` has, is a :class:`WideReader`.
    """

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """The rows of ``block``, as many as fit into ``num_bytes``, and the positions of the others.

        :raises FileChangedError: if the file has changed.
        :raises OSError: if it cannot be read.
        """

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        """Single rows at ``places``; the size of each in bytes is ``lengths[place.row]``.

        :raises FileChangedError: if a file has changed.
        :raises OSError: if it cannot be read.
        """

    def check(self) -> None:
        """Check that no file that was read since the last call had changed when it was read.

        :raises FileChangedError: naming a file that may have changed.
        :raises OSError: if the check fails.
        """

    def close(self) -> None:
        """Close the files."""


class WideReader(BlockReader, Protocol):
    """A reader of objects in stores, where each request takes long, and many take no longer than one.

    :ivar _reads: the :class:`~asyncdata.sources.remote.reads.Reads` of its stores.
    """

    _reads: Any

    def watch(self, on_progress: Callable[[], object], counts: ReadCounts) -> None:
        """Call ``on_progress``, in any thread, after each try of a request to a store, and count it."""
        self._reads.on_progress, self._reads.counts = on_progress, counts

    def give_up(self) -> None:
        """Let requests that wait for a store fail, in whatever thread: they are not needed any more."""
        self._reads.close()

    def expect(self, blocks: Sequence[Block]) -> None:
        """Begin to read ``blocks``, all at once: :meth:`read_block` is asked for each of them next."""


MAX_LISTED_FILES = 1000
"""With more files than this, a fingerprint has only their combined digest, so that snapshots stay small."""

_EDGE_BYTES = 64 << 10
_BLOCK_BYTES = 4 << 10
_NUM_BLOCKS = 16
WHOLE_BYTES = 2 * _EDGE_BYTES + _NUM_BLOCKS * _BLOCK_BYTES
"""A file of no more bytes is digested whole."""

_MAX_OPEN_FILES = 64


def stamp(path: str) -> FileRef:
    """The file as it is now, without the digest of its content.

    :raises SourceError: if it cannot be looked at.
    """
    try:
        return stamp_of(path, os.stat(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def stamp_of(path: str, found: os.stat_result) -> FileRef:
    """The same, from a result of ``stat``."""
    return FileRef(path, found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)


def file_digest(path: str, num_bytes: int) -> str:
    """Digest of a sample of the file's first ``num_bytes`` bytes: its size, both ends, and blocks between them.

    Files up to 192 KiB are read whole. The positions of the blocks depend only on the size.

    :raises SourceChangedError: if the file is shorter.
    :raises SourceError: if it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return content_digest(fd, path, num_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(path, error) from error


def content_digest(fd: int, path: str, num_bytes: int) -> str:
    """:func:`file_digest` of a file that is open.

    :raises SourceChangedError: if the file is shorter.
    :raises OSError: if it cannot be read.
    """
    return digest(str(num_bytes), *(_read(fd, path, *piece, num_bytes) for piece in _pieces(num_bytes)))


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """The sampled ranges: (offset, length)."""
    if num_bytes <= WHOLE_BYTES:
        yield 0, num_bytes
        return

    yield 0, _EDGE_BYTES
    between = num_bytes - 2 * _EDGE_BYTES
    for number in range(_NUM_BLOCKS):
        yield _EDGE_BYTES + between * number // _NUM_BLOCKS, _BLOCK_BYTES
    yield num_bytes - _EDGE_BYTES, _EDGE_BYTES


def _read(fd: int, path: str, offset: int, length: int, num_bytes: int) -> bytes:
    pieces: list[bytes] = []
    while length > 0:
        piece = os.pread(fd, length, offset)
        if not piece:
            found = os.fstat(fd).st_size
            raise SourceChangedError(
                f"AD302 {path} is not the file it was: expected {num_bytes} bytes, found {found}; "
                "put the file back, or start a new run on the new one"
            )

        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(pieces)


def _unreadable(path: str, error: OSError) -> SourceError:
    code = "AD304" if isinstance(error, FileNotFoundError) else "AD305"
    return SourceError(f"{code} {path} cannot be read: {error.strerror}; check the path and its permissions")


def data_fingerprint(files: FileRefs) -> dict[str, Any]:
    """The fingerprint of files: name, size and content sample of each, in order, without the folder.

    ``{"num_files", "num_bytes", "digest", "files": [[name, num_bytes, digest], ...]}``. Above
    :data:`MAX_LISTED_FILES`, ``files`` is empty, and ``content`` is a digest of the same without the names.

    :param files: a file whose digest is not known is read. The digests of objects are known.
    :raises SourceError: as :func:`file_digest`.
    """
    is_listed = len(files) <= MAX_LISTED_FILES
    entries: Iterator[list[Any]] = (
        [base_name(file.path), file.num_bytes, file.digest or file_digest(file.path, file.num_bytes)] for file in files
    )
    if isinstance(files, ObjectRefs):
        digests, listed = files.digests, list(entries) if is_listed else []
    else:
        digests, listed = ListDigest(), list(entries)
        for entry in listed:
            digests.add(*entry)
    size = {"num_files": len(files), "num_bytes": sum(all_sizes(files))}
    found = {**size, "digest": digests.with_names, "files": listed if is_listed else []}
    # what is listed tells the content without the names as well
    return found if is_listed else found | {"content": digests.without_names}


def looks(file: FileRef) -> tuple[int, int, int, int]:
    """What ``stat`` says of a file."""
    return file.num_bytes, file.inode, file.mtime_ns, file.ctime_ns


def is_same(file: FileRef, now: FileRef, content: Callable[[], str]) -> bool:
    """Whether a file that is not shorter than at the start still has the same rows; it may have grown.

    A different ctime alone is no proof of an edit: chmod, link and rename change it, too. Then the sampled content
    decides, if it was digested at the start. Otherwise, and for bytes outside of the sample, a different mtime is an
    edit, unless the file has grown.

    :param content: computes the digest of the current content.
    """
    if looks(now) == looks(file):
        return True

    is_known = bool(file.digest)
    if is_known and content() != file.digest:
        return False

    if is_known and file.num_bytes <= WHOLE_BYTES:  # all of it was compared
        return True

    if now.num_bytes > file.num_bytes:
        return is_known or now.inode == file.inode

    if now.mtime_ns != file.mtime_ns:
        return False

    # Some file systems invent inodes; a copy that kept its mtime has another ctime.
    return is_known or now.inode == file.inode or now.ctime_ns == file.ctime_ns


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
        self._seen = file
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
        """Check that all bytes that were read until now are as they were at the start.

        :raises FileChangedError: if they may have changed.
        :raises OSError: if the check fails.
        """
        if self.is_untouched:
            return

        now = stamp_of(self._file.path, os.fstat(self.fd))

        if now.num_bytes < self._file.num_bytes:
            raise FileChangedError(shrunk(self._file, now.num_bytes))

        if self._file.inode and not is_same(self._file, now, self._content):
            raise FileChangedError(edited(self._file.path))

        self._seen = now

    @property
    def is_untouched(self) -> bool:
        """Whether it looks as when it was checked last."""
        return looks(stamp_of(self._file.path, os.fstat(self.fd))) == looks(self._seen)

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
