"""Sources that can only be read from front to back: what they give, and the order over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.specs import LINES
from asyncdata.order.permutation import feistel_permutation, order_keys, shuffled_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from asyncdata.core.messages import Block, FileRef
    from asyncdata.core.types import SourceLocation
    from asyncdata.order.shuffle import Shuffle
    from asyncdata.sources.base import Blocks

__all__ = ("MAX_ROW_BYTES", "MAX_WINDOW_ROWS", "Int32", "Int64", "RowStream", "Rows", "StreamOrder")

Int32 = np.ndarray[Any, np.dtype[np.int32]]
Int64 = np.ndarray[Any, np.dtype[np.int64]]

MAX_ROW_BYTES = 1 << 30
"""No stream has a higher ``max_row_bytes``: places in a slot are int32."""

MAX_WINDOW_ROWS = 1 << 20
"""Rows of a window, however short they are. It is part of every position, so it never changes."""


class Rows(NamedTuple):
    """Consecutive rows of one file, as many as it is convenient to give at once. Nothing depends on how many.

    :ivar numbers: each row's number in its file, int64 of shape (num_rows,), rising.
    :ivar lengths: its bytes, int64 of shape (num_rows,).
    :ivar data: the rows end to end, each with one byte behind it; those longer than ``max_row_bytes`` are left out.
    :ivar num_blank: blank lines passed over between them.
    :ivar state: what :meth:`RowStream.read` takes to give these rows first, as builtins; None if there is no such
        thing.
    :ivar offsets: where each row begins in the text of its file, in bytes, int64 of shape (num_rows,); None where there
        is no text.
    """

    file_id: int
    numbers: Int64
    lengths: Int64
    data: bytes
    num_blank: int
    state: dict[str, Any] | None
    offsets: Int64 | None = None


class RowStream(ABC):
    """A source that is open, and has no pieces that a worker could read by itself: ``num_blocks`` is 0.

    One reader passes over it in each epoch, in the trainer's process.

    :ivar files: what the rows lie in, numbered.
    :ivar max_row_bytes: a longer row is a bad row; :data:`MAX_ROW_BYTES` at most.
    """

    reader = LINES
    reads_single_rows = False
    are_arrays: Sequence[bool] = ()
    num_blocks = extent = block_bytes = room_bytes = 0
    files: list[FileRef]
    max_row_bytes: int

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        """None, as there are none."""
        return []

    def close(self) -> None:  # noqa: B027 - there is nothing to do
        """As :class:`~asyncdata.sources.base.Blocks` says: nothing was written."""

    def as_blocks(self, block_bytes: int) -> Blocks | None:
        """The same rows in pieces that workers can read, for orders of single rows; None if there are no such."""
        return None

    @abstractmethod
    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        """The rows of ``epoch``, from its start or from ``state`` on. Closing the iterator closes the files.

        :param check: called now and then; it raises when nobody wants the rows any more.
        :raises SourceError: for what is wrong with the data, and will be so at every reading; after the rows before it.
        :raises SourceChangedError: if the data is not what it was.
        :raises OSError: if it cannot be read.
        """
        ...

    @abstractmethod
    def location(self, file_id: int, offset: int, num_bytes: int, byte_offset: int = -1) -> SourceLocation:
        """The place of the row numbered ``offset``, which begins at ``byte_offset`` of its text, if there is one."""
        ...

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What the data is: ``{"digest": ..., ...}``."""
        ...

    @abstractmethod
    def check_unchanged(self) -> None:
        """Look whether the data is still what it was.

        :raises SourceChangedError: naming what is not.
        """
        ...


class StreamOrder:
    """D over a stream, for one seed: the order of files, and of the rows in a window.

    A window is the next rows of the stream, as many as have ``window_bytes`` with one byte more for each, and no more
    than :data:`MAX_WINDOW_ROWS`; a row longer than that has a window to itself. How many windows there are is not
    known before they are read. For mixing, one window is as good as a shuffle buffer that holds as many rows, and is
    emptied before it is filled again.
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
        """From 1 to 2**31: what a source may shuffle its own parts by; 0 where the order is that of the source."""
        if not self.shuffle.enabled:
            return 0

        return 1 + order_keys(self.seed, epoch, "parts")[0] % (1 << 31)

    def description(self) -> dict[str, Any]:
        """What a snapshot must agree with, as builtins."""
        return {"seed": self.seed, **msgspec.to_builtins(self.shuffle), "num_files": self.num_files}
