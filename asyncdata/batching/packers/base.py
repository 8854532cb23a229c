"""Base classes of all packings, and the counters of samples that cannot be packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

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
"""``(reference, start, stop)``: tokens ``start`` to ``stop`` of the sample that ``reference`` stands for."""

Pack = list[Piece]
"""The pieces of one sequence, in their order."""

Overlong = Literal["error", "drop", "truncate"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]
"""Of an epoch, a window or a row. None is greater, and what is worked out from it has 64 bits."""

StateT = TypeVar("StateT")


class Packer(Protocol):
    """A packing at work. What it gives depends on the samples and their order alone.

    Many samples at once give what they give one by one. A reference is whatever the caller knows a sample by, such as
    its number; it is handed through untouched.

    :ivar counts: what was not packed.
    """

    counts: Counts

    def push(self, length: int, reference: Any) -> list[Pack]:
        """Take in a sample of ``length`` tokens; the packs that are ready now."""
        ...

    def extend(self, lengths: Sequence[int], references: Iterable[Any]) -> list[Pack]:
        """Take in several, or, if one of them is an error, none."""
        ...

    def flush(self) -> list[Pack]:
        """The packs of all waiting samples: there are no more samples."""
        ...

    def waiting(self) -> Iterable[Piece]:
        """The parts of samples that are in no pack yet."""
        ...

    def copy(self) -> Self:
        """Another one in the same state."""
        ...

    def state(self) -> dict[str, Any]:
        """All that the next packs depend on, as builtins if the references are."""
        ...


class Packing(Protocol):
    """A description that opens to a :class:`Packer`."""

    @property
    def max_length(self) -> int:
        """Tokens of a full pack."""
        ...

    @property
    def cuts(self) -> bool:
        """Whether a sample may be in several packs; all its pieces are in order then."""
        ...

    @property
    def across_epochs(self) -> bool:
        """Whether what waits at an epoch's end is packed with the next one."""
        ...

    def keeps(self, length: int) -> bool:
        """Whether a sample of so many tokens is packed, or else counted."""
        ...

    def open(self, state: Mapping[str, Any] | None = None) -> Packer:
        """A new packer, or the one that gave ``state``.

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
        """Count them."""
        for counter, number in ((self.samples, samples), (self.tokens, tokens)):
            if number:
                counter[reason] = counter.get(reason, 0) + number

    def copy(self) -> Counts:
        """The same, counted on separately."""
        return Counts(dict(self.samples), dict(self.tokens))


_Ranks = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]

Place = tuple[Number, Number, Number]
PlacedPiece = tuple[Place, Count, Count]
"""A :data:`Piece` of the sample at a place of D."""


class PackState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a snapshot keeps of packing: no tokens, only where they can be read again.

    D is read again from the snapshot's position on. Samples up to ``last`` are passed over, but for those that wait.

    :ivar epoch: the epoch that is being delivered.
    :ivar last: the last sample of D that was taken in before the window; None: none was.
    :ivar packer: the packer's state where the window began; its references are positions.
    :ivar packs: packs that were closed by then and belong to the window.
    :ivar num_gone: packs of the window, and of what follows it, that are delivered.
    :ivar window: the window's number.
    :ivar world_size: the ranks that the window is grouped for.
    :ivar accumulation: packs of each rank in an optimizer step.
    :ivar num_packs: packs delivered, in this run and those it resumed.
    :ivar epoch_packs: packs delivered of the epoch.
    :ivar num_tokens: tokens of the packs delivered.
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
    """Both as lists, the lengths as Python's own integers.

    :raises ConfigError: if a length is negative or no integer, or if there are not as many references.
    """
    array = np.asarray(lengths)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0):
        raise ConfigError(f"lengths are whole numbers of tokens, from 0 on; got {str(lengths)[:80]}")

    whole, given = array.tolist(), list(references)
    if len(whole) != len(given):
        raise ConfigError(f"{len(whole)} lengths and {len(given)} references")

    return whole, given


def restored(state: Mapping[str, Any], kind: type[StateT]) -> StateT:
    """``state`` as the record that it was made from.

    :raises SnapshotError: if it is none.
    """
    try:
        return msgspec.convert(state, kind)
    except Exception as error:  # a crafted value may make the converter raise anything
        raise SnapshotError(f"AD602 the state of a packer cannot be read: {error}") from None


def refuse_wrong_pieces(pieces: Iterable[Piece], *, longest: int | None = None) -> None:
    """Look whether each piece has a token, and none has more than ``longest``.

    :raises SnapshotError: if one has not.
    """
    for _, start, stop in pieces:
        if not 0 <= start < stop or (longest is not None and stop - start > longest):
            raise wrong_state()


def wrong_state() -> SnapshotError:
    """The error for a state that no packer of this kind gives."""
    return SnapshotError("AD602 the state of a packer cannot be read: it is of another packing, or damaged")
