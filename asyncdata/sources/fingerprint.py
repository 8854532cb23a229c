"""Digests of files and settings that must match when a snapshot is loaded, and messages about differences.

Tests pin the digests: a changed digest would make every existing snapshot unusable.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.digest import ListDigest, digest
from asyncdata.core.errors import SourceChangedError, SourceError
from asyncdata.core.file_refs import base_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.core.file_refs import ObjectRefs, SizedFile

__all__ = (
    "FileStamp",
    "MAX_LISTED_FILES",
    "WHOLE_BYTES",
    "content_digest",
    "data_fingerprint",
    "file_digest",
    "stamp",
    "stamp_of",
)

MAX_LISTED_FILES = 1000
"""With more files than this, a fingerprint has only their combined digest, so that snapshots stay small."""

_EDGE_BYTES = 64 << 10
_BLOCK_BYTES = 4 << 10
_NUM_BLOCKS = 16
WHOLE_BYTES = 2 * _EDGE_BYTES + _NUM_BLOCKS * _BLOCK_BYTES
"""A file of no more bytes is digested whole."""


class FileStamp(msgspec.Struct, frozen=True):
    """The result of ``stat`` for a file; equal stamps mean the same unchanged file of this machine."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int = 0


def stamp(path: str) -> FileStamp:
    """The file's stamp now.

    :raises SourceError: if it cannot be looked at.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error

    return stamp_of(path, found)


def stamp_of(path: str, found: os.stat_result) -> FileStamp:
    """The stamp from a result of ``stat``."""
    return FileStamp(path, found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


def file_digest(path: str, num_bytes: int) -> str:
    """Digest of a sample of the file's first ``num_bytes`` bytes: its size, both ends, and blocks between them.

    Files up to 192 KiB are read whole. The positions of the blocks depend only on the size.

    :raises SourceChangedError: if the file is shorter.
    :raises SourceError: if it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return content_digest(fd, path, num_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(path, error) from error


def content_digest(fd: int, path: str, num_bytes: int) -> str:
    """:func:`file_digest` of a file that is open.

    :raises SourceChangedError: if the file is shorter.
    :raises OSError: if it cannot be read.
    """
    return digest(str(num_bytes), *(_read(fd, path, *piece, num_bytes) for piece in _pieces(num_bytes)))


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """The sampled ranges: (offset, length)."""
    if num_bytes <= WHOLE_BYTES:
        yield 0, num_bytes
        return

    yield 0, _EDGE_BYTES
    between = num_bytes - 2 * _EDGE_BYTES
    for number in range(_NUM_BLOCKS):
        yield _EDGE_BYTES + between * number // _NUM_BLOCKS, _BLOCK_BYTES
    yield num_bytes - _EDGE_BYTES, _EDGE_BYTES


def _read(fd: int, path: str, offset: int, length: int, num_bytes: int) -> bytes:
    pieces: list[bytes] = []
    while length > 0:
        piece = os.pread(fd, length, offset)
        if not piece:
            found = os.fstat(fd).st_size
            raise SourceChangedError(
                f"AD302 {path} is not the file it was: expected {num_bytes} bytes, found {found}; "
                "put the file back, or start a new run on the new one"
            )

        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(pieces)


def _unreadable(path: str, error: OSError) -> SourceError:
    code = "AD304" if isinstance(error, FileNotFoundError) else "AD305"
    return SourceError(f"{code} {path} cannot be read: {error.strerror}; check the path and its permissions")


def data_fingerprint(files: Sequence[SizedFile], digests: Sequence[str] | None = None) -> dict[str, Any]:
    """The fingerprint of files: name, size and content sample of each, in order, without the folder.

    ``{"num_files", "num_bytes", "digest", "files": [[name, num_bytes, digest], ...]}``. Above
    :data:`MAX_LISTED_FILES`, ``files`` is empty, and ``content`` is a digest of the same without the names.

    :param digests: of the files' content if known; empty for a file that has to be read.
    :raises SourceError: as :func:`file_digest`.
    """
    found, listed = ListDigest(), list[list[Any]]()
    for file, known in zip(files, digests or [""] * len(files), strict=True):
        entry = base_name(file.path), file.num_bytes, known or file_digest(file.path, file.num_bytes)
        found.add(*entry)
        if len(files) <= MAX_LISTED_FILES:
            listed.append(list(entry))
    return _fingerprint(found, listed, len(files), sum(file.num_bytes for file in files))


def objects_fingerprint(objects: ObjectRefs) -> dict[str, Any]:
    """The same of objects, whose digests are known."""
    listed = objects[:] if len(objects) <= MAX_LISTED_FILES else []
    entries = [[base_name(file.path), file.num_bytes, file.digest] for file in listed]
    return _fingerprint(objects.digests, entries, len(objects), sum(objects.sizes))


def _fingerprint(digests: ListDigest, listed: list[list[Any]], num_files: int, num_bytes: int) -> dict[str, Any]:
    found = {"num_files": num_files, "num_bytes": num_bytes, "digest": digests.with_names, "files": listed}
    # what is listed tells the content without the names as well
    return found if num_files <= MAX_LISTED_FILES else found | {"content": digests.without_names}
