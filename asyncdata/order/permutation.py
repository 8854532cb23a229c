"""Keyed permutations without state: of numbers by a Feistel network, of rows by sorted keys; and torch's own.

The network walks cycles (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); its round function,
and the key by which rows are sorted, is the finaliser of splitmix64.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncdata.core.errors import ConfigError

Words = np.ndarray[Any, np.dtype[np.uint64]]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: numbers that follow one another lie far apart once they are multiplied by it."""

_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD_1, _WORD_2 = np.uint64(_MIX_1), np.uint64(_MIX_2)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
# From here on torch draws two words for each place.
_MAX_SIZE = (1 << 32) // 20


def mix(words: Words) -> Words:
    """Each word mixed: a bijection of 64-bit words in which every bit depends on every other."""
    mixed = words >> _SHIFTS[0]
    mixed ^= words
    mixed *= _WORD_1
    shifted = mixed >> _SHIFTS[1]
    mixed ^= shifted
    mixed *= _WORD_2
    np.right_shift(mixed, _SHIFTS[2], out=shifted)
    mixed ^= shifted
    return mixed


def mix_one(word: int) -> int:
    """The same for one number from 0 to 2^64 - 1."""
    word = (word ^ (word >> 30)) * _MIX_1 & MASK
    word = (word ^ (word >> 27)) * _MIX_2 & MASK
    return word ^ (word >> 31)


class TorchGenerator:
    """``torch.Generator().manual_seed(seed)``, as far as :meth:`randperm` goes."""

    def __init__(self, seed: int) -> None:
        self._words = np.random.RandomState(seed & 0xFFFFFFFF)

    def randperm(self, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """``torch.randperm(size, generator=self)``, int64 of shape (size,); the next call continues the random stream.

        :raises ConfigError: for 214 million or more, where torch draws otherwise.
        """
        if not 0 <= size < _MAX_SIZE:
            raise ConfigError(f"randperm is that of torch for 0 to {_MAX_SIZE - 1} numbers, not for {size}")

        words = self._words.randint(0, 1 << 32, max(size - 1, 0), dtype=np.uint32)
        jumps = (words % np.arange(size, 1, -1, dtype=np.uint32)).tolist()
        numbers = list(range(size))
        for place, jump in enumerate(jumps):
            other = place + jump
            numbers[place], numbers[other] = numbers[other], numbers[place]
        return np.array(numbers, dtype=np.int64)


_ROUNDS = 6
_GOLDEN = np.uint64(GOLDEN)
_MAX_TABLE = 1 << 12
"""Where the network has so few values, all are computed at once, and a step of the walk is a look into that table: a
step of few values costs as much as one of a thousand."""


Indices = np.ndarray[Any, np.dtype[np.int64]]


def order_keys(seed: int, epoch: int, stream: str) -> list[int]:
    """Six 64-bit keys. Hashed, not added: seed 1 of epoch 0 must not be seed 0 of epoch 1."""
    text = f"asyncdata order 1|{seed}|{epoch}|{stream}"
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]


def feistel_permutation(ids: Indices, size: int, keys: list[int]) -> Indices:
    """Where a keyed permutation of ``range(size)`` sends ``ids``; time and memory are O(len(ids)), whatever
    ``size``.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    step: Callable[[Words], Words] = functools.partial(_feistel, half=half, keys=keys)
    if 1 << 2 * half <= _MAX_TABLE:
        step = step(np.arange(1 << 2 * half, dtype=np.uint64)).__getitem__
    result = step(ids.astype(np.uint64))
    while len(outside := np.flatnonzero(result >= size)):
        result[outside] = step(result[outside])
    return result.astype(np.int64)


def _feistel(values: Words, half: int, keys: list[int]) -> Words:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + np.uint64(key)) & mask)
    return (left << shift) | right


def shuffled_rows(num_rows: int, key: int) -> Indices:
    """A keyed permutation of ``range(num_rows)``: row numbers sorted by a 64-bit mix of each."""
    numbers = np.arange(num_rows, dtype=np.uint64) * _GOLDEN + np.uint64(key & MASK)
    return np.argsort(mix(numbers)).astype(np.int64, copy=False)  # no two are equal: every sort gives the same
