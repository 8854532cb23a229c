"""Parquet files: finds them, checks them before a row is read, and splits them into blocks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError, SourceError
from asyncdata.core.extras import missing_package
from asyncdata.core.messages import Block
from asyncdata.core.specs import ReaderSpec
from asyncdata.core.types import SourceLocation
from asyncdata.sources.arrow.column_types import is_same_form, shown_type
from asyncdata.sources.arrow.parquet_objects import RangesFile, load_footer
from asyncdata.sources.arrow.parquet_reader import MAGIC, footer_digest
from asyncdata.sources.arrow.rows_to_json import RowWriter
from asyncdata.sources.base import Files
from asyncdata.sources.fingerprint import stamp_of
from asyncdata.sources.paths import find_files, open_regular, why_unreadable
from asyncdata.sources.remote.listing import find_objects, names_objects
from asyncdata.sources.remote.reads import Reads
from asyncdata.sources.remote.store import ObjectStamp, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    from asyncdata.core.specs import StoreSpec
    from asyncdata.sources.base import Numbers
    from asyncdata.sources.fingerprint import FileStamp
    from asyncdata.sources.remote.listing import Objects

__all__ = ("ParquetBlocks", "ParquetSource")

_READER = "asyncdata.sources.arrow.parquet_reader:ParquetReader"
_REMOTE_READER = "asyncdata.sources.arrow.parquet_objects:RemoteParquetReader"
_READS_PER_GROUP, _READS_PER_GROUP_OF_OBJECTS = 64, 4
_MAX_THREADS = 16
_ROOM = 4
_ENCRYPTED = b"PARE"


class ParquetSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one Parquet file or many.

    At the start only the footer of every file is read. A row group is split into blocks of about ``block_bytes`` of
    JSON, estimated from the footer, but into at most ``reads_per_group`` blocks: to reach the rows of a block, the rows
    before it must be decoded. So a row group is decoded at most ``reads_per_group`` times in an epoch, and half as
    often on average. If row groups are large, blocks are larger than ``block_bytes``, and a window has fewer of them.

    :param paths: a path, a glob, a folder (its ``*.parquet``), or a list of these. A glob's and a folder's files are
        sorted by name; a list keeps its order. The order of files is part of the order of samples.
    :param columns: the columns of a row, in order; None: those of the first file, which all other files must have, too.
    :param reads_per_group: *order.* More mixes better and decodes more. None: 64, and 4 for objects of a store, where a
        row group is not only decoded as often, but read.
    :param max_row_bytes: a row whose JSON is longer is a bad row.
    :param allow_repeats: a file may be listed more than once: its rows come as often in an epoch.
    :param storage_options: as for :class:`JsonlSource`. From a store, whole row groups are read, of the columns alone.
    :param python_values: binary values and maps are marked in the row's JSON, for the data sources of slime and miles,
        which make bytes and lists of tuples of them. Otherwise they are base64 text, and objects or lists of pairs.
    """

    paths: str | list[str]
    columns: list[str] | None = None
    reads_per_group: int | None = None
    max_row_bytes: int = 64 * 1024 * 1024
    allow_repeats: bool = False
    storage_options: dict[str, Any] = {}
    python_values: bool = False

    def __repr__(self) -> str:
        return shown(self)

    def __post_init__(self) -> None:
        if self.reads_per_group is not None and self.reads_per_group < 1:
            raise ConfigError(f"reads_per_group must be at least 1, got {self.reads_per_group}")

    def open(self, block_bytes: int) -> ParquetBlocks:
        """Find the files and read their footers, in threads if there are many.

        :raises SourceError: naming every file that is missing, unreadable, no Parquet, cut off, or encrypted, that
            lacks a column, or has one of another type than the first file.
        :raises ConfigError: for ``columns`` that cannot be, and if pyarrow is not installed.
        """
        _import_pyarrow()
        stores: list[StoreSpec] = []
        faults: list[str] = []
        if names_objects(self.paths):
            objects = find_objects(self.paths, (".parquet",), self.storage_options, allow_repeats=self.allow_repeats)
            stores = objects.stores
            read = _footers_of_objects(objects)
        else:
            paths, faults = find_files(self.paths, ".parquet", allow_repeats=self.allow_repeats)
            read = _footers_of_files(paths)
        faults += [found for found in read if isinstance(found, str)]
        files = [found for found in read if not isinstance(found, str)]
        if faults:
            raise SourceError("\n".join(faults))

        if not any(sum(file.group_rows) for file in files):
            names = ", ".join(file.stamp.path for file in files[:5])
            raise SourceError(f"AD201 no rows in {len(files)} files, all empty: {names}")

        reads = self.reads_per_group or (_READS_PER_GROUP_OF_OBJECTS if stores else _READS_PER_GROUP)
        blocks = ParquetBlocks(files, _columns(files, self.columns), block_bytes, reads, self.max_row_bytes, stores)
        if self.python_values:
            blocks.reader.settings["python_values"] = True
        return blocks


