"""Large groups of checkpoints, each in its own file, which is written once for all checkpoints that name it.

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
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec

from asyncdata.core.checksummed_file import MAX_FILE_BYTES, checksum_in, pack, read_header, unpack_file
from asyncdata.core.errors import SnapshotError
from asyncdata.core.files import remove_left_overs, replace_file, sync_folder
from asyncdata.core.log import get_logger
from asyncdata.core.plain_values import Block
from asyncdata.core.settings import prepared

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

            self._stored, self._folder = _write(folder, encoding, pieces, self.samples), folder
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


def _write(folder: str, encoding: str, pieces: list[bytes], samples: list[Any]) -> Stored:
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
