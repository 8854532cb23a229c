"""The canonical order D: which rows come when, computed from (seed, epoch, position) and from nothing else.

An epoch permutes the blocks of all files, cuts them into equal windows, and permutes the rows of each window. Both
permutations are keyed and stateless, so any position is reached at once and no generator's state is ever saved.

The block permutation is a Feistel network with cycle walking (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002); its round function, and the key by which rows are sorted, is the finaliser of splitmix64
(:mod:`asyncdata.order.splitmix`).
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.order.splitmix import GOLDEN, MASK, Words, mix

__all__ = (
    "ROWS_PER_WINDOW",
    "Order",
    "RowOrder",
    "RowShuffle",
    "Shuffle",
    "feistel_permutation",
    "order_keys",
    "shuffled_rows",
)

ROWS_PER_WINDOW = 1 << 16
"""Rows of a window where rows are ordered one by one. It is part of every position, so it never changes."""

_ROUNDS = 6
_MAX_OVERREAD_BYTES = 16 * 1024
_MAX_WINDOW_BYTES = 1 << 30
_GOLDEN = np.uint64(GOLDEN)

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Shuffle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows are mixed. Every field is part of the order: changing one makes another D.

    :ivar enabled: False reads the rows as they lie, block after block.
    :ivar block_bytes: files are cut into blocks of this size; the rows of one block stay neighbours until the window
        mixes them.
    :ivar window_blocks: at most this many blocks are held and mixed together. With topics in long runs, the variance of
        a batch's mean is ``1 + (batch - 1) / window_blocks`` times that of independent rows.
    """

    enabled: bool = True
    block_bytes: int = 32 * 1024
    window_blocks: int = 1024

    def __post_init__(self) -> None:
        for name in ("block_bytes", "window_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

        # With each block goes an over-read; offsets in a window are int32.
        if (self.block_bytes + _MAX_OVERREAD_BYTES) * self.window_blocks > _MAX_WINDOW_BYTES:
            raise ConfigError(
                f"a window of {self.window_blocks} blocks of {self.block_bytes} bytes takes more than "
                "1 GiB with what is read beyond them; lower block_bytes or window_blocks"
            )


class Order:
    """D for one seed over ``num_blocks`` blocks.

    :param block_bytes: what a block has on average, where that is more than was asked for: a window keeps its size, and
        has fewer blocks.
    :raises ConfigError: if there is no block.
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


class RowShuffle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An order of all rows, one by one. It needs the row index, which a pass over the data makes.

    :ivar method: ``keyed``, an exact permutation of all rows, by a key for each epoch; ``slime``, the permutation of
        slime's own dataset, ``random.Random(seed + epoch).shuffle``; ``none``, as they lie.
    :ivar first: only rows from here on, as in a slice of a list: negative numbers count from the end. Rows that are no
        JSON object have no number.
    :ivar stop: only rows before this one, likewise.
    :ivar only_kept: rows that yield no sample are left out before they are ordered, so that an epoch has a known number
        of samples. The pass over the data tokenizes it then.
    :ivar part: only the rows of one part of a split, of all that are left by then; None: of both. As in
        ``torch.utils.data.random_split``, ``torch.randperm`` of ``split_seed`` says which rows are in which part. They
        are known when all rows are.
    :ivar train_ratio: the share of rows in ``train``, rounded down to a row; ``eval`` has the others.
    :ivar split_seed: another seed is another split. It is not that of the order.
    :raises ConfigError: for another part, or a ratio outside 0 to 1.
    """

    method: Literal["keyed", "slime", "none"] = "keyed"
    first: int | None = None
    stop: int | None = None
    only_kept: bool = False
    part: Literal["train", "eval"] | None = None
    train_ratio: float = 0.9
    split_seed: int = 42

    def __post_init__(self) -> None:
        if self.part not in (None, "train", "eval"):
            raise ConfigError(f"part must be 'train', 'eval' or None, got {self.part!r}")

        if not 0 <= self.train_ratio <= 1:
            raise ConfigError(f"train_ratio must be from 0 to 1, got {self.train_ratio}")

    @property
    def check(self) -> str:
        """How far rows are looked at while they are indexed: ``none``, ``json`` or ``samples``."""
        if self.only_kept:
            return "samples"

        return "none" if self.first is None and self.stop is None else "json"

    @property
    def grows(self) -> bool:
        """Whether the first rows are known before the last ones are."""
        return self.method == "none" and self.part is None and min(self.first or 0, self.stop or 0) >= 0

    def description(self) -> dict[str, Any]:
        """What an order says of it, as builtins. Without a part nothing follows from how one would be made."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        split = ("part", "train_ratio", "split_seed")
        return {name: value for name, value in fields.items() if self.part is not None or name not in split}


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
    result = _feistel(ids.astype(np.uint64), half, keys)
    while len(outside := np.flatnonzero(result >= size)):
        result[outside] = _feistel(result[outside], half, keys)
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