class ParquetBlocks(Files):
    """Row groups split into ranges of rows, numbered across all files. Only the footers are needed.

    :ivar block_bytes: average bytes of a block's rows as JSON, estimated from the footers.
    :ivar room_bytes: bytes of a slot for a block. Dictionary encoding of repeated values makes the estimate too low.
    """

    def __init__(
        self,
        files: Sequence[_Footer],
        columns: list[str],
        block_bytes: int,
        reads_per_group: int,
        max_row_bytes: int,
        stores: Sequence[StoreSpec] = (),
    ) -> None:
        super().__init__([file.stamp for file in files], max_row_bytes, stores)
        self.reads_single_rows = False  # a row costs a pass over its row group up to it
        settings = {"columns": columns, "footers": [file.digest for file in files]}
        self.reader = ReaderSpec(_REMOTE_READER if stores else _READER, settings, "parquet")
        rows = np.array([number for file in files for number in file.group_rows], np.int64)
        guessed = np.array([size for file in files for size in file.group_bytes(columns)], np.int64)
        pieces = np.clip(-(-guessed // block_bytes), 1, reads_per_group)
        self._block_rows = np.maximum(1, -(-rows // pieces))
        self._first_blocks = np.concatenate(([0], np.cumsum(-(-rows // self._block_rows))))
        self._file_ids = np.repeat(np.arange(len(files)), [len(file.group_rows) for file in files])
        self._starts = np.concatenate([np.cumsum([0, *file.group_rows])[:-1] for file in files]).astype(np.int64)
        self._stops = self._starts + rows
        self.extent = int(rows.sum())
        self.block_bytes = max(1, int(guessed.sum()) // self.num_blocks)
        self.room_bytes = _ROOM * self.block_bytes

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return int(self._first_blocks[-1])

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        """The blocks numbered ``ids``, sorted by position, so that those of one row group are read in one pass."""
        numbers = np.sort(np.asarray(ids, dtype=np.int64))
        groups = np.searchsorted(self._first_blocks, numbers, side="right") - 1
        starts = self._starts[groups] + (numbers - self._first_blocks[groups]) * self._block_rows[groups]
        stops = np.minimum(starts + self._block_rows[groups], self._stops[groups])
        return list(map(Block, self._file_ids[groups].tolist(), starts.tolist(), stops.tolist()))

    def numbers(self, file_ids: Numbers, starts: Numbers) -> Numbers:
        """The numbers of the blocks that begin at these rows of these files; -1 where none does."""
        groups = np.flatnonzero(self._stops > self._starts)  # an empty row group has no block
        firsts = np.concatenate(([0], np.cumsum((self._stops - self._starts)[groups])))[:-1]
        bases = np.full(len(self.files), -1, np.int64)  # rows of all files before each
        bases[self._file_ids[groups][::-1]] = (firsts - self._starts[groups])[::-1]
        groups = groups[np.maximum(np.searchsorted(firsts, bases[file_ids] + starts, side="right") - 1, 0)]
        inside = starts - self._starts[groups]
        is_there = (self._file_ids[groups] == file_ids) & (inside >= 0) & (starts < self._stops[groups])
        found = self._first_blocks[groups] + inside // self._block_rows[groups]
        return np.where(is_there & (inside % self._block_rows[groups] == 0), found, -1)

    def location(self, file_id: int, offset: int, num_bytes: int) -> SourceLocation:
        """A row's place, with its file's path and its number there."""
        return SourceLocation(self.files[file_id].path, -1, num_bytes, offset)


class _Footer(NamedTuple):
    """The contents of a file's footer."""

    stamp: FileStamp | ObjectStamp
    digest: str
    metadata: Any
    schema: pa.Schema

    @property
    def group_rows(self) -> list[int]:
        return [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]

    def group_bytes(self, columns: Sequence[str]) -> list[int]:
        """The estimated bytes of each row group as JSON: those of the decompressed values and of the keys."""
        per_row = 2 + sum(len(name) + 4 for name in columns)
        tops = tuple(f"{name}." for name in columns)
        leaves = [
            number
            for number in range(self.metadata.num_columns)
            if f"{self.metadata.schema.column(number).path}.".startswith(tops)
        ]
        groups = [self.metadata.row_group(number) for number in range(self.metadata.num_row_groups)]
        if len(leaves) == self.metadata.num_columns:
            return [group.total_byte_size + per_row * group.num_rows for group in groups]

        return [
            sum(group.column(leaf).total_uncompressed_size for leaf in leaves) + per_row * group.num_rows
            for group in groups
        ]


def _import_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401 - what workers need too
    except ImportError as error:
        raise missing_package("Parquet", "pyarrow", error) from error


def _footers_of_files(paths: Sequence[str]) -> list[_Footer | str]:
    """The footer of each file, or what is wrong with it."""
    with ThreadPoolExecutor(min(_MAX_THREADS, max(1, len(paths))), "asyncdata-footers") as threads:
        return list(threads.map(_footer_or_fault, paths))


def _footers_of_objects(objects: Objects) -> list[_Footer | str]:
    """The same for objects, all at once."""
    with closing(Reads(objects.stores)) as reads:
        under_way = [reads.start(_footer_of_object, reads, ObjectStamp.of(found)) for found in objects.refs]
        return [future.result() for future in under_way]


def _footer_of_object(reads: Reads, stamp: ObjectStamp) -> _Footer | str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = load_footer(reads, stamp)
        if not found.digest:
            head = reads.load(stamp, 0, min(4, stamp.num_bytes)) if stamp.num_bytes else b""
            return _why_no_parquet(stamp.path, head, found.tail[-4:])

        file = RangesFile(
            stamp.num_bytes, [(stamp.num_bytes - len(found.tail), found.tail)], partial(reads.load, stamp)
        )
        with pq.ParquetFile(pa.PythonFile(file, mode="r")) as parquet:
            return _Footer(stamp, found.digest, parquet.metadata, parquet.schema_arrow)
    except SourceError as error:
        return str(error)
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"AD124 {stamp.path}: its footer cannot be read: {error}"


def _footer_or_fault(path: str) -> _Footer | str:
    try:
        return _read_footer(path)
    except SourceError as error:
        return str(error)
    except OSError as error:
        return why_unreadable(path, error)


def _read_footer(path: str) -> _Footer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fd = open_regular(path)
    try:
        found = stamp_of(os.path.abspath(path), os.fstat(fd))
        footer = footer_digest(fd, found.num_bytes)
        if not footer or os.pread(fd, 4, 0) != MAGIC:
            raise SourceError(_why_no_parquet(path, os.pread(fd, 4, 0), os.pread(fd, 4, max(0, found.num_bytes - 4))))
    finally:
        os.close(fd)

    try:
        with pq.ParquetFile(path) as file:
            return _Footer(found, footer, file.metadata, file.schema_arrow)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(f"AD124 {path}: its footer cannot be read: {error}") from error


def _why_no_parquet(path: str, head: bytes, tail: bytes) -> str:
    if not head:
        return f"AD124 {path} has no bytes at all; a Parquet file without rows has a footer"

    if _ENCRYPTED in (head, tail):
        return f"AD124 {path} is encrypted; decrypt it first"

    if head != MAGIC:
        way_out = "; read it with JsonlSource" if head.lstrip()[:1] in {b"{", b"["} else ""
        return f"AD123 {path} is not Parquet: it begins with {head!r}{way_out}"

    return f"AD124 {path} is cut off: it has no footer at its end; perhaps it is still being written"


def _columns(files: Sequence[_Footer], wanted: list[str] | None) -> list[str]:
    """The columns to read; every file must have them with the same form in JSON.

    :raises SourceError: naming all differences.
    """
    first = files[0]
    columns = list(first.schema.names) if wanted is None else list(wanted)
    if not columns or len(set(columns)) < len(columns):
        raise ConfigError(f"columns must name some columns, each once; got {columns}")

    faults = []
    for file in files:
        faults += [f"AD124 {file.stamp.path}: {text}" for text in _differences(first, file, columns, wanted is None)]
    if faults:
        raise SourceError("\n".join(faults))

    try:
        for file in files:
            RowWriter(file.schema, columns)
    except TypeError as error:
        raise SourceError(f"AD124 {file.stamp.path}: {error}; leave it out with columns=[...]") from error

    return columns


def _differences(first: _Footer, file: _Footer, columns: Sequence[str], is_all: bool) -> list[str]:
    names, found = file.schema.names, []
    for name in columns:
        if names.count(name) != 1:
            has = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            found.append(f"it has {'no' if name not in names else 'more than one'} column {name!r}; it has {has}")
        elif name in first.schema.names:
            kinds = file.schema.field(name).type, first.schema.field(name).type
            if not is_same_form(*kinds):
                shown = [shown_type(kind) for kind in kinds]
                found.append(f"column {name!r} is {shown[0]}, and {shown[1]} in {first.stamp.path}")
    extra = [name for name in names if name not in columns] if is_all else []
    if extra:
        way_out = "name what to read with columns=[...]"
        found.append(f"it has {', '.join(extra[:20])}, which {first.stamp.path} has not; {way_out}")
    return found
