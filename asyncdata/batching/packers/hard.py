"""Samples laid end to end and cut into packs of exactly the same length, as pretraining does."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from asyncdata.batching.packers.base import (
    Counts,
    Pack,
    Piece,
    Positive,
    arrivals_of,
    refuse_wrong_pieces,
    restored,
    wrong_state,
)
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ("HardPacker", "HardPacking")


class HardPacking(Description, frozen=True, kw_only=True):
    """Samples end to end, cut wherever ``max_length`` tokens are full: every pack is full, and samples are cut.

    With samples of m tokens on average, about m in ``max_length`` of them are cut. The order is that of arrival.

    :ivar max_length: tokens of every pack.
    :ivar keep_tail: True: what fills no pack at the end becomes a short pack. False: it is dropped, and counted.
    :ivar across_epochs: False: each epoch is packed on its own, so a loop is an epoch. True: the pack that is open at
        an epoch's end is filled from the next epoch; only the end of the data is an end.
    :raises ConfigError: for a setting that cannot work.
    """

    cuts: ClassVar[bool] = True

    max_length: Positive
    keep_tail: bool = False
    across_epochs: bool = False

    def keeps(self, length: int) -> bool:
        """Whether a sample of ``length`` tokens is packed, except for a tail that is dropped."""
        return length > 0

    def open(self, state: Mapping[str, Any] | None = None) -> HardPacker:
        """A new packer, or one that continues from ``state``.

        :raises SnapshotError: for a state of another packing.
        """
        return HardPacker(self, _State() if state is None else restored(state, _State))


class _State(msgspec.Struct, forbid_unknown_fields=True):
    open_pack: list[Piece] = []
    counts: Counts = msgspec.field(default_factory=Counts)


class HardPacker:
    """Makes the packs of a :class:`HardPacking`. Only the open pack waits."""

    def __init__(self, packing: HardPacking, state: _State) -> None:
        self._packing = packing
        self._pack: Pack = list(state.open_pack)
        self._room = packing.max_length - sum(stop - start for _, start, stop in self._pack)
        self.counts = state.counts
        refuse_wrong_pieces(state.open_pack)
        if self._room <= 0:
            raise wrong_state()

    def extend(self, lengths: Sequence[int], references: Iterable[Any]) -> list[Pack]:
        """As the protocol says."""
        packs: list[Pack] = []
        for length, reference in zip(*arrivals_of(lengths, references), strict=True):
            start = 0
            while start < length:
                stop = min(length, start + self._room)
                self._pack.append((reference, start, stop))
                self._room -= stop - start
                start = stop
                if not self._room:
                    packs.append(self._close())
            if not length:
                self.counts.add("empty", samples=1)
        return packs

    def flush(self) -> list[Pack]:
        """There are no more samples: return the short last pack, if there is one."""
        num_tokens = self._packing.max_length - self._room
        pack = self._close()
        if pack and self._packing.keep_tail:
            return [pack]

        self.counts.add("tail", tokens=num_tokens)
        return []

    def waiting(self) -> Iterator[Piece]:
        """What is in no pack yet."""
        return iter(self._pack)

    def copy(self) -> HardPacker:
        """An independent copy."""
        other = copy.copy(self)
        other._pack, other.counts = self._pack.copy(), self.counts.copy()  # noqa: SLF001 - of its own kind
        return other

    def state(self) -> dict[str, Any]:
        """All that the next packs depend on, as builtins if the references are."""
        return {"open_pack": [list(piece) for piece in self._pack], "counts": msgspec.to_builtins(self.counts)}

    def _close(self) -> Pack:
        pack, self._pack, self._room = self._pack, [], self._packing.max_length
        return pack
