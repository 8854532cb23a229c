"""Reads that fail, come short or late: of local files in this process and in workers, and of a remote file system.

A worker imports this module for its tokenize function, and has short reads from then on.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import stat
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("FAULTS", "Faults", "faulty", "faulty_file_system")

SLOW_S = 0.0005


class Faults:
    """What happens to reads.

    :param short: whether they come short, as the system may let them.
    :param fail_at: the number of the read that fails, from 1; 0: none does.
    :param error: what it raises.
    :ivar is_on: no read counts while it is not.
    :ivar num_reads: so many there were.
    :ivar num_faults: that were not as they are in quiet times.
    """

    def __init__(
        self, *, short: bool = False, slow: bool = False, fail_at: int = 0, error: OSError | None = None, seed: int = 0
    ) -> None:
        self.num_reads = self.num_faults = 0
        self.is_on = True
        self._is_short, self._is_slow = short, slow
        self._fail_at, self._error = fail_at, error
        self._chance = random.Random(seed)

    def read(self, num_bytes: int, read: Callable[[int], bytes]) -> bytes:
        """Read at most ``num_bytes``, as it goes."""
        if not self.is_on:
            return read(num_bytes)

        self.num_reads += 1
        if self._is_slow:
            time.sleep(SLOW_S * self._chance.random())
        if self.num_reads == self._fail_at and self._error is not None:
            self.num_faults += 1
            raise self._error

        if not self._is_short or num_bytes < 2:
            self.num_faults += self._is_slow
            return read(num_bytes)

        self.num_faults += 1
        return read(self._chance.randrange(1, num_bytes))


FAULTS = Faults(short=True)
"""Of this process, where it is a worker."""


class _FaultyFile(io.FileIO):
    faults: Faults

    def read(self, num_bytes: int | None = -1) -> bytes:
        if num_bytes is None or num_bytes < 0:
            return super().read(num_bytes)

        return self.faults.read(num_bytes, super().read)


@contextlib.contextmanager
def faulty(faults: Faults) -> Iterator[Faults]:
    """Reads of the library in this process, meanwhile."""
    pread = os.pread

    def faulty_pread(fd: int, num_bytes: int, offset: int) -> bytes:
        return faults.read(num_bytes, lambda number: pread(fd, number, offset))

    def faulty_open(fd: int, _mode: str, buffering: int, closefd: bool) -> _FaultyFile:
        assert buffering == 0
        file = _FaultyFile(fd, closefd=closefd)
        file.faults = faults
        return file

    with (
        patch("os.pread", faulty_pread),
        patch("asyncdata.sources.text.compression.open", faulty_open, create=True),
    ):
        yield faults


def row_id(row: dict[str, Any]) -> list[int]:
    """The row's id; in a worker whose reads come short."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and not hasattr(os.pread, "is_faulty"):
        pread = os.pread

        def faulty_pread(fd: int, num_bytes: int, offset: int) -> bytes:
            return FAULTS.read(num_bytes, lambda number: pread(fd, number, offset))

        faulty_pread.is_faulty = True  # type: ignore[attr-defined]
        os.pread = faulty_pread
    return [row["id"]]


def _place(path: str) -> str:
    return "/" + path.removeprefix("faulty://").strip("/")


def faulty_file_system(faults: Faults) -> str:
    """Register a remote file system with these faults; what paths of it begin with."""
    import fsspec
    from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

    class FaultyFileSystem(AbstractFileSystem):
        """Local files that look remote."""

        protocol = "faulty"
        cachable = False

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            path = _place(path)
            found = os.stat(path)
            kind = "directory" if stat.S_ISDIR(found.st_mode) else "file"
            return {"name": path, "size": found.st_size, "type": kind, "mtime": found.st_mtime}

        def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
            path = _place(path)
            names = [path] if os.path.isfile(path) else [f"{path}/{name}" for name in os.listdir(path)]
            return [self.info(name) for name in names] if detail else names

        def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
            return RemoteFile(self, path, mode, block_size=1 << 10, cache_type="readahead")

    class RemoteFile(AbstractBufferedFile):
        """Fetches blocks, which is where things go wrong."""

        def _fetch_range(self, start: int, end: int) -> bytes:
            with open(_place(self.path), "rb") as file:
                return faults.read(end - start, lambda number: os.pread(file.fileno(), number, start))

    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    return "faulty://"
