"""From a snapshot to the ledger that it was taken of, or to an epoch where its place means nothing any more."""

from __future__ import annotations

from binascii import a2b_base64
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.core.log import get_logger
from asyncdata.core.settings import prepared
from asyncdata.core.types import Position
from asyncdata.delivery.ledger import Counters, Ledger, Returned, Served
from asyncdata.delivery.rollout_buffer import record_of
from asyncdata.delivery.stream_digest import StreamDigest
from asyncdata.order.order import ROWS_PER_WINDOW

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from asyncdata.checkpoint.snapshot import Snapshot
    from asyncdata.core.file_refs import FileRefs
    from asyncdata.delivery.rollouts import Rollouts

_log = get_logger(__name__)
_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])


def ledger_of(saved: Snapshot, now: Ledger, *, digest: str, group_size: int, files: Mapping[str, FileRefs]) -> Ledger:
    """The ledger that ``saved`` was taken of; what was leased then waits in the buffer.

    :param now: the present one: the progress of packing is restored later, and rules for rollouts are those of now.
    :param digest: what the running digest is of from now on.
    :param group_size: samples of a group.
    :param files: those of now of each part that has the same rows. Groups are of the files' present paths from now on.
    :raises ConfigError: if groups in the snapshot have another number of samples.
    :raises SnapshotError: if a value in it cannot be read.
    """
    excluded = dict.fromkeys(saved.excluded or (), Position())
    known = [(part, at, path) for part, at, path in saved.group_files or () if at < len(files.get(part, ()))]
    moved = {(part, path): files[part][at].path for part, at, path in known if files[part][at].path != path}
    returned = [_returned(record, group_size) for record in (*saved.leases, *saved.buffer)]
    return Ledger(
        position=Position(*saved.position),
        counters=_counters(saved, digest),
        buffer=tuple(_moved(item, moved) for item in returned) if moved else tuple(returned),
        group_files=frozenset((part, at, files[part][at].path) for part, at, _ in known),
        acked=frozenset(Position(*place) for place in saved.acked),
        journal=frozenset(saved.journal),
        group_drops=dict(saved.group_drops or {}),
        excluded=excluded | {(file, offset): Position(*place) for file, offset, *place in saved.excluded_late or ()},
        served=saved.served or Served(),
        rollouts=_rollouts(saved, now),
        packs=now.packs._replace(delivered=saved.packing.delivered) if now.packs and saved.packing else now.packs,
    )


def _rollouts(saved: Snapshot, now: Ledger) -> Rollouts | None:
    if not saved.rollouts and now.rollouts is None:
        return None

    from asyncdata.delivery.rollouts import Rollouts, RolloutState  # only where groups are tracked or have versions

    state: RolloutState = saved.rollouts or RolloutState()
    return state.restored(now.rollouts or Rollouts())


def _counters(saved: Snapshot, of: str) -> Counters:
    digest = saved_digest(saved).resumed(of)
    try:
        return structs.replace(msgspec.convert(saved.counters, prepared(Counters)), digest=digest)
    except Exception as error:  # a crafted value may make the converter raise anything
        raise SnapshotError(f"AD602 the snapshot's counters cannot be read: {error}") from error


def saved_digest(saved: Snapshot) -> StreamDigest:
    """The running digest of a snapshot.

    :raises SnapshotError: AD602, if it is not laid out as one, or does not cover the run from its first sample on.
    """
    found = saved.counters.get("digest")
    if found is None or (isinstance(found, dict) and found.get("first")):  # samples before it began
        raise SnapshotError(
            "AD602 this snapshot has no digest of the whole run: a development build wrote it. Finish the run with "
            "that build, or begin anew"
        )

    try:
        return msgspec.convert(found, prepared(StreamDigest))
    except Exception as error:
        raise SnapshotError(f"AD602 the digest in a snapshot is not laid out as one: {error}") from error


def _returned(record: str | list[dict[str, Any]], size: int) -> Returned:
    try:
        number = len(_DECODER.decode(a2b_base64(record, strict_mode=True)) if isinstance(record, str) else record)
    except ValueError as error:
        raise SnapshotError(f"AD602 a group in the snapshot's buffer cannot be read: {error}") from error

    if not number:
        raise SnapshotError("AD602 a group in the snapshot's buffer cannot be read: it has no sample")

    if number != size:
        raise ConfigError(
            f"the snapshot's buffer has groups of {number} samples, and n_samples_per_prompt is {size}; serve "
            "them with the old setting first"
        )

    item = Returned(None, record)
    return item if isinstance(record, str) or item.group else item


def _moved(item: Returned, paths: Mapping[tuple[str, str], str]) -> Returned:
    """A group whose samples name the present paths of their files."""
    for sample in item.group:
        path = sample.source and paths.get((sample.source_name or "", sample.source.path))
        if sample.source and path:
            sample.source = structs.replace(sample.source, path=path)
    return Returned(item.group, record_of(item.group))


def epoch_to_begin(saved: Snapshot, ledger: Ledger, changed: Collection[str]) -> int:
    """The epoch to begin with if the saved position is not valid: the next, unless the saved one had not begun.

    Logs what is left out of the saved epoch.
    """
    epoch, num_delivered, num_left_out = ledger.position.epoch, ledger.counters.epoch_groups, None
    if saved.packing:  # rows after the saved position may be in packs that are delivered already
        epoch, num_delivered = saved.packing.epoch, saved.packing.epoch_packs
        if not num_delivered:
            return int(epoch)
    elif ledger.position == Position(epoch):
        return epoch
    elif saved.rows_left is not msgspec.UNSET:
        num_left_out = saved.rows_left
    _log.warning(
        "snapshot.rows_left_out",
        epoch=epoch,
        changed=sorted(changed),
        num_delivered=num_delivered,
        num_left_out=num_left_out,
    )
    return epoch + 1


def ledger_at_row(ledger: Ledger, epoch: int, row: int, group_index: int | None, group_size: int) -> Ledger:
    """The ledger of an epoch's start, moved to row ``row`` of its order of single rows.

    :param group_index: of the next group; None: as in ``ledger``.
    """
    counters = structs.replace(ledger.counters, epoch_groups=row)
    if group_index is not None:
        counters = structs.replace(counters, num_groups=group_index, num_samples=group_index * group_size)
    position = Position(epoch, *divmod(row, ROWS_PER_WINDOW))
    return structs.replace(ledger, position=position, counters=counters, served=Served())
