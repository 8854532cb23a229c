"""Packings: which samples, or which parts of samples, are put into one sequence. A packer makes packs of lengths alone.

Samples come in portions of any size, and the packs depend only on the samples and their order. For
:class:`SoftPacking`, a window of a few hundred samples fills packs as well as a plan of the whole epoch. The method,
fifo-fill: the oldest sample of the window goes into the open pack as long as it fits. When it does not, the pack is
topped up with the largest samples of the window that do, and the oldest begins the next pack. So no sample waits for
long, and the mix of long and short samples stays as in the data. Taking the largest samples first would fill packs no
better, and each epoch would go from long samples to short ones.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal, Self

import msgspec
import numpy as np

from asyncdata.batching.packs import Counts, OfPacks, Pack, Piece, Positive, refuse_wrong_pieces, restored, wrong_state
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Count

Overlong = Literal["drop", "truncate_right", "error"]
"""As the tokenize functions have it, but a packing cuts no left end."""

# A key is (size << _SHIFT) + (_MASK - arrival): sorted by size, and of one size the oldest last, where it is found.
_SHIFT = 48
_MASK = (1 << _SHIFT) - 1


class Packer(ABC):
    """Makes packs of the samples that it is given. The packs depend only on the samples and their order.

    It makes the same packs, however many samples it is given at once. A reference is any value by which the caller
    identifies a sample, such as its number; packs have it unchanged.

    :ivar counts: what was not packed.
    """

    def __init__(self, open_pack: list[Piece], counts: Counts, longest: int) -> None:
        self.counts = counts
        self._pack: Pack = list(open_pack)
        refuse_wrong_pieces(open_pack, longest)

    def extend(self, lengths: Sequence[int], references: Iterable[Any]) -> list[Pack]:
        """Take in samples of these lengths, and return the packs that are closed now. On an error none is taken in.

        :raises ConfigError: AD450, for a sample that cannot be packed; if a length is negative or not an integer; or if
            there are not as many lengths as references.
        """
        array = np.asarray(lengths)
        if array.size and (array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0):
            raise ConfigError(f"lengths are whole numbers of tokens, from 0 on; got {str(lengths)[:80]}")

        whole, given = array.tolist(), list(references)
        if len(whole) != len(given):
            raise ConfigError(f"{len(whole)} lengths and {len(given)} references")

        return self.take_in(list(zip(whole, given, strict=True)))

    @abstractmethod
    def take_in(self, arrivals: list[tuple[int, Any]]) -> list[Pack]:
        """What :meth:`extend` does, for pairs of length and reference; the lengths are right."""

    def flush(self) -> list[Pack]:
        """The packs of all waiting samples: there are no more samples."""
        return []

    def waiting(self) -> Iterable[Piece]:
        """The parts of samples that are in no pack yet, the oldest sample's first."""
        return iter(self._pack)

    def copy(self) -> Self:
        """An independent copy."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | dict | Counts):
                setattr(other, name, value.copy())
        return other

    def state(self) -> dict[str, Any]:
        """All that the next packs depend on, as builtins if the references are."""
        return {"open_pack": [list(piece) for piece in self._pack], "counts": msgspec.to_builtins(self.counts)}


# Each sample is a pack.


class SinglePacking(OfPacks, frozen=True, kw_only=True):
    """Each sample is a pack, in the order of arrival: no packing, for batches that are padded and grouped by length."""

    cuts: ClassVar[bool] = False
    across_epochs: ClassVar[bool] = False
    max_length: ClassVar[int] = sys.maxsize

    def keeps(self, length: int) -> bool:
        """Whether a sample of ``length`` tokens is packed. Others are only counted."""
        return length > 0

    def open(self, state: Mapping[str, Any] = {}) -> Packer:
        """A new packer, or one that continues from ``state``.

        :raises SnapshotError: for a state of another packing.
        """
        return _SinglePacker([], restored(state, _SingleState).counts, self.max_length)


class _SingleState(msgspec.Struct, forbid_unknown_fields=True):
    counts: Counts = msgspec.field(default_factory=Counts)


class _SinglePacker(Packer):
    def take_in(self, arrivals: list[tuple[int, Any]]) -> list[Pack]:
        packs: list[Pack] = [[(reference, 0, length)] for length, reference in arrivals if length]
        self.counts.add("empty", samples=len(arrivals) - len(packs))
        return packs

    def state(self) -> dict[str, Any]:
        return {"counts": msgspec.to_builtins(self.counts)}


# Samples end to end.


class HardPacking(OfPacks, frozen=True, kw_only=True):
    """Samples end to end, cut wherever ``max_length`` tokens are full: every pack is full, and samples are cut.

    With samples of m tokens on average, about m in ``max_length`` of them are cut. The order is the order of arrival.

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

    def open(self, state: Mapping[str, Any] = {}) -> Packer:
        """A new packer, or one that continues from ``state``.

        :raises SnapshotError: for a state of another packing.
        """
        return _HardPacker(self, restored(state, _HardState))


