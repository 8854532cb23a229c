"""What was delivered, as one immutable value, and the requests that replace it.

Replacing the ledger is the commit; putting the old one back is the rollback.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import msgspec
from msgspec import structs

from asyncdata.core.errors import ConfigError, InvalidGroupError, SnapshotError
from asyncdata.core.messages import EXCLUDED_REASON
from asyncdata.core.plain_values import unpacked
from asyncdata.core.threads import no_op
from asyncdata.core.types import FINISHED, Group, Position, Sample
from asyncdata.delivery.bad_rows import BadRowPolicy
from asyncdata.delivery.chunk import BadRow, StreamDigest

if TYPE_CHECKING:
    from asyncdata.delivery.items import Run

    Choose = Callable[[Sequence["Returned"], int], list["Returned"]]
    IsOf = Callable[[Group, Mapping["RowKey", Position]], object]

_FILE_BITS, _SMALL_BYTES = 24, 4096
AT_END = "the data is at its end"
"""So begins why a request is held that may wait for ever."""
RowKey = tuple[int, int]
"""The number of a row's file, in a mixture with its part, and the row's offset there."""
GroupFile = tuple[str, int, str]
"""The part, the number and the path of a file that a group is of."""


def grouped(items: Iterable[Sample] | Iterable[Group], call: str) -> list[Group]:
    """The samples or groups that a call was given, each as a group.

    :raises InvalidGroupError: AD409, for anything else.
    """
    listed = None if isinstance(items, str | Sample | Mapping) or not isinstance(items, Iterable) else list(items)
    groups: list[Any] = [[item] if isinstance(item, Sample) else item for item in listed or ()]
    if listed is None or not all(_is_group(group) for group in groups):
        what = items if listed is None else next(group for group in groups if not _is_group(group))
        raise InvalidGroupError(
            f"AD409 {call}() takes a list of groups or of samples, as they were delivered; got "
            f"{'' if listed is None else 'one with '}{type(what).__name__}; of one sample it is {call}([sample])"
        )

    return groups


def not_out(call: str, group_index: int | None) -> ConfigError:
    """The error for a group that is not out, and so cannot be consumed."""
    number = "without a number" if group_index is None or group_index < 0 else group_index
    return ConfigError(
        f"AD437 {call} takes a group that get_samples returned, once: group {number} was not served, or was consumed, "
        "dropped or given back, or was served before groups were tracked"
    )


def not_tracked(call: str) -> ConfigError:
    """The error where groups are not tracked."""
    return ConfigError(f"AD437 groups are not tracked: call {call}() before the first group is served")


def counted(drops: Mapping[str, int], reason: str, number: int) -> dict[str, int]:
    """The drops after ``number`` more for this reason."""
    return {**drops, reason: drops.get(reason, 0) + number} if number else dict(drops)


def _is_group(group: Any) -> bool:
    return isinstance(group, Sequence) and all(isinstance(sample, Sample) for sample in group)


class Returned(msgspec.Struct, eq=False, gc=False):
    """A group that the trainer gave back, and its record for the snapshot.

    :ivar opened: the group; None: it was restored, and was not needed yet.
    :ivar kept: its samples as builtins; or packed, as bytes or as their base64 text.
    :ivar finished: what ``is_finished`` has found.
    """

    opened: Group | None
    kept: bytes | str | list[dict[str, Any]]
    finished: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.kept, bytes) and len(self.kept) < _SMALL_BYTES:
            self.kept = self.record  # so that a state of very many groups has nothing to do

    @property
    def group(self) -> Group:
        """The group.

        :raises SnapshotError: if a snapshot had something else.
        """
        if self.opened is None:
            try:
                self.opened = [Sample.from_dict(values) for values in unpacked(self.kept)]
            except Exception as error:  # a crafted value may make the decoder of arrays raise anything
                raise SnapshotError(f"AD602 a group in the snapshot's buffer cannot be read: {error!r}") from error

        return self.opened

    @property
    def is_finished(self) -> bool:
        """Whether each response has come to its end. The group does not change while it is here."""
        if self.finished is None:
            self.finished = all(sample.status in FINISHED for sample in self.group)
        return self.finished

    @property
    def record(self) -> str | list[dict[str, Any]]:
        """What JSON can hold."""
        if isinstance(self.kept, bytes):
            self.kept = b2a_base64(self.kept, newline=False).decode("ascii")
        return self.kept


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What was delivered from the stream so far, in this run and in the runs that it resumed.

    :ivar num_groups: groups of the stream; also the next ``group_index``.
    :ivar num_samples: samples of the stream; also the next ``index``.
    :ivar num_tokens: their tokens; a group's prompt counts once.
    :ivar num_bad_rows: bad rows that were passed over.
    :ivar drops: rows that yielded no sample, by reason; bad rows are counted as ``bad row <code>``.
    :ivar epoch_groups: groups of the current epoch.
    :ivar epoch_drops: drops of the current epoch.
    :ivar notes: rows that were kept and noted by the tokenize function, by name.
    :ivar digest: of the delivered samples: their positions, their order and their tokens.
    :ivar mixture: how far each part of a mixture was delivered: a
        :class:`~asyncdata.delivery.mixture.MixturePoint`, which a snapshot resolves. None for a single source.
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
    mixture: Any = None

    def dropping(self, reason: str, number: int) -> Counters:
        """After so many drops more."""
        return structs.replace(self, drops=counted(self.drops, reason, number))

    def saved(self) -> dict[str, Any]:
        """What a snapshot keeps of them, as builtins; it keeps the mixture elsewhere."""
        fields: dict[str, Any] = msgspec.to_builtins(structs.replace(self, mixture=None))
        del fields["mixture"]
        return fields


class RestartPoint(NamedTuple):
    """Where D is read from after a restart, and what was counted before it."""

    position: Position = Position()
    counters: Counters = Counters()


class Lease(msgspec.Struct, frozen=True, eq=False):
    """A request that was served under ``commit="on_ack"`` and is not fully acknowledged.

    :ivar position: the ledger's position before the request.
    :ivar counters: the ledger's counters before the request.
    :ivar open: the groups that are not acknowledged: pairs of :func:`lease_key`, and the position of a group of the
        stream, or the group itself if it came from the buffer, as D cannot make it again; None if it is excluded. A
        copy of a group has the same key.
    :ivar acked: positions of the stream's groups that are acknowledged.
    """

    position: Position
    counters: Counters
    open: tuple[tuple[int, Position | Returned | None], ...]
    acked: frozenset[Position] = frozenset()

    def without(self, keys: Set[int]) -> Lease:
        """This lease with ``keys`` acknowledged."""
        left = tuple(item for item in self.open if item[0] not in keys)
        if len(left) == len(self.open):
            return self

        places = [owed for key, owed in self.open if key in keys and isinstance(owed, Position)]
        return Lease(self.position, self.counters, left, self.acked.union(places))


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How far the stream was ever served, in this run and in those that it resumed. A restart may begin before it.

    :ivar num_groups: as in :class:`Counters`; ``num_samples``: as well.
    :ivar positions: of each part of a mixture, or of the only source, the first row that was never delivered.
    """

    num_groups: int = 0
    num_samples: int = 0
    positions: dict[str, Position] = {}


