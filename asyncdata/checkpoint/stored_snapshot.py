"""Snapshots in files or in object stores. An object has the bytes of the file that it would be."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from asyncdata.checkpoint.snapshot import encode, load, read_unpacked, save
from asyncdata.core.checksummed_file import unpack
from asyncdata.core.errors import ConfigError, SnapshotError, SourceError
from asyncdata.sources.remote.address import is_address, without_secrets
from asyncdata.sources.remote.stored_files import read_stored, write_stored

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdata.checkpoint.snapshot import Snapshot

__all__ = ("load_from", "save_at")

_FOLDER = re.compile(r"$|.*/$|\w+:/{2}[^/]*$", re.DOTALL)


def save_at(path: str | os.PathLike[str], snapshot: Snapshot, storage_options: Mapping[str, Any]) -> None:
    """Write the snapshot to a file, or to the object at an address.

    :raises SnapshotError: if it cannot be written; what was there is kept.
    """
    _refuse_folder(path, "AD601")
    if isinstance(path, str) and is_address(path):
        _save_stored(path, snapshot, storage_options)
    else:
        save(path, snapshot)


def load_from(path: str | os.PathLike[str], storage_options: Mapping[str, Any]) -> Snapshot:
    """The snapshot in a file, or in the object at an address.

    :raises SnapshotVersionError: if a later version of asyncdata wrote it.
    :raises SnapshotError: if it cannot be read, or is damaged or anything else.
    """
    _refuse_folder(path, "AD602")
    return _load_stored(path, storage_options) if isinstance(path, str) and is_address(path) else load(path)


def _refuse_folder(path: str | os.PathLike[str], code: str) -> None:
    """What names no file: a folder, whose last slash would be left out, or a bucket.

    :raises SnapshotError: naming the way out.
    """
    text = os.fspath(path)
    if isinstance(text, str) and _FOLDER.match(text):
        name = without_secrets(text).rstrip("/")
        raise SnapshotError(f"{code} {name!r} names no file, and a snapshot is one: add its name, {name}/data.state")


def _save_stored(path: str, snapshot: Snapshot, storage_options: Mapping[str, Any], *, keep: int = 3) -> None:
    """Write the snapshot; older ones become ``path.1`` and ``path.2``. At every instant the object is the old or the
    new snapshot, whole.
    """
    data = b"".join(encode(snapshot, ()))
    try:
        write_stored(path, data, keep, storage_options)
    except (SourceError, ConfigError) as error:
        raise SnapshotError(
            f"AD601 {without_secrets(path)} was not written: {error}; what was there before is kept"
        ) from error


def _load_stored(path: str, storage_options: Mapping[str, Any]) -> Snapshot:
    """The snapshot in the object, proven whole."""
    name = without_secrets(path)
    try:
        data = read_stored(path, storage_options)
    except (SourceError, ConfigError) as error:
        raise SnapshotError(f"AD602 {name} cannot be read: {error}; older ones are {name}.1 and .2") from error

    try:
        return read_unpacked(*unpack(data))[1]
    except SnapshotError as error:
        raise type(error)(f"AD602 {name} cannot be loaded: {error}; older ones are {name}.1 and .2") from error
