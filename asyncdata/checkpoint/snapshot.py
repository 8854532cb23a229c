"""The state as a value (:class:`Snapshot`), as plain builtins, and as a file that is whole at every instant.

The file is the payload with a checksum, replaced atomically. When one is taken is the loader's business.
What only some runs have (packs, outcomes, a mixture) is a *section*: a struct of a module that is imported for it.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from asyncdata.core.checksummed_file import MAX_FILE_BYTES, Header, pack, unpack, unpack_file
from asyncdata.core.errors import ConfigError, SnapshotError, SnapshotVersionError, SourceError
from asyncdata.core.files import remove_left_over, replace_file, sync_folder
from asyncdata.core.settings import Count, Number, prepared, resolve_path
from asyncdata.sources.paths import is_address, without_secrets

SCHEMA = 1
_KEPT = 3
_FOLDER = re.compile(r"$|.*/$|\w+:/{2}[^/]*$", re.DOTALL)


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a source that is read from front to back has a window's first row.

    :ivar window: number of the window in its epoch.
    :ivar at: what the source takes to begin there, as builtins; None for the epoch's start.
    :ivar skip: rows to pass over from there.
    :ivar row: digest of the first row, by which another row in its place is noticed.
    """

    window: Number
    at: dict[str, Any] | None = None
    skip: Count = 0
    row: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run needs to continue with exactly the sample that would have come next.

    Keys are text and values plain builtins throughout, so that JSON, msgpack and torch.save give back the same.

    :ivar schema: layout of these fields.
    :ivar library: version of asyncdata that wrote it.
    :ivar position: (epoch, window, row), the first row that was not delivered.
    :ivar counters: num_groups, num_samples, num_tokens, drops by reason, num_bad_rows ...
    :ivar order: seed and every setting the order follows from, and counts of the data, named ``num_*``.
    :ivar fingerprints: of data (``data_fingerprint``), tokenizer, template and tokenize_fn; None or absent: unknown.
    :ivar buffer: groups given back by the trainer, as lists of ``Sample.to_dict()``; or such a list in msgpack, with
        arrays as bytes, as base64 text.
    :ivar leases: groups served from the buffer and not acknowledged.
    :ivar group_files: (part, file_id, path) of the files that these groups are of, as files may be elsewhere after a
        restart; unset: there are no groups.
    :ivar acked: positions after :attr:`position` that are acknowledged already.
    :ivar journal: (file_id, byte_offset) of rows dropped because they killed workers.
    :ivar excluded: (file_id, byte_offset) of rows that the run continues without; unset: none.
    :ivar excluded_late: (file_id, byte_offset, epoch, window, row) of those that may have been a group before that
        place in the order of their source, and keep its number where that comes again; unset: none.
    :ivar served: a :class:`Served`: how far the stream was ever served, if that is behind :attr:`position`; else unset.
    :ivar canaries: token hashes of up to 8 fixed rows; empty if unknown.
    :ivar stream: where to begin reading for :attr:`position`, if the source is read from front to back and that is not
        the epoch's start; else unset.
    :ivar packing: a :class:`PackState`: what waits to be packed, and which packs are delivered; unset where nothing is
        packed.
    :ivar outcomes: an :class:`OutcomeState`: what was reported of rows, or where that is stored; unset where nothing is
        remembered.
    :ivar rows_left: rows of the epoch from :attr:`position` on. An estimate where they lie in windows that were not
        read yet; unset if that cannot be known.
    :ivar group_drops: groups that were dropped, by reason; unset if there are none.
    :ivar growth: ``GrowthState``: what the epochs of a source that grows cover; unset for any other.
    :ivar rollouts: a :class:`RolloutState`: whether groups are tracked, and the version of the policy; unset: neither.
    :ivar mixture: a :class:`SavedMixture`: how far each part of a mixture was delivered; unset for a single source.
    """

    schema: int = SCHEMA
    library: str = "unknown"
    position: tuple[Number, Number, Number]
    counters: dict[str, Any] = {}
    order: dict[str, Any] = {}
    fingerprints: dict[str, Any] = {}
    buffer: list[str | list[dict[str, Any]]] = []
    leases: list[str | list[dict[str, Any]]] = []
    group_files: list[tuple[str, Count, str]] | msgspec.UnsetType = msgspec.UNSET
    acked: list[tuple[Number, Number, Number]] = []
    journal: list[tuple[Count, Count]] = []
    excluded: list[tuple[Count, Count]] | msgspec.UnsetType = msgspec.UNSET
    excluded_late: list[tuple[Count, Count, Number, Number, Number]] | msgspec.UnsetType = msgspec.UNSET
    served: Any = msgspec.UNSET
    canaries: list[str] = []
    stream: StreamState | msgspec.UnsetType = msgspec.UNSET  # not written where it is not needed
    packing: Any = msgspec.UNSET
    outcomes: Any = msgspec.UNSET
    rows_left: Count | msgspec.UnsetType = msgspec.UNSET
    group_drops: dict[str, Count] | msgspec.UnsetType = msgspec.UNSET
    growth: Any = msgspec.UNSET
    rollouts: Any = msgspec.UNSET
    mixture: Any = msgspec.UNSET


SECTIONS = {
    "packing": "asyncdata.batching.packs:PackState",
    "outcomes": "asyncdata.delivery.outcome_memory:OutcomeState",
    "growth": "asyncdata.sources.growing:GrowthState",
    "rollouts": "asyncdata.delivery.rollouts:RolloutState",
    "mixture": "asyncdata.checkpoint.saved_mixture:SavedMixture",
    "served": "asyncdata.delivery.ledger:Served",
}
"""The struct of each section. Its module is imported where a snapshot has the section."""


# As plain builtins

_FORMAT = "asyncdata.snapshot"
_GROUPS = ("buffer", "leases")


def to_state_dict(snapshot: Snapshot) -> dict[str, Any]:
    """The snapshot as dicts, lists, text, numbers, booleans and None, which share nothing with it."""
    state = msgspec.to_builtins(snapshot, str_keys=True)
    # A sample's dict has no tuples, and may have a million numbers: those stay in C.
    fields = {name: value if name in _GROUPS else _without_tuples(value) for name, value in state.items()}
    return {"format": _FORMAT, **fields}


def _without_tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_tuples(item) for item in value]

    return {key: _without_tuples(item) for key, item in value.items()} if isinstance(value, dict) else value


def from_state_dict(state: Mapping[str, Any]) -> Snapshot:
    """The snapshot that :func:`to_state_dict` wrote, after JSON, torch.save or DCP as well.

    Unknown fields are ignored, missing ones have their defaults.

    :raises SnapshotVersionError: if a later version of asyncdata wrote it.
    :raises SnapshotError: if it is anything else; the message names the place, as in ``$.position[1]``.
    """
    try:
        mark = state.get("format") if isinstance(state, Mapping) else None
        if not isinstance(mark, str) or mark != _FORMAT:
            way_out = "; restore(path) loads a file" if isinstance(state, str | os.PathLike) else ""
            raise SnapshotError(f"it is {_kind(state)}, not what asyncdata's state_dict() returns{way_out}")

        return _from_builtins(state)
    except SnapshotError as error:
        raise type(error)(f"AD602 this state_dict cannot be loaded: {error}") from error.__cause__


def _kind(value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"a {type(value).__name__}"

    keys = ", ".join(repr(key)[:40] for key in list(value)[:8])
    return f"a dict with the keys {keys}" if keys else "an empty dict"


def _from_builtins(state: Any) -> Snapshot:
    try:
        state = dict(state)
        _check_schema(state.get("schema", 1), state.get("library"))
        snapshot = msgspec.convert(state, prepared(Snapshot))
        sections = [name for name in SECTIONS if getattr(snapshot, name) is not msgspec.UNSET]
        return msgspec.structs.replace(snapshot, **{name: _section(snapshot, name) for name in sections})
    except SnapshotError:
        raise
    except Exception as error:  # a crafted value may make the converter raise anything
        raise SnapshotError(f"it is not laid out as a snapshot: {error}") from error


def _section(snapshot: Snapshot, name: str) -> Any:
    section = prepared(resolve_path(SECTIONS[name]))
    kind = msgspec.defstruct("Section", [(name, section)])  # so that errors name the place
    return getattr(msgspec.convert({name: getattr(snapshot, name)}, kind), name)


def _check_schema(schema: Any, library: Any) -> None:
    if type(schema) is not int or schema < 1:
        raise SnapshotError(f"its schema must be a whole number from 1 on, got {schema!r} - at `$.schema`")

    _refuse_newer(schema, library)


def _refuse_newer(schema: int, library: Any) -> None:
    if schema > SCHEMA:
        raise SnapshotVersionError(
            f"it has schema {schema}, written by asyncdata {library}; this version reads up to {SCHEMA}: "
            f"use asyncdata {library} or later"
        )


# As a file: write


def save(path: str | os.PathLike[str], snapshot: Snapshot, *, keep: int = _KEPT, files: Collection[str] = ()) -> int:
    """Write the snapshot and return its size in bytes, once it would survive a power loss.

    At every instant ``path`` is the old snapshot or the new one, whole. Older ones become ``path.1``, ``path.2``;
    ``keep`` files stay in all.

    :param files: names of other files that it refers to; they are listed in its header.
    :raises SnapshotError: if it cannot be written; what was there is kept and nothing half-written stays.
    """
    if keep < 1:
        raise ConfigError(f"keep must be 1 or more snapshots, got {keep}")

    path = _absolute(path, "AD601", "was not written")
    pieces = _encode(snapshot, files)
    num_bytes = sum(map(len, pieces))
    try:
        replace_file(path, pieces, keep)
    except OSError as error:
        reason = _reason(error, path, num_bytes)
        raise SnapshotError(f"AD601 {path} was not written: {reason}; {_kept(path)}") from error

    try:
        sync_folder(path)
    except OSError as error:
        raise SnapshotError(f"AD601 {path} is written, but a power loss may undo it: {error}; save again") from error

    remove_left_over(path)
    return num_bytes


def _absolute(path: str | os.PathLike[str], code: str, what: str) -> str:
    found = os.path.abspath(path)
    if "\0" in found:
        raise SnapshotError(f"{code} {found!r} {what}: it has a NUL in it, which no path may have")

    return found


def _encode(snapshot: Snapshot, files: Collection[str]) -> tuple[bytes, bytes]:
    """What a file has of the snapshot: all before the payload, and the payload."""
    try:
        encoding, payload = _payload(snapshot)
        head = pack(payload, encoding, schema=snapshot.schema, library=snapshot.library, files=files)
    except (TypeError, ValueError, RecursionError) as error:
        raise SnapshotError(f"AD601 the snapshot holds what no file can: {error}; nothing was written") from error

    num_bytes = len(head) + len(payload)
    if num_bytes > MAX_FILE_BYTES:
        raise SnapshotError(
            f"AD601 the snapshot has {num_bytes} bytes, more than {MAX_FILE_BYTES}; nothing was written"
        )

    return head, payload


def _payload(snapshot: Snapshot) -> tuple[str, bytes]:
    try:
        # As a dict: the header of a Struct's map depends on how many fields it may have, not on how many it has.
        values = msgspec.structs.asdict(snapshot)
        return "msgpack", msgspec.msgpack.encode(
            {name: values[name] for name in values if values[name] is not msgspec.UNSET}
        )
    except (UnicodeEncodeError, OverflowError):  # msgpack has no lone surrogates and no integers over 64 bit: rows do
        return "json", json.dumps(msgspec.to_builtins(snapshot, str_keys=True)).encode("ascii")


def _reason(error: OSError, path: str, num_bytes: int) -> str:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return f"there is no folder {folder}; make it first"

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror} (need {num_bytes} bytes); free some, or save elsewhere"

    return str(error.strerror or error)


def _kept(path: str) -> str:
    for name in (path, f"{path}.1"):
        if os.path.exists(name):
            return f"the previous snapshot is kept as {os.path.basename(name)}"
    return "there was none before"


# As a file: read


def load(path: str | os.PathLike[str]) -> Snapshot:
    """The snapshot in the file, proven whole.

    :raises SnapshotVersionError: if a later version of asyncdata wrote it.
    :raises SnapshotError: if it is damaged or anything else; the message says what, and which older one is valid.
    """
    return load_fields(path)[0]


def load_fields(path: str | os.PathLike[str]) -> tuple[Snapshot, dict[str, Any]]:
    """:func:`load`, and all fields that the file has, also fields that a :class:`Snapshot` does not know."""
    return _load(_absolute(path, "AD602", "cannot be read"))[1:]


def load_with_header(path: str | os.PathLike[str]) -> tuple[Header, Snapshot]:
    """:func:`load`, and the header of the file."""
    return _load(_absolute(path, "AD602", "cannot be read"))[:2]


def _load(path: str) -> tuple[Header, Snapshot, dict[str, Any]]:
    try:
        return _read(path)
    except SnapshotError as error:
        raise type(error)(f"AD602 {path} cannot be loaded: {error}; {_valid_older(path)}") from error.__cause__
    except OSError as error:
        raise SnapshotError(f"AD602 {path} cannot be read: {error.strerror}; {_valid_older(path)}") from error


def _valid_older(path: str) -> str:
    for number in range(1, 10):
        with suppress(OSError, SnapshotError):
            _read(f"{path}.{number}")
            return f"{os.path.basename(path)}.{number} is valid: restore it instead"
    return "no older snapshot beside it is valid either"


def _read(path: str) -> tuple[Header, Snapshot, dict[str, Any]]:
    return _read_unpacked(*unpack_file(path))


def _read_unpacked(header: Header, payload: memoryview) -> tuple[Header, Snapshot, dict[str, Any]]:
    """What is in a file that is proven whole. A SnapshotError's message is the reason alone."""
    _refuse_newer(header.schema, header.library)
    fields = _decode(header.encoding, payload)
    return header, _from_builtins(fields), fields


