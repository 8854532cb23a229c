"""What the batches of all kinds need: the deliveries, this rank's share of a batch, and totals for the statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from asyncdata.batching.packers.base import Counts
from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.delivery.ledger import Ledger
    from asyncdata.delivery.requests import Request
    from asyncdata.loader.config import LoaderConfig

__all__ = ("NO_PACKS", "BatchShare", "Deliveries", "PackTotals", "share_of_batch")


class Deliveries(Protocol):
    """The coordinator, as far as batches need it."""

    @property
    def ledger(self) -> Ledger:
        """What was delivered so far."""
        ...

    def commit(self, request: Request, packs: object) -> bool:
        """Commit what ``request`` was served, with the progress of packing; False if the state has changed since."""
        ...


class PackTotals(NamedTuple):
    """What the statistics say about packs.

    :ivar num_packs: packs delivered to all ranks.
    :ivar num_tokens: their tokens.
    :ivar counts: samples and tokens that are in no pack.
    :ivar num_held: samples in memory, as they wait to be packed or delivered.
    """

    num_packs: int
    num_tokens: int
    counts: Counts
    num_held: int = 0


NO_PACKS = PackTotals(0, 0, Counts())


class BatchShare(NamedTuple):
    """One rank's part of a batch of all ranks: every ``world_size``-th item, from ``rank`` on.

    :ivar size: items of the batch of all ranks.
    """

    rank: int
    world_size: int
    size: int
    rounds_up: bool

    def of(self, num_items: int) -> Sequence[int]:
        """This rank's items of ``num_items``. With ``rounds_up``, items are repeated to fill a batch of ``size``."""
        if num_items < self.size and num_items and self.rounds_up:
            return [number % num_items for number in range(self.rank, self.size, self.world_size)]

        return range(self.rank, num_items, self.world_size)


def share_of_batch(config: LoaderConfig) -> BatchShare:
    """This rank's part of a batch of all ranks: groups of samples, or packs.

    :raises ConfigError: if the configuration has no batch size.
    """
    if config.batch_size is None:
        raise ConfigError("iterating needs batch_size=...; or call get_next_batch(n)")

    size = config.batch_size // config.n_samples_per_prompt * config.ranks.world_size
    return BatchShare(config.ranks.rank, config.ranks.world_size, size, config.ranks.rounds_up)
