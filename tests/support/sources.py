"""Streams of rows that can be watched, and every kind of source as an entry: how rows are written for a loader."""

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncdata import IterableSource, JsonlSource, ParquetSource, Shuffle, SourceLocation
from asyncdata.core.identity import FileRef, digest
from asyncdata.order.order import order_keys, shuffled_rows
from asyncdata.sources.stream import Rows, RowStream
from tests.support.stores import BUCKET, FAST, http_host, s3


class ListStream(RowStream):
    """Rows from a list, the same in every epoch, given ``at_once`` at a time.

    :param has_states: whether it can begin in the middle.
    :param fault: raised in place of row ``fault_at``.
    :ivar reads: the epoch and state of each :meth:`read`.
    :ivar num_given: rows given, in all passes; ``num_open``: passes that are not closed.
    """

    def __init__(self, rows, *, at_once=3, max_row_bytes=1 << 20, has_states=True, fault=None, fault_at=None):
        self.files = [FileRef("list", 0)]
        self.max_row_bytes = max_row_bytes
        self.rows = list(rows)
        self.at_once = at_once
        self.has_states = has_states
        self.fault = fault
        self.fault_at = len(self.rows) if fault_at is None else fault_at
        self.reads, self.num_given, self.num_open = [], 0, 0
        self.on_row: Callable[[int], object] = bool

    def read(self, order, epoch, state, check):
        self.reads.append((epoch, state))
        self.num_open += 1
        try:
            first = 0 if state is None else state["row"]
            stop = self.fault_at if self.fault is not None else len(self.rows)
            while first < stop:
                last = min(first + self.at_once, stop)
                for row in range(first, last):
                    self.on_row(row)
                self.num_given += last - first
                yield rows_of(self.rows[first:last], first, self.max_row_bytes, {"row": first}, self.has_states)
                first = last
            if self.fault is not None:
                raise self.fault
        finally:
            self.num_open -= 1

    def location(self, file_id: int, offset: int, num_bytes: int, byte_offset: int = -1) -> SourceLocation:
        return SourceLocation("list", -1, num_bytes, row_number=offset)

    def fingerprint(self) -> dict[str, Any]:
        return {"digest": "list"}

    def check_unchanged(self) -> None:
        return


def rows_of(texts, number, max_row_bytes, state, has_state=True):
    lengths = np.array([len(text) for text in texts], np.int64)
    data = b"".join(text + b"\n" for text in texts if len(text) <= max_row_bytes)
    return Rows(0, number + np.arange(len(texts)), lengths, data, 0, state if has_state else None)


def texts_of(found: Any, max_row_bytes: int = 1 << 30) -> list[bytes | None]:
    """The rows in ``data``; None for those that are too long to be there."""
    texts, start = [], 0
    for length in found.lengths.tolist():
        texts.append(found.data[start : start + length] if length <= max_row_bytes else None)
        start += length + 1 if length <= max_row_bytes else 0
    assert start == len(found.data)
    return texts


def windows_of(lengths: Sequence[int], window_bytes: int) -> list[list[int]]:
    """Which rows come into which window: worked out row by row, and without a stream."""
    windows: list[list[int]] = [[]]
    used = 0
    for row, length in enumerate(lengths):
        if windows[-1] and used + length + 1 > window_bytes:
            windows.append([])
            used = 0
        windows[-1].append(row)
        used += length + 1
    return windows


def stream_order_of(lengths: Sequence[int], shuffle: Shuffle, seed: int, num_epochs: int) -> list[int]:
    """D over one file: the numbers of its rows."""
    found: list[int] = []
    for epoch in range(num_epochs):
        for number, rows in enumerate(windows_of(lengths, shuffle.block_bytes * shuffle.window_blocks)):
            order: Iterable[int] = range(len(rows))
            if shuffle.enabled:
                order = shuffled_rows(len(rows), order_keys(seed, epoch, f"rows {number}")[0]).tolist()
            found += [rows[row] for row in order]
    return found


