"""JSON in files, as lines or as one array: finds the files, detects their format, and checks them."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.errors import ConfigError, SourceError
from asyncdata.core.identity import FileRef, FileRefs, all_sizes
from asyncdata.core.messages import ReaderSpec, StoreSpec
from asyncdata.core.settings import Settings
from asyncdata.sources.base import FileBlocks
from asyncdata.sources.files import stamp
from asyncdata.sources.paths import find_files, names_objects, noting, open_regular, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.sources.remote.listing import Objects
    from asyncdata.sources.splits import Splits
    from asyncdata.sources.text_stream import TextStream

    _Suffixes = Sequence[tuple[str, ...]]


CODING_OF_SUFFIX = {".gz": "gzip", ".zst": "zstd"}
"""The coding by the file's suffix; its first bytes decide."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes((n, 0x2A, 0x4D, 0x18)) for n in range(0x50, 0x60)))  # or one to be skipped
_HEAD_BYTES = 4096
_FIRST_BYTES = 32 * 1024
"""A block: so much is read where no row of the head can be decoded; of an object at once, as a request costs more."""
_MANY_ROWS = 8
_BEGUN_ROW = re.compile(rb'\s*\{\s*(["}]|$)')
_PYTHON_LINES = ReaderSpec("asyncdata.sources.line_scanner:PythonLineReader", tag="python-lines")
_CODED_SUFFIXES = tuple(CODING_OF_SUFFIX)
_ENDS = (("UTF-32", "LE"), ("UTF-32", "BE"), ("UTF-16", "LE"), ("UTF-16", "BE"))
_NOT_UTF8 = "AD103 {path} looks like {coding} (begins with {head}); convert it: iconv -f {coding} -t UTF-8"
_CODINGS = (
    ("UTF-32", b"\xff\xfe\0\0"),
    ("UTF-32", b"\0\0\xfe\xff"),
    ("UTF-16", b"\xff\xfe"),
    ("UTF-16", b"\xfe\xff"),
    *((f"{coding}{end}", bracket.encode(f"{coding}{end}")) for bracket in "{[" for coding, end in _ENDS),
)
"""First bytes that are not UTF-8: byte-order marks, longer ones first, and a row without a mark."""


class JsonlSource(Settings, frozen=True, forbid_unknown_fields=True):
    """One JSON object a line, in one file or many.

    Lines end with ``\\n`` or ``\\r\\n``; blank ones are skipped, a byte-order mark at the start is too, and the last
    line needs no end. Files are read to the size they have at the start, and never memory-mapped.

    Files that are compressed with gzip or zstd, and files not named ``*.jsonl`` that hold one JSON array, are known by
    their first bytes. If there is one of them, all files are read from front to back, in the trainer's process; but in
    orders of single rows arrays are indexed as lines are.

    :param paths: a path, a glob, a folder (its ``*.jsonl``, or, without any, its ``*.jsonl.gz`` and ``*.jsonl.zst``),
        or a list of these. A glob's and a folder's files are sorted by name; a list keeps its order. The order of
        files is part of the order of samples. A folder's hidden files are left out, and a folder with files of two
        splits is refused.
    :param max_row_bytes: a longer row is a bad row.
    :param python_lines: lines are what Python's text files and ``str.strip`` make of them: a lone ``\\r`` ends one too,
        and Unicode white space around a row is not part of it. Not for compressed
        files and arrays.
    :param allow_repeats: a file may be listed several times; its rows then occur as often in an epoch.
    :param grows: files may get more lines, and a glob, folder or store more files, while the run lasts: each epoch
        covers what is there when the loader begins to read it, in whole lines. A folder's name, instead of True, is
        where ranks that each have a loader agree on that. Only for files of lines that are not compressed.
    :param storage_options: for addresses of objects, such as ``s3://bucket/folder``: credentials, endpoint, limits.
        They are given to the store only, and never shown or stored.
    """

    paths: str | list[str]
    max_row_bytes: int = 64 * 1024 * 1024
    python_lines: bool = False
    allow_repeats: bool = False
    grows: bool | str = False
    storage_options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return shown(self)

    def open(self, block_bytes: int) -> FileBlocks | TextStream:
        """Find the files and look at each one's first bytes.

        :raises SourceError: naming every file that is missing, unreadable, or not JSONL, a folder of two splits, and
            empty files if all are empty.
        """
        suffixes = (".jsonl",), (".jsonl.gz", ".jsonl.zst")
        found = _find(self, suffixes, False)
        opened = self._opened(found, suffixes, block_bytes)
        opened.undecoded = [(found.files[n].path, look.num_lost) for n, look in enumerate(found.looks) if look.num_lost]
        return opened

    def _opened(self, found: _Found, suffixes: _Suffixes, block_bytes: int) -> FileBlocks | TextStream:
        if self.grows:
            from asyncdata.sources.splits import Splits

            splits = Splits(file.path for file in found.files)
            return self._growing(found, block_bytes, lambda: _find(self, suffixes, False, splits))

        if any(look[:2] != ("plain", False) for look in found.looks):
            return _stream(found, self.max_row_bytes)

        if found.stores and self.python_lines:
            raise ConfigError("AD320 python_lines=True reads files only; copy the objects, or leave it out")

        reader = _PYTHON_LINES if self.python_lines else None
        return FileBlocks(found.files, block_bytes, self.max_row_bytes, reader, found.stores)

    def _growing(self, found: _Found, block_bytes: int, find: Callable[[], _Found]) -> FileBlocks:
        from asyncdata.sources.growing import GrowingBlocks

        if self.python_lines or self.allow_repeats:
            raise ConfigError("AD311 grows does not work with python_lines or allow_repeats; leave one of them out")

        shared = self.grows if isinstance(self.grows, str) else ""
        knobs = block_bytes, self.max_row_bytes, None, found.stores
        return GrowingBlocks(_lines_of(found), *knobs, lambda: _lines_of(find()), shared)


