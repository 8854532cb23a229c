"""The order of a replay: each epoch is a pass over rows that were chosen by their scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.order.shuffle import RowShuffle

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    Ids = np.ndarray[Any, np.dtype[np.uint64]]

__all__ = ("ReplayOrder",)


class ReplayOrder:
    """D of a replay.

    :param of: the part whose rows come again.
    :param where: the settings that choose them.
    :ivar ids_of: returns the ids of the rows of a pass, in its order; None if they are not decided yet.
    """

    shuffle = RowShuffle(method="none")

    def __init__(self, seed: int, of: str, where: Any) -> None:
        self.seed = seed
        self.ids_of: Callable[[int], Ids | None] = lambda _: None
        self._of = of
        self._where = where

    def description(self) -> dict[str, Any]:
        """What a snapshot must agree with, as builtins."""
        return {"seed": self.seed, "shuffle": "replay", "of": self._of, "where": msgspec.to_builtins(self._where)}
