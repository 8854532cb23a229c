"""A part of a sample, in a pack."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from asyncdata.core.types import Sample

__all__ = ("PackedSample",)


class PackedSample(NamedTuple):
    """Tokens ``[start, stop)`` of a sample, in a pack."""

    sample: Sample
    start: int
    stop: int
