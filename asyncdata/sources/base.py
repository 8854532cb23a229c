"""The Source protocol, opened sources, and files split into byte blocks by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from asyncdata.core.errors import SourceChangedError, SourceError
from asyncdata.core.identity import FileRef, FileRefs, ObjectRefs, all_sizes
from asyncdata.core.messages import LINES, REMOTE_LINES, Block, BlockCacheSpec, ReaderSpec, StoreSpec
from asyncdata.core.types import SourceLocation
from asyncdata.sources.files import data_fingerprint, edited, file_digest, is_same, stamp
from asyncdata.sources.paths import commits_in

_MAX_DIGESTED_FILES = 32
"""Of more, the content is not looked at when a loader starts: that is to be over at once."""
_MAX_SLOT_BYTES = 1 << 30  # places in a slot are int32


@runtime_checkable
class Source(Protocol):
    """A description of where rows are stored."""

    def open(self, block_bytes: int) -> Blocks:
        """Inspect the data once, and split it into blocks of about ``block_bytes``.

        :raises SourceError: if files cannot be read; it names all of them.
        """


class Blocks(Protocol):
    """An opened source: pieces numbered from 0, which any worker can read independently.

    :ivar files: the files with the pieces, numbered.
    :ivar max_row_bytes: a longer row is a bad row.
    :ivar reader: describes how a worker reads a piece.
    :ivar block_bytes: average bytes of a piece's rows; it determines the size of windows.
    :ivar room_bytes: bytes of a slot that a piece may use. Rows that do not fit are read one by one.
    :ivar reads_single_rows: whether reading a single row costs no more than reading it with its neighbours.
    :ivar are_arrays: for each file, whether its rows are the elements of an array. Such rows also have a number, and
        are found by reading the file from its front. Empty if there are no arrays.
    """

    files: FileRefs
    max_row_bytes: int
    reader: ReaderSpec
    block_bytes: int
    room_bytes: int
    reads_single_rows: bool
    are_arrays: Sequence[bool]

    @property
    def num_blocks(self) -> int:
        """How many pieces there are."""

    @property
    def extent(self) -> int:
        """The sum of the pieces' ``stop - start``: bytes, or rows where rows are numbered."""

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        """The pieces numbered ``ids``."""

    def location(self, file_id: int, offset: int, num_bytes: int) -> SourceLocation:
        """A row's place, with its file's path."""

    def fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the data: ``{"digest": ..., ...}``."""

    def check_unchanged(self) -> None:
        """Check that the data have not changed.

        :raises SourceChangedError: naming what has changed.
        """

    def close(self) -> None:
        """Remove temporary files of this run."""


def room_of(source: Blocks, max_blocks: int) -> int:
    """Bytes of a slot for each of at most ``max_blocks`` pieces."""
    return min(source.room_bytes, max(1, _MAX_SLOT_BYTES // max_blocks))


class Files:
    """Numbered files, or objects, with their state at the start, and checks that they have not changed.

    :param stores: the stores of the objects.
    :ivar refs: the state of each file, or object, at the start.
    :ivar undecoded: files with no rows but bad ones at their start, and how many.
    """

    reader = LINES
    are_arrays: Sequence[bool] = ()
    undecoded: Sequence[tuple[str, int]] = ()

    def __init__(self, files: FileRefs, max_row_bytes: int, stores: Sequence[StoreSpec] = ()) -> None:
        self.stores = list(stores)
        self.reads_single_rows = not stores  # from a store, each row would be a request
        has_time = isinstance(files, list) and len(files) <= _MAX_DIGESTED_FILES
        self.refs: FileRefs = list(map(_with_content, files)) if has_time else files
        self.files = self.refs
        self.max_row_bytes = max_row_bytes
        self._fingerprint: dict[str, Any] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(all_sizes(self.files))

    def close(self) -> None:
        """There are no temporary files to remove."""

    def location(self, file_id: int, offset: int, num_bytes: int) -> SourceLocation:
        """A row's place, with its file's path and its number there."""
        return SourceLocation(self.files[file_id].path, -1, num_bytes, offset)

    def keep_blocks(self, kept: BlockCacheSpec) -> None:
        """Let those who read the objects keep their blocks on the local disk."""
        self.stores = [store.with_cache(kept) for store in self.stores]

    def fingerprint(self) -> dict[str, Any]:
        """Digest of samples of the files' content (``sources.files``); with many files it is computed at the
        first call.
        """
        if self._fingerprint is None:
            found = data_fingerprint(self.refs)
            if isinstance(self.refs, ObjectRefs):
                paths = self.refs.paths if "hf" in self.refs.schemes else iter(())
            else:
                paths = (ref.path for ref in self.refs if ref.pin is not None)
            if commits := commits_in(paths):
                found["commits"] = commits
            if isinstance(self.refs, list) and any(not ref.digest and _is_touched(ref) for ref in self.refs):
                return found  # of what the files are now: nothing to hold them against later

            self._fingerprint = found
        return self._fingerprint

    def check_unchanged(self) -> None:
        """Check that no file has changed: at an epoch's start, before its blocks are read again.

        :raises SourceChangedError: naming the file, and how it differs.
        """
        if not isinstance(self.refs, ObjectRefs):  # of objects, each read finds out
            for number in range(len(self.refs)):
                self.check_file(number)

    def check_file(self, number: int) -> None:
        """The same of one file.

        :raises SourceChangedError: as above.
        """
        before = self._known(number)
        if before.pin is not None:
            return

        try:
            now = stamp(before.path)
        except SourceError as error:
            raise SourceChangedError(f"{error}. It was there at the start.") from error

        if now.num_bytes < before.num_bytes:
            raise SourceChangedError(
                f"AD302 {before.path} shrank from {before.num_bytes} to {now.num_bytes} bytes while it was read"
            )

        if not is_same(before, now, lambda: file_digest(before.path, before.num_bytes)):
            raise SourceChangedError(edited(before.path))

    def _known(self, number: int) -> FileRef:
        """The file, with the digest of its content if that was looked at while it was what it was at the start."""
        ref, listed = self.refs[number], self._fingerprint["files"] if self._fingerprint is not None else []
        if ref.digest or number >= len(listed):
            return ref

        return msgspec.structs.replace(ref, digest=listed[number][2])


def _is_touched(ref: FileRef) -> bool:
    now = stamp(ref.path)
    return (now.num_bytes, now.inode, now.mtime_ns) != (ref.num_bytes, ref.inode, ref.mtime_ns)


def _with_content(file: FileRef) -> FileRef:
    """The file with the digest of its content, if it is still the same."""
    if file.pin is not None or file.digest:
        return file

    with suppress(SourceError):  # the reader reports it
        content = file_digest(file.path, file.num_bytes)
        if stamp(file.path) == file:
            return msgspec.structs.replace(file, digest=content)
    return file


class FileBlocks(Files):
    """Files split into byte ranges, numbered across all files.

    The files are not scanned: a row belongs to the block that contains its first byte.

    :param reader: how lines are separated; None: by newlines only.
    """

    def __init__(
        self,
        files: FileRefs,
        block_bytes: int,
        max_row_bytes: int,
        reader: ReaderSpec | None = None,
        stores: Sequence[StoreSpec] = (),
    ) -> None:
        super().__init__(files, max_row_bytes, stores)
        self.reader = reader or (REMOTE_LINES if stores else LINES)
        self.block_bytes = self.room_bytes = block_bytes
        counts = -(-np.asarray(all_sizes(self.files), np.int64) // block_bytes)
        self._first_blocks = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))

    @property
    def extent(self) -> int:
        """Bytes of all blocks."""
        return self.num_bytes

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return int(self._first_blocks[-1])

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        """The byte ranges of the blocks numbered ``ids``."""
        numbers = np.asarray(ids, dtype=np.int64)
        file_ids = np.searchsorted(self._first_blocks, numbers, side="right") - 1
        starts = (numbers - self._first_blocks[file_ids]) * self.block_bytes
        return [
            Block(file_id, start, min(start + self.block_bytes, self.files[file_id].num_bytes))
            for file_id, start in zip(file_ids.tolist(), starts.tolist(), strict=True)
        ]

    def location(self, file_id: int, offset: int, num_bytes: int) -> SourceLocation:
        """A row's place, with its file's path."""
        return SourceLocation(self.files[file_id].path, offset, num_bytes)
