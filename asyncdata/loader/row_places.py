"""Where a row is in its source: the numbers of its file, and its offset there. A state names rows by these."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.file_refs import FileRefs
    from asyncdata.sources.base import Blocks

_BOM = b"\xef\xbb\xbf"


class RowPlaces:
    """The places of a source's rows. A source may have a file several times, and one that grows gets new files."""

    def __init__(self, source: Blocks) -> None:
        self._source = source
        self._counts_rows = source.location(0, 5, 1).byte_offset != 5  # rows are located by their numbers
        self._refs: FileRefs | None = None
        self._numbers: dict[str, list[int]] = {}

    def files(self, path: Any) -> Sequence[int]:
        """The numbers of the file with this path, ascending; none, if the source has no such file."""
        refs = self._source.files
        if self._refs is not refs:
            numbers: dict[str, list[int]] = {}
            for number, file in enumerate(refs):
                numbers.setdefault(file.path, []).append(number)
            self._numbers, self._refs = numbers, refs  # in this order, as another thread may read them
        return self._numbers.get(path, ())

    def offset(self, byte_offset: Any, row_number: Any) -> Any:
        """The one by which the source locates its rows."""
        return row_number if self._counts_rows else byte_offset

    def has_row(self, file: int, place: int) -> bool:
        """Whether a row begins there; True where a store, or all of the file, would have to be read to know it."""
        source, ref = self._source, self._source.files[file]
        if self._counts_rows:
            numbers = range(getattr(source, "num_blocks", 0))
            last = bisect_right(numbers, file, key=lambda number: source.blocks([number])[0].file_id)
            return last == 0 or place < source.blocks([last - 1])[0].stop

        is_array = any(source.are_arrays[file : file + 1])
        if ref.pin is not None or is_array or source.reader.tag == "python-lines":  # these may follow white space
            return place < ref.num_bytes

        with suppress(OSError), open(ref.path, "rb") as opened:
            opened.seek(max(0, place - len(_BOM)))
            before, first = opened.read(min(place, len(_BOM))), opened.read(1)
            return first not in b"\n" and (before == _BOM or before[-1:] in b"\n")
        return True
