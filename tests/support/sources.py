"""Every kind of source, each as one entry: how rows are written so that a loader can read them."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata import IterableSource, JsonlSource, ParquetSource
from asyncdata.core.digest import digest
from tests.support.stores import BUCKET, FAST, http_host, s3
from tests.support.streams import frames, jsonl, members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Row = dict[str, Any]
Rows = list[Row]

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
    :ivar place: what errors say of the row of a number, given what ``write`` returned and how many rows there are.
    :ivar needs: packages without which it cannot be tested.
    :ivar is_in_files: whether somebody can change it while it is read.
    :ivar is_stream: whether it can only be read from front to back.
    :ivar is_content_known: whether a fingerprint tells rows from others.
    :ivar changed: how the error begins that says it was replaced.
    """

    write: Callable[[Path, Rows], Any]
    place: Callable[[Any, int, int], Place]
    needs: tuple[str, ...] = ()
    is_in_files: bool = True
    is_stream: bool = False
    is_content_known: bool = True
    changed: str = "AD30[23]"


def make_rows(num_rows: int, text: str = "x") -> Rows:
    """Rows of many lengths; some are longer than a small block, and none looks like another."""
    return [
        {"id": i, "pad": text * (3000 if i % 40 == 7 else i * 37 % 90), "nested": [{"n": i}]} for i in range(num_rows)
    ]


def _replace(path: Path, write: Callable[[Path], object]) -> str:
    new = path.with_name(f"{path.name}.new")
    write(new)
    new.replace(path)
    return str(path)


