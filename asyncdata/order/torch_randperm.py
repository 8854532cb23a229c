"""``torch.randperm`` without torch, for plans that must be those of another program.

A CPU ``torch.Generator`` is the Mersenne Twister (M. Matsumoto, T. Nishimura, 1998) seeded with the low 32 bits of its
seed, as numpy's ``RandomState`` is; both streams are frozen. ``randperm`` is a Fisher-Yates shuffle that draws one word
for each place but the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncdata.core.errors import ConfigError

__all__ = ("TorchGenerator",)

# From here on torch draws two words for each place.
_MAX_SIZE = (1 << 32) // 20


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
