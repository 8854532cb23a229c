"""Copies of rows that can be read one by one, for sources that can only be read in pieces. Runs without numpy.

While the row index is built, workers write the rows of each piece to a file: the JSON text of each row, followed by a
checksum. If the checksum does not match, the row is read from its source, and its copy is repaired.
"""

from __future__ import annotations

import os
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from zlib import crc32

from asyncdata.core.files import sync_folder
from asyncdata.core.identity import FileRef
from asyncdata.core.settings import resolve_path
from asyncdata.sources.files import BlockReader, BlockRows, OpenFiles, SameFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdata.core.messages import Block, Job, Overflow

_SUM_BYTES = 4


def part_path(folder: str, number: int) -> str:
    """The file of the rows whose blocks begin with block ``number``."""
    return os.path.join(folder, f"{number:012d}.rows")


def write_part(path: str, rows: Iterable[bytes | memoryview], *, is_kept: bool = False) -> array[int]:
    """Write the rows atomically, and return the start of each in bytes.

    :param is_kept: whether a later run may use them; then they are synced to the disk before this returns.
    :raises OSError: if they cannot be written.
    """
    offsets, end, salt = array("i"), 0, _salt(path)
    unfinished = f"{path}.{os.getpid()}"
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", buffering=1 << 20) as file:
            for row in rows:
                offsets.append(end)
                file.write(row)
                file.write(_sum(row, salt, end))
                end += len(row) + _SUM_BYTES
            if is_kept:
                file.flush()
                os.fsync(fd)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise

    if is_kept:
        sync_folder(path)
    return offsets


def is_whole(path: str, lengths: Sequence[int]) -> bool:
    """Whether the size of the file fits rows of these lengths. Its content is checked when it is read."""
    try:
        return os.stat(path).st_size == sum(max(0, length) + _SUM_BYTES for length in lengths)
    except OSError:
        return False


def _salt(path: str) -> int:
    return crc32(os.path.basename(path).encode())


def _sum(row: bytes | memoryview, salt: int, offset: int) -> bytes:
    """The checksum of a row and its position, so that an intact row from another position does not match."""
    return crc32(row, salt ^ offset).to_bytes(_SUM_BYTES, "little")


class SpoolReader:
    """Reads blocks as another reader does, and single rows from the files that :func:`write_part` wrote.

    If a copy of a row is missing or damaged, the row is read by the other reader, and its copy is repaired if possible.

    :param inner: the other reader.
    :param folder: where the files are.
    :ivar num_mended: rows whose copy was damaged, so far.
    """

    def __init__(self, job: Job, inner: str, settings: dict[str, Any], folder: str) -> None:
        self.num_mended = 0
        self._inner: BlockReader = resolve_path(inner)(job, **settings)
        self._folder = folder
        self._pieces = OpenFiles(lambda number: SameFile(FileRef(part_path(folder, number), 0)))

    def __getattr__(self, name: str) -> Any:
        """What else the other reader has: what it does as one of objects, and what it counts."""
        return getattr(self._inner, name)

    def read_block(self, block: Block, num_bytes: int) -> BlockRows:
        return self._inner.read_block(block, num_bytes)

    def read_rows(self, places: Sequence[Overflow], lengths: Sequence[int]) -> list[bytes]:
        copied = [self._copy(place, lengths[place.row]) for place in places]
        missing = [place for place, row in zip(places, copied, strict=True) if row is None]
        if not missing:
            return [row for row in copied if row is not None]

        originals = self._inner.read_rows(missing, lengths)
        for place, row in zip(missing, originals, strict=True):
            if place.copy_id >= 0:
                self.num_mended += 1
                self._mend(place, row)
        found = iter(originals)
        return [next(found) if row is None else row for row in copied]

    def _copy(self, place: Overflow, num_bytes: int) -> bytes | None:
        """The row from its copy; None if the copy is missing or damaged."""
        if place.copy_id < 0:
            return None

        try:
            found = os.pread(self._pieces.to_read(place.copy_id).fd, num_bytes + _SUM_BYTES, place.copy_offset)
        except OSError:
            return None

        row, salt = found[:num_bytes], _salt(part_path(self._folder, place.copy_id))
        return row if found[num_bytes:] == _sum(row, salt, place.copy_offset) else None

    def _mend(self, place: Overflow, row: bytes) -> None:
        """A concurrent reader sees either a wrong checksum or the complete row."""
        path = part_path(self._folder, place.copy_id)
        with suppress(OSError):  # a copy that is missing or not writable may be written again by the next run
            fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.pwrite(fd, row + _sum(row, _salt(path), place.copy_offset), place.copy_offset)
            finally:
                os.close(fd)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()
        self._pieces.close()
