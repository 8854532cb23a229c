"""Packs, and what is counted of them and kept of them in a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from asyncdata.core.errors import SnapshotError
from asyncdata.core.settings import Count, Description, Number, prepared

if TYPE_CHECKING:
    from asyncdata.batching.collators import Document

Int64 = np.ndarray[Any, np.dtype[np.int64]]
Int32 = np.ndarray[Any, np.dtype[np.int32]]
Float64 = np.ndarray[Any, np.dtype[np.float64]]

Piece = tuple[Any, int, int]
"""``(reference, start, stop)``: tokens ``[start, stop)`` of the sample with this reference."""

Pack = list[Piece]
"""The pieces of one sequence, in their order. The first one is of the oldest sample that waited."""

Positive = Annotated[int, msgspec.Meta(ge=1)]

StateT = TypeVar("StateT")


class OfPacks(Description, frozen=True):
    """A packing: a batch is a list of packs, each a list of documents. Type checkers have it from here."""

    if TYPE_CHECKING:

        @property
        def _item(self) -> list[Document]:
            raise NotImplementedError


class Counts(msgspec.Struct, forbid_unknown_fields=True):
    """What was taken in and not packed, by reason.

    :ivar samples: ``empty`` samples have no token; ``overlong`` ones were dropped whole; those that are ``not_named``
        are in no pack of a ``PresetPacking``.
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


class Delivered(NamedTuple):
    """Packs that were delivered to all ranks.

    :ivar num_packs: in this run and in those that it resumed.
    :ivar epoch_packs: of the epoch.
    :ivar num_tokens: of the packs of all these runs.
    :ivar bad_rows: samples in them whose media could not be loaded, by ``bad row <code>``.
    """

    num_packs: int = 0
    epoch_packs: int = 0
    num_tokens: int = 0
    bad_rows: Mapping[str, int] = {}

    def plus(self, num_packs: int, num_tokens: int, bad_rows: Mapping[str, int] = {}) -> Delivered:
        """These packs, and more of the same epoch."""
        bad = dict(Counter(self.bad_rows) + Counter(bad_rows)) if bad_rows else self.bad_rows
        return Delivered(self.num_packs + num_packs, self.epoch_packs + num_packs, self.num_tokens + num_tokens, bad)


class Packs(NamedTuple):
    """Many packs, in the order of packing, as columns.

    :ivar offsets: int64 of shape (num_packs + 1,): pack p has the pieces ``offsets[p]`` to ``offsets[p + 1]``.
    :ivar rows: int32 of shape (num_pieces,): the row of each piece, numbered as the row index does.
    :ivar starts: int32 of shape (num_pieces,): its first token.
    :ivar stops: int32 of shape (num_pieces,): where it ends.
    :ivar costs: float64 of shape (num_packs,): what packs are grouped by.
    :ivar counts: what was not packed.
    """

    offsets: Int64
    rows: Int32
    starts: Int32
    stops: Int32
    costs: Float64
    counts: Counts

    @classmethod
    def of(cls, portions: Iterable[list[Pack]], costs: Sequence[float], counts: Counts) -> Packs:
        """Packs of rows, which their references are. Few are objects at a time: a piece takes a hundred bytes then."""
        sizes, columns = [np.zeros(1, np.int64)], [np.empty((3, 0), np.int32)]
        for packs in portions:
            sizes.append(np.array([len(pack) for pack in packs], np.int64))
            columns.append(np.array([piece for pack in packs for piece in pack], np.int32).reshape(-1, 3).T)
        rows, starts, stops = np.concatenate(columns, axis=1)
        return cls(np.cumsum(np.concatenate(sizes)), rows, starts, stops, np.array(costs, np.float64), counts)

    @property
    def num_packs(self) -> int:
        """The number of packs."""
        return len(self.costs)

    def pack(self, number: int) -> Pack:
        """Pack ``number``; its references are the numbers of the rows."""
        pieces = slice(*self.offsets[number : number + 2].tolist())
        return list(zip(*(column[pieces].tolist() for column in self[1:4]), strict=True))


# What a snapshot keeps.

_Ranks = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]

Place = tuple[Number, Number, Number]
PlacedPiece = tuple[Place, Count, Count]
"""A :data:`Piece` whose reference is the sample's position in D."""


class PackState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a snapshot keeps of packing. It has no tokens, only the positions from which they are read again.

    D is read again from the snapshot's position. Samples up to ``last`` are skipped, except those that waited.

    :ivar epoch: the epoch that is being delivered.
    :ivar last: the last sample of the order that was taken in before the window; None: none was.
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
    :ivar bad_rows: samples in delivered packs whose media could not be loaded, by ``bad row <code>``; unset: none.
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
    bad_rows: dict[str, Count] | msgspec.UnsetType = msgspec.UNSET

    @property
    def delivered(self) -> Delivered:
        """The numbers of delivered packs."""
        return Delivered(self.num_packs, self.epoch_packs, self.num_tokens, self.bad_rows or {})


def restored(state: Mapping[str, Any], kind: type[StateT]) -> StateT:
    """``state`` as the Struct that it was made from.

    :raises SnapshotError: if it has other fields or types.
    """
    try:
        return msgspec.convert(state, prepared(kind))
    except Exception as error:  # a crafted value may make the converter raise anything
        raise SnapshotError(f"AD602 the state of a packer cannot be read: {error}") from None


def refuse_wrong_pieces(pieces: Iterable[Piece], longest: int) -> None:
    """Check that each piece has at least one token, and at most ``longest``.

    :raises SnapshotError: if one does not.
    """
    if not all(0 <= start < stop <= start + longest for _, start, stop in pieces):
        raise wrong_state()


def wrong_state() -> SnapshotError:
    """The error for a state that no packer of this kind has."""
    return SnapshotError("AD602 the state of a packer cannot be read: it is of another packing, or damaged")
