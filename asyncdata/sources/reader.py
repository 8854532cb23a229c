"""How a worker reads: blocks into rows, and single rows that found no room. Runs without numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from asyncdata.core.messages import Block, Overflow

__all__ = ("BlockReader", "BlockRows", "FileChangedError", "unreadable")


class FileChangedError(Exception):
    """A file is no longer what it was at the start."""


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
    """Opened in a worker from a :class:`~asyncdata.core.messages.Job` and the settings of its ``ReaderSpec``."""

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

    def check(self) -> None:
        """Look whether all files that were read since the last call were what they were at the start, when they were
        read.

        :raises FileChangedError: naming one that may not have been.
        :raises OSError: if that cannot be found out.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...
