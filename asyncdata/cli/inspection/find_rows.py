"""Looks at rows, one by one: the first ones of D, or those at a place in a file; also of what is read as a stream."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.cli.inspection.window_view import OpenView, WindowView, Witness
from asyncdata.config import LoaderConfig
from asyncdata.errors import ConfigError
from asyncdata.executors.handler import Handler
from asyncdata.order import Order, Shuffle
from asyncdata.sources.described import described
from asyncdata.sources.stream import RowStream, StreamOrder
from asyncdata.stream_pass import StreamPass
from asyncdata.stream_windows import StreamWindow
from asyncdata.types import Position
from asyncdata.window import SLACK_BYTES
from asyncdata.wire import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.cli.inspection.window_view import Look
    from asyncdata.sources.base import Blocks, Source
    from asyncdata.tokenization.base import TokenizeFn

__all__ = ("RowLooks",)

_BOM_BYTES = 3
_PIECE_BYTES = 1 << 20


class RowLooks:
    """The rows of D, as a loader with these arguments has them, and what becomes of each.

    :param tokenize_fn: None for the rows alone.
    :raises SourceError: for files that cannot be read.
    :raises ConfigError: for a setting that cannot work.
    """

    def __init__(
        self,
        source: Source | str | list[str],
        tokenize_fn: TokenizeFn | Callable[..., Any] | None = None,
        *,
        seed: int = 42,
        shuffle: bool | Shuffle = True,
    ) -> None:
        config = LoaderConfig.of({"seed": seed, "shuffle": shuffle})
        blocks = config.shuffle if isinstance(config.shuffle, Shuffle) else Shuffle(enabled=config.shuffle)
        files = described(source).open(blocks.block_bytes)
        witness = Witness(tokenize_fn)
        self._views: _BlockViews | _StreamViews
        if isinstance(files, RowStream):
            self._views = _StreamViews(files, StreamOrder(blocks, config.seed, len(files.files)), witness)
        else:
            order = Order(blocks, config.seed, files.num_blocks, files.block_bytes)
            self._views = _BlockViews(files, order, witness)
        self._paths = [file.path for file in files.files]

    def first(self, num_rows: int, epoch: int = 0) -> Iterator[Look]:
        """The first rows of an epoch, in the order of delivery."""
        for view in self._views.each(epoch):
            with view:
                for row in range(min(num_rows, view.num_rows)):
                    yield view.look(row)
                num_rows -= view.num_rows
            if num_rows <= 0:
                return

    def at(self, position: Position) -> Look:
        """The row at a position.

        :raises ConfigError: if there is none.
        """
        with self._views.at(position.epoch, position.window) as view:
            return view.look(position.row)

    def in_file(self, place: str) -> Look:
        """The row at ``LINE``, or ``FILE:LINE``: in files of lines counted from 1, else the row's number from 0.

        :raises ConfigError: if there is none.
        """
        path, colon, number = place.rpartition(":")
        if not number.isdecimal():
            raise ConfigError(f"a row's place is written LINE or FILE:LINE, as in data.jsonl:12; got {place!r}")

        file_id = self._file_id(path) if colon else self._only_file(place)
        found = self._views.find(file_id, int(number))
        if found is None:
            raise ConfigError(f"there is no row at {self._paths[file_id]}:{number}: it is blank, or beyond the end")

        return found

    def at_byte(self, byte_offset: int) -> Look | None:
        """The row that begins at a byte of the only file; None if none does, or if rows have numbers there."""
        return self._views.find_byte(self._only_file(f"byte {byte_offset}"), byte_offset)

    def _file_id(self, path: str) -> int:
        wanted = os.path.abspath(path)
        named = [number for number, each in enumerate(self._paths) if os.path.abspath(each) == wanted]
        named = named or [number for number, each in enumerate(self._paths) if os.path.basename(each) == path]
        if len(named) != 1:
            why = "several files of the data have that name" if named else "it is no file of the data"
            raise ConfigError(f"{path}: {why}; give its path as the data has it, such as {self._paths[0]}")

        return named[0]

    def _only_file(self, place: str) -> int:
        if len(self._paths) > 1:
            raise ConfigError(f"the data has {len(self._paths)} files; say which: {self._paths[0]}:{place}")

        return 0


class _BlockViews:
    """Windows of blocks, opened."""

    def __init__(self, files: Blocks, order: Order, witness: Witness) -> None:
        self._files = files
        self._order = order
        self._witness = witness

    def each(self, epoch: int) -> Iterator[OpenView]:
        """The windows of an epoch, from its start."""
        for window in range(self._order.num_windows):
            yield self.at(epoch, window)

    def at(self, epoch: int, window: int) -> OpenView:
        """One window."""
        return WindowView(self._files, self._order, epoch, window, self._witness)

    def find(self, file_id: int, number: int) -> Look | None:
        """The row with this number or on this line, in epoch 0; None if there is none."""
        offsets = [number]
        if self._files.location(file_id, 0, 0).row_number is None:
            start = _line_start(self._files.files[file_id].path, number)
            offsets = [] if start is None else [start] if start else [0, _BOM_BYTES]
        return self._find_at(file_id, offsets)

    def find_byte(self, file_id: int, offset: int) -> Look | None:
        """The row that begins at this byte; None if there is none, or rows have numbers."""
        if self._files.location(file_id, 0, 0).row_number is not None:
            return None

        return self._find_at(file_id, [offset])

    def _find_at(self, file_id: int, offsets: list[int]) -> Look | None:
        """The row at one of these places of a file."""
        block = self._block_of(file_id, offsets[0]) if offsets else None
        for window in range(self._order.num_windows if block is not None else 0):
            if block in self._order.blocks(0, window):
                with self.at(0, window) as view:
                    rows = view.window.find({(file_id, offset) for offset in offsets})
                    return view.look(rows[0]) if rows else None

        return None

    def _block_of(self, file_id: int, offset: int) -> int | None:
        """The number of the block that has the offset: blocks lie as files do."""
        low, high = 0, self._files.num_blocks
        while low < high:
            middle = (low + high) // 2
            (block,) = self._files.blocks([middle])
            if (block.file_id, block.stop) <= (file_id, offset):
                low = middle + 1
            else:
                high = middle
        return low if low < self._files.num_blocks else None


def _line_start(path: str, line: int) -> int | None:
    """Where a line begins, counted from 1; None beyond the end. Reads the file up to there."""
    left, offset = line - 1, 0
    if left < 0:
        return None

    with open(path, "rb", buffering=0) as file:
        while left and (piece := file.read(_PIECE_BYTES)):
            ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n"))
            if len(ends) >= left:
                return offset + int(ends[left - 1]) + 1

            left -= len(ends)
            offset += len(piece)
    return None if left else offset


class _StreamViews:
    """Windows of a stream, read one after the other."""

    def __init__(self, stream: RowStream, order: StreamOrder, witness: Witness) -> None:
        self._stream = stream
        self._order = order
        self._witness = witness
        self._job = Job(
            files=stream.files,
            tokenize=None,
            max_row_bytes=stream.max_row_bytes,
            block_bytes=order.shuffle.block_bytes,
            slack_bytes=SLACK_BYTES,
            reader=stream.reader,
        )

    def each(self, epoch: int, first: int = 0) -> Iterator[OpenView]:
        """The windows of an epoch, from window ``first`` on."""
        memory = memoryview(bytearray(max(self._order.window_bytes, self._stream.max_row_bytes) + 1))
        reading = StreamPass(self._stream, self._order, epoch, None, bool)
        try:
            is_last = False
            while not is_last:
                rows = reading.read_window(memory)
                is_last = rows.is_last
                if reading.number > first:
                    window = StreamWindow(self._stream, 0)
                    window.fill(rows, self._order.rows(epoch, reading.number - 1, len(rows.lengths)))
                    handler = Handler(self._job, [memory], self._witness)
                    yield OpenView(window, handler, self._witness, Position(epoch, reading.number - 1, 0))
        finally:
            reading.close()

    def at(self, epoch: int, window: int) -> OpenView:
        """One window; reads all that comes before it."""
        for view in self.each(epoch, window):
            return view

        raise ConfigError(f"there is no window {window} in epoch {epoch}")

    def find(self, file_id: int, number: int) -> Look | None:
        """The row with this number, in epoch 0; None if there is none."""
        for view in self.each(0):
            with view:
                rows = view.window.find({(file_id, number)})
                if rows:
                    return view.look(rows[0])

        return None

    def find_byte(self, file_id: int, offset: int) -> Look | None:
        """None: rows of a stream have numbers."""
