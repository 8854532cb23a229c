"""Finds rows of D by their location in the data: by line, by row number, or by byte."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from asyncdata.core.errors import ConfigError, SourceChangedError
from asyncdata.order.order import Order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.cli.inspection.window_view import InspectedRow, OpenedOrder, WindowView
    from asyncdata.core.types import SourceLocation

__all__ = ("has_file", "line_numbers", "row_at", "row_at_byte", "row_in_file")

_BOM_BYTES = 3
_PIECE_BYTES = 1 << 20


def row_in_file(opened: OpenedOrder, place: str) -> InspectedRow:
    """The row at ``LINE``, or ``FILE:LINE``: in files of lines counted from 1, else the row's number from 0.

    :raises ConfigError: if there is none.
    """
    path, colon, number = place.rpartition(":")
    if not number.isdecimal():
        raise ConfigError(f"a row's location is written LINE or FILE:LINE, as in data.jsonl:12; got {place!r}")

    paths = [file.path for file in opened.files.files]
    file_id = _file_id(paths, path) if colon else _only_file(paths, place)
    if _has_numbers(opened, file_id):
        offsets = [int(number)]
    else:
        start = _line_start(paths[file_id], int(number))
        offsets = [] if start is None else [start] if start else [0, _BOM_BYTES]
    found = _find(opened, file_id, offsets)
    if found is None:
        raise ConfigError(f"there is no row at {paths[file_id]}:{number}: it is blank, beyond the end, or left out")

    return found


def row_at_byte(opened: OpenedOrder, byte_offset: int) -> InspectedRow | None:
    """The row that starts at this byte of the only file; None if there is none, or if the file's rows have numbers."""
    file_id = _only_file([file.path for file in opened.files.files], f"byte {byte_offset}")
    return None if _has_numbers(opened, file_id) else _find(opened, file_id, [byte_offset])


def row_at(opened: OpenedOrder, location: SourceLocation) -> InspectedRow:
    """The row of a delivered sample.

    :raises SourceChangedError: if it is not there any more.
    """
    file_id = _file_id([file.path for file in opened.files.files], location.path)
    offset = location.byte_offset if location.row_number is None else location.row_number
    found = _find(opened, file_id, [offset])
    if found is None:
        raise SourceChangedError(f"AD303 {location.path} changed while it was read: its row at {offset} is gone")

    return found


def has_file(opened: OpenedOrder, place: str) -> bool:
    """Whether the file of ``FILE:LINE`` is one of the data."""
    path, colon, _ = place.rpartition(":")
    return bool(colon) and bool(_named([file.path for file in opened.files.files], path))


def _has_numbers(opened: OpenedOrder, file_id: int) -> bool:
    """Whether a file's rows are identified by their numbers, as in Parquet, arrays and streams, and not by lines."""
    files = opened.files
    return files.num_blocks == 0 or _is_array(opened, file_id) or files.location(file_id, 0, 0).row_number is not None


def _is_array(opened: OpenedOrder, file_id: int) -> bool:
    """Whether a file is a JSON array whose elements are read by their bytes, but have numbers too."""
    return opened.files.num_blocks > 0 and bool(opened.files.are_arrays) and opened.files.are_arrays[file_id]


def _file_id(paths: list[str], path: str) -> int:
    named = _named(paths, path)
    if len(named) != 1:
        why = "several files of the data have that name" if named else "it is not a file of the data"
        raise ConfigError(f"{path}: {why}; give its path as the data has it, such as {paths[0]}")

    return named[0]


def _named(paths: list[str], path: str) -> list[int]:
    """The files of this path, or else of this name."""
    wanted = os.path.abspath(path)
    named = [number for number, each in enumerate(paths) if os.path.abspath(each) == wanted]
    return named or [number for number, each in enumerate(paths) if os.path.basename(each) == path]


def _only_file(paths: list[str], place: str) -> int:
    if len(paths) > 1:
        raise ConfigError(f"the data has {len(paths)} files; say which: {paths[0]}:{place}")

    return 0


def _find(opened: OpenedOrder, file_id: int, offsets: list[int]) -> InspectedRow | None:
    """The row at one of these offsets of a file, in epoch 0."""
    for view in _windows_with(opened, file_id, offsets[0]) if offsets else ():
        if _is_array(opened, file_id):
            path = opened.files.files[file_id].path
            named = [(location.path, location.row_number) for location in view.locations()]
            rows = [named.index((path, offsets[0]))] if (path, offsets[0]) in named else []
        else:
            rows = view.find({(file_id, offset) for offset in offsets})
        if rows:
            return view.inspect(rows[0])

    return None


def _windows_with(opened: OpenedOrder, file_id: int, offset: int) -> Iterator[WindowView]:
    """The windows that may contain a row: that of its block, or all windows if rows are not ordered by blocks."""
    order = opened.order
    if not isinstance(order, Order):
        yield from opened.windows(0)
        return

    block = _block_of(opened, file_id, offset)
    for number in range(order.num_windows):
        if block in order.blocks(0, number):
            with opened.window(0, number) as view:
                yield view


def _block_of(opened: OpenedOrder, file_id: int, offset: int) -> int:
    """The number of the block with this offset; the number of blocks if there is none. Blocks are in file order."""
    low, high = 0, opened.files.num_blocks
    while low < high:
        middle = (low + high) // 2
        (block,) = opened.files.blocks([middle])
        if (block.file_id, block.stop) <= (file_id, offset):
            low = middle + 1
        else:
            high = middle
    return low


def _line_start(path: str, line: int) -> int | None:
    """The offset of a line, counted from 1; None beyond the end. Reads the file up to there."""
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


def line_numbers(locations: Sequence[SourceLocation]) -> list[int]:
    """The line of each location, counted from 1. Reads each file once, up to the last of its locations."""
    found: dict[tuple[str, int], int] = {}
    for path in {location.path for location in locations}:
        place, line = 0, 1
        with open(path, "rb", buffering=0) as file:
            for offset in sorted({location.byte_offset for location in locations if location.path == path}):
                while place < offset and (piece := file.read(min(_PIECE_BYTES, offset - place))):
                    place += len(piece)
                    line += piece.count(b"\n")
                found[path, offset] = line
    return [found[location.path, location.byte_offset] for location in locations]