_DECODERS: dict[str, Callable[[memoryview], Any]] = {
    "msgpack": msgspec.msgpack.decode,
    "json": lambda raw: json.loads(bytes(raw)),
}


def _decode(encoding: str, payload: memoryview) -> Any:
    try:
        return _DECODERS[encoding](payload)
    except Exception as error:  # a crafted payload may make a decoder raise anything
        raise SnapshotError(f"its content cannot be decoded: {error!r}") from error


# In a file or in an object store. An object has the bytes of the file that it would be


def save_at(path: str | os.PathLike[str], snapshot: Snapshot, storage_options: Mapping[str, Any]) -> None:
    """Write the snapshot to a file, or to the object at an address; older ones become ``path.1`` and ``path.2``.

    At every instant it is the old or the new snapshot, whole.

    :raises SnapshotError: if it cannot be written; what was there is kept.
    """
    _refuse_folder(path, "AD601")
    if not (isinstance(path, str) and is_address(path)):
        save(path, snapshot)
        return

    from asyncdata.sources.remote.reads import write_stored

    data = b"".join(_encode(snapshot, ()))
    try:
        write_stored(path, data, _KEPT, storage_options)
    except (SourceError, ConfigError) as error:
        raise SnapshotError(
            f"AD601 {without_secrets(path)} was not written: {error}; what was there before is kept"
        ) from error


