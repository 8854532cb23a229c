"""The files of a checkpoint of the data source: slime's own five numbers, and beside them everything else.

``{folder}/rollout/global_dataset_state_dict_{rollout_id}.pt`` is what slime writes and reads: the position of the
stream, and the plugins' metadata. ``....asyncdata`` is a snapshot of asyncdata (``asyncdata snapshot show`` reads it),
with what slime's file lacks: the dataset's identity, the groups in the buffer, the exact position in any order. It is
written first and read first; slime's file is for slime, and for runs that slime has started. The snapshot also has the
digest of slime's file: if slime has continued in the same folder, the snapshot is of an abandoned run.

A large group has a file of its own, which is written once for all checkpoints that name it.
``{folder}/rollout/asyncdata_groups/{checksum}.group`` is a checksummed file with the payload ``u64 length | samples |
bytes of large arrays, each from a multiple of 64 on``. The samples are records as in a snapshot, but that a large
array's bytes are named by ``[offset, length]``. The file is named by its own checksum, so that the same group is the
same file. In the snapshot stands ``[{"__samples__": {"file": checksum, ...}}]`` in its place, and the snapshot's header
lists all its files; those that no snapshot of the folder lists are removed after each save.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from asyncdata.checkpoint import snapshot as snapshots
from asyncdata.checkpoint.snapshot import Snapshot
from asyncdata.core import __version__
from asyncdata.core.checksummed_file import MAX_FILE_BYTES, checksum_in, pack, read_header, unpack_file
from asyncdata.core.errors import SnapshotError, SnapshotMismatchError, get_logger
from asyncdata.core.files import open_regular, remove_left_overs, replace_file, sync_folder
from asyncdata.core.identity import digest
from asyncdata.core.plain_values import Block, from_builtins, to_builtins, unpacked
from asyncdata.core.settings import prepared
from asyncdata.integrations.slime import torch_data
from asyncdata.integrations.slime.rollout_ledger import Moment, Numbering

FILE_BYTES = 1 << 20
"""A smaller group is stored in the snapshot itself: syncing a separate file would cost more than writing it again."""

SAMPLES = "__samples__"
"""The key that replaces a sample's attributes: the samples that one prompt became, or the file of the group."""

_log = get_logger(__name__)
_FOLDER = "asyncdata_groups"
_NAME = "[0-9a-f]{64}"
_SCHEMA = 1
_LIBRARY = "asyncdata"  # no version: the checksum must depend on the content alone
_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """The entry in a snapshot for a group that has a file.

    :ivar file: the file's checksum, which names it.
    :ivar num_bytes: the file's size.
    """

    file: Annotated[str, msgspec.Meta(pattern=rf"\A{_NAME}\Z")]
    num_bytes: int
    num_samples: int
    num_tokens: int


class GroupRecord:
    """The record of a group in a checkpoint.

    :ivar samples: plain builtins, but that large arrays are a :class:`~asyncdata.core.plain_values.Block`, which is not
        copied before the group is written.
    """

    __slots__ = ("_folder", "_is_small", "_stored", "samples")

    def __init__(self, samples: list[Any], folder: str = "", stored: Stored | None = None) -> None:
        self.samples = samples
        self._folder, self._stored = folder, stored
        self._is_small = False

    def inline(self) -> list[Any]:
        """The samples as plain builtins, with large arrays as text."""
        return msgspec.to_builtins(self.samples, enc_hook=lambda value: _block(value).to_text())  # type: ignore[no-any-return]

    def reference(self, folder: str) -> list[Any]:
        """The reference to the group in a snapshot of ``folder``. Writes its file there, unless it exists.

        :raises OSError: if it cannot be written.
        """
        if self._is_small:
            return self.inline()

        if self._stored is None or self._folder != folder or not _is_there(folder, self._stored):
            encoding, pieces = _encode(self.samples)
            if sum(map(len, pieces)) < FILE_BYTES:
                self._is_small = True
                return self.inline()

            self._stored, self._folder = _write_group(folder, encoding, pieces, self.samples), folder
        return [{SAMPLES: msgspec.to_builtins(self._stored)}]


