"""Files that are read from front to back: compressed files, and files with one JSON array."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdata.core.types import SourceLocation
from asyncdata.sources.base import Files
from asyncdata.sources.stream import MAX_ROW_BYTES, Rows, RowStream
from asyncdata.sources.text.compression import CodedText
from asyncdata.sources.text.json_array_blocks import ArrayBlocks
from asyncdata.sources.text.json_array_stream import split_array
from asyncdata.sources.text.line_stream import split_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from asyncdata.sources.fingerprint import FileStamp
    from asyncdata.sources.stream import StreamOrder
    from asyncdata.sources.text.line_stream import TextRows

__all__ = ("TextStream",)

_START = {"entry": [0, 0], "offset": 0, "row": 0}


class TextStream(Files, RowStream):
    """Texts whose rows are numbered from 0: lines, blank ones counted, or the elements of an array.

    A state is ``{"file": number, "entry": [offset in the file, offset in its text], "offset": of the row in the text,
    "row": its number}``: decoding begins at the entry, the last place before the row where it can.

    :ivar are_arrays: of each file: whether it is a JSON array; else its rows are lines.
    :ivar codings: of each file: ``plain``, ``gzip`` or ``zstd``.
    """

    def __init__(
        self, stamps: Sequence[FileStamp], max_row_bytes: int, codings: Sequence[str], are_arrays: Sequence[bool]
    ) -> None:
        super().__init__(stamps, min(max_row_bytes, MAX_ROW_BYTES))
        self.codings = list(codings)
        self.are_arrays = list(are_arrays)

    def as_blocks(self, block_bytes: int) -> ArrayBlocks | None:
        """As the base class says: of files that are not compressed."""
        if any(coding != "plain" for coding in self.codings):
            return None

        return ArrayBlocks(self._stamps, block_bytes, self.max_row_bytes, self.are_arrays)

    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        """As the base class says."""
        ids = order.files(epoch)
        first = 0 if state is None else ids.index(state["file"])
        for file_id in ids[first:]:
            yield from self._read_file(file_id, _START if state is None else state, check)
            state = None

    def _read_file(self, file_id: int, start: dict[str, Any], check: Callable[[], object]) -> Generator[Rows]:
        file = self.files[file_id]
        if file.num_bytes == 0:
            return

        self.check_file(file_id)  # the files before it took their time
        text = CodedText(file, self.codings[file_id], check)
        split = partial(split_array, path=file.path) if self.are_arrays[file_id] else split_lines
        offset, number = start["offset"], start["row"]
        found: TextRows
        for found in split(text.pieces(tuple(start["entry"]), offset), offset, number, self.max_row_bytes):
            entry = list(text.entry(found.offset))
            state = {"file": file_id, "entry": entry, "offset": found.offset, "row": found.number}
            yield Rows(file_id, found.numbers, found.lengths, found.data, found.num_blank, state, found.offsets)

    def location(self, file_id: int, offset: int, num_bytes: int, byte_offset: int = -1) -> SourceLocation:
        """The row's number, with its file's path; its line, and its place in the text."""
        line = None if self.are_arrays[file_id] else offset + 1
        return SourceLocation(self.files[file_id].path, byte_offset, num_bytes, row_number=offset, line=line)
