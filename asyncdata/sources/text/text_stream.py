"""Files that are read from front to back: compressed files, and files with one JSON array."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdata.core.types import SourceLocation
from asyncdata.sources.base import Files
from asyncdata.sources.remote.object_file import ObjectFile
from asyncdata.sources.remote.reads import Reads
from asyncdata.sources.remote.store import ObjectStamp, with_cache
from asyncdata.sources.stream import MAX_ROW_BYTES, Rows, RowStream
from asyncdata.sources.text.compression import CodedText
from asyncdata.sources.text.json_array_blocks import ArrayBlocks
from asyncdata.sources.text.json_array_stream import split_array
from asyncdata.sources.text.line_stream import split_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from asyncdata.core.file_refs import ObjectRefs
    from asyncdata.core.read_counts import ReadCounts
    from asyncdata.core.specs import BlockCacheSpec, StoreSpec
    from asyncdata.sources.fingerprint import FileStamp
    from asyncdata.sources.stream import StreamOrder
    from asyncdata.sources.text.line_stream import TextRows

__all__ = ("TextStream",)

_OBJECTS_AHEAD = 8
_START = {"entry": [0, 0], "offset": 0, "row": 0}


class TextStream(Files, RowStream):
    """Texts whose rows are numbered from 0: lines, blank ones counted, or the elements of an array.

    A state is ``{"file": number, "entry": [offset in the file, offset in its text], "offset": of the row in the text,
    "row": its number}``: decoding begins at the entry, the last place before the row where it can.

    :ivar are_arrays: of each file: whether it is a JSON array; else its rows are lines.
    :ivar codings: of each file: ``plain``, ``gzip`` or ``zstd``.
    """

    def __init__(
        self,
        stamps: Sequence[FileStamp | ObjectStamp] | ObjectRefs,
        max_row_bytes: int,
        codings: Sequence[str],
        are_arrays: Sequence[bool],
        stores: Sequence[StoreSpec] = (),
    ) -> None:
        super().__init__(stamps, min(max_row_bytes, MAX_ROW_BYTES), stores)
        self.stores = []  # workers read nothing
        self._object_stores = list(stores)
        self._reads = Reads(stores) if stores else None
        self.codings = list(codings)
        self.are_arrays: Sequence[bool] = list(are_arrays)

    def as_blocks(self, block_bytes: int) -> ArrayBlocks | None:
        """As the base class says: of files that are not compressed, and no objects."""
        if any(coding != "plain" for coding in self.codings) or self._reads is not None:
            return None

        return ArrayBlocks(self._stamps, block_bytes, self.max_row_bytes, self.are_arrays)

    def keep_blocks(self, kept: BlockCacheSpec) -> None:
        """As the base class says."""
        if self._reads is not None:
            self._reads = Reads(with_cache(self._object_stores, kept))

    def close(self) -> None:
        """As the protocol says."""
        if self._reads is not None:
            self._reads.close()

    @property
    def read_counts(self) -> ReadCounts | None:
        """Counts of requests to the stores."""
        return None if self._reads is None else self._reads.counts

    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        """As the base class says."""
        ids = order.files(epoch)
        first = 0 if state is None else ids.index(state["file"])
        begun: dict[int, ObjectFile] = {}
        try:
            for place in range(first, len(ids)):
                self._begin(ids[place : place + _OBJECTS_AHEAD], begun)
                stored = begun.pop(ids[place], None)
                yield from self._read_file(ids[place], _START if state is None else state, check, stored)
                state = None
        finally:
            for stored in begun.values():
                stored.close()

    def _begin(self, file_ids: Sequence[int], begun: dict[int, ObjectFile]) -> None:
        """Begin to read these objects, so that the next one is there when one ends."""
        for file_id in file_ids if self._reads is not None else ():
            if file_id not in begun and self._reads is not None:
                begun[file_id] = ObjectFile(self._reads, ObjectStamp.of(self.files[file_id]))
                begun[file_id].begin()

    def _read_file(
        self, file_id: int, start: dict[str, Any], check: Callable[[], object], stored: ObjectFile | None
    ) -> Generator[Rows]:
        file = self.files[file_id]
        if file.num_bytes == 0:
            return

        self.check_file(file_id)  # the files before it took their time
        text = CodedText(file, self.codings[file_id], check, stored)
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
