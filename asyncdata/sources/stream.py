"""Sources that can only be read from front to back: their rows, and the order over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.specs import LINES
from asyncdata.order.permutation import feistel_permutation, order_keys, shuffled_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from asyncdata.core.file_refs import FileRefs
    from asyncdata.core.messages import Block
    from asyncdata.core.types import SourceLocation
    from asyncdata.order.shuffle import Shuffle
    from asyncdata.sources.base import Blocks

__all__ = ("MAX_ROW_BYTES", "MAX_WINDOW_ROWS", "Int32", "Int64", "RowStream", "Rows", "StreamOrder")

Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]

MAX_ROW_BYTES = 1 << 30
"""The upper limit of ``max_row_bytes`` for streams: positions in a slot are int32."""

MAX_WINDOW_ROWS = 1 << 20
"""The largest number of rows of a window. Every saved position depends on it, so it never changes."""


class Rows(NamedTuple):
    """Consecutive rows of one file; the order does not depend on how many there are.

    :ivar numbers: each row's number in its file, int64 of shape (num_rows,), sorted.
    :ivar lengths: the bytes of each row, int64 of shape (num_rows,).
    :ivar data: the concatenated rows, each followed by one byte, without rows longer than ``max_row_bytes``.
    :ivar num_blank: the number of blank lines between them.
    :ivar state: the argument with which :meth:`RowStream.read` starts at these rows, as builtins; None if there is
        none.
    :ivar offsets: the start of each row in the text of its file, in bytes, int64 of shape (num_rows,); None if there is
        no text.
    """

    file_id: int
    numbers: Int64
    lengths: Int64
    data: bytes
    num_blank: int
    state: dict[str, Any] | None
    offsets: Int64 | None = None


class RowStream(ABC):
    """An opened source without pieces that a worker could read independently: ``num_blocks`` is 0.

    One reader in the trainer's process reads it in each epoch.

    :ivar files: the files with the rows, numbered.
    :ivar max_row_bytes: a longer row is a bad row; :data:`MAX_ROW_BYTES` at most.
    """

    reader = LINES
    reads_single_rows = False
    are_arrays: Sequence[bool] = ()
    num_blocks = extent = block_bytes = room_bytes = 0
    files: FileRefs
    max_row_bytes: int

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        """Always empty: a stream has no blocks."""
        return []

    def close(self) -> None:  # noqa: B027 - there is nothing to do
        """As :class:`~asyncdata.sources.base.Blocks` says; there are no temporary files."""

    def as_blocks(self, block_bytes: int) -> Blocks | None:
        """The same rows in pieces that workers can read, for orders of single rows; None if that is not possible."""
        return None

    @abstractmethod
    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        """The rows of ``epoch``, from its start or from ``state`` on. Closing the iterator closes the files.

        :param check: called regularly; it raises when the rows are no longer needed.
        :raises SourceError: for a permanent error in the data, after the rows before it.
        :raises SourceChangedError: if the data have changed.
        :raises OSError: if it cannot be read.
        """
        ...

    @abstractmethod
    def location(self, file_id: int, offset: int, num_bytes: int, byte_offset: int = -1) -> SourceLocation:
        """The place of the row numbered ``offset``, which begins at ``byte_offset`` of its text, if there is one."""
        ...

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the data: ``{"digest": ..., ...}``."""
        ...

    @abstractmethod
    def check_unchanged(self) -> None:
        """Check that the data have not changed.

        :raises SourceChangedError: naming what has changed.
        """
        ...


class StreamOrder:
    """D over a stream, for one seed: the order of files, and of the rows in a window.

    A window has the next rows of the stream: up to ``window_bytes``, where each row counts one byte more than its
    length, and up to :data:`MAX_WINDOW_ROWS` rows; a longer row has its own window. The number of windows is not known
    in advance. A window mixes as well as a shuffle buffer of the same size that is emptied before it is filled again.
    """

    def __init__(self, shuffle: Shuffle, seed: int, num_files: int) -> None:
        self.shuffle = shuffle
        self.seed = seed
        self.num_files = num_files
        self.window_bytes = shuffle.block_bytes * shuffle.window_blocks

    def files(self, epoch: int) -> list[int]:
        """The files in their order."""
        ids = np.arange(self.num_files, dtype=np.int64)
        if self.shuffle.enabled:
            ids = feistel_permutation(ids, self.num_files, order_keys(self.seed, epoch, "files"))
        return [int(number) for number in ids]

    def rows(self, epoch: int, window: int, num_rows: int) -> Int64:
        """The window's rows, numbered as they are read, in the order of delivery: int64 of shape (num_rows,)."""
        if not self.shuffle.enabled:
            return np.arange(num_rows, dtype=np.int64)

        return shuffled_rows(num_rows, order_keys(self.seed, epoch, f"rows {window}")[0])

    def key(self, epoch: int) -> int:
        """A key from 1 to 2**31 with which a source may shuffle its own parts; 0 for the order of the source."""
        if not self.shuffle.enabled:
            return 0

        return 1 + order_keys(self.seed, epoch, "parts")[0] % (1 << 31)

    def description(self) -> dict[str, Any]:
        """The settings that a snapshot must match, as builtins."""
        return {"seed": self.seed, **msgspec.to_builtins(self.shuffle), "num_files": self.num_files}
