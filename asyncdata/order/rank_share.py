"""Which rows a rank tokenizes, where all ranks read the same D: its own, so that no row is tokenized twice.

The rows of other ranks keep their places in D, as samples of no tokens. So positions, counters and numbers are those of
all ranks together, and a snapshot of any of them fits every other, also with another number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.order.order import ROWS_PER_WINDOW

if TYPE_CHECKING:
    from asyncdata.core.types import Position


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one of several ranks tokenizes.

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