class Opened(NamedTuple):
    """A group's record, as read from a checkpoint.

    :ivar samples: plain builtins.
    :ivar blocks: the bytes to which ``[offset, length]`` in them refer; None: there are none.
    :ivar stored: its file, in ``folder``.
    """

    samples: list[Any]
    blocks: memoryview | None = None
    folder: str = ""
    stored: Stored | None = None


class GroupStore:
    """The files of groups in a folder of checkpoints.

    :param folder: ``args.save`` or ``args.load``.
    """

    def __init__(self, folder: str) -> None:
        self._checkpoints = os.path.join(os.path.abspath(folder), "rollout")
        self._folder = os.path.join(self._checkpoints, _FOLDER)

    def keep(self, records: Iterable[GroupRecord]) -> tuple[list[Any], list[str]]:
        """The references to ``records`` in a snapshot, and the names of their files, which are durable.

        :raises SnapshotError: if one cannot be written.
        """
        try:
            kept = [record.reference(self._folder) for record in records]
            names = sorted({item[0][SAMPLES]["file"] for item in kept if _is_reference(item)})
            if names:
                sync_folder(os.path.join(self._folder, names[0]))
                sync_folder(self._folder)  # it may be new
        except OSError as error:
            raise SnapshotError(
                f"AD601 a group of the buffer cannot be written to {self._folder}: {error.strerror or error}; free "
                "some space, or save elsewhere. Checkpoints that were there are whole"
            ) from error

        return kept, names

    def open(self, record: list[Any]) -> Opened:
        """A group's record, read from its file if it has one.

        :raises SnapshotError: if the file is missing, damaged or another one; the message names it.
        """
        if not _is_reference(record):
            return Opened(record)

        try:
            stored = msgspec.convert(record[0][SAMPLES], prepared(Stored))
        except msgspec.ValidationError as error:
            raise SnapshotError(f"AD602 a group in the snapshot's buffer names no file: {error}") from error

        path = _path(self._folder, stored)
        try:
            header, payload = unpack_file(path)
            if header.blake2b != stored.file:
                raise SnapshotError("it is another group's")

            return Opened(*_decode(header.encoding, payload), self._folder, stored)
        except FileNotFoundError:
            reason = "it is not there; a checkpoint is moved or copied together with this folder"
        except OSError as error:
            reason = str(error.strerror or error)
        except SnapshotError as error:
            reason = str(error)
        raise SnapshotError(
            f"AD602 the file of a group in the checkpoint's buffer cannot be read: {path}: {reason}. Put the file "
            "back, or load an older checkpoint"
        )

    def sweep(self, newest: str) -> None:
        """Remove the files of groups that no checkpoint names, and temporary files of killed processes.

        If a checkpoint cannot be read, nothing is removed, which is logged.

        :param newest: the checkpoint that was just written.
        """
        if not os.path.isdir(self._folder):
            return

        try:
            named = self._named()
            for name in os.listdir(self._folder):
                stem, dot, end = name.partition(".")
                if (dot, end) == (".", "group") and re.fullmatch(_NAME, stem) and stem not in named:
                    os.unlink(os.path.join(self._folder, name))
        except (OSError, SnapshotError) as error:
            _log.warning("checkpoint.groups_not_removed", path=self._folder, reason=str(error))
        remove_left_overs(self._folder, rf"{_NAME}\.group", newest)
        with suppress(OSError):  # it is not empty
            os.rmdir(self._folder)

    def _named(self) -> set[str]:
        named: set[str] = set()
        for name in os.listdir(self._checkpoints):
            path = os.path.join(self._checkpoints, name)
            if ".asyncdata" not in name or name.endswith(".tmp") or not os.path.isfile(path):
                continue

            try:
                files = read_header(path).files
            except SnapshotError as error:
                raise SnapshotError(f"{path} may name some, and cannot be read: {error}") from error

            named.update(() if files is msgspec.UNSET else files)
        return named


