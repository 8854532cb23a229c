"""JSONL files: which files are meant, and what is wrong with them before a row is read."""

from __future__ import annotations

import errno
import glob
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncdata.errors import ConfigError, SourceError
from asyncdata.fingerprint import stamp
from asyncdata.sources.base import FileBlocks

if TYPE_CHECKING:
    from asyncdata.fingerprint import FileStamp

__all__ = ("JsonlSource",)

_MAGIC = (
    (b"\x1f\x8b", "AD123 {path} is gzip (magic 1f 8b); decompress it first: gunzip --keep {path}"),
    (b"\x28\xb5\x2f\xfd", "AD123 {path} is zstd (magic 28 b5 2f fd); decompress it first: zstd -d {path}"),
    (b"PAR1", "AD123 {path} is Parquet, not JSONL"),
    (b"\xff\xfe", "AD103 {path} looks like UTF-16 (begins with ff fe); convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "AD103 {path} looks like UTF-16 (begins with fe ff); convert it: iconv -f UTF-16 -t UTF-8"),
)


class JsonlSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One JSON object a line, in one file or many.

    Lines end with ``\\n`` or ``\\r\\n``; blank ones are skipped, a byte-order mark at the start is too, and the last
    line needs no end. Files are read to the size they have at the start, and never memory-mapped.

    :param paths: a path, a glob, a folder (its ``*.jsonl``), or a list of these. A glob's and a folder's files are
        sorted by name; a list keeps its order. The order of files is part of the order of samples.
    :param max_row_bytes: a longer row is a bad row.
    """

    paths: str | list[str]
    max_row_bytes: int = 64 * 1024 * 1024

    def open(self, block_bytes: int) -> FileBlocks:
        """Find the files and look at each one's first bytes.

        :raises SourceError: naming every file that is missing, unreadable, empty where all are, or no JSONL at all.
        """
        given = [self.paths] if isinstance(self.paths, str | os.PathLike) else list(self.paths)
        paths: list[str] = []
        stamps, faults = [], []
        for item in given:
            try:
                paths += _expand(os.path.expanduser(item))
            except SourceError as error:
                faults.append(str(error))
        _refuse_repeats(paths)
        for path in paths:
            try:
                stamps.append(_inspect(path))
            except SourceError as error:
                faults.append(str(error))
        if faults:
            raise SourceError("\n".join(faults))

        if not any(found.num_bytes for found in stamps):
            raise SourceError(f"AD201 no rows in {len(stamps)} files, all empty: {', '.join(paths[:5])}")

        return FileBlocks(stamps, block_bytes, self.max_row_bytes)


def _expand(path: str) -> list[str]:
    if os.path.isdir(path):
        found = sorted(str(entry) for entry in Path(path).iterdir() if entry.name.endswith(".jsonl"))
        if not found:
            raise SourceError(f"AD306 the folder {path} holds no *.jsonl; name the files, or a glob")

        return found

    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]

    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise SourceError(f"AD308 {path!r} matches nothing in {os.getcwd()}")

    return found


def _refuse_repeats(paths: list[str]) -> None:
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise ConfigError(f"AD309 {path} is listed twice; its rows would come twice an epoch")

        seen.add(real)


def _inspect(path: str) -> FileStamp:
    try:
        with open(path, "rb", buffering=0, opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SourceError(f"AD306 {path} is no regular file; it could not be read again on resume")

            head = file.read(4096)
        found = stamp(os.path.abspath(path))
    except OSError as error:
        raise SourceError(_why_unreadable(path, error)) from error

    for magic, text in _MAGIC:
        if head.startswith(magic):
            raise SourceError(text.format(path=path))

    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        raise SourceError(f"AD120 {path} is a JSON array; write one object a line: jq -c '.[]' {path}")

    return found


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO's open would wait for a writer


def _why_unreadable(path: str, error: OSError) -> str:
    if error.errno == errno.ENOENT and os.path.islink(path):
        return f"AD307 {path} -> {os.readlink(path)} (missing): a broken link"

    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"AD305 cannot read {path} as uid {os.getuid()}: {error.strerror}"

    return f"AD304 cannot read {path}: {error.strerror}"