def _lines_of(found: _Found) -> FileRefs:
    """The files, all of which must be lines that are not compressed.

    :raises SourceError: naming one that is not.
    """
    for file, look in zip(found.files, found.looks, strict=True):
        if look[:2] != ("plain", False):
            raise SourceError(f"AD311 {file.path} is compressed, or a JSON array; with grows, all files must be lines")
    return found.files


class JsonArraySource(Settings, frozen=True, forbid_unknown_fields=True):
    """One JSON array of objects a file, in one file or many, compressed or not; read from front to back.

    Elements may be laid out over any number of lines. Nothing but the present one is held in memory. In orders of
    single rows, arrays that are not compressed are indexed as lines are.

    :param paths: as for :class:`JsonlSource`; a folder stands for its ``*.json``, or, without any, its ``*.json.gz``
        and ``*.json.zst``.
    :param max_row_bytes: a longer element is a bad row.
    :param allow_repeats: a file may be listed several times; its rows then occur as often in an epoch.
    :param storage_options: as for :class:`JsonlSource`.
    """

    paths: str | list[str]
    max_row_bytes: int = 64 * 1024 * 1024
    allow_repeats: bool = False
    storage_options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return shown(self)

    def open(self, block_bytes: int) -> TextStream:
        """Find the files and look at each one's first bytes.

        :raises SourceError: naming every file that is missing, unreadable, or not an array, and empty files if all are
            empty.
        """
        suffixes = (".json",), (".json.gz", ".json.zst")
        return _stream(_find(self, suffixes, True), self.max_row_bytes)


class _Look(NamedTuple):
    """How a file looks by its first bytes.

    :ivar num_lost: how many rows it begins with, if none of them can be decoded; fewer than eight. Otherwise 0.
    """

    coding: str
    is_array: bool
    num_lost: int = 0


class _Found(NamedTuple):
    """Files, or objects of ``stores``."""

    files: FileRefs
    looks: list[_Look]
    stores: Sequence[StoreSpec] = ()


def _find(
    source: JsonlSource | JsonArraySource, suffixes: _Suffixes, must_be_array: bool, splits: Splits | None = None
) -> _Found:
    faults: list[str] = []
    knobs: Any = {"allow_repeats": source.allow_repeats, "splits": splits}
    if names_objects(source.paths):
        from asyncdata.sources.remote.listing import find_objects

        objects = find_objects(source.paths, suffixes, source.storage_options, **knobs)
        found = _Found(objects.refs, _looks_of_objects(objects, faults, must_be_array), objects.stores)
    else:
        paths, faults = find_files(source.paths, *suffixes, **knobs)
        files, looks = [], []
        for path in paths:
            with noting(path, faults):
                with open(open_regular(path), "rb", buffering=0) as opened:
                    head = opened.read(_HEAD_BYTES)
                    file = stamp(os.path.abspath(path))
                    looks.append(_inspect(path, head, must_be_array, file, opened.read))
                files.append(file)
        found = _Found(files, looks)
    if faults:
        raise SourceError("\n".join(faults))

    if not any(all_sizes(found.files)):
        names = ", ".join(file.path for file in found.files[:5])
        raise SourceError(f"AD201 no rows in {len(found.files)} files, all empty: {names}")

    return found


