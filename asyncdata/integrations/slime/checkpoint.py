"""The files of a checkpoint of the data source: slime's own five numbers, and beside them everything else.

``{folder}/rollout/global_dataset_state_dict_{rollout_id}.pt`` is what slime writes and reads: the position of the
stream, and the plugins' metadata. ``....asyncdata`` is a snapshot of asyncdata (``asyncdata snapshot show`` reads it),
with what slime's file lacks: the dataset's identity, the groups in the buffer, the exact position in any order. It is
written first and read first; slime's file is for slime, and for runs that slime has started. The snapshot also has the
digest of slime's file: if slime has continued in the same folder, the snapshot is of an abandoned run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import msgspec

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.checkpoint.snapshot import Snapshot
from asyncdata.core.digest import digest
from asyncdata.core.errors import SnapshotError, SnapshotMismatchError
from asyncdata.core.files import open_regular
from asyncdata.core.log import get_logger
from asyncdata.core.plain_values import from_builtins, to_builtins, unpacked
from asyncdata.core.settings import prepared
from asyncdata.core.version import __version__
from asyncdata.integrations.slime import torch_data
from asyncdata.integrations.slime.groups import GroupStore
from asyncdata.integrations.slime.rollout_ledger import Moment, Numbering

_log = get_logger(__name__)
_FORMAT = snapshots.to_state_dict(Snapshot(position=(0, 0, 0)))["format"]

Kind = Literal["loader", "adapter", "sequence", "none"]


class Unsaved(msgspec.Struct, frozen=True, kw_only=True):
    """A group of the buffer that is not in the snapshot, as no snapshot can store it.

    :ivar group_index: its number, if it has one.
    :ivar reason: the value, its place, and its type.
    """

    group_index: int | None = None
    reason: str


class SlimeState(msgspec.Struct, frozen=True, kw_only=True):
    """What the snapshot of slime's data source has in addition to a loader's.

    :ivar rollout_id: the last rollout that it includes.
    :ivar samples_per_group: ``n_samples_per_prompt``.
    :ivar numbering: the four numbers.
    :ivar kind: where prompts came from: ``loader``, ``adapter``, ``sequence`` (a dataset with ``samples``) or ``none``.
    :ivar dataset: the state of a dataset other than this library's loader.
    :ivar metadata: the plugins' metadata, as pairs, as keys need not be text.
    :ivar drops: groups that left the buffer and were not served, by reason.
    :ivar beside: digest of slime's own file; None: it was not written.
    :ivar unsaved: groups that were in the buffer and are not in the snapshot.
    """

    rollout_id: int | None
    samples_per_group: int
    numbering: Numbering
    kind: Kind
    dataset: Any = None
    metadata: list[tuple[Any, Any]] = []
    drops: dict[str, int] = {}
    beside: str | None = None
    unsaved: list[Unsaved] = []


class SlimeSnapshot(Snapshot, frozen=True, kw_only=True):
    """A loader's snapshot with slime's groups in its buffer, and the other state of slime's data source."""

    format: str = _FORMAT
    slime: SlimeState


class Found(NamedTuple):
    """The contents of a checkpoint.

    :ivar records: of the buffer's groups, which a ``GroupStore`` opens.
    :ivar state: None for slime's own file, which has neither the identity of the data nor the buffer.
    :ivar dataset: the state of the dataset; None for slime's own file.
    """

    path: str
    numbering: Numbering
    metadata: dict[Any, Any]
    records: list[list[Any]]
    state: SlimeState | None
    dataset: Any


def _stem(folder: str, rollout_id: Any) -> str:
    return os.path.join(folder, "rollout", f"global_dataset_state_dict_{rollout_id}")


def write(
    folder: str, rollout_id: int | None, moment: Moment, *, kind: Kind, samples_per_group: int, drops: Mapping[str, int]
) -> None:
    """Write the files of large groups, and then both files; slime's only if torch is installed.

    :raises SnapshotError: if one cannot be written; existing files are unchanged.
    """
    metadata = [
        (_plain(key, "a key of the metadata"), _plain(value, f"metadata[{key!r}]"))
        for key, value in moment.metadata.items()
    ]
    content = _slimes_own(moment)
    state = SlimeState(
        rollout_id=rollout_id,
        samples_per_group=samples_per_group,
        numbering=moment.numbering,
        kind=kind,
        dataset=None if kind == "loader" else _plain(moment.dataset, "the dataset's state"),
        metadata=metadata,
        drops=dict(drops),
        beside=None if content is None else digest(content),
        unsaved=[
            Unsaved(group_index=entry.group_index, reason=entry.reason or "")
            for entry in moment.entries
            if entry.record is None
        ],
    )
    stem = _stem(folder, rollout_id)
    os.makedirs(os.path.dirname(stem), mode=0o700, exist_ok=True)
    store = GroupStore(folder)
    try:
        records = [entry.record for entry in moment.entries if entry.record is not None]
        _write(stem, state, moment.dataset, content, *store.keep(records))
    finally:
        store.sweep(f"{stem}.asyncdata")