def _is_reference(record: Any) -> bool:
    match record:
        case [{"__samples__": dict()}]:
            return True
    return False


def _path(folder: str, stored: Stored) -> str:
    return os.path.join(folder, f"{stored.file}.group")


def _is_there(folder: str, stored: Stored) -> bool:
    with suppress(OSError):
        return os.path.getsize(_path(folder, stored)) == stored.num_bytes
    return False


def _write_group(folder: str, encoding: str, pieces: list[bytes], samples: list[Any]) -> Stored:
    head = pack(pieces, encoding, schema=_SCHEMA, library=_LIBRARY, created=0.0)
    num_bytes = len(head) + sum(map(len, pieces))
    if num_bytes > MAX_FILE_BYTES:
        raise SnapshotError(f"AD601 a group of the buffer has {num_bytes} bytes, more than {MAX_FILE_BYTES}")

    flat = list(_flat(samples))
    num_tokens = sum(len(sample["tokens"]) for sample in flat if isinstance(sample.get("tokens"), list))
    stored = Stored(file=checksum_in(head), num_bytes=num_bytes, num_samples=len(flat), num_tokens=num_tokens)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not _is_there(folder, stored):
        replace_file(_path(folder, stored), [head, *pieces], keep=1)
    return stored


def _flat(samples: list[Any]) -> Iterable[dict[str, Any]]:
    for item in samples:
        if SAMPLES in item:
            yield from _flat(item[SAMPLES])
        else:
            yield item


# The payload


def _encode(samples: list[Any]) -> tuple[str, list[bytes]]:
    """The encoding, and the payload in pieces. Each block is copied once, so that later changes cannot corrupt it."""
    try:
        try:
            return "msgpack", pieces(samples, msgspec.msgpack.encode)
        except (UnicodeEncodeError, OverflowError):  # no lone surrogates, no integers over 64 bits
            return "json", pieces(samples, _to_json)
    except (TypeError, ValueError, RecursionError) as error:
        raise SnapshotError(f"AD601 a group of the buffer holds what no file can: {error}") from error


def _to_json(value: Any, *, enc_hook: Callable[[Any], Any]) -> bytes:
    return json.dumps(msgspec.to_builtins(value, enc_hook=enc_hook)).encode("ascii")


def pieces(value: Any, encode: Callable[..., bytes]) -> list[bytes]:
    """``u64 length | value | bytes of its blocks``, in pieces; a block in ``value`` is ``[offset, length]``.

    :param value: plain builtins with a :class:`~asyncdata.core.plain_values.Block` in place of large arrays.
    :raises TypeError: for a value of another type.
    """
    blocks: list[bytes] = []
    end = 0

    def place(block: Any) -> list[int]:
        nonlocal end
        data = _block(block).data
        start = _aligned(end)
        blocks.extend((bytes(start - end), bytes(data)))
        end = start + data.nbytes
        return [start, data.nbytes]

    head = encode(value, enc_hook=place)
    before = _LENGTH.size + len(head)
    return [_LENGTH.pack(len(head)), head, bytes(_aligned(before) - before), *blocks]


def split(payload: memoryview) -> tuple[memoryview, memoryview]:
    """The encoded value and the bytes of its blocks, of what :func:`pieces` made.

    :raises struct.error: if it is too short.
    """
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    return payload[_LENGTH.size : end], payload[_aligned(end) :]


def _decode(encoding: str, payload: memoryview) -> tuple[list[Any], memoryview]:
    try:
        head, blocks = split(payload)
        samples = json.loads(bytes(head)) if encoding == "json" else msgspec.msgpack.decode(head)
        if not isinstance(samples, list):
            raise TypeError(f"a {type(samples).__name__} in place of samples")
    except Exception as error:  # a crafted payload may make a decoder raise anything
        raise SnapshotError(f"its content cannot be decoded: {error!r}") from error

    return samples, blocks


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _block(value: Any) -> Block:
    if not isinstance(value, Block):
        raise TypeError(f"a {type(value).__name__}")

    return value


# The files of a checkpoint

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