def load_from(path: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> Snapshot:
    """The snapshot in a file, or in the object at an address, proven whole.

    :raises SnapshotVersionError: if a later version of asyncdata wrote it.
    :raises SnapshotError: if it cannot be read, or is damaged or anything else.
    """
    _refuse_folder(path, "AD602")
    if not (isinstance(path, str) and is_address(path)):
        return load(path)

    from asyncdata.sources.remote.reads import read_stored

    name = without_secrets(path)
    try:
        data = read_stored(path, storage_options)
    except (SourceError, ConfigError) as error:
        raise SnapshotError(f"AD602 {name} cannot be read: {error}; older ones are {name}.1 and .2") from error

    try:
        return _read_unpacked(*unpack(data))[1]
    except SnapshotError as error:
        raise type(error)(f"AD602 {name} cannot be loaded: {error}; older ones are {name}.1 and .2") from error


def _refuse_folder(path: str | os.PathLike[str], code: str) -> None:
    """What names no file: a folder, whose last slash would be left out, or a bucket.

    :raises SnapshotError: naming the way out.
    """
    text = os.fspath(path)
    if isinstance(text, str) and _FOLDER.match(text):
        name = without_secrets(text).rstrip("/")
        raise SnapshotError(f"{code} {name!r} names no file, and a snapshot is one: add its name, {name}/data.state")