def _looks_of_objects(objects: Objects, faults: list[str], must_be_array: bool) -> list[_Look]:
    """How each object looks; why others cannot be read is added to ``faults``.

    Of very many objects, most have the same head and suffix as one before them.
    """
    from asyncdata.sources.remote.listing import with_heads

    known: dict[tuple[bytes, bool, bool], _Look] = {}
    looks = []
    for path, head in with_heads(objects, _FIRST_BYTES):
        key = head, path.endswith(_CODED_SUFFIXES), _bare(path).endswith(".jsonl")
        if key not in known:
            with noting(path, faults):
                known[key] = _inspect(path, head, must_be_array)
        if key in known:
            looks.append(known[key])
    return looks


def _stream(found: _Found, max_row_bytes: int) -> TextStream:
    from asyncdata.sources.text_stream import TextStream

    codings, are_arrays, _ = zip(*found.looks, strict=True)
    return TextStream(found.files, max_row_bytes, codings, are_arrays, found.stores)


def _inspect(
    path: str, head: bytes, must_be_array: bool, file: FileRef | None = None, read: Callable[[int], bytes] | None = None
) -> _Look:
    """How the file, or object, looks that begins with ``head``.

    :param read: reads more of the file; None: ``head`` has all that is looked at.
    """
    coding = _coding_of(head)
    if coding != "plain":
        head = _decoded_head(path, file, head, coding)
    elif not head and path.endswith(_CODED_SUFFIXES):
        raise SourceError(
            f"AD121 {path} is empty, but a compressed file never is: it was truncated, or is still being written"
        )

    _refuse_others(path, head)
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    is_array = first == b"["
    if must_be_array and not is_array and first:
        raise SourceError(f"AD120 {path} is not a JSON array: it begins with {head[:16]!r}; read it with JsonlSource")

    if is_array and not must_be_array and _bare(path).endswith(".jsonl"):
        raise SourceError(
            f"AD120 {path} is a JSON array, not JSONL; name it *.json, or write one object a line: jq -c '.[]' {path}"
        )

    num_lost = 0 if is_array else _num_lost(head)
    if num_lost and coding == "plain" and read is not None:
        num_lost = _num_lost(head + read(_FIRST_BYTES - len(head)))
    if num_lost >= _MANY_ROWS:
        raise SourceError(
            f"AD109 {path}: none of its first {num_lost} rows is a JSON object: leave it out, or read it "
            "with Python, by IterableSource"
        )

    return _Look(coding, is_array, num_lost)


def _num_lost(text: bytes) -> int:
    """How many rows a text begins with, if none of them can be decoded; 0 if one can, or if more is needed to tell."""
    *lines, rest = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows = [line for line in lines if line.strip()]
    is_begun = _BEGUN_ROW.match(rest) is not None
    if any(map(_is_object, rows)) or (is_begun and len(rows) < _MANY_ROWS):
        return 0

    return len(rows) + bool(rest.strip() and not is_begun)


def _is_object(row: bytes) -> bool:
    try:
        return isinstance(json.loads(row.decode().strip()), dict)
    except (ValueError, RecursionError):
        return False


def _coding_of(head: bytes) -> str:
    """``gzip``, ``zstd`` or ``plain``: the coding of a file that begins with ``head``."""
    if head.startswith(_GZIP_MAGIC):
        return "gzip"

    return "zstd" if head.startswith(_ZSTD_MAGICS) else "plain"


def _refuse_others(path: str, head: bytes) -> None:
    if head.startswith(b"PAR1"):
        raise SourceError(f"AD123 {path} is Parquet, not JSONL")

    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in {b"", b"{", b"["}:
        from asyncdata.sources.splits import why_no_data

        if what := why_no_data(_bare(path), head):
            raise SourceError(f"AD123 {path} is {what}")

    for coding, magic in _CODINGS:
        if head.startswith(magic):
            raise SourceError(_NOT_UTF8.format(path=path, coding=coding, head=magic.hex(" ")))


def _bare(path: str) -> str:
    """The path without the suffix of its compression."""
    for suffix in _CODED_SUFFIXES:
        path = path.removesuffix(suffix)
    return path


def _decoded_head(path: str, file: FileRef | None, head: bytes, coding: str) -> bytes:
    from asyncdata.sources.text_stream import CodedText, decoded_start

    path = path if file is None else file.path
    if coding == "zstd":
        try:
            import zstandard  # noqa: F401 - only tests whether it is installed
        except ImportError as error:
            raise SourceError(
                f"AD123 {path} is zstd (magic 28 b5 2f fd): pip install zstandard, or decompress it first: zstd -d "
                f"{path}"
            ) from error

    if file is None:
        return decoded_start(head, coding)[:_FIRST_BYTES]

    return next(CodedText(file, coding, bool).pieces((0, 0), 0), b"")[:_FIRST_BYTES]
