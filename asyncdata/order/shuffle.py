"""How rows are mixed: the settings that choose D."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

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
