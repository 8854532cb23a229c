"""From a bad row in a chunk to the error that a user reads: where it is, and what stands there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from asyncdata.errors import BadRowError
from asyncdata.tokenization.rows import excerpt

if TYPE_CHECKING:
    from asyncdata.channel import Bad
    from asyncdata.types import SourceLocation

__all__ = ("bad_row_error",)

_EXCERPT_BYTES = 400


def bad_row_error(bad: Bad) -> BadRowError:
    """The error for ``bad``. Reads the file up to the row, to count lines."""
    place, error = bad.chunk.row_location(bad.error.row), bad.error
    return BadRowError(
        error.code,
        error.reason,
        path=place.path,
        line=_line_number(place),
        byte_offset=place.byte_offset,
        row_number=place.row_number,
        excerpt=error.excerpt or _excerpt(place),
        traceback=error.traceback,
    )


def _line_number(place: SourceLocation) -> int | None:
    """The row's line; None where the file cannot be read any more, which must not hide what is wrong with the row."""
    with suppress(OSError):
        return place.line_number()
    return None


def _excerpt(place: SourceLocation) -> str:
    """The beginning of a row of which its worker could not tell any more."""
    if place.row_number is not None:
        return ""

    with suppress(OSError), open(place.path, "rb", buffering=0) as file:
        file.seek(place.byte_offset)
        length = _EXCERPT_BYTES if place.num_bytes < 0 else min(place.num_bytes, _EXCERPT_BYTES)
        return excerpt(file.read(length).partition(b"\n")[0])
    return ""