def _in_parts(rows: Rows) -> Iterator[Rows]:
    for number in range(MAX_FILES):
        yield rows[number * len(rows) // MAX_FILES : (number + 1) * len(rows) // MAX_FILES]


def _part_of(row: int, num_rows: int) -> tuple[int, int]:
    """The number of the row's file, and its number there."""
    starts = [number * num_rows // MAX_FILES for number in range(MAX_FILES)]
    part = max(number for number, start in enumerate(starts) if start <= row)
    return part, row - starts[part]


def _write_jsonl(path: Path, rows: Rows) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    return _replace(path, lambda new: new.write_text(text, encoding="utf-8"))


def _jsonl_file(folder: Path, rows: Rows) -> str:
    return _write_jsonl(folder / "rows.jsonl", rows)


def _jsonl_files(folder: Path, rows: Rows) -> list[str]:
    return [_write_jsonl(folder / f"{number}.jsonl", part) for number, part in enumerate(_in_parts(rows))]


def _line(source: str, row: int, num_rows: int) -> Place:
    return Place(source, row + 1, None)


def _line_of_files(source: list[str], row: int, num_rows: int) -> Place:
    part, number = _part_of(row, num_rows)
    return Place(source[part], number + 1, None)


def _write_parquet(path: Path, rows: Rows, group_rows: int) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    nested = pa.list_(pa.struct([("n", pa.int64())]))
    schema = pa.schema([("id", pa.int64()), ("pad", pa.string()), ("nested", nested)])
    table = pa.Table.from_pylist(rows, schema)
    return _replace(path, lambda new: pq.write_table(table, new, row_group_size=group_rows))


def _parquet_file(group_rows: int) -> Callable[[Path, Rows], str]:
    return lambda folder, rows: _write_parquet(folder / "rows.parquet", rows, group_rows)


def _parquet_files(folder: Path, rows: Rows) -> list[str]:
    return [_write_parquet(folder / f"{n}.parquet", part, 20 + 30 * n) for n, part in enumerate(_in_parts(rows))]


def _number(source: str, row: int, num_rows: int) -> Place:
    return Place(source, None, row)


def _number_of_files(source: list[str], row: int, num_rows: int) -> Place:
    part, number = _part_of(row, num_rows)
    return Place(source[part], None, number)


def _dataset(rows: Rows) -> Any:
    import datasets

    return datasets.Dataset.from_dict({key: [row[key] for row in rows] for key in ("id", "pad", "nested")})


def _saved(folder: Path, rows: Rows) -> str:
    import datasets

    new, path = folder / "new", folder / "saved"
    datasets.disable_progress_bars()
    try:
        _dataset(rows).save_to_disk(new, max_shard_size="20KB")
    finally:
        datasets.enable_progress_bars()
    path.mkdir(exist_ok=True)
    for name in sorted(os.listdir(new)):
        (new / name).replace(path / name)
    return str(path)


def _in_memory(folder: Path, rows: Rows) -> Any:
    return _dataset(rows)


def _mapped(folder: Path, rows: Rows) -> Any:
    """A dataset in files whose rows lie the wrong way round, with a mapping that gives them in their order."""
    import datasets

    if not rows:
        return _dataset(rows)

    return datasets.load_from_disk(_saved(folder, rows[::-1])).select(range(len(rows))[::-1])


def _index(source: str, row: int, num_rows: int) -> Place:
    return Place(source if isinstance(source, str) else "Dataset", None, row)


def _numbered_line(source: str, row: int, num_rows: int) -> Place:
    return Place(source, row + 1, row)


def _numbered_line_of_files(source: list[str], row: int, num_rows: int) -> Place:
    part, number = _part_of(row, num_rows)
    return Place(source[part], number + 1, number)


def _gzip_file(folder: Path, rows: Rows) -> str:
    """Of several members, which end within rows."""
    text = jsonl(rows)
    data = members(text[start : start + 3000] for start in range(0, max(1, len(text)), 3000))
    return _replace(folder / "rows.jsonl.gz", lambda new: new.write_bytes(data))


def _zstd_files(folder: Path, rows: Rows) -> list[str]:
    return [
        _replace(folder / f"{number}.jsonl.zst", partial(Path.write_bytes, data=frames([jsonl(part)])))
        for number, part in enumerate(_in_parts(rows))
    ]


def _array(folder: Path, rows: Rows) -> str:
    return _replace(folder / "rows.json", lambda new: new.write_text(json.dumps(rows, indent=1), encoding="utf-8"))


def _iterable(folder: Path, rows: Rows) -> Any:
    return IterableSource(lambda epoch: rows, version=digest(json.dumps(rows)))


def _streamed(folder: Path, rows: Rows) -> Any:
    import datasets

    features = datasets.Features(
        {
            "id": datasets.Value("int64"),
            "pad": datasets.Value("string"),
            "nested": datasets.List({"n": datasets.Value("int64")}),
        }
    )
    return datasets.IterableDataset.from_generator(lambda: iter(rows), features=features)


def _made(source: Any, row: int, num_rows: int) -> Place:
    return Place("tests.support.sources:" if isinstance(source, IterableSource) else "", None, row)


def _on_s3(name: str, made: Callable[[Rows], bytes]) -> Callable[[Path, Rows], JsonlSource]:
    def write(folder: Path, rows: Rows) -> JsonlSource:
        return JsonlSource(s3().put(f"{folder.name}/{name}", made(rows)), storage_options=s3().options)

    return write


def _objects_on_s3(folder: Path, rows: Rows) -> JsonlSource:
    for number, part in enumerate(_in_parts(rows)):
        s3().put(f"{folder.name}/parts/{number}.jsonl", jsonl(part))
    return JsonlSource(f"s3://{BUCKET}/{folder.name}/parts", storage_options=s3().options)


def _by_http(folder: Path, rows: Rows) -> JsonlSource:
    return JsonlSource(http_host().put(f"/{folder.name}/rows.jsonl", jsonl(rows)), storage_options=FAST)


def _parquet_by_http(folder: Path, rows: Rows) -> ParquetSource:
    data = Path(_write_parquet(folder / "rows.parquet", rows, 90)).read_bytes()
    return ParquetSource(http_host().put(f"/{folder.name}/rows.parquet", data), storage_options=FAST)


def _parquet_on_s3(folder: Path, rows: Rows) -> ParquetSource:
    for number, path in enumerate(_parquet_files(folder, rows)):
        s3().put(f"{folder.name}/parts/{number}.parquet", Path(path).read_bytes())
    return ParquetSource(f"s3://{BUCKET}/{folder.name}/parts", storage_options=s3().options)


def _in_object(source: JsonlSource, row: int, num_rows: int) -> Place:
    return Place(str(source.paths), None, None)


def _in_objects(source: JsonlSource, row: int, num_rows: int) -> Place:
    return Place(f"{source.paths}/{_part_of(row, num_rows)[0]}.jsonl", None, None)


KINDS: dict[str, Kind] = {
    "a JSONL file": Kind(_jsonl_file, _line),
    "JSONL files": Kind(_jsonl_files, _line_of_files),
    "Parquet, one row group": Kind(_parquet_file(100_000), _number, ("pyarrow",)),
    "Parquet, large row groups": Kind(_parquet_file(90), _number, ("pyarrow",)),
    "Parquet, tiny row groups": Kind(_parquet_file(3), _number, ("pyarrow",)),
    "Parquet files": Kind(_parquet_files, _number_of_files, ("pyarrow",)),
    "a saved dataset": Kind(_saved, _index, ("datasets",)),
    "a dataset in memory": Kind(_in_memory, _index, ("datasets",), is_in_files=False),
    "a dataset with a mapping of indices": Kind(_mapped, _index, ("datasets",)),
    "a gzip file": Kind(_gzip_file, _numbered_line, is_stream=True),
    "zstd files": Kind(_zstd_files, _numbered_line_of_files, ("zstandard",), is_stream=True),
    "a JSON array": Kind(_array, _number, is_stream=True),
    "an object of S3": Kind(_on_s3("rows.jsonl", jsonl), _in_object, ("moto",), changed="AD322"),
    "objects of S3": Kind(_objects_on_s3, _in_objects, ("moto",), changed="AD322"),
    "an object by http": Kind(_by_http, _in_object, ("obstore",), changed="AD322"),
    "a gzip object of S3": Kind(
        _on_s3("rows.jsonl.gz", lambda rows: members([jsonl(rows)])),
        lambda source, row, num_rows: Place(str(source.paths), row + 1, row),
        ("moto",),
        is_stream=True,
        changed="AD322",
    ),
    "a Parquet object by http": Kind(
        _parquet_by_http,
        lambda source, row, num_rows: Place(str(source.paths), None, row),
        ("pyarrow", "obstore"),
        changed="AD322",
    ),
    "Parquet objects of S3": Kind(
        _parquet_on_s3,
        lambda source, row, num_rows: Place(
            f"{source.paths}/{_part_of(row, num_rows)[0]}.parquet", None, _part_of(row, num_rows)[1]
        ),
        ("pyarrow", "moto"),
        changed="AD322",
    ),
    "an iterable": Kind(_iterable, _made, is_in_files=False, is_stream=True),
    "a streaming dataset": Kind(
        _streamed, _made, ("datasets",), is_in_files=False, is_stream=True, is_content_known=False
    ),
}
