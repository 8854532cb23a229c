"""The finaliser of splitmix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014)."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ("GOLDEN", "MASK", "Words", "mix", "mix_one")

Words = np.ndarray[Any, np.dtype[np.uint64]]

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: numbers that follow one another lie far apart once they are multiplied by it."""

_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD_1, _WORD_2 = np.uint64(_MIX_1), np.uint64(_MIX_2)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


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
