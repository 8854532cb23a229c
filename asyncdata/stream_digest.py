"""The digest of a stream: which samples were handed over, in which order, and of which tokens, in three sums.

Each sample has two words of 64 bits: ``p``, a mix of its position, and ``t``, a mix of its position, its number of
tokens and, if asked for, the CRC-32 of its tokens. Over samples 1, 2 ... of the stream the digest has the sums of
``p_n``, of ``n * p_n`` and of ``t_n``, modulo 2^64. The first tells which positions came, whatever their order; the
second, as in Fletcher's checksum (J. G. Fletcher, "An arithmetic checksum for serial transmissions", 1982), in which
order; the third, of which tokens. Sums over a piece of a chunk are differences of running sums: where batches, chunks
and runs are cut makes no difference. It finds faults, not forgers: it is no cryptographic hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.mixing import GOLDEN, MASK, Words, mix, mix_one

if TYPE_CHECKING:
    from typing import Self

__all__ = ("StreamDigest", "Sums", "sums_of")

Numbers = np.ndarray[Any, Any]

_GOLDEN, _HALF = np.uint64(GOLDEN), np.uint64(32)
_NUM_ORDINALS = 4096
_FIRST_ORDINALS = np.arange(1, _NUM_ORDINALS + 1, dtype=np.uint64)


class Sums(NamedTuple):
    """Running sums over a chunk's samples; item ``n`` of each is over the first ``n`` samples, modulo 2^64.

    :ivar positions: of ``p``.
    :ivar order: of ``n * p``, samples counted from 1 in the chunk.
    :ivar tokens: of ``t``.
    """

    positions: memoryview
    order: memoryview
    tokens: memoryview


def sums_of(epoch: int, window: int, rows: Numbers, lengths: Numbers, token_sums: Numbers | None) -> Sums:
    """The running sums over samples at ``rows`` of one window.

    :param rows: int, shape (num_samples,).
    :param lengths: tokens of each, int, likewise.
    :param token_sums: CRC-32 of each one's tokens as little-endian int32, likewise; None: not known.
    """
    num_samples = len(rows)
    words = np.empty((2, num_samples), np.uint64)  # both at once: what costs time here is the number of calls
    np.multiply(rows, _GOLDEN, out=words[0], dtype=np.uint64, casting="unsafe")
    words[0] += np.uint64(mix_one(mix_one(epoch + 1) + window & MASK))
    np.left_shift(lengths, _HALF, out=words[1], dtype=np.uint64, casting="unsafe")
    if token_sums is not None:
        words[1] |= token_sums
    words[1] ^= words[0]
    words = mix(words)
    sums = np.zeros((3, num_samples + 1), np.uint64)
    np.add.accumulate(words, axis=1, out=sums[:2, 1:])
    words[0] *= _ordinals(num_samples)
    np.add.accumulate(words[0], out=sums[2, 1:])
    return Sums(sums[0].data, sums[2].data, sums[1].data)


def _ordinals(number: int) -> Words:
    return _FIRST_ORDINALS[:number] if number <= _NUM_ORDINALS else np.arange(1, number + 1, dtype=np.uint64)


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
        positions = sums.positions[stop] - sums.positions[start]
        order = (self.num_samples - start) * positions + sums.order[stop] - sums.order[start]
        tokens = self.tokens
        if tokens is not None:
            tokens = tokens + sums.tokens[stop] - sums.tokens[start] & MASK
        return type(self)(
            self.of,
            self.first,
            self.num_samples + stop - start,
            self.positions + positions & MASK,
            self.order + order & MASK,
            tokens,
        )

    def resumed(self, of: str) -> Self:
        """The digest with which a run of another ``of`` goes on: what was not hashed cannot be made up for."""
        return self if of == self.of else msgspec.structs.replace(self, of=of, tokens=None)
