"""The file of one start: whole lines are appended, and nothing that happens to the disk reaches the caller."""

from __future__ import annotations

import os
from contextlib import suppress

_MAX_STARTS = 10_000
_RESERVED_BYTES = 1024
"""Bytes that stay free for the last record."""


class RecordFile:
    """Appends lines, all of each or nothing of it. A forked child does not close it.

    The first line makes the folder and the file, under a name that no other start has.

    :param max_bytes: limit of the file: one half for details, the other for totals.
    :ivar number: of this start among its rank's.
    :ivar fault: why the last line could not be written; empty if it was.
    """

    def __init__(self, folder: str, rank: int, max_bytes: int) -> None:
        self._fd, self._pid = -1, os.getpid()
        self._folder, self._rank = folder, rank
        self._share = max_bytes // 2
        self._num_bytes = {"details": 0, "totals": 0}
        self.number = 0
        self.fault = ""

    def open(self) -> bool:
        """Make the file, unless it is there; return whether it is."""
        if self._fd >= 0:
            return True

        try:
            os.makedirs(self._folder, exist_ok=True)
            self._fd = self._made()
        except OSError as error:
            self.fault = str(error)
        return self._fd >= 0

    def _made(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            path = f"{self._folder}/rank-{self._rank:05}-{self.number:04}.jsonl"
            try:
                return os.open(path, flags, 0o644)
            except FileExistsError:
                if self.number >= _MAX_STARTS:
                    raise

                self.number += 1

    def write(self, line: bytes, *, is_detail: bool = False, is_last: bool = False) -> str:
        """Append a line. Return why it is lost: ``disk`` or ``size``; empty if it is written."""
        if self._pid != os.getpid() or not self.open():
            return "disk"

        kind = "details" if is_detail else "totals"
        room = self._share - self._num_bytes[kind] - (0 if is_last else _RESERVED_BYTES)
        if len(line) > room:
            return "size"

        self.fault = self._append(line)
        if self.fault:
            return "disk"

        self._num_bytes[kind] += len(line)
        return ""

    def _append(self, line: bytes) -> str:
        """Append a line to the open file. Return why that was not possible; empty if it was."""
        try:
            if os.fstat(self._fd).st_nlink == 0:
                return "the file was removed"

            num_written = os.write(self._fd, line)
            if num_written < len(line):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - num_written)
                return "no space left for a whole record"
        except OSError as error:
            return str(error)

        return ""

    @property
    def thinning(self) -> int:
        """By how much longer intervals are: 1, and twice as much each time half of the room that was left is used."""
        left = max(1, self._share - self._num_bytes["totals"])
        return 1 << (self._share // left).bit_length() - 1

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0 and self._pid == os.getpid():
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1
