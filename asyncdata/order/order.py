"""The settings that choose the canonical order D, and D itself: which rows come when, computed from (seed, epoch,
position) and from nothing else.

An epoch permutes the blocks of all files, cuts them into equal windows, and permutes the rows of each window. Both
permutations are keyed and stateless, so any position is reached at once and no generator's state is ever saved.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from asyncdata.core.types import Position


_MAX_OVERREAD_BYTES = 16 * 1024
_MAX_WINDOW_BYTES = 1 << 30


class Shuffle(Description, frozen=True, kw_only=True):
    """How rows are mixed. Every field is part of the order: changing one makes another D.

    :ivar enabled: False reads the rows as they lie, block after block.
    :ivar block_bytes: files are cut into blocks of this size; the rows of one block stay neighbours until the window
        mixes them.
    :ivar window_blocks: at most this many blocks are held and mixed together. With topics in long runs, the variance of
        a batch's mean is ``1 + (batch - 1) / window_blocks`` times the variance of independent rows.
    """

    enabled: bool = True
    block_bytes: int = 32 * 1024
    window_blocks: int = 1024

    def check(self) -> None:
        """Whether a window of such blocks can be held."""
        for name in ("block_bytes", "window_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

        # With each block goes an over-read; offsets in a window are int32.
        if (self.block_bytes + _MAX_OVERREAD_BYTES) * self.window_blocks > _MAX_WINDOW_BYTES:
            raise ConfigError(
                f"a window of {self.window_blocks} blocks of {self.block_bytes} bytes takes more than "
                "1 GiB with what is read beyond them; lower block_bytes or window_blocks"
            )


class RowShuffle(Description, frozen=True, kw_only=True):
    """An order of all rows, one by one. It needs the row index, which a pass over the data makes.

    :ivar method: ``keyed``, an exact permutation of all rows, by a key for each epoch; ``slime``, the permutation of
        slime's own dataset, ``random.Random(seed + epoch).shuffle``; ``none``, as they lie.
    :ivar first: only rows from here on, as in a slice of a list: negative numbers count from the end. Rows that are no
        JSON object have no number.
    :ivar stop: only rows before this one; a negative number counts from the end.
    :ivar only_kept: rows that yield no sample are left out before they are ordered, so that an epoch has a known number
        of samples. The pass over the data tokenizes it then.
    :ivar part: only the rows of one part of a split, of all that are left by then; None: of both. As in
        ``torch.utils.data.random_split``, ``torch.randperm`` of ``split_seed`` says which rows are in which part. They
        are known when all rows are.
    :ivar train_ratio: the share of rows in ``train``, rounded down to a row; ``eval`` has the others.
    :ivar split_seed: another seed is another split. It is not the order's seed.
    :raises ConfigError: for another part, or a ratio outside 0 to 1.
    """

    method: Literal["keyed", "slime", "none"] = "keyed"
    first: int | None = None
    stop: int | None = None
    only_kept: bool = False
    part: Literal["train", "eval"] | None = None
    train_ratio: float = 0.9
    split_seed: int = 42

    def check(self) -> None:
        """Whether there is such a split."""
        if not 0 <= self.train_ratio <= 1:
            raise ConfigError(f"train_ratio must be from 0 to 1, got {self.train_ratio}")

    @property
    def looks_at(self) -> str:
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


# The order

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

    A Feistel network that walks cycles (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); its
    round function, and the key by which rows are sorted, is the finaliser of splitmix64.
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


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one of several ranks tokenizes, where all ranks read the same D: its own, so that no row is tokenized twice.

    The rows of other ranks keep their places in D, as samples of no tokens. So positions, counters and numbers are
    those of all ranks together, and a snapshot of any of them fits every other, also with another number of ranks.

    What is dealt out is single rows, or, where packs are planned, packs. Of any ``world_size * n`` of them in a row,
    each rank has ``n``. Those that fill no batch of all ranks, at an epoch's end, are every rank's: the batch may be
    filled by repeating any of them.

    :ivar batch_size: how many of them each rank has in a batch.
    :raises ConfigError: for a rank that there is not.
    """

    rank: int
    world_size: int
    batch_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"there is no rank {self.rank} among {self.world_size}: ranks are counted from 0")

    @property
    def global_batch(self) -> int:
        """How many all ranks together have in a batch."""
        return self.world_size * self.batch_size

    def owns(self, numbers: Any, first: int, stop: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which of the rows or packs so numbered are this rank's; any shape, int64, negative numbers as well.

        :param first: where the epoch's first batch begins.
        :param stop: one more than the epoch's last row or pack.
        """
        left = first + (stop - first) // self.global_batch * self.global_batch
        numbers = np.asarray(numbers)
        owned: np.ndarray[Any, np.dtype[np.bool_]] = (numbers % self.world_size == self.rank) | (numbers >= left)
        return owned


def row_of_epoch(position: Position) -> int:
    """The row at ``position``, counted from the start of its epoch; of orders of single rows."""
    return position.window * ROWS_PER_WINDOW + position.row
