"""Where a row is in its source: the numbers of its file, and its offset there. A state names rows by these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.file_refs import FileRefs
    from asyncdata.sources.base import Blocks

__all__ = ("RowPlaces",)


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
