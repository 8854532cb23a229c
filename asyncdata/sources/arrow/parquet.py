"""Parquet files: finds them, checks them before a row is read, and splits them into blocks."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.errors import ConfigError, SourceError
from asyncdata.core.messages import Block, ReaderSpec, StoreSpec
from asyncdata.core.settings import Settings, needing
from asyncdata.sources.arrow.parquet_reader import MAGIC, footer_digest, leaves_of, load_footer, ranges_file
from asyncdata.sources.arrow.rows_to_json import RowWriter, is_same_form, shown_type
from asyncdata.sources.base import Files
from asyncdata.sources.files import stamp_of
from asyncdata.sources.paths import find_files, names_objects, noting, open_regular, shown
from asyncdata.sources.remote.listing import find_objects
from asyncdata.sources.remote.reads import Reads
from asyncdata.sources.remote.store import ObjectStamp
from asyncdata.sources.splits import why_no_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    from asyncdata.core.identity import FileRef

_READER = "asyncdata.sources.arrow.parquet_reader:ParquetReader"
_REMOTE_READER = "asyncdata.sources.arrow.parquet_reader:RemoteParquetReader"
_READS_PER_GROUP, _READS_PER_GROUP_OF_OBJECTS = 64, 4
_MAX_THREADS = 16
_SUFFIXES = ((".parquet",),)
_ROOM = 4
_ENCRYPTED = b"PARE"
_HEAD_BYTES = 512


class ParquetSource(Settings, frozen=True, forbid_unknown_fields=True):
    """Rows of one Parquet file or many.

    At the start only the footer of every file is read. A row group is split into blocks of about ``block_bytes`` of
    JSON, estimated from the footer, but into at most ``reads_per_group`` blocks: to reach the rows of a block, the rows
    before it must be decoded. So a row group is decoded at most ``reads_per_group`` times in an epoch, and half as
    often on average. If row groups are large, blocks are larger than ``block_bytes``, and a window has fewer of them.

    :param paths: a path, a glob, a folder (its ``*.parquet``, as for :class:`JsonlSource`), or a list of these. A
        glob's and a folder's files are sorted by name; a list keeps its order. The order of files is part of the order
        of samples.
    :param columns: the columns of a row, in order; None: the first file's, which all other files must have, too.
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
        with needing("Parquet", "pyarrow"):
            import pyarrow.parquet  # noqa: F401 - what workers need too

        stores: list[StoreSpec] = []
        faults: list[str] = []
        if names_objects(self.paths):
            objects = find_objects(self.paths, _SUFFIXES, self.storage_options, allow_repeats=self.allow_repeats)
            stores = objects.stores
            with closing(Reads(stores)) as reads:
                begun = [(file.path, reads.start(_footer_of_object, reads, file)) for file in objects.refs]
                files = _results(begun, faults)
        else:
            paths, faults = find_files(self.paths, *_SUFFIXES, allow_repeats=self.allow_repeats)
            with ThreadPoolExecutor(min(_MAX_THREADS, max(1, len(paths))), "asyncdata-footers") as threads:
                files = _results([(path, threads.submit(_footer_of_file, path)) for path in paths], faults)
        if faults:
            raise SourceError("\n".join(faults))

        if not any(sum(file.group_rows) for file in files):
            names = ", ".join(file.file.path for file in files[:5])
            raise SourceError(f"AD201 no rows in {len(files)} files, all empty: {names}")

        per_group = self.reads_per_group or (_READS_PER_GROUP_OF_OBJECTS if stores else _READS_PER_GROUP)
        blocks = ParquetBlocks(files, _columns(files, self.columns), block_bytes, per_group, self.max_row_bytes, stores)
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
        super().__init__([file.file for file in files], max_row_bytes, stores)
        self.reads_single_rows = False  # a row costs a pass over its row group up to it
        settings = {"columns": columns, "footers": [file.digest for file in files]}
        self.reader = ReaderSpec(_REMOTE_READER if stores else _READER, settings, "parquet-2")
        rows = np.array([number for file in files for number in file.group_rows], np.int64)
        guessed = np.array([size for file in files for size in file.group_bytes(columns)], np.int64)
        pieces = np.clip(-(-guessed // block_bytes), 1, reads_per_group)
        self._block_rows = np.maximum(1, -(-rows // pieces))
        self._first_blocks = np.concatenate(([0], np.cumsum(-(-rows // self._block_rows))))
        self._file_ids = np.repeat(np.arange(len(files)), [len(file.group_rows) for file in files])
        self._stops = np.cumsum(rows)  # of each group, counted over all files; so are the first rows of files
        self._starts = self._stops - rows
        self._first_rows = np.cumsum([0, *(sum(file.group_rows) for file in files)])[:-1]
        self.extent = int(rows.sum())
        self.block_bytes = max(1, int(guessed.sum()) // self.num_blocks)
        self.room_bytes = _ROOM * self.block_bytes

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return int(self._first_blocks[-1])

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        """The blocks numbered ``ids``, sorted by position, so that blocks of one row group are read in one pass."""
        numbers = np.sort(np.asarray(ids, dtype=np.int64))
        groups = np.searchsorted(self._first_blocks, numbers, side="right") - 1
        starts = self._starts[groups] + (numbers - self._first_blocks[groups]) * self._block_rows[groups]
        stops = np.minimum(starts + self._block_rows[groups], self._stops[groups])
        file_ids = self._file_ids[groups]
        firsts = self._first_rows[file_ids]
        return list(map(Block, file_ids.tolist(), (starts - firsts).tolist(), (stops - firsts).tolist()))


_MAX_SIZE = 1 << 48
"""Rows or bytes of a row group; a footer that has more is damaged."""


class _Footer(NamedTuple):
    """The contents of a file's footer."""

    file: FileRef
    digest: str
    metadata: Any
    schema: pa.Schema

    @property
    def group_rows(self) -> list[int]:
        return [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]

    def group_bytes(self, columns: Sequence[str]) -> list[int]:
        """The estimated bytes of each row group as JSON: of the decompressed values and of the keys."""
        per_row = 2 + sum(len(name) + 4 for name in columns)
        leaves = leaves_of(self.metadata, columns)
        groups = [self.metadata.row_group(number) for number in range(self.metadata.num_row_groups)]
        if len(leaves) == self.metadata.num_columns:
            return [group.total_byte_size + per_row * group.num_rows for group in groups]

        return [
            sum(group.column(leaf).total_uncompressed_size for leaf in leaves) + per_row * group.num_rows
            for group in groups
        ]


def _results(begun: Sequence[tuple[str, Future[_Footer]]], faults: list[str]) -> list[_Footer]:
    """The footers of files; why others cannot be read is added to ``faults``."""
    found = []
    for path, future in begun:
        with noting(path, faults):
            found.append(future.result())
    return found


def _footer_of_object(reads: Reads, file: FileRef) -> _Footer:
    stamp = ObjectStamp.of(file)
    found = load_footer(reads, stamp)
    if not found.digest:
        head = reads.load(stamp, 0, min(_HEAD_BYTES, stamp.num_bytes)) if stamp.num_bytes else b""
        raise SourceError(_why_no_parquet(stamp.path, head, found.tail[-4:]))

    return _parsed(file, found.digest, stamp.path, ranges_file(reads, stamp, found.pieces(stamp)))


def _footer_of_file(path: str) -> _Footer:
    fd = open_regular(path)
    try:
        found = stamp_of(os.path.abspath(path), os.fstat(fd))
        footer = footer_digest(fd, found.num_bytes)
        if not footer or os.pread(fd, 4, 0) != MAGIC:
            head = os.pread(fd, _HEAD_BYTES, 0)
            raise SourceError(_why_no_parquet(path, head, os.pread(fd, 4, max(0, found.num_bytes - 4))))
    finally:
        os.close(fd)

    return _parsed(found, footer, path, path)


def _parsed(file: FileRef, digest: str, path: str, opened: Any) -> _Footer:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(opened) as parquet:
            found = _Footer(file, digest, parquet.metadata, parquet.schema_arrow)
        sizes = [*found.group_rows, *found.group_bytes(found.schema.names)]
        if sizes and not 0 <= min(sizes) <= max(sizes) <= _MAX_SIZE:
            raise ValueError(f"a row group has {min(found.group_rows)} to {max(found.group_rows)} rows")

        return found
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError(f"AD124 {path}: its footer cannot be read: {error}") from error


def _why_no_parquet(path: str, head: bytes, tail: bytes) -> str:
    if not head:
        return f"AD124 {path} has no bytes at all; a Parquet file without rows has a footer"

    if what := why_no_data(path, head):
        return f"AD123 {path} is {what}"

    head = head[:4]
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
        faults += [f"AD124 {file.file.path}: {text}" for text in _differences(first, file, columns, wanted is None)]
    if faults:
        raise SourceError("\n".join(faults))

    try:
        for file in files:
            RowWriter(file.schema, columns)
    except TypeError as error:
        raise SourceError(f"AD124 {file.file.path}: {error}; leave it out with columns=[...]") from error

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
                found.append(f"column {name!r} is {shown[0]}, and {shown[1]} in {first.file.path}")
    extra = [name for name in names if name not in columns] if is_all else []
    if extra:
        way_out = "name what to read with columns=[...]"
        found.append(f"it has {', '.join(extra[:20])}, which {first.file.path} has not; {way_out}")
    return found
