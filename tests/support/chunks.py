"""Chunks made by hand."""

import json
from typing import Any

from asyncdata import Position, SourceLocation
from asyncdata.delivery.chunk import Chunk
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.rows import RowFault

__all__ = ("BadRow", "Lines", "chunk_of")

START = Position()


class Lines:
    """Rows of ten bytes each."""

    def __init__(self, path: str = "rows.jsonl") -> None:
        self._path = path

    def location(self, row: int) -> SourceLocation:
        return SourceLocation(self._path, 10 * row, 9)

    def key(self, row: int) -> tuple[int, int]:
        return 0, 10 * row

    def keys(self, first: int, stop: int) -> Any:
        return [0] * (stop - first), [10 * row for row in range(first, stop)]


class BadRow(str):
    """A row that is bad with this code."""

    __slots__ = ()


def chunk_of(
    *rows: int | list[int] | str | BadRow,
    first: Position = START,
    ends_epoch: bool = False,
    path: str = "rows.jsonl",
    columns: dict[str, Any] | None = None,
) -> Chunk:
    """A chunk of these rows: tokens are kept, a word is why one is dropped, a BadRow is bad.

    :param columns: the same for every row that is kept.
    """
    out = ColumnWriter()
    encoded = {name: json.dumps(value).encode() for name, value in (columns or {}).items()}
    for number, row in enumerate(rows):
        if isinstance(row, BadRow):
            out.fail(number, RowFault(row, "as it was told to", b"{}"))
        elif isinstance(row, str):
            out.drop(number, row)
        else:
            out.keep(number, row if isinstance(row, list) else [row], **encoded)
    return Chunk(out.finish(len(rows), 0.0), first, len(rows), Lines(path), ends_epoch=ends_epoch)
