"""Keyed permutations without state: of numbers by a Feistel network, of rows by sorted keys.

The network walks cycles (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); its round function,
and the key by which rows are sorted, is the finaliser of splitmix64 (:mod:`asyncdata.order.splitmix`).
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.order.splitmix import GOLDEN, MASK, Words, mix

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("feistel_permutation", "order_keys", "shuffled_rows")


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