class _HardState(msgspec.Struct, forbid_unknown_fields=True):
    open_pack: list[Piece] = []
    counts: Counts = msgspec.field(default_factory=Counts)


class _HardPacker(Packer):
    """Only the open pack waits."""

    def __init__(self, packing: HardPacking, state: _HardState) -> None:
        super().__init__(state.open_pack, state.counts, packing.max_length)
        self._packing = packing
        self._room = packing.max_length - sum(stop - start for _, start, stop in self._pack)
        if self._room <= 0:
            raise wrong_state()

    def take_in(self, arrivals: list[tuple[int, Any]]) -> list[Pack]:
        packs: list[Pack] = []
        for length, reference in arrivals:
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

    def _close(self) -> Pack:
        pack, self._pack, self._room = self._pack, [], self._packing.max_length
        return pack


# Whole samples.


class SoftPacking(OfPacks, frozen=True, kw_only=True):
    """Whole samples into packs of at most ``max_length`` tokens; every sample exactly once.

    The window is the shortest run of arrivals, from the oldest waiting sample on, that has ``window_samples`` samples
    and ``window_tokens`` tokens. A sample overtakes another one only within it, so with samples of usual length none is
    moved by ``window_samples`` places. Nothing is packed until the window is full. A window near the size of an epoch
    drains badly: keep it below a twentieth of one, or let it run on into the next epoch.

    :ivar max_length: tokens of a full pack.
    :ivar window_samples: samples of the window, at least.
    :ivar window_tokens: tokens of the window, at least; None: ``8 * max_length``. Fewer than two packs fill badly.
    :ivar overlong: what to do with a sample longer than ``max_length``: drop it, counted as ``overlong``; cut its right
        end, counted as ``truncated``; or raise an error.
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
    overlong: Overlong = "drop"
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
        return 0 < length <= self.max_length or (length > 0 and self.overlong == "truncate_right")

    def room_of(self, length: int) -> int:
        """The room that a sample of ``length`` tokens takes in a pack."""
        return -(-length // self.segment_multiple_of) * self.segment_multiple_of

    def open(self, state: Mapping[str, Any] = {}) -> Packer:
        """A new packer, or one that continues from ``state``.

        :raises SnapshotError: for a state of another packing.
        """
        return _SoftPacker(self, restored(state, _SoftState))


class _SoftState(msgspec.Struct, forbid_unknown_fields=True):
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


class _SoftPacker(Packer):
    """Packs a sample in about a microsecond, whatever the window. Arrivals are numbered."""

    def __init__(self, packing: SoftPacking, state: _SoftState) -> None:
        super().__init__(state.open_pack, state.counts, packing.max_length)
        self._packing = packing
        self._room = packing.max_length - sum(packing.room_of(stop - start) for _, start, stop in self._pack)
        self._pieces: dict[int, Piece] = {}  # of the arrivals that wait
        self._sizes: dict[int, int] = {}  # of all arrivals from the head on, which is the oldest that may wait
        self._keys: list[int] = []  # of the arrivals that wait
        self._head, self._end = 0, len(state.lengths)
        self._tokens = 0  # of all arrivals from the head on
        taken, references = set(state.taken), iter(state.references)
        is_whole = len(taken) == len(state.taken) and self._end == len(taken) + len(state.references)
        if not is_whole or max(taken, default=-1) >= self._end or self._room < 0:
            raise wrong_state()

        if state.lengths and not 0 < min(state.lengths) <= max(state.lengths) <= packing.max_length:
            raise wrong_state()

        for number, length in enumerate(state.lengths):
            self._sizes[number] = size = packing.room_of(length)
            self._tokens += size
            if number not in taken:
                self._pieces[number] = (next(references), 0, length)
                insort(self._keys, (size << _SHIFT) + _MASK - number)

    def take_in(self, arrivals: list[tuple[int, Any]]) -> list[Pack]:
        """The packs that samples complete. Nothing is counted if a sample is too long, and that is an error."""
        packing = self._packing
        longest = packing.max_length
        if packing.overlong == "error":
            for length, reference in arrivals:
                if length > longest:
                    raise ConfigError(
                        f"AD450 sample {reference} has {length} tokens, more than the max_length={longest} of "
                        'SoftPacking; limit it where it is tokenized, or set overlong="drop" or "truncate_right"'
                    )

        return self._run(arrivals, packing.window_samples, packing.window_tokens or 8 * longest)

    def flush(self) -> list[Pack]:
        """The packs of all waiting samples: there are no more samples."""
        packs = self._run((), 1, 0)
        if self._pack:
            packs.append(self._close())
        return packs

    def waiting(self) -> Iterable[Piece]:
        return chain(self._pack, self._pieces.values())

    def state(self) -> dict[str, Any]:
        pieces = self._pieces
        return {
            "lengths": [pieces[number][2] if number in pieces else size for number, size in self._sizes.items()],
            "taken": [place for place, number in enumerate(self._sizes) if number not in pieces],
            "references": [reference for reference, _, _ in pieces.values()],
            **super().state(),
        }

    def _run(self, arrivals: Iterable[tuple[int, Any]], window_samples: int, window_tokens: int) -> list[Pack]:
        """Take in the arrivals one after the other, and pack after each while the window is full."""
        packs: list[Pack] = []
        pieces, sizes, keys, head, tokens = self._pieces, self._sizes, self._keys, self._head, self._tokens
        longest, multiple = self._packing.max_length, self._packing.segment_multiple_of
        for arrival in chain((None,), arrivals):
            if arrival is not None:
                length, reference = arrival
                if not 0 < length <= longest and not (length := self._kept(length)):
                    continue

                size = length if multiple == 1 else self._packing.room_of(length)
                insort(keys, (size << _SHIFT) + _MASK - self._end)
                pieces[self._end], sizes[self._end] = (reference, 0, length), size
                self._end += 1
                tokens += size
            while self._end - head >= window_samples and tokens >= window_tokens:
                size = sizes[head]
                if head in pieces:
                    if size > self._room:
                        packs.append(self._close())
                        continue

                    self._pack.append(pieces.pop(head))
                    self._room -= size
                    del keys[bisect_left(keys, (size << _SHIFT) + _MASK - head)]
                del sizes[head]
                tokens -= size
                head += 1
        self._head, self._tokens = head, tokens
        return packs

    def _kept(self, length: int) -> int:
        """How many tokens of an empty sample, or of one that is too long, are packed; the others are counted."""
        longest = self._packing.max_length
        if length == 0:
            self.counts.add("empty", samples=1)
        elif self._packing.overlong == "drop":
            self.counts.add("overlong", samples=1, tokens=length)
            return 0
        else:
            self.counts.add("truncated", tokens=length - longest)
        return min(length, longest)

    def _close(self) -> Pack:
        """The open pack, topped up from the window; a new one is begun."""
        pack, keys, room = self._pack, self._keys, self._room
        while found := bisect_right(keys, (room << _SHIFT) + _MASK):
            key = keys.pop(found - 1)
            pack.append(self._pieces.pop(_MASK - (key & _MASK)))
            room -= key >> _SHIFT
        self._pack, self._room = [], self._packing.max_length
        return pack


Packing = SinglePacking | HardPacking | SoftPacking
"""The settings of a packing, which opens a :class:`Packer`.

``keeps`` says whether a sample of some length is packed, except for a tail that is dropped; others are counted.
``cuts`` says whether a sample may be cut: its pieces are then in consecutive packs, in their order.
"""
