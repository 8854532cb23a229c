"""What all packings have in common, and the counters of samples that cannot be packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError, SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Self

__all__ = (
    "Count",
    "Counts",
    "Overlong",
    "Pack",
    "Number",
    "PackState",
    "Packer",
    "Packing",
    "Piece",
    "Place",
    "PlacedPiece",
    "Positive",
    "arrivals_of",
    "refuse_wrong_pieces",
    "restored",
    "wrong_state",
)

Piece = tuple[Any, int, int]
"""``(reference, start, stop)``: tokens ``[start, stop)`` of the sample with this reference."""

Pack = list[Piece]
"""The pieces of one sequence, in their order."""

Overlong = Literal["error", "drop", "truncate"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]
"""The number of an epoch, a window or a row. The limit keeps what is computed from it within 64 bits."""

StateT = TypeVar("StateT")


class Packer(Protocol):
    """Makes packs of the samples that it is given. The packs depend only on the samples and their order.

    It makes the same packs, however many samples it is given at once. A reference is any value by which the caller
    identifies a sample, such as its number; packs have it unchanged.

    :ivar counts: what was not packed.
    """

    counts: Counts

    def extend(self, lengths: Sequence[int], references: Iterable[Any]) -> list[Pack]:
        """Take in samples of these lengths, and return the packs that are closed now. On an error none is taken in."""
        ...

    def flush(self) -> list[Pack]:
        """The packs of all waiting samples: there are no more samples."""
        ...

    def waiting(self) -> Iterable[Piece]:
        """The parts of samples that are in no pack yet."""
        ...

    def copy(self) -> Self:
        """An independent copy."""
        ...

    def state(self) -> dict[str, Any]:
        """All that the next packs depend on, as builtins if the references are."""
        ...


class Packing(Protocol):
    """The settings of a packing, which opens a :class:`Packer`.

    :cvar cuts: whether a sample may be cut. Its pieces are then in consecutive packs, in their order.
    """

    cuts: ClassVar[bool]

    @property
    def max_length(self) -> int:
        """Tokens of a full pack."""
        ...

    @property
    def across_epochs(self) -> bool:
        """Whether samples that wait at an epoch's end are packed with those of the next epoch."""
        ...

    def keeps(self, length: int) -> bool:
        """Whether a sample of ``length`` tokens is packed. Others are only counted."""
        ...

    def open(self, state: Mapping[str, Any] | None = None) -> Packer:
        """A new packer, or one that continues from ``state``.

        :raises SnapshotError: for a state of another packing.
        """
        ...


class Counts(msgspec.Struct, forbid_unknown_fields=True):
    """What was taken in and not packed, by reason.

    :ivar samples: ``empty`` samples have no token; ``overlong`` ones were dropped whole.
    :ivar tokens: of ``overlong`` samples; the ends of ``truncated`` ones; the ``tail`` that filled no hard pack.
    """

    samples: dict[str, Count] = {}
    tokens: dict[str, Count] = {}

    def add(self, reason: str, *, samples: int = 0, tokens: int = 0) -> None:
        """Count samples and tokens under ``reason``."""
        for counter, number in ((self.samples, samples), (self.tokens, tokens)):
            if number:
                counter[reason] = counter.get(reason, 0) + number

    def copy(self) -> Counts:
        """An independent copy."""
        return Counts(dict(self.samples), dict(self.tokens))


_Ranks = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]

Place = tuple[Number, Number, Number]
PlacedPiece = tuple[Place, Count, Count]
"""A :data:`Piece` whose reference is the sample's position in D."""


class PackState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a snapshot keeps of packing. It has no tokens, only the positions from which they are read again.

    D is read again from the snapshot's position. Samples up to ``last`` are skipped, except those that waited.

    :ivar epoch: the epoch that is being delivered.
    :ivar last: the last sample of D that was taken in before the window; None: none was.
    :ivar packer: the packer's state at the start of the window; its references are positions.
    :ivar packs: packs that were closed before the start of the window, and belong to it.
    :ivar num_gone: packs of this window, and of later ones, that are delivered.
    :ivar window: the window's number.
    :ivar world_size: the ranks that the window is grouped for.
    :ivar accumulation: packs of each rank in an optimizer step.
    :ivar num_packs: packs delivered, in this run and in those that it resumed.
    :ivar epoch_packs: packs delivered of the epoch.
    :ivar num_tokens: tokens of the delivered packs.
    :ivar is_alone: what waited at the epoch's end was packed by itself, and is being delivered.
    """

    epoch: Number
    last: Place | None
    packer: dict[str, Any]
    packs: list[Annotated[list[PlacedPiece], msgspec.Meta(min_length=1)]]
    num_gone: Count
    window: Number
    world_size: _Ranks
    accumulation: _Ranks
    num_packs: Count
    epoch_packs: Count
    num_tokens: Count
    is_alone: bool = False


def arrivals_of(lengths: Sequence[int], references: Iterable[Any]) -> tuple[list[int], list[Any]]:
    """Both as lists, with the lengths as Python integers.

    :raises ConfigError: if a length is negative or not an integer, or if the numbers of both differ.
    """
    array = np.asarray(lengths)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0):
        raise ConfigError(f"lengths are whole numbers of tokens, from 0 on; got {str(lengths)[:80]}")

    whole, given = array.tolist(), list(references)
    if len(whole) != len(given):
        raise ConfigError(f"{len(whole)} lengths and {len(given)} references")

    return whole, given


def restored(state: Mapping[str, Any], kind: type[StateT]) -> StateT:
    """``state`` as the Struct that it was made from.

    :raises SnapshotError: if it has other fields or types.
    """
    try:
        return msgspec.convert(state, kind)
    except Exception as error:  # a crafted value may make the converter raise anything
        raise SnapshotError(f"AD602 the state of a packer cannot be read: {error}") from None


def refuse_wrong_pieces(pieces: Iterable[Piece], *, longest: int | None = None) -> None:
    """Check that each piece has at least one token, and at most ``longest``.

    :raises SnapshotError: if one does not.
    """
    for _, start, stop in pieces:
        if not 0 <= start < stop or (longest is not None and stop - start > longest):
            raise wrong_state()


def wrong_state() -> SnapshotError:
    """The error for a state that no packer of this kind has."""
    return SnapshotError("AD602 the state of a packer cannot be read: it is of another packing, or damaged")
