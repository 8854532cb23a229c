"""Writes bad rows that were passed over to the log and the quarantine file, and reads that file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from asyncdata.core.errors import BadRowError, ConfigError, QuarantineError, get_logger
from asyncdata.core.files import open_regular, refuse_others

_log = get_logger(__name__)
_MAX_LINE_BYTES = 1 << 20
_MAX_LOGGED = 10
"""Number of bad rows of one code that are logged one by one."""


class Quarantine:
    """Where bad rows go that are passed over: to the log, and to a JSONL file if ``path`` is given.

    :param path: the file; rows are appended. A run that resumes before a bad row writes that row again.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._num_logged: dict[str, int] = {}
        self._log = _log.owned()

    @classmethod
    def opened(cls, path: str | None) -> Quarantine:
        """A quarantine whose file, if it has one, exists and can be written.

        :raises ConfigError: if it cannot.
        """
        try:
            if path is not None:
                os.close(_open(path))
        except OSError as error:
            raise ConfigError(f"AD605 cannot write BadRows(path={path!r}): {error.strerror}") from error

        return cls(path)

    def add(self, error: BadRowError) -> None:
        """Log the row, and write it to the file, durably. Called before the delivery is committed.

        :raises QuarantineError: if the write fails; then the row is not passed over.
        """
        self._log_first(error)
        if self._path is None:
            return

        line = json.dumps(record_of(error)).encode() + b"\n"
        try:
            _append(self._path, line)
        except OSError as error:
            raise QuarantineError(
                f"AD605 cannot write to {self._path}: {error.strerror}. The bad row was not passed over; make room, "
                "and ask again"
            ) from error

    def _log_first(self, error: BadRowError) -> None:
        """Log the first rows of a code one by one; after that, one row each time their number has doubled."""
        number = self._num_logged[error.code] = self._num_logged.get(error.code, 0) + 1
        where: dict[str, Any] = {"code": error.code, "path": error.path}
        if error.line is not None:
            where["line"] = error.line
        elif error.row_number is not None:
            where["row_number"] = error.row_number
        else:  # an object of a store: its lines are not counted
            where["byte_offset"] = error.byte_offset
        if number <= _MAX_LOGGED:
            self._log.warning("row.bad", **where, reason=error.reason)
        elif number % _MAX_LOGGED == 0 and (number // _MAX_LOGGED).bit_count() == 1:
            self._log.warning("row.bad_again", num_rows=number, **where, reason=error.reason)


def _append(path: str, line: bytes) -> None:
    fd = _open(path)
    try:
        if _is_torn(fd):
            line = b"\n" + line
        left = line
    except BaseException:
        os.close(fd)
        raise

    try:
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    except OSError:
        _take_back(fd, len(line) - len(left))
        raise
    finally:
        os.close(fd)


def _take_back(fd: int, num_bytes: int) -> None:
    """Remove a half-written line, which would spoil the next one; but not if another process has appended since."""
    end = os.lseek(fd, 0, os.SEEK_CUR)
    if num_bytes and end == os.fstat(fd).st_size:
        os.ftruncate(fd, end - num_bytes)


def _is_torn(fd: int) -> bool:
    """Whether the file ends with half a line, because a process was killed while it wrote."""
    num_bytes = os.fstat(fd).st_size
    return num_bytes > 0 and os.pread(fd, 1, num_bytes - 1) != b"\n"


def _open(path: str) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        refuse_others(fd, path)
    except BaseException:
        os.close(fd)
        raise

    return fd


def record_of(error: BadRowError) -> dict[str, Any]:
    """The JSON object that the quarantine file has for a bad row."""
    numbered = {} if error.row_number is None else {"row_number": error.row_number}
    return {
        "code": error.code,
        "path": error.path,
        "line": error.line,
        "byte_offset": error.byte_offset,
        **numbered,
        "reason": error.reason,
        "excerpt": error.excerpt,
    }


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A bad row, as :func:`record_of` wrote it; see :class:`~asyncdata.errors.BadRowError`."""

    code: str
    path: str
    line: int | None
    byte_offset: int
    row_number: int | None = None
    reason: str
    excerpt: str = ""

    @property
    def place(self) -> str:
        """``FILE:LINE`` if the line is known; otherwise the file with the row number or the byte offset."""
        if self.line is not None:
            return f"{self.path}:{self.line}"

        return f"{self.path} ({f'byte {self.byte_offset}' if self.row_number is None else f'row {self.row_number}'})"


class Quarantined(NamedTuple):
    """The content of a quarantine file.

    :ivar entries: each row once, as it was written last, in the order in which the rows were first written.
    :ivar times: how often each row was written: once per epoch, and again after a resume.
    :ivar num_unreadable: lines that are not a record, such as the last line of a process that was killed.
    """

    entries: list[Entry]
    times: list[int]
    num_unreadable: int


def read_quarantine(path: str) -> Quarantined:
    """Read a quarantine file.

    :raises ConfigError: if it cannot be read.
    """
    entries: dict[tuple[object, ...], Entry] = {}
    times: dict[tuple[object, ...], int] = {}
    num_unreadable = 0
    decoder = msgspec.json.Decoder(Entry)
    try:
        for line in _lines(path):
            try:
                entry = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                num_unreadable += 1
                continue

            key = (entry.path, entry.byte_offset, entry.row_number)
            entries[key] = entry
            times[key] = times.get(key, 0) + 1
    except OSError as error:
        raise ConfigError(f"AD605 cannot read the quarantine {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL in it
        raise ConfigError(f"AD605 cannot read the quarantine {path!r}: {error}") from error

    return Quarantined(list(entries.values()), list(times.values()), num_unreadable)


def _lines(path: str) -> Iterator[bytes]:
    """The lines of the file; of a line longer than any record, only the start."""
    with open_regular(path) as file:
        is_within = False
        while line := file.readline(_MAX_LINE_BYTES):
            if not is_within:
                yield line
            is_within = not line.endswith(b"\n")