def cut(text: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    """The text in pieces of these sizes, the last one as large as it must be."""
    start = 0
    for size in sizes:
        if start + size < len(text):
            yield text[start : start + size]
            start += size
    if start < len(text):
        yield text[start:]


def jsonl(rows: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def members(texts: Iterable[bytes], level: int = 9) -> bytes:
    return b"".join(gzip.compress(text, level, mtime=0) for text in texts)


def frames(texts: Iterable[bytes]) -> bytes:
    import zstandard

    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    return b"".join(compress(text) for text in texts)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


Row = dict[str, Any]
RowList = list[Row]

MAX_FILES = 3


class Place(NamedTuple):
    """What an error says of a row: its file, and its line (from 1) or its number (from 0)."""

    path: str
    line: int | None
    row_number: int | None


class Kind(NamedTuple):
    """One kind of source.

    :ivar write: writes the rows into a folder and returns what a loader is given. Called again, it replaces the files
        that are there by others of the same names, as an editor does.
    :ivar told: what errors say of a row, beside its file: its ``line``, its ``row`` number, both, or nothing.
    :ivar parts: how its files are named after their numbers, where they are several objects.
    :ivar is_content_known: whether a fingerprint tells rows from others.
    :ivar changed: how the error begins that says it was replaced.
    """

    write: Callable[[Path, RowList], Any]
    told: str
    needs: tuple[str, ...] = ()
    parts: str = ""
    is_in_files: bool = True
    is_stream: bool = False
    is_content_known: bool = True
    changed: str = "AD30[23]"

    def place(self, source: Any, row: int, num_rows: int) -> Place:
        """What errors say of the row of a number, given what :attr:`write` returned and how many rows there are."""
        named = {"IterableSource": f"{__name__}:", "Dataset": "Dataset"}.get(type(source).__name__, "")
        path = str(getattr(source, "paths", source if isinstance(source, str) else named))
        if isinstance(source, list) or self.parts:
            starts = [number * num_rows // MAX_FILES for number in range(MAX_FILES)]
            part = max(number for number, start in enumerate(starts) if start <= row)
            row -= starts[part]
            path = source[part] if isinstance(source, list) else f"{path}/{part}.{self.parts}"
        return Place(path, row + 1 if "line" in self.told else None, row if "row" in self.told else None)


def make_rows(num_rows: int, text: str = "x") -> RowList:
    """RowList of many lengths; some are longer than a small block, and none looks like another."""
    return [
        {"id": i, "pad": text * (3000 if i % 40 == 7 else i * 37 % 90), "nested": [{"n": i}]} for i in range(num_rows)
    ]


def _in_parts(rows: RowList) -> Iterator[tuple[int, RowList]]:
    for number in range(MAX_FILES):
        yield number, rows[number * len(rows) // MAX_FILES : (number + 1) * len(rows) // MAX_FILES]


def _gzip(rows: RowList) -> bytes:
    """Of several members, which end within rows."""
    text = jsonl(rows)
    return members(text[start : start + 3000] for start in range(0, max(1, len(text)), 3000))


def _parquet(group_rows: int) -> Callable[[RowList], bytes]:
    def made(rows: RowList) -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        nested = pa.list_(pa.struct([("n", pa.int64())]))
        schema = pa.schema([("id", pa.int64()), ("pad", pa.string()), ("nested", nested)])
        out = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema), out, row_group_size=group_rows)
        return bytes(out.getvalue())

    return made


def _file(name: str, made: Callable[[RowList], bytes]) -> Callable[[Path, RowList], str]:
    def write(folder: Path, rows: RowList) -> str:
        path, new = folder / name, folder / f"{name}.new"
        new.write_bytes(made(rows))
        new.replace(path)
        return str(path)

    return write


def _files(suffix: str, *made: Callable[[RowList], bytes]) -> Callable[[Path, RowList], list[str]]:
    def write(folder: Path, rows: RowList) -> list[str]:
        return [_file(f"{n}.{suffix}", made[n % len(made)])(folder, part) for n, part in _in_parts(rows)]

    return write


def _on_s3(name: str, made: Callable[[RowList], bytes]) -> Callable[[Path, RowList], JsonlSource]:
    return lambda folder, rows: JsonlSource(s3().put(f"{folder.name}/{name}", made(rows)), storage_options=s3().options)


def _parts_on_s3(kind: Any, suffix: str, made: Callable[[RowList], bytes]) -> Callable[[Path, RowList], Any]:
    def write(folder: Path, rows: RowList) -> Any:
        for number, part in _in_parts(rows):
            s3().put(f"{folder.name}/parts/{number}.{suffix}", made(part))
        return kind(f"s3://{BUCKET}/{folder.name}/parts", storage_options=s3().options)

    return write


def _by_http(kind: Any, name: str, made: Callable[[RowList], bytes]) -> Callable[[Path, RowList], Any]:
    return lambda folder, rows: kind(http_host().put(f"/{folder.name}/{name}", made(rows)), storage_options=FAST)


def _in_memory(folder: Path, rows: RowList) -> Any:
    import datasets

    return datasets.Dataset.from_dict({key: [row[key] for row in rows] for key in ("id", "pad", "nested")})


def _saved(folder: Path, rows: RowList) -> str:
    import datasets

    new, path = folder / "new", folder / "saved"
    datasets.disable_progress_bars()
    try:
        _in_memory(folder, rows).save_to_disk(new, max_shard_size="20KB")
    finally:
        datasets.enable_progress_bars()
    path.mkdir(exist_ok=True)
    for name in sorted(os.listdir(new)):
        (new / name).replace(path / name)
    return str(path)


def _mapped(folder: Path, rows: RowList) -> Any:
    """A dataset in files whose rows lie the wrong way round, with a mapping that gives them in their order."""
    import datasets

    if not rows:
        return _in_memory(folder, rows)

    return datasets.load_from_disk(_saved(folder, rows[::-1])).select(range(len(rows))[::-1])


def _streamed(folder: Path, rows: RowList) -> Any:
    from datasets import Features, IterableDataset, List, Value

    features = Features({"id": Value("int64"), "pad": Value("string"), "nested": List({"n": Value("int64")})})
    return IterableDataset.from_generator(lambda: iter(rows), features=features)


def _iterable(folder: Path, rows: RowList) -> Any:
    return IterableSource(lambda epoch: rows, version=digest(json.dumps(rows)))


PARQUET, DATASETS, STORED = ("pyarrow",), ("datasets",), {"changed": "AD322"}
KINDS: dict[str, Kind] = {
    "a JSONL file": Kind(_file("rows.jsonl", jsonl), "line"),
    "JSONL files": Kind(_files("jsonl", jsonl), "line"),
    "Parquet, one row group": Kind(_file("rows.parquet", _parquet(100_000)), "row", PARQUET),
    "Parquet, large row groups": Kind(_file("rows.parquet", _parquet(90)), "row", PARQUET),
    "Parquet, tiny row groups": Kind(_file("rows.parquet", _parquet(3)), "row", PARQUET),
    "Parquet files": Kind(_files("parquet", _parquet(20), _parquet(50), _parquet(80)), "row", PARQUET),
    "a saved dataset": Kind(_saved, "row", DATASETS),
    "a dataset in memory": Kind(_in_memory, "row", DATASETS, is_in_files=False),
    "a dataset with a mapping of indices": Kind(_mapped, "row", DATASETS),
    "a gzip file": Kind(_file("rows.jsonl.gz", _gzip), "line and row", is_stream=True),
    "zstd files": Kind(
        _files("jsonl.zst", lambda rows: frames([jsonl(rows)])), "line and row", ("zstandard",), is_stream=True
    ),
    "a JSON array": Kind(_file("rows.json", lambda rows: json.dumps(rows, indent=1).encode()), "row"),
    "an object of S3": Kind(_on_s3("rows.jsonl", jsonl), "", ("moto",), **STORED),
    "objects of S3": Kind(_parts_on_s3(JsonlSource, "jsonl", jsonl), "", ("moto",), "jsonl", **STORED),
    "an object by http": Kind(_by_http(JsonlSource, "rows.jsonl", jsonl), "", ("obstore",), **STORED),
    "a gzip object of S3": Kind(_on_s3("rows.jsonl.gz", _gzip), "line and row", ("moto",), is_stream=True, **STORED),
    "a Parquet object by http": Kind(
        _by_http(ParquetSource, "rows.parquet", _parquet(90)), "row", ("pyarrow", "obstore"), **STORED
    ),
    "Parquet objects of S3": Kind(
        _parts_on_s3(ParquetSource, "parquet", _parquet(50)), "row", ("pyarrow", "moto"), "parquet", **STORED
    ),
    "an iterable": Kind(_iterable, "row", is_in_files=False, is_stream=True),
    "a streaming dataset": Kind(_streamed, "row", DATASETS, is_in_files=False, is_stream=True, is_content_known=False),
}
