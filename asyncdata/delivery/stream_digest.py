"""The digest of a stream: which samples were handed over, in which order, and of which tokens, in three sums.

Each sample has two words of 64 bits: ``p``, a mix of its position, and ``c``, of its number of tokens and, if asked
for, the CRC-32 of its tokens. Modulo 2^64, the digest has the sum of all ``p``, which tells what positions came; the
sum of that sum as it was behind each sample, which tells in what order, as in Fletcher's checksum (J. G. Fletcher, "An
arithmetic checksum for serial transmissions", 1982); and the sum of all ``p * c``, ``p`` made odd, which tells of what
tokens: a multilinear hash (D. Lemire and O. Kaser, "Strongly universal string hashing is fast", 2014).

Sums over a piece of a chunk follow from running sums: where batches, chunks and runs are cut makes no difference. It
finds faults, not forgers: it is no cryptographic hash.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.order.splitmix import GOLDEN, MASK, Words, mix, mix_one

if TYPE_CHECKING:
    from typing import Self

__all__ = ("StreamDigest", "Sums", "sums_of")

Numbers = np.ndarray[Any, Any]

_GOLDEN, _ONE = np.uint64(GOLDEN), np.uint64(1)
_NUM_KEPT = 4096
_FIRST_STEPS = np.arange(_NUM_KEPT, dtype=np.uint64) * _GOLDEN


class Sums(NamedTuple):
    """Running sums over a chunk's samples; item ``n`` of each is over the first ``n`` samples, modulo 2^64.

    :ivar positions: of ``p``.
    :ivar order: of :attr:`positions`.
    :ivar tokens: of ``p * c``.
    """

    positions: memoryview
    order: memoryview
    tokens: memoryview


def sums_of(
    first: tuple[int, int, int], token_ends: Numbers, kept: Numbers | None = None, token_sums: Numbers | None = None
) -> Sums:
    """The running sums over samples of one window.

    :param first: epoch, window and row from which rows are counted.
    :param token_ends: where the tokens of each sample stop, if all lie end to end: unsigned, shape (num_samples,).
    :param kept: each one's row, counted from ``first``: int32, likewise; None: one row after the other.
    :param token_sums: CRC-32 of each one's tokens as little-endian int32: uint32, likewise; None: not known.
    """
    num_samples = len(token_ends)
    base = np.uint64(_base(*first[:2]) + first[2] * GOLDEN & MASK)
    places = mix(_steps(num_samples) + base if kept is None else kept.astype(np.uint64) * _GOLDEN + base)
    contents = token_ends * _GOLDEN
    contents[1:] -= contents[:-1]  # how many tokens each has
    if token_sums is not None:
        contents += token_sums
    sums = np.zeros((3, num_samples + 1), np.uint64)
    positions, order, tokens = sums
    np.add.accumulate(places, out=positions[1:])
    np.add.accumulate(positions, out=order)
    places |= _ONE
    contents *= places
    np.add.accumulate(contents, out=tokens[1:])
    return Sums(positions.data, order.data, tokens.data)


@lru_cache(maxsize=16)
def _base(epoch: int, window: int) -> int:
    return mix_one(mix_one(epoch + 1) + window & MASK)


def _steps(number: int) -> Words:
    """0, GOLDEN, 2 GOLDEN ..."""
    return _FIRST_STEPS[:number] if number <= _NUM_KEPT else np.arange(number, dtype=np.uint64) * _GOLDEN


class StreamDigest(msgspec.Struct, frozen=True):
    """What was handed over of the stream, as three sums modulo 2^64.

    :ivar of: ``positions``: the sums are of positions and numbers of tokens; ``tokens``: of the tokens too.
    :ivar first: how many samples of the stream were handed over before the digest began: 0, unless the run goes on from
        a snapshot that has none.
    :ivar num_samples: how many it is over. The ``n`` samples of a group count once.
    :ivar positions: which positions, in whatever order.
    :ivar order: which position came when.
    :ivar tokens: what the samples at those positions held; None from where a run went on with another ``of``.
    """

    of: str = "positions"
    first: int = 0
    num_samples: int = 0
    positions: int = 0
    order: int = 0
    tokens: int | None = 0

    def plus(self, sums: Sums, start: int, stop: int) -> Self:
        """The digest after samples ``[start, stop)`` of a chunk."""
        number, before = stop - start, self.positions - sums.positions[start]
        order = number * before + sums.order[stop] - sums.order[start]
        tokens = self.tokens
        if tokens is not None:
            tokens = tokens + sums.tokens[stop] - sums.tokens[start] & MASK
        return type(self)(
            self.of,
            self.first,
            self.num_samples + number,
            before + sums.positions[stop] & MASK,
            self.order + order & MASK,
            tokens,
        )

    def resumed(self, of: str) -> Self:
        """The digest with which a run of another ``of`` goes on: what was not hashed cannot be made up for."""
        return self if of == self.of else msgspec.structs.replace(self, of=of, tokens=None)
