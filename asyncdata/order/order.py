"""The canonical order D: which rows come when, computed from (seed, epoch, position) and from nothing else.

An epoch permutes the blocks of all files, cuts them into equal windows, and permutes the rows of each window. Both
permutations are keyed and stateless (:mod:`asyncdata.order.permutation`), so any position is reached at once and no
generator's state is ever saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.order.permutation import Indices, feistel_permutation, order_keys, shuffled_rows

if TYPE_CHECKING:
    from asyncdata.order.shuffle import RowShuffle, Shuffle

ROWS_PER_WINDOW = 1 << 16
"""Rows of a window where rows are ordered one by one. It is part of every position, so it never changes."""


class Order:
    """D for one seed over ``num_blocks`` blocks.

    :param block_bytes: what a block has on average, where that is more than was asked for: a window keeps its size, and
        has fewer blocks.
    :raises ConfigError: if there are no blocks.
    """

    def __init__(self, shuffle: Shuffle, seed: int, num_blocks: int, block_bytes: int = 0) -> None:
        if num_blocks < 1:
            raise ConfigError("an order needs at least one block")

        self.shuffle = shuffle
        self.seed = seed
        self.num_blocks = num_blocks
        num_bytes = num_blocks * max(block_bytes, shuffle.block_bytes)
        self.num_windows = min(num_blocks, -(-num_bytes // (shuffle.block_bytes * shuffle.window_blocks)))

    @property
    def max_window_blocks(self) -> int:
        """Blocks in the largest window. Windows differ by one block at most: a short last one would mix badly."""
        return -(-self.num_blocks // self.num_windows)

    def blocks(self, epoch: int, window: int) -> Indices:
        """The blocks of ``window``, int64 of shape (num_blocks_of_window,), in their order."""
        start = window * self.num_blocks // self.num_windows
        stop = (window + 1) * self.num_blocks // self.num_windows
        ids = np.arange(start, stop, dtype=np.int64)
        return feistel_permutation(ids, self.num_blocks, self._keys(epoch, "blocks")) if self.shuffle.enabled else ids

    def rows(self, epoch: int, window: int, num_rows: int) -> Indices:
        """The window's rows, numbered as its blocks hold them, in the order of delivery: int64 of shape (num_rows,)."""
        if not self.shuffle.enabled:
            return np.arange(num_rows, dtype=np.int64)

        return shuffled_rows(num_rows, self._keys(epoch, f"rows {window}")[0])

    def description(self) -> dict[str, Any]:
        """What a snapshot must agree with, as builtins."""
        return {"seed": self.seed, **msgspec.to_builtins(self.shuffle), "num_blocks": self.num_blocks}

    def _keys(self, epoch: int, stream: str) -> list[int]:
        return order_keys(self.seed, epoch, stream)


class RowOrder:
    """D for one seed over rows that are numbered from 0. How many there are is told when it is known."""

    def __init__(self, shuffle: RowShuffle, seed: int) -> None:
        self.shuffle = shuffle
        self.seed = seed

    def rows(self, epoch: int, window: int, num_rows: int) -> Indices:
        """The rows of a window, int64 of shape (num_rows_of_window,); not for the ``slime`` method."""
        start = window * ROWS_PER_WINDOW
        ids = np.arange(start, min(start + ROWS_PER_WINDOW, num_rows), dtype=np.int64)
        if self.shuffle.method == "none":
            return ids

        return feistel_permutation(ids, num_rows, order_keys(self.seed, epoch, "all rows"))

    def description(self) -> dict[str, Any]:
        """What a snapshot must agree with, as builtins."""
        return {"seed": self.seed, "shuffle": "rows", **self.shuffle.description()}
