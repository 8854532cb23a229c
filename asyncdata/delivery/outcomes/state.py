"""What a snapshot keeps of the outcome memory."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ("OutcomeState",)

Count = Annotated[int, msgspec.Meta(ge=0)]


class OutcomeState(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a moment: itself, or where it is in its file.

    :ivar memory: the memory as base64 text; None: it is in the file, unless that is not needed.
    :ivar num_bytes: bytes of the file.
    :ivar digest: of these bytes, BLAKE2b of 16 bytes in hex digits.
    :ivar decided: epochs whose exclusions the memory has and a restart needs.
    :ivar num_rows: rows in the memory.
    :ivar num_scores: scores that were counted.
    :ivar num_repeated: scores that had been reported before.
    :ivar num_late: scores of an earlier epoch than the last one of their row.
    :ivar passes: of each replay of the rows, by its name, the passes that a restart needs.
    """

    memory: str | None = None
    num_bytes: Count = 0
    digest: str = ""
    decided: list[Count] = []
    num_rows: Count = 0
    num_scores: Count = 0
    num_repeated: Count = 0
    num_late: Count = 0
    passes: dict[str, list[Count]] = {}
