"""How a worker reads: blocks into rows, and single rows that found no room. Runs without numpy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from asyncdata.wire import Block, FileRef, Overflow

__all__ = ("BlockReader", "BlockRows", "FileChangedError", "open_same", "unreadable")


class FileChangedError(Exception):
    """A file is no longer what it was at the start."""


def open_same(file: FileRef) -> int:
    """A descriptor of the file that it was at the start; it may have grown.

    A worker may open it in the middle of an epoch, and must not go on in another file of that name. A file system that
    makes up inodes keeps at least the time of the last change.

    :raises FileChangedError: if another file has taken its name.
    :raises OSError: if it cannot be opened.
    """
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    now = os.fstat(fd)
    if file.inode and now.st_ino != file.inode and now.st_mtime_ns != file.mtime_ns:
        os.close(fd)
        raise FileChangedError(
            f"AD303 {file.path} was replaced or edited while it was read. Start a new run, or put the file back."
        )

    return fd


def unreadable(error: OSError, path: str, offset: int) -> OSError:
    """The same error with its place: one that comes of a descriptor does not know it."""
    return OSError(error.errno, f"{error.strerror or error}, at byte {offset}", path)


class BlockRows(NamedTuple):
    """The rows of one block.

    :ivar data: what goes into the slot.
    :ivar starts: where each row begins in ``data``; -1 if it found no room there.
    :ivar lengths: its bytes; -1 for a row that is too long.
    :ivar offsets: its place in the file, counted from the block's start.
    """

    data: bytes | bytearray
    starts: array[int]
    lengths: array[int]
    offsets: array[int]
    num_blank: int


class BlockReader(Protocol):
    """Opened in a worker from a :class:`~asyncdata.wire.Job` and the settings of its ``ReaderSpec``."""

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """The rows of ``block``, as many as find room in ``num_bytes``, and the places of the others.

        :raises FileChangedError: if the file is no longer what it was.
        :raises OSError: if it cannot be read.
        """
        ...

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        """Single rows: ``places``, each of as many bytes as ``lengths`` says at its ``row``.

        :raises FileChangedError: if a file is no longer what it was.
        :raises OSError: if it cannot be read.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...
