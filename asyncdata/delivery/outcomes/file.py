"""The file of the memory: records end to end, only ever appended, each with its checksum.

A state names a prefix of it, by its length and its digest. So taking a state costs one append, and restoring one reads
the prefix: what a killed run appended later is cut off before the next append. A file that has grown is replaced by one
record of the whole memory, for each reward; the last two files stay beside it, for older states::

    ADOUTC1\\n | kind, 1 byte | length, u32 | crc32 of the payload, u32 | payload | kind ...
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from asyncdata.core.atomic_file import replace_file, sync_folder
from asyncdata.core.errors import ConfigError, SnapshotError, SnapshotMismatchError
from asyncdata.core.file_checks import lock, open_regular
from asyncdata.delivery.outcomes.memory import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("Found", "OutcomeFile")

_MAGIC = b"ADOUTC1\n"
_FRAME = struct.Struct("<cII")
_KEPT = 3


class Found(NamedTuple):
    """The records of a state, and where they are.

    :ivar path: the file; None: there is none, as there were no records.
    :ivar data: its bytes.
    """

    path: str | None
    data: bytes
    records: list[Record]


class OutcomeFile:
    """The file at ``path``, which no other loader may write at the same time: ``path.lock`` is locked.

    :ivar num_bytes: of the records so far, with the file's first bytes; 0: there are none, and no file is needed.
    :ivar digest: of these bytes, as hex digits.
    :raises ConfigError: if its folder cannot be written to.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.num_bytes, self.digest = 0, ""
        self._hash = blake2b(digest_size=16)
        self._at: str | None = None  # the file that has the records; None: none yet
        self._fd: int | None = None
        self._lock_fd: int | None = None
        self._is_closed = False
        folder = os.path.dirname(self.path)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"AD607 Outcomes(path={path!r}): {folder} is no folder that can be written to; make it")

    def _locked(self) -> int:
        """The lock, taken with the first write: until then, another loader may hand the file over."""
        if self._lock_fd is not None:
            return self._lock_fd

        try:
            fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._not_written(error) from error

        is_ours = True
        with suppress(OSError):  # a file system without locks
            is_ours = lock(fd)
        if not is_ours:
            os.close(fd)
            raise ConfigError(
                f"AD607 Outcomes(path={self.path!r}) is in use by another loader: close that one first, or give each "
                "run a file of its own"
            )

        self._lock_fd = fd
        return fd

    # Read

    def find(self, num_bytes: int, digest: str) -> Found:
        """The records of a state.

        :raises SnapshotMismatchError: if no file has them (AD606).
        """
        if num_bytes == 0:
            return Found(None, b"", [])

        faults = []
        for path in (self.path, *(f"{self.path}.{number}" for number in range(1, _KEPT))):
            data = _start_of(path, num_bytes)
            if data is not None and len(data) == num_bytes and _digest(data) == digest:
                records, fault = _records(data)
                if fault is None:
                    return Found(path, data, records)

                faults.append(f"{path} {fault}")  # the digest is right: a state that was made by hand
            elif data is not None:
                faults.append(f"{path} {_fault(data, num_bytes)}")
        reason = "; ".join(faults) or "there is no such file"
        raise SnapshotMismatchError(
            f"AD606 the outcome memory of this snapshot, {num_bytes} bytes of {self.path}, is not there: {reason}. "
            'Give back the file that was beside the snapshot; or pass allow_changed={"outcomes"}, to begin with an '
            "empty memory",
            {"outcomes": (f"{num_bytes} bytes, digest {digest}", reason)},
        )

    def continue_after(self, path: str | None, data: bytes) -> None:
        """What is appended from now on follows ``data``, the first bytes of ``path``; what is there now is cut off."""
        self._close_file()
        self._at = path
        self._hash = blake2b(data, digest_size=16)
        self.num_bytes, self.digest = len(data), self._hash.hexdigest() if data else ""

    # Write

    def append(self, records: Iterable[Record]) -> None:
        """Append records; they survive a power loss.

        :raises SnapshotError: if they cannot be written (AD601); the file counts as unchanged then.
        :raises ConfigError: if another loader writes it (AD607).
        """
        data = b"".join(map(_frame, records))
        if not data:
            return

        try:
            fd = self._opened()
            if os.fstat(fd).st_size > self.num_bytes:  # of a killed run, or of an append that failed
                os.ftruncate(fd, self.num_bytes)
            _write(fd, data, self.num_bytes)
            os.fsync(fd)
        except OSError as error:
            raise self._not_written(error) from error
        finally:
            self._release_if_closed()

        self._extend(data)

    def replace(self, *records: Record) -> None:
        """Begin a new file with these records; the older ones stay as ``path.1`` and ``path.2``.

        :raises SnapshotError: if it cannot be written (AD601); the file is as it was.
        """
        self._locked()
        data = _MAGIC + b"".join(map(_frame, records))
        try:
            replace_file(self.path, [data], _KEPT)
            sync_folder(self.path)
        except OSError as error:
            raise self._not_written(error) from error
        finally:
            self._release_if_closed()

        self.continue_after(self.path, data)

    def _opened(self) -> int:
        if self._fd is not None:
            return self._fd

        self._locked()
        if self._at is None:
            replace_file(self.path, [_MAGIC], _KEPT)
            sync_folder(self.path)
            self.continue_after(self.path, _MAGIC)
        elif self._at != self.path:
            data = _start_of(self._at, self.num_bytes)
            if data is None or _digest(data) != self.digest:
                raise OSError(None, f"{self._at} was changed since it was read")

            replace_file(self.path, [data], _KEPT)
            sync_folder(self.path)
            self._at = self.path
        self._fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        return self._fd

    def _extend(self, data: bytes) -> None:
        self._hash.update(data)
        self.num_bytes += len(data)
        self.digest = self._hash.hexdigest()

    def _not_written(self, error: OSError) -> SnapshotError:
        return SnapshotError(
            f"AD601 the outcome memory {self.path} was not written: {error.strerror or error}; free space, or make its "
            "folder writable, and take the state again: no score is lost"
        )

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _release_if_closed(self) -> None:
        """A state may be taken after the loader is closed."""
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Close the file and give up the lock; a later write takes both for as long as it lasts."""
        self._is_closed = True
        self._close_file()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _frame(record: Record) -> bytes:
    return _FRAME.pack(record.kind, len(record.payload), crc32(record.payload)) + record.payload


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _write(fd: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        number = os.pwrite(fd, left, offset)
        left, offset = left[number:], offset + number


def _start_of(path: str, num_bytes: int) -> bytes | None:
    """The first ``num_bytes`` of the file, or all if it has fewer; None if there is no such file."""
    try:
        with open_regular(path) as file:
            return file.read(min(num_bytes, os.fstat(file.fileno()).st_size))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(f"AD606 the outcome memory {path} cannot be read: {error.strerror or error}") from error


def _records(data: bytes) -> tuple[list[Record], str | None]:
    """The records, and what is wrong with the first one that is not whole."""
    if not data.startswith(_MAGIC):
        return [], f"is no outcome memory (it starts with {data[:8]!r})"

    records: list[Record] = []
    place = len(_MAGIC)
    while place < len(data):
        if place + _FRAME.size > len(data):
            return records, f"is cut off at byte {place}"

        kind, length, checksum = _FRAME.unpack_from(data, place)
        payload = data[place + _FRAME.size : place + _FRAME.size + length]
        if len(payload) < length:
            return records, f"is cut off in the record at byte {place}"

        if crc32(payload) != checksum:
            return records, f"is damaged in the record at byte {place}"

        records.append(Record(kind, payload))
        place += _FRAME.size + length
    return records, None


def _fault(data: bytes, num_bytes: int) -> str:
    """Why these first bytes of a file are not those of a state."""
    _, fault = _records(data)
    if len(data) < num_bytes and (fault is None or "cut off" in fault):
        return f"has only {len(data)} bytes: a run that was resumed from an earlier snapshot has cut them off"

    return fault or "has other records: those of another run, or of one resumed from an earlier snapshot"
