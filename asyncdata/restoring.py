"""From a snapshot to the ledger that it was taken of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.errors import ConfigError, SnapshotError
from asyncdata.ledger import Counters, Ledger, Returned
from asyncdata.types import Position, Sample

if TYPE_CHECKING:
    from asyncdata.snapshot import Snapshot

__all__ = ("ledger_of",)


def ledger_of(saved: Snapshot, *, digest: str, group_size: int) -> Ledger:
    """The ledger that ``saved`` was taken of; what was leased then waits in the buffer.

    :param digest: what the running digest is of from now on.
    :param group_size: samples of a group.
    :raises ConfigError: if groups in the snapshot have another number of samples.
    :raises SnapshotError: if a value in it cannot be read.
    """
    return Ledger(
        position=Position(*saved.position),
        counters=_counters(saved, digest),
        buffer=tuple(_returned(record, group_size) for record in (*saved.leases, *saved.buffer)),
        acked=frozenset(Position(*place) for place in saved.acked),
        journal=frozenset(saved.journal),
    )


def _counters(saved: Snapshot, digest: str) -> Counters:
    try:
        return Counters.restored(saved.counters, digest)
    except Exception as error:  # a crafted value may make the converter raise anything
        raise SnapshotError(f"AD602 the snapshot's counters cannot be read: {error}") from error


def _returned(record: list[dict[str, Any]], size: int) -> Returned:
    if not record:
        raise SnapshotError("AD602 a group in the snapshot's buffer cannot be read: it has no sample")

    if len(record) != size:
        raise ConfigError(
            f"the snapshot's buffer has groups of {len(record)} samples, and n_samples_per_prompt is {size}; serve "
            "them with the old setting first"
        )

    try:
        return Returned([Sample.from_dict(values) for values in record], record)
    except Exception as error:  # a crafted value may make the decoder of arrays raise anything
        raise SnapshotError(f"AD602 a group in the snapshot's buffer cannot be read: {error!r}") from error
