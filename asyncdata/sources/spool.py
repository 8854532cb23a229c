"""Rows copied to where they can be read one by one: for sources that can only be read in pieces. Runs without numpy.

While the row index is made, workers write the rows of each piece to a file of their own, one JSON text a line.
"""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING, Any

from asyncdata.import_path import resolve_path
from asyncdata.sources.reader import FileChangedError, unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.sources.reader import BlockReader, BlockRows
    from asyncdata.wire import Block, Job, Overflow

__all__ = ("SpoolReader", "is_whole", "part_path", "write_part")

_MAX_OPEN_FILES = 64


def part_path(folder: str, number: int) -> str:
    """The file of the rows whose blocks begin with block ``number``."""
    return os.path.join(folder, f"{number:012d}.jsonl")


def write_part(path: str, rows: Sequence[bytes | memoryview]) -> array[int]:
    """Write the rows, whole or not at all; where each begins is returned, in bytes.

    :raises OSError: if they cannot be written.
    """
    offsets, end = array("i"), 0
    unfinished = f"{path}.{os.getpid()}"
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", buffering=1 << 20) as file:
            for row in rows:
                offsets.append(end)
                file.write(row)
                file.write(b"\n")
                end += len(row) + 1
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise

    return offsets


def is_whole(path: str, lengths: Sequence[int]) -> bool:
    """Whether the file can hold rows of these lengths."""
    try:
        return os.stat(path).st_size == sum(max(0, length) + 1 for length in lengths)
    except OSError:
        return False


class SpoolReader:
    """Reads blocks as another reader does, and single rows from the files that :func:`write_part` wrote.

    :param inner: the other reader.
    :param folder: where the files are. A place in file number n of it has the ``file_id`` -1 - n; others are the other
        reader's.
    """

    def __init__(self, job: Job, inner: str, settings: dict[str, Any], folder: str) -> None:
        self._inner: BlockReader = resolve_path(inner)(job, **settings)
        self._folder = folder
        self._fds: dict[int, int] = {}

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        """As the protocol says."""
        return self._inner.read_block(block, num_bytes)

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        """As the protocol says."""
        return [self._read(place, lengths) for place in places]

    def _read(self, place: Overflow, lengths: Sequence[int]) -> bytes:
        if place.file_id >= 0:
            return self._inner.read_rows([place], lengths)[0]

        number, num_bytes = -1 - place.file_id, lengths[place.row]
        path = part_path(self._folder, number)
        try:
            row = os.pread(self._fd(number), num_bytes, place.offset)
        except OSError as error:
            raise unreadable(error, path, place.offset) from error

        if len(row) < num_bytes:
            raise FileChangedError(
                f"AD302 {path} shrank while it was read; delete its folder, and the rows are copied anew"
            )

        return row

    def _fd(self, number: int) -> int:
        fd = self._fds.get(number)
        if fd is None:
            if len(self._fds) >= _MAX_OPEN_FILES:
                os.close(self._fds.pop(next(iter(self._fds))))
            fd = self._fds[number] = os.open(part_path(self._folder, number), os.O_RDONLY | os.O_CLOEXEC)
        return fd

    def check(self) -> None:
        """As the protocol says."""
        self._inner.check()

    def close(self) -> None:
        """As the protocol says."""
        self._inner.close()
        while self._fds:
            os.close(self._fds.popitem()[1])
