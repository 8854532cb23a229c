"""What was delivered, as one immutable value: replacing it is the commit, and keeping the old one is the rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.types import Group, Position
from asyncdata.delivery.stream_digest import StreamDigest

if TYPE_CHECKING:
    from collections.abc import Iterable, Set
    from typing import Self

    from asyncdata.core.types import Sample

__all__ = ("Counters", "Lease", "Ledger", "Returned", "lease_key")


class Returned(msgspec.Struct, frozen=True, eq=False):
    """A group that the trainer gave back, and the builtins that a snapshot keeps of it."""

    group: Group
    record: list[dict[str, Any]]


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What was delivered from the stream so far, in this run and the runs it resumed.

    :ivar num_groups: groups of the stream; also the next ``group_index``.
    :ivar num_samples: samples of the stream; also the next ``index``.
    :ivar num_tokens: their tokens; a group's prompt counts once.
    :ivar num_bad_rows: bad rows that were passed over.
    :ivar drops: rows that yielded no sample, by reason; bad rows are there as ``bad row <code>``.
    :ivar epoch_groups: groups of the present epoch.
    :ivar epoch_drops: drops of the present epoch.
    :ivar notes: rows that were kept and noted by the tokenize function, by name.
    :ivar digest: which samples those were, in which order, of which tokens.
    """

    num_groups: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_bad_rows: int = 0
    drops: dict[str, int] = {}
    epoch_groups: int = 0
    epoch_drops: dict[str, int] = {}
    notes: dict[str, int] = {}
    digest: StreamDigest = StreamDigest()

    @classmethod
    def restored(cls, saved: dict[str, Any], of: str) -> Self:
        """Those of a snapshot; where it has no digest yet, one begins here.

        :param of: what the digest is of from now on.
        """
        counters = msgspec.convert(saved, cls)
        digest = counters.digest if "digest" in saved else StreamDigest(of, first=counters.num_groups)
        return msgspec.structs.replace(counters, digest=digest.resumed(of))


class Lease(msgspec.Struct, frozen=True, eq=False):
    """A request that was served under ``commit="on_ack"`` and is not wholly acknowledged.

    :ivar position: the ledger's position before the request.
    :ivar counters: its counters before the request.
    :ivar open: groups not acknowledged: :func:`lease_key`, and the position of a group of the stream, or a group from
        the buffer, which D cannot make again, itself. Copies that a trainer made of a group have the same key.
    :ivar acked: positions of the stream's groups that are acknowledged.
    """

    position: Position
    counters: Counters
    open: tuple[tuple[int, Position | Returned], ...]
    acked: frozenset[Position] = frozenset()

    def without(self, keys: Set[int]) -> Lease:
        """This lease with ``keys`` acknowledged."""
        left = tuple(item for item in self.open if item[0] not in keys)
        if len(left) == len(self.open):
            return self

        places = [owed for key, owed in self.open if key in keys and isinstance(owed, Position)]
        return Lease(self.position, self.counters, left, self.acked.union(places))


class Ledger(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The state of delivery. ``head``, ``offset`` and ``taken`` point into the channel; the rest is in the snapshot.

    :ivar position: the first row of D that is not delivered.
    :ivar buffer: groups that the trainer gave back, the oldest first.
    :ivar leases: requests waiting for an acknowledgement, the oldest first.
    :ivar acked: positions from ``position`` on that were acknowledged before a restart.
    :ivar journal: rows (file number, byte offset) given up for good because they kill workers.
    :ivar head: number of the channel's next segment.
    :ivar offset: samples of it that are delivered.
    :ivar taken: samples taken from this channel.
    """

    position: Position = Position()
    counters: Counters = Counters()
    buffer: tuple[Returned, ...] = ()
    leases: tuple[Lease, ...] = ()
    acked: frozenset[Position] = frozenset()
    journal: frozenset[tuple[int, int]] = frozenset()
    head: int = 0
    offset: int = 0
    taken: int = 0

    def with_returned(self, returned: Iterable[Returned]) -> Ledger:
        """The ledger after the trainer gave groups back: they are at the buffer's end, and no lease holds them."""
        returned = tuple(returned)
        ledger = self.acknowledged(lease_key(item.group) for item in returned) if self.leases else self
        return msgspec.structs.replace(ledger, buffer=self.buffer + returned)

    def with_lease(self, before: Ledger, chosen: list[Returned], samples: list[Sample], group_size: int) -> Ledger:
        """The ledger with a lease on all that a request was served.

        :param before: the ledger before the request.
        :param chosen: groups from the buffer.
        :param samples: those of ``chosen``, and then those of the stream.
        """
        leased: list[tuple[int, Position | Returned]] = [(lease_key(item.group), item) for item in chosen]
        firsts = samples[len(chosen) * group_size :: group_size]
        leased += [(lease_key([sample]), sample.position) for sample in firsts if sample.position is not None]
        lease = Lease(before.position, before.counters, tuple(leased))
        return msgspec.structs.replace(self, leases=(*self.leases, lease))

    def acknowledged(self, keys: Iterable[int] | None) -> Ledger:
        """The ledger after the groups of ``keys`` (None: all) are done with."""
        if keys is None:
            return msgspec.structs.replace(self, leases=())

        wanted = set(keys)
        leases = [lease.without(wanted) for lease in self.leases]
        while leases and not leases[0].open:
            del leases[0]
        return msgspec.structs.replace(self, leases=tuple(leases))

    def restart_point(self) -> tuple[Position, Counters, frozenset[Position]]:
        """Where a restart goes on: before the oldest request that is not wholly acknowledged, or at the position."""
        start = self.leases[0] if self.leases else self
        acked = self.acked.union(*(lease.acked for lease in self.leases))
        return start.position, start.counters, frozenset(place for place in acked if place >= start.position)

    def at_epoch(self, epoch: int) -> Ledger:
        """The ledger at the start of ``epoch``; only groups from the buffer are still leased."""
        position = Position(epoch)
        counters = msgspec.structs.replace(self.counters, epoch_groups=0, epoch_drops={})
        leased = tuple((lease_key(item.group), item) for item in self.leased_groups())
        leases = (Lease(position, counters, leased),) if leased else ()
        return msgspec.structs.replace(self, position=position, counters=counters, leases=leases, acked=frozenset())

    def leased_groups(self) -> list[Returned]:
        """Groups served from the buffer and not acknowledged, in order: D cannot make them again."""
        return [owed for lease in self.leases for _, owed in lease.open if not isinstance(owed, Position)]


def lease_key(group: Group) -> int:
    """What names a group, in whatever list it comes: its index, or, if it has none, its first sample's identity."""
    index = group[0].group_index
    return -1 - id(group[0]) if index is None else index
