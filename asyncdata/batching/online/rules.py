"""The settings by which packs are made, ordered, and divided among the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from asyncdata.batching.length_grouping import LengthGrouping
    from asyncdata.batching.online.progress import WindowStart
    from asyncdata.batching.packers.base import Pack, Packing

__all__ = ("PackRules",)


class PackRules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings by which packs are made, ordered, and divided among the ranks.

    :ivar grouping: how packs are ordered; None: in the order in which they are closed.
    :ivar batch_size: packs of each rank in a batch.
    :ivar accumulation: batches of each rank in an optimizer step, which the grouping balances.
    """

    packing: Packing
    grouping: LengthGrouping | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    batch_size: int = 1
    accumulation: int = 1

    @property
    def global_batch(self) -> int:
        """Packs of all ranks in a batch."""
        return self.world_size * self.batch_size

    @property
    def across_epochs(self) -> bool:
        """Whether packs may hold samples of two epochs."""
        return self.packing.across_epochs and (self.grouping is None or self.grouping.method != "xtuner")

    def description(self) -> dict[str, Any]:
        """The settings that a snapshot must have, too, as builtins."""
        settings = {"packing": self.packing, "length_grouping": self.grouping}
        found: dict[str, Any] = {}
        for name, value in settings.items():
            if value is not None:
                fields = msgspec.to_builtins(value)
                found |= {name: type(value).__name__, **{f"{name}.{field}": fields[field] for field in fields}}
        return found

    def window_size(self, window: WindowStart) -> int | None:
        """The number of packs of the window; None: all packs of the epoch."""
        if self.grouping is None:
            return None

        steps = self.grouping.steps_of_window(window.window, window.accumulation)
        return None if steps is None else steps * window.world_size * window.accumulation

    def ordered(self, packs: list[Pack], window: WindowStart) -> list[Pack]:
        """The window's packs, in the order of delivery."""
        if self.grouping is None:
            return packs

        first_place = packs[0][0][0]
        costs = [self.grouping.cost([stop - start for _, start, stop in pack]) for pack in packs]
        order = self.grouping.order(
            costs,
            world_size=window.world_size,
            accumulation=window.accumulation,
            seed=self.seed,
            epoch=first_place[0] if self.grouping.method == "xtuner" else 0,
            window=window.window,
        )
        return [packs[number] for number in order.tolist()]
