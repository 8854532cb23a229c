"""A worker's reading: splits blocks into rows, and reads single rows that did not fit into the slot. Runs without
numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

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
        ...

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        """Single rows at ``places``; the size of each in bytes is ``lengths[place.row]``.

        :raises FileChangedError: if a file has changed.
        :raises OSError: if it cannot be read.
        """
        ...

    def check(self) -> None:
        """Check that no file that was read since the last call had changed when it was read.

        :raises FileChangedError: naming a file that may have changed.
        :raises OSError: if the check fails.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class WideReader(BlockReader, Protocol):
    """A reader of objects in stores, where each request takes long, and many take no longer than one."""

    def watch(self, on_progress: Callable[[], object], counts: ReadCounts) -> None:
        """Call ``on_progress``, in any thread, after each try of a request to a store, and count it."""
        ...

    def give_up(self) -> None:
        """Let requests that wait for a store fail, in whatever thread: they are not needed any more."""
        ...

    def expect(self, blocks: Sequence[Block]) -> None:
        """Begin to read ``blocks``, all at once: :meth:`read_block` is asked for each of them next."""
        ...