class Ledger(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The state of delivery. ``head``, ``offset`` and ``taken`` point into the channel; the rest is in the snapshot.

    If samples are packed, ``packs`` changes in the same commit as ``position``: there is no state in between, in which
    samples were taken from the stream and are in no pack.

    :ivar position: the first row of D that is not delivered.
    :ivar buffer: groups that the trainer gave back, oldest first.
    :ivar leases: requests that wait for an acknowledgement, oldest first.
    :ivar acked: positions from ``position`` on that were acknowledged before a restart.
    :ivar journal: rows (file number, byte offset) that are always skipped, because they kill workers.
    :ivar group_drops: tracked groups that the trainer has dropped, by reason; and groups that were given back, and
        their row is excluded.
    :ivar excluded: rows, named in the same way, that the run continues without: each with the first place in the order
        of its source that was not served yet when it was excluded. Before that, the row may have been a group: it is
        not delivered again, and keeps its number. From there on it is left out.
    :ivar group_files: the files that groups in ``buffer`` and ``leases`` are of: the part, the number, and the path.
    :ivar served: what was served before a restart; see :meth:`reached`.
    :ivar rollouts: whether groups are tracked, and which are too old, a value of ``delivery.rollouts``; None: neither.
    :ivar packs: the progress of packing, an immutable value of ``asyncdata.batching``; None if nothing is packed.
    :ivar head: number of the channel's next item.
    :ivar offset: samples of that item that are delivered.
    :ivar taken: samples taken from this channel.
    """

    position: Position = Position()
    counters: Counters = Counters()
    buffer: tuple[Returned, ...] = ()
    leases: tuple[Lease, ...] = ()
    acked: frozenset[Position] = frozenset()
    journal: frozenset[tuple[int, int]] = frozenset()
    group_drops: dict[str, int] = {}
    excluded: dict[RowKey, Position] = {}
    group_files: frozenset[GroupFile] = frozenset()
    served: Served = Served()
    rollouts: Any = None
    packs: Any = None
    head: int = 0
    offset: int = 0
    taken: int = 0

    def with_returned(self, returned: Sequence[Returned], is_of: IsOf = no_op) -> Ledger:
        """The ledger with groups that the trainer gave back: at the buffer's end, and acknowledged in all leases.

        :param is_of: whether a group is of one of these rows. Groups of excluded rows are dropped, and counted.
        """
        kept = tuple(item for item in returned if not (self.excluded and is_of(item.group, self.excluded)))
        ledger = self.acknowledged(lease_key(item.group) for item in returned) if self.leases else self
        drops = counted(self.group_drops, EXCLUDED_REASON, len(returned) - len(kept))
        return structs.replace(ledger, buffer=self.buffer + kept, group_drops=drops)

    def without(self, excluded: Mapping[RowKey, Position], is_of: IsOf) -> Ledger:
        """The ledger that excludes these rows. Their groups that are out stay out, and no restart serves them again.

        :param is_of: whether a group is of one of these rows.
        """
        gone = {id(item) for item in self.leased_groups() if is_of(item.group, excluded)}
        left = [tuple((key, None if id(owed) in gone else owed) for key, owed in lease.open) for lease in self.leases]
        leases = [structs.replace(lease, open=groups) for lease, groups in zip(self.leases, left, strict=True)]
        ledger = structs.replace(self, excluded=excluded, leases=tuple(leases), buffer=())
        return ledger.with_returned(self.buffer, is_of)

    def reached(self, places: Mapping[str, Position]) -> Served:
        """How far the stream was ever served.

        :param places: how far the parts are delivered now.
        """
        served, counters = self.served, self.counters
        before = served.positions
        return Served(
            num_groups=max(served.num_groups, counters.num_groups),
            num_samples=max(served.num_samples, counters.num_samples),
            positions={name: max(place, before.get(name, place)) for name, place in places.items()},
        )

    def with_lease(self, before: Ledger, chosen: list[Returned], samples: list[Sample], group_size: int) -> Ledger:
        """The ledger with a lease on all groups that a request was served.

        :param before: the ledger before the request.
        :param chosen: groups from the buffer.
        :param samples: the samples of ``chosen``, and then the stream's.
        """
        leased: list[tuple[int, Position | Returned]] = [(lease_key(item.group), item) for item in chosen]
        firsts = samples[len(chosen) * group_size :: group_size]
        leased += [(lease_key([sample]), sample.position) for sample in firsts if sample.position is not None]
        lease = Lease(before.position, before.counters, tuple(leased))
        return structs.replace(self, leases=(*self.leases, lease))

    def acknowledged(self, keys: Iterable[int] | None) -> Ledger:
        """The ledger after the groups of ``keys`` (None: all) are acknowledged."""
        if keys is None:
            return structs.replace(self, leases=())

        wanted = set(keys)
        leases = [lease.without(wanted) for lease in self.leases]
        while leases and not leases[0].open:
            del leases[0]
        return structs.replace(self, leases=tuple(leases))

    def leaving_out(self, places: Iterable[Position], reason: str, number: int) -> Ledger:
        """The ledger after samples of the stream were dropped: a restart before them does not deliver or count them."""
        counters = self.counters.dropping(reason, number)
        leases = [structs.replace(one, counters=one.counters.dropping(reason, number)) for one in self.leases]
        if leases:  # the last one stays as long as a restart begins before these places
            leases[-1] = structs.replace(leases[-1], acked=leases[-1].acked.union(places))
        return structs.replace(self, counters=counters, leases=tuple(leases))

    @property
    def num_out(self) -> int:
        """Groups that are tracked: served, and not acknowledged."""
        return sum(len(lease.open) for lease in self.leases)

    def ended(self, call: str, keys: Iterable[int], reason: str | None) -> Ledger:
        """The ledger after tracked groups are over: they are acknowledged.

        :param call: its name in errors.
        :param reason: why they were dropped, those that are out; None: they were trained, and all must be out.
        :raises ConfigError: AD437, if one of those is not.
        """
        out, wanted = {key for lease in self.leases for key, _ in lease.open}, set(keys)
        if reason is None and (missing := wanted - out):
            raise not_out(call, max(missing))

        ended = wanted & out
        drops = self.group_drops if reason is None else counted(self.group_drops, reason, len(ended))
        return structs.replace(self.acknowledged(ended), group_drops=drops)

    def settled(self) -> Ledger:
        """The ledger without what was taken for a batch of packs that is not delivered: what a snapshot is taken of."""
        before: Ledger | None = getattr(self.packs, "settled", None)
        if before is None:
            return self

        return structs.replace(self, position=before.position, counters=before.counters, packs=before.packs)

    def needed(self) -> RestartPoint:
        """Where D is read from after a restart: before the samples of packs that are not delivered, and before the
        oldest lease; or at the next sample.
        """
        ledger = self.settled()
        point: RestartPoint | None = getattr(ledger.packs, "restart_point", None)
        first = ledger.leases[0] if ledger.leases else ledger
        return point or RestartPoint(first.position, first.counters)

    def acked_from(self, position: Position) -> list[Position]:
        """The places from ``position`` on whose groups are acknowledged, in order."""
        acked = self.acked.union(*(lease.acked for lease in self.leases))
        return sorted(place for place in acked if place >= position)

    def at_epoch(self, epoch: int) -> Ledger:
        """The ledger at the start of ``epoch``. Of the leases, only groups from the buffer are kept.

        No row comes again, so numbers go on after all that were served.
        """
        position, served = Position(epoch), self.reached({})
        numbers = {"num_groups": served.num_groups, "num_samples": served.num_samples}
        counters = structs.replace(self.counters, **numbers, epoch_groups=0, epoch_drops={})
        leased = tuple((lease_key(item.group), item) for item in self.leased_groups())
        leases = (Lease(position, counters, leased),) if leased else ()
        after = structs.replace(self, position=position, counters=counters, leases=leases, acked=frozenset())
        return structs.replace(after, excluded=dict.fromkeys(self.excluded, Position()), served=served)

    def leased_groups(self) -> list[Returned]:
        """Groups that were served from the buffer and are not acknowledged, in order. D cannot make them again."""
        return [owed for lease in self.leases for _, owed in lease.open if isinstance(owed, Returned)]


def lease_key(group: Group) -> int:
    """The key of a group, which any copy of the list has too: its index, or ``id`` of its first sample (negated)."""
    index = group[0].group_index
    return -1 - id(group[0]) if index is None else index


def journal_key(source: str, key: tuple[int, int]) -> tuple[int, int]:
    """A row in the journal. Of a part of a mixture, the number of its file names the part, too."""
    file, offset = key
    return (crc32(source.encode()) << _FILE_BITS | file if source else file), offset


def key_in_part(source: str, key: tuple[int, int]) -> tuple[int, int]:
    """A row in the journal, as its part of a mixture itself names it."""
    file, offset = key
    return (file & (1 << _FILE_BITS) - 1 if source else file), offset


def is_key_of(source: str, key: tuple[int, int]) -> bool:
    """Whether a row in the journal is one of this part. Without a mixture all are of the only source."""
    return not source or key[0] >> _FILE_BITS == crc32(source.encode())


class DeliveryRules(msgspec.Struct, frozen=True, kw_only=True):
    """The loader's settings that delivery depends on; see :class:`~asyncdata.LoaderConfig`.

    :ivar leaves_gaps: whether excluded rows are left out of packs that are made, and not out of D.
    """

    capacity: int
    max_ready_bytes: int
    samples_per_group: int = 1
    epochs: int | None = None
    drop_last: bool = False
    bad_rows: BadRowPolicy = BadRowPolicy()
    commit_on_ack: bool = False
    digest: str = "positions"
    leaves_gaps: bool = False

    def last_epoch(self, wanted: int | None) -> int | None:
        """The last epoch that a request may be served from, if its caller wants none after ``wanted``."""
        if self.epochs is None or (wanted is not None and wanted < self.epochs):
            return wanted

        return self.epochs - 1


class State(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What is delivered: a ledger, and ``num_taken`` samples of ``run``, the channel item that it points to.

    So the next batch of a run costs one small object; position and counters are computed only when they are read.
    """

    ledger: Ledger
    run: Run | None = None
    num_taken: int = 0

    def without(self, samples: list[Sample], samples_per_group: int) -> State:
        """The state before ``samples`` were taken from the run; this state if other samples were taken after them."""
        ledger, run, num_taken = self.ledger, self.run, self.num_taken
        num_groups = len(samples) // samples_per_group
        if run is None or num_taken < num_groups:
            return self

        last = run.start + ledger.offset + num_taken - 1
        return State(ledger, run, num_taken - num_groups) if samples[-1].position == run.chunk.position(last) else self


class Request:
    """A caller's request for ``num_groups`` groups, kept while the caller waits.

    :param last_epoch: do not go beyond this epoch; there may be fewer groups then.
    :param is_for_packs: the caller packs the samples, and then commits the delivery together with the progress of
        packing (:meth:`~asyncdata.delivery.coordinator.Coordinator.commit`). Until then nothing is delivered.
    :param may_be_fewer: take the samples before what stops the stream, which is raised at the next call.
    :param is_peek: the caller only looks at what comes next: nothing is delivered.
    :param at_least: the caller takes fewer groups if no more are ready, but not fewer than this; None: exactly
        ``num_groups``.
    :ivar held: why it waits for the trainer, and not for data; empty: it does not.
    :ivar packed: the samples of the packs that are delivered next, if they have media: those that it waits for, and
        those whose media are loaded ahead.
    :ivar wake: called, from any thread, when the caller should poll again.
    :ivar ready_at: since when it can be served, on the monotonic clock; 0: it cannot, as far as is known.
    :ivar chosen: the groups that the buffer filter chose; they stay in the buffer until the request is served.
    :ivar served: the state before the delivery that served the request, and the ledger after it.
    :ivar passed: the bad rows that it passes over.
    :ivar commit: the states before and after the commit of that delivery, so that it can be rolled back.
    """

    __slots__ = (
        "at_least chosen commit held is_for_packs is_peek last_epoch may_be_fewer num_groups packed passed ready_at "
        "served wake"
    ).split()
    may_be_held = takes_finished = False

    def __init__(
        self,
        num_groups: int,
        last_epoch: int | None = None,
        *,
        is_for_packs: bool = False,
        may_be_fewer: bool = False,
        is_peek: bool = False,
        at_least: int | None = None,
    ) -> None:
        self.num_groups, self.at_least, self.held = num_groups, num_groups if at_least is None else at_least, ""
        self.last_epoch = last_epoch
        self.is_for_packs, self.may_be_fewer, self.is_peek = is_for_packs, may_be_fewer, is_peek
        self.packed: tuple[list[Sample], list[Sample]] | None = None
        self.wake: Callable[[], object] = no_op
        self.ready_at = 0.0
        self.chosen: list[Returned] | None = None
        self.served: tuple[State, Ledger] | None = None
        self.passed: list[BadRow] = []
        self.commit: tuple[State, State] | None = None

    def choose(self, buffer: Sequence[Returned], choose: Choose) -> list[Returned]:
        """The groups of the buffer that it is served; ``choose`` asks the buffer filter."""
        return choose(buffer, self.num_groups)

    def held_by(self, ledger: Ledger, rules: DeliveryRules) -> str:
        """Why it has to wait for the trainer now."""
        return ""

    @property
    def num_missing(self) -> int:
        """Groups of the stream without which it cannot be served."""
        return 0 if self.takes_finished else self.at_least - len(self.chosen or ())

    @property
    def before(self) -> Ledger:
        """The ledger before the delivery that served it."""
        assert self.served is not None, "it is served"
        return self.served[0].ledger

    @property
    def after(self) -> Ledger:
        """The ledger after that delivery, without the progress of packing."""
        assert self.served is not None, "it is served"
        return self.served[1]
