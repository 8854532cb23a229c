"""JSON arrays split into byte blocks like lines, for orders of single rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.specs import ReaderSpec
from asyncdata.sources.base import FileBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.sources.fingerprint import FileStamp
    from asyncdata.sources.remote.store import ObjectStamp

__all__ = ("ArrayBlocks",)


class ArrayBlocks(FileBlocks):
    """Files of which some are JSON arrays; the rows of the others are lines."""

    def __init__(
        self,
        stamps: Sequence[FileStamp | ObjectStamp],
        block_bytes: int,
        max_row_bytes: int,
        are_arrays: Sequence[bool],
    ) -> None:
        super().__init__(stamps, block_bytes, max_row_bytes)
        self.are_arrays = list(are_arrays)
        self.reader = ReaderSpec(
            "asyncdata.sources.text.json_array_reader:ArrayReader", {"are_arrays": self.are_arrays}, "json-array"
        )
