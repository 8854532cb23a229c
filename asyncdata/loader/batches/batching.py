"""How a loader makes batches of samples: what the engine knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import msgspec

    from asyncdata.batching.packers.base import PackState
    from asyncdata.delivery.ledger import Ledger, RestartPoint
    from asyncdata.loader.batches.base import Deliveries, PackTotals
    from asyncdata.loader.batches.pack_batches import PackBatches
    from asyncdata.loader.batches.sample_batches import SampleBatches

__all__ = ("Batching",)


class Batching(Protocol):
    """How a loader makes batches; chosen once, by :mod:`asyncdata.loader.packing_choice`.

    The implementations have no state: the progress of packing is ``ledger.packs``.

    :ivar is_packed: whether batches are made of packs. ``batches`` then returns ``PackBatches``.
    :ivar loops_only: why only a ``for`` loop may take samples; empty if other calls may.
    """

    is_packed: bool
    loops_only: str

    def description(self) -> dict[str, Any]:
        """The settings that decide which packs there are, if they are not in the source's order. As builtins."""
        ...

    def begin(self) -> Any:
        """The progress of packing before the first sample."""
        ...

    def at_epoch(self, ledger: Ledger, epoch: int) -> Ledger:
        """The ledger at the start of ``epoch``, without samples that wait to be packed."""
        ...

    def epoch(self, ledger: Ledger) -> int:
        """The epoch of the next sample, or of the next pack."""
        ...

    def totals(self, ledger: Ledger) -> PackTotals:
        """How many packs were delivered."""
        ...

    def restart_point(self, ledger: Ledger) -> RestartPoint:
        """Where D is read from after a restart."""
        ...

    def saved(self, ledger: Ledger) -> PackState | msgspec.UnsetType:
        """What a snapshot keeps of packing."""
        ...

    def restored(self, ledger: Ledger, state: PackState) -> Ledger:
        """The ledger with the progress that ``state`` was saved from.

        :raises SnapshotError: if it is not a state of this packing.
        """
        ...

    def batches(self, deliveries: Deliveries, *, runs_on: bool) -> SampleBatches | PackBatches:
        """The batches of one loop.

        :param runs_on: False: the loop covers the epoch in which it begins, even if no samples are left of it.
        """
        ...
