"""The digest of a stream: three sums that tell which samples were delivered, in which order, and with which tokens.

Each sample has two 64-bit words: ``p``, a mix of its position, and ``c``, a mix of its number of tokens and, if asked
for, the CRC-32 of its tokens. The digest has three sums, modulo 2^64:

- the sum of all ``p``: which positions were delivered;
- the sum of the running sums of ``p``: in which order, as in Fletcher's checksum (J. G. Fletcher, "An arithmetic
  checksum for serial transmissions", 1982);
- the sum of all ``p * c``, with ``p`` made odd: which tokens, a multilinear hash (D. Lemire and O. Kaser, "Strongly
  universal string hashing is fast", 2014).

The sums over a part of a chunk follow from running sums, so it makes no difference where batches, chunks and runs are
cut. The digest finds faults, not attacks: it is not a cryptographic hash.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from asyncdata.order.order import GOLDEN, MASK, Words, mix, mix_one

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
    :param token_ends: end offset of each sample's tokens, all tokens end to end: unsigned, shape (num_samples,).
    :param kept: row of each sample, counted from ``first``: int32, shape (num_samples,); None: every row is a sample.
    :param token_sums: CRC-32 of each sample's tokens as little-endian int32: uint32, shape (num_samples,); None: not
        computed.
    """
    num_samples = len(token_ends)
    base = np.uint64(_base(*first[:2]) + first[2] * GOLDEN & MASK)
    places = mix(_steps(num_samples) + base if kept is None else kept.astype(np.uint64) * _GOLDEN + base)
    contents = token_ends * _GOLDEN
    contents[1:] -= contents[:-1]  # the number of tokens of each
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
    """The samples of the stream that were delivered, as three sums modulo 2^64.

    :ivar of: ``positions``: the sums cover positions and numbers of tokens; ``tokens``: the tokens, too.
    :ivar num_samples: samples that the digest covers. The ``n`` samples of a group count once.
    :ivar positions: the sum that tells which positions were delivered.
    :ivar order: the sum that tells in which order.
    :ivar tokens: the sum that tells with which tokens; None after a run was resumed with another ``of``.
    """

    of: str = "positions"
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
            self.num_samples + number,
            before + sums.positions[stop] & MASK,
            self.order + order & MASK,
            tokens,
        )

    def resumed(self, of: str) -> Self:
        """The digest of a run that resumes with ``of``. With another one than before, the sum of tokens is lost."""
        return self if of == self.of else msgspec.structs.replace(self, of=of, tokens=None)
