"""No packing: each sample is a pack of its own, for batches that are padded and grouped by length."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from asyncdata.batching.packers.base import Counts, Pack, Piece, arrivals_of, restored
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ("SinglePacker", "SinglePacking")


class SinglePacking(Description, frozen=True, kw_only=True):
    """Each sample is a pack, in the order of arrival."""

    cuts: ClassVar[bool] = False
    across_epochs: ClassVar[bool] = False
    max_length: ClassVar[int] = sys.maxsize

    def keeps(self, length: int) -> bool:
        """Whether a sample of ``length`` tokens is packed. Others are only counted."""
        return length > 0

    def open(self, state: Mapping[str, Any] | None = None) -> SinglePacker:
        """A new packer, or one that continues from ``state``.

        :raises SnapshotError: for a state of another packing.
        """
        return SinglePacker(_State() if state is None else restored(state, _State))


class _State(msgspec.Struct, forbid_unknown_fields=True):
    counts: Counts = msgspec.field(default_factory=Counts)


class SinglePacker:
    """Makes the packs of a :class:`SinglePacking`. Nothing waits."""

    def __init__(self, state: _State) -> None:
        self.counts = state.counts

    def extend(self, lengths: Sequence[int], references: Iterable[Any]) -> list[Pack]:
        """As the protocol says: a pack for each sample that has tokens."""
        arrivals = list(zip(*arrivals_of(lengths, references), strict=True))
        packs: list[Pack] = [[(reference, 0, length)] for length, reference in arrivals if length]
        self.counts.add("empty", samples=len(arrivals) - len(packs))
        return packs

    def flush(self) -> list[Pack]:
        """As the protocol says: none, as nothing waits."""
        return []

    def waiting(self) -> Iterable[Piece]:
        """As the protocol says: none."""
        return ()

    def copy(self) -> SinglePacker:
        """An independent copy."""
        return SinglePacker(_State(self.counts.copy()))

    def state(self) -> dict[str, Any]:
        """As the protocol says: what was counted."""
        return {"counts": msgspec.to_builtins(self.counts)}
