"""Whole samples to packs, online: a window of a few hundred samples fills packs as well as a plan of the whole epoch.

The method, fifo-fill: the oldest sample of the window goes into the open pack as long as it fits. When it does not, the
pack is topped up with the largest samples of the window that do, and the oldest begins the next pack. So no sample
waits for long, and the mix of long and short samples stays that of the data. Taking the largest samples first would
fill packs no better, and each epoch would go from long samples to short ones.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right, insort
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from asyncdata.batching.packers.base import (
    Count,
    Counts,
    Overlong,
    Pack,
    Piece,
    Positive,
    arrivals_of,
    refuse_wrong_pieces,
    restored,
    wrong_state,
)
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ("SoftPacker", "SoftPacking")

# A key is (size << _SHIFT) + (_MASK - arrival): sorted by size, and of one size the oldest last, where it is found.
_SHIFT = 48
_MASK = (1 << _SHIFT) - 1

_FORGET_FROM = 1024


class SoftPacking(Description, frozen=True, kw_only=True):
    """Whole samples into packs of at most ``max_length`` tokens; every sample exactly once.

    The window is the shortest run of arrivals, from the oldest waiting sample on, that has ``window_samples`` samples
    and ``window_tokens`` tokens. A sample overtakes another one only within it, so with samples of usual length none is
    moved by ``window_samples`` places. Nothing is packed until the window is full. A window near the size of an epoch
    drains badly: keep it below a twentieth of one, or let it run on into the next epoch.

    :ivar max_length: tokens of a full pack.
    :ivar window_samples: samples of the window, at least.
    :ivar window_tokens: tokens of the window, at least; None: ``8 * max_length``. Fewer than two packs fill badly.
    :ivar overlong: what to do with a sample longer than ``max_length``: ``error``, ``drop`` (counted), or ``truncate``
        to its first ``max_length`` tokens (counted).
    :ivar segment_multiple_of: each sample takes room up to the next multiple of this, as the collator's
        ``segment_multiple_of`` asks for.
    :ivar across_epochs: False: an epoch's packs hold all of its samples and no others, so a loop is an epoch. True:
        what waits at an epoch's end is packed with the next one's samples, so a loop leaves a window of samples to the
        next loop, and with a length grouping a window of packs as well.
    :raises ConfigError: for a setting that cannot work.
    """

    cuts: ClassVar[bool] = False

    max_length: Positive
    window_samples: Positive = 256
    window_tokens: Positive | None = None
    overlong: Overlong = "error"
    segment_multiple_of: Positive = 1
    across_epochs: bool = False

    def check(self) -> None:
        """Whether a full pack has no gap at its end."""
        if self.max_length % self.segment_multiple_of:
            raise ConfigError(
                f"SoftPacking: max_length={self.max_length} is no multiple of "
                f"segment_multiple_of={self.segment_multiple_of}"
            )

    def keeps(self, length: int) -> bool:
        """Whether a sample of ``length`` tokens is packed. Others are only counted."""
        return 0 < length <= self.max_length or (length > 0 and self.overlong == "truncate")

    def open(self, state: Mapping[str, Any] | None = None) -> SoftPacker:
        """A new packer, or one that continues from ``state``.

        :raises SnapshotError: for a state of another packing.
        """
        return SoftPacker(self, _State() if state is None else restored(state, _State))


class _State(msgspec.Struct, forbid_unknown_fields=True):
    """What the next packs depend on.

    :ivar lengths: of the arrivals since the oldest waiting sample, in their order.
    :ivar taken: which of them are packed already, by their place.
    :ivar references: of the others.
    :ivar open_pack: the pieces of the pack that is being filled.
    """

    lengths: list[Count] = []
    taken: list[Count] = []
    references: list[Any] = []
    open_pack: list[Piece] = []
    counts: Counts = msgspec.field(default_factory=Counts)


class SoftPacker:
    """Makes the packs of a :class:`SoftPacking`, in about a microsecond per sample, whatever the window."""

    def __init__(self, packing: SoftPacking, state: _State) -> None:
        self._packing = packing
        self._window_tokens = packing.window_tokens or 8 * packing.max_length
        self.counts = state.counts
        self._pack: Pack = list(state.open_pack)
        self._room = packing.max_length - sum(self._size(stop - start) for _, start, stop in self._pack)
        # The arrivals. All before the head are in packs; None: one after the head that is in a pack, too.
        self._pieces: list[Piece | None] = []
        self._sizes: list[int] = []
        self._head, self._num_gone = 0, 0
        self._tokens = 0  # of the arrivals from the head on
        self._keys: list[int] = []
        self._restore(state)

    def extend(self, lengths: Sequence[int], references: Iterable[Any]) -> list[Pack]:
        """As the protocol says.

        :raises ConfigError: AD450, for an overlong sample under ``overlong="error"``; none is taken in then.
        """
        arrivals = self._fitting(*arrivals_of(lengths, references))
        return self._run(arrivals, self._packing.window_samples, self._window_tokens)

    def flush(self) -> list[Pack]:
        """The packs of all waiting samples: there are no more samples."""
        packs = self._run((), 1, 0)
        if self._pack:
            packs.append(self._close())
        return packs

    def waiting(self) -> Iterator[Piece]:
        """What is in no pack yet."""
        return chain(self._pack, (piece for piece in self._pieces[self._head :] if piece is not None))

    def copy(self) -> SoftPacker:
        """An independent copy."""
        other = copy.copy(self)
        other.counts = self.counts.copy()
        for name in ("_pack", "_pieces", "_sizes", "_keys"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def state(self) -> dict[str, Any]:
        """All that the next packs depend on, as builtins if the references are."""
        pieces = self._pieces[self._head :]
        sizes = self._sizes[self._head :]
        return {
            "lengths": [size if piece is None else piece[2] for piece, size in zip(pieces, sizes, strict=True)],
            "taken": [place for place, piece in enumerate(pieces) if piece is None],
            "references": [piece[0] for piece in pieces if piece is not None],
            "open_pack": [list(piece) for piece in self._pack],
            "counts": msgspec.to_builtins(self.counts),
        }

    def _restore(self, state: _State) -> None:
        taken, references = set(state.taken), iter(state.references)
        longest = self._packing.max_length
        refuse_wrong_pieces(state.open_pack, longest=longest)
        is_whole = len(taken) == len(state.taken) and len(state.lengths) == len(taken) + len(state.references)
        if not is_whole or max(taken, default=-1) >= len(state.lengths) or self._room < 0:
            raise wrong_state()

        if state.lengths and not 0 < min(state.lengths) <= max(state.lengths) <= longest:
            raise wrong_state()

        for place, length in enumerate(state.lengths):
            piece = None if place in taken else (next(references), 0, length)
            size = self._size(length)
            self._pieces.append(piece)
            self._sizes.append(size)
            self._tokens += size
            if piece is not None:
                insort(self._keys, (size << _SHIFT) + _MASK - place)

    def _size(self, length: int) -> int:
        multiple = self._packing.segment_multiple_of
        return -(-length // multiple) * multiple

    def _fitting(self, lengths: list[int], references: list[Any]) -> Iterable[tuple[int, Any]]:
        """The samples that can be packed, truncated if needed. Nothing is counted if one of them is an error."""
        longest = self._packing.max_length
        if not lengths or 0 < min(lengths) <= max(lengths) <= longest:
            return zip(lengths, references, strict=True)

        if self._packing.overlong == "error" and max(lengths) > longest:
            length, reference = next(pair for pair in zip(lengths, references, strict=True) if pair[0] > longest)
            raise ConfigError(
                f"AD450 sample {reference} has {length} tokens, more than the max_length={longest} of "
                'SoftPacking; limit it where it is tokenized, or set overlong="truncate" or "drop"'
            )

        return [(kept, ref) for length, ref in zip(lengths, references, strict=True) if (kept := self._kept(length))]

    def _kept(self, length: int) -> int:
        """How many of the tokens can be packed; the others are counted."""
        longest = self._packing.max_length
        if length == 0:
            self.counts.add("empty", samples=1)
        elif length > longest and self._packing.overlong == "drop":
            self.counts.add("overlong", samples=1, tokens=length)
            return 0
        elif length > longest:
            self.counts.add("truncated", tokens=length - longest)
        return min(length, longest)

    def _run(self, arrivals: Iterable[tuple[int, Any]], window_samples: int, window_tokens: int) -> list[Pack]:
        """Take in the arrivals one after the other, and pack after each while the window is full."""
        packs: list[Pack] = []
        pieces, sizes, keys, head, tokens = self._pieces, self._sizes, self._keys, self._head, self._tokens
        multiple = self._packing.segment_multiple_of
        for arrival in chain((None,), arrivals):
            if arrival is not None:
                length, reference = arrival
                size = length if multiple == 1 else self._size(length)
                insort(keys, (size << _SHIFT) + _MASK - self._num_gone - len(pieces))
                pieces.append((reference, 0, length))
                sizes.append(size)
                tokens += size
            while len(pieces) - head >= window_samples and tokens >= window_tokens:
                piece, size = pieces[head], sizes[head]
                if piece is not None:
                    if size > self._room:
                        packs.append(self._close())
                        continue

                    self._pack.append(piece)
                    self._room -= size
                    del keys[bisect_left(keys, (size << _SHIFT) + _MASK - self._num_gone - head)]
                tokens -= size
                head += 1
        self._head, self._tokens = head, tokens
        self._forget()
        return packs

    def _close(self) -> Pack:
        """The open pack, topped up from the window; a new one is begun."""
        pack, keys, room = self._pack, self._keys, self._room
        while found := bisect_right(keys, (room << _SHIFT) + _MASK):
            key = keys.pop(found - 1)
            place = _MASK - (key & _MASK) - self._num_gone
            piece = self._pieces[place]
            assert piece is not None, "a key is that of a waiting sample"
            pack.append(piece)
            self._pieces[place] = None
            room -= key >> _SHIFT
        self._pack, self._room = [], self._packing.max_length
        return pack

    def _forget(self) -> None:
        """Drop the arrivals before the head once there are many of them."""
        if self._head >= _FORGET_FROM:
            del self._pieces[: self._head], self._sizes[: self._head]
            self._num_gone += self._head
            self._head = 0