def _write(
    stem: str, state: SlimeState, dataset: Any, content: bytes | None, buffer: list[Any], files: list[str]
) -> None:
    if os.path.exists(f"{stem}.asyncdata"):
        # After a kill between the two writes, one file may be missing, but they never contradict each other.
        with suppress(FileNotFoundError):
            os.unlink(f"{stem}.pt")
    snapshots.save(f"{stem}.asyncdata", _snapshot(state, dataset, buffer), files=files)
    if content is not None:
        torch_data.write(f"{stem}.pt", content)
    else:
        _log.warning("checkpoint.without_torch", path=f"{stem}.pt")


def _slimes_own(moment: Moment) -> bytes | None:
    if not torch_data.is_available():
        return None

    return torch_data.encode({**msgspec.structs.asdict(moment.numbering), "metadata": moment.metadata})


def _snapshot(state: SlimeState, dataset: Any, buffer: list[Any]) -> SlimeSnapshot:
    if state.kind == "loader":
        base = snapshots.from_state_dict(dataset)
    else:
        number = state.numbering
        base = Snapshot(library=__version__, position=(number.epoch_id, 0, number.sample_offset))
    fields = msgspec.structs.asdict(base) | {"buffer": buffer}
    return SlimeSnapshot(**fields, slime=state)


def _plain(value: Any, name: str) -> Any:
    try:
        return to_builtins(value)
    except TypeError as error:
        raise SnapshotError(f"AD601 {name} cannot be saved: {error}; nothing was written") from error


def read(folder: str, rollout_id: int | None) -> Found | None:
    """The checkpoint of a rollout; None if there is none.

    :raises SnapshotError: if it is damaged, or not a checkpoint.
    """
    stem = _stem(folder, rollout_id)
    if not os.path.lexists(f"{stem}.asyncdata"):
        return _read_slimes(f"{stem}.pt") if os.path.exists(f"{stem}.pt") else None

    found = _read_own(f"{stem}.asyncdata")
    if os.path.exists(f"{stem}.pt") and found.state is not None:
        _refuse_other_run(f"{stem}.pt", found.path, found.state.beside)
    return found


def _refuse_other_run(slimes: str, own: str, expected: str | None) -> None:
    with open_regular(slimes) as file:
        present = digest(file.read())
    if present != expected:
        raise SnapshotMismatchError(
            f"AD603 {slimes} is not the one that was written with {os.path.basename(own)} beside it: another run has "
            "continued in this folder. Remove the file that you do not want",
            {"checkpoint": (expected, present)},
        )


def _read_own(path: str) -> Found:
    base, fields = snapshots.load_fields(path)
    if "slime" not in fields:
        raise SnapshotError(
            f"AD602 {path} cannot be loaded: it is the snapshot of a loader, not of slime's data source"
        )

    try:
        state = msgspec.convert(fields["slime"], prepared(SlimeState))
    except msgspec.ValidationError as error:
        raise SnapshotError(f"AD602 {path} cannot be loaded: it is not laid out as a snapshot: {error}") from error

    metadata = {from_builtins(key): from_builtins(value) for key, value in state.metadata}
    if state.kind == "loader":
        dataset = snapshots.to_state_dict(msgspec.structs.replace(base, buffer=[]))
    else:
        dataset = from_builtins(state.dataset)
    return Found(path, state.numbering, metadata, list(map(unpacked, base.buffer)), state, dataset)


def _read_slimes(path: str) -> Found:
    if not torch_data.is_available():
        raise SnapshotError(
            f"AD602 {path} cannot be read without torch, and there is no snapshot of asyncdata beside it"
        )

    fields = torch_data.read(path)
    if "hf_adapter_state" in fields:
        raise SnapshotError(
            f"AD602 {path} cannot be continued: slime's streaming dataset wrote it, whose order depends on a shuffle "
            "buffer that it does not save; start a new run"
        )

    metadata = fields.get("metadata", {})
    numbers = {name: fields.get(name, 0) for name in Numbering.__struct_fields__}
    if not isinstance(metadata, dict) or not all(type(number) is int and number >= 0 for number in numbers.values()):
        raise SnapshotError(f"AD602 {path} cannot be loaded: it is not laid out as slime's state: {numbers}")

    return Found(path, Numbering(**numbers), metadata, [], None, None)


def refuse_change(name: str, saved: str, present: str, allow_changed: Collection[str]) -> None:
    """Refuse a checkpoint in which ``name`` differs, unless that is allowed.

    :raises SnapshotMismatchError: naming what differs.
    """
    if name in allow_changed:
        return

    raise SnapshotMismatchError(
        f"AD603 this checkpoint was written with another {name}: saved {saved}, present {present}. Use what it was "
        f"written with; or, to continue anyway, set asyncdata_allow_changed: [{name}]",
        {name: (saved, present)},
    )
