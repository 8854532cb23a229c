"""A file is edited in place in the middle of an epoch: what is delivered is D to some row, and then an error names it.

Nothing of the new content is ever delivered. What leaves the content alone, such as chmod, changes nothing.
"""

from __future__ import annotations

import gzip
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, EndOfData, HuggingFaceSource, Shuffle, SourceChangedError
from asyncdata.sources.fingerprint import file_digest
from tests.support.combinations import each_pair
from tests.support.loading import NEVER_S
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.thorough

SHUFFLE = Shuffle(block_bytes=4096, window_blocks=4)
Ids = range


def _jsonl(ids: Ids) -> bytes:
    return b"".join(b'{"id": %d, "pad": "%s"}\n' % (number, b"x" * (30 + number % 50)) for number in ids)


def _write_jsonl(folder: Path, ids: Ids) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(_jsonl(ids))
    return path


def _write_gzip(folder: Path, ids: Ids) -> Path:
    """Stored and not compressed, so that other rows of these lengths take as many bytes."""
    path = folder / "rows.jsonl.gz"
    path.write_bytes(
        b"".join(gzip.compress(_jsonl(ids[start : start + 500]), 0, mtime=0) for start in range(0, len(ids), 500))
    )
    return path


def _write_array(folder: Path, ids: Ids) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps([{"id": number} for number in ids]))
    return path


def _write_parquet(folder: Path, ids: Ids) -> Path:
    """Without what follows from the values: another file of the same size has the same footer."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "rows.parquet"
    pq.write_table(
        pa.table({"id": list(ids)}),
        path,
        row_group_size=100,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    return path


def _write_dataset(folder: Path, ids: Ids) -> Path:
    datasets = pytest.importorskip("datasets")
    path = folder / "saved"
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"id": list(ids)}).save_to_disk(path)
    datasets.enable_progress_bars()
    return path / "data-00000-of-00001.arrow"


def _saved(path: Path) -> HuggingFaceSource:
    return HuggingFaceSource(str(path.parent))


WAYS: dict[str, tuple[Callable[[Path, Ids], Path], Callable[[Path], Any], int, dict[str, Any]]] = {
    "JSONL": (_write_jsonl, str, 1500, {}),
    "JSONL, by its index": (_write_jsonl, str, 1500, {"shuffle": "full", "cache": {"folder": ""}}),
    "Parquet": (_write_parquet, str, 2000, {}),
    "a saved dataset": (_write_dataset, _saved, 2000, {}),
    "gzip": (_write_gzip, str, 6000, {}),
    "a JSON array": (_write_array, str, 20_000, {}),
}


def _other_content(write: Callable[[Path, Ids], Path], path: Path, ids: Ids) -> bytes:
    folder = path.parent.parent / "other"
    folder.mkdir()
    data = write(folder, ids).read_bytes()
    assert len(data) == path.stat().st_size
    return data


def _write_over(path: Path, data: bytes, *, keeps_time: bool) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    now = path.stat()
    assert (now.st_ino, now.st_size) == (before.st_ino, before.st_size)


def _loader(source: Any, **knobs: Any) -> DataLoader:
    settings = {"tokenize_fn": row_id, "shuffle": SHUFFLE, "epochs": 1, "timeout_s": NEVER_S, "buffer_size": 8}
    return DataLoader(source, **settings | knobs)


def _take(loader: DataLoader, found: list[int], stop: int | None = None) -> None:
    while stop is None or len(found) < stop:
        try:
            found += [int(sample.tokens[0]) for sample in loader.get_next_batch(40)]
        except EndOfData as end:
            found += [int(sample.tokens[0]) for sample in end.samples]
            return


def _order(source: Any, **knobs: Any) -> list[int]:
    found: list[int] = []
    with _loader(source, num_workers=0, buffer_size=1000, **knobs) as loader:
        _take(loader, found)
    return found


TIMES = {"another time": False, "the same time": True}


@pytest.mark.parametrize(("way", "keeps_time", "num_workers"), each_pair(WAYS.keys(), TIMES, [0, 2]))
def test_no_row_of_the_new_content_comes_when_a_file_is_edited_in_place(tmp_path, way, keeps_time, num_workers):
    write, source_of, num_rows, knobs = WAYS[way]
    (tmp_path / "data").mkdir()
    path = write(tmp_path / "data", range(100_000, 100_000 + num_rows))
    other = _other_content(write, path, range(500_000, 500_000 + num_rows))
    expected, found = _order(source_of(path), **knobs), list[int]()

    with _loader(source_of(path), num_workers=num_workers, **knobs) as loader:
        _take(loader, found, 40)
        _write_over(path, other, keeps_time=keeps_time)
        with pytest.raises(SourceChangedError, match="^AD303 .* was replaced or edited while it was read") as caught:
            _take(loader, found)

    assert str(path) in str(caught.value)
    assert found == expected[: len(found)]
    assert 40 <= len(found) < num_rows


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_row_of_the_new_content_comes_while_a_file_is_written_anew(tmp_path, num_workers):
    """Its writer has cut it, and is half way: it is shorter than it was, and every row of it is another one."""
    path = _write_jsonl(tmp_path, range(100_000, 101_500))
    expected, found = _order(str(path)), list[int]()

    with _loader(str(path), num_workers=num_workers) as loader:
        _take(loader, found, 40)
        path.write_bytes(_jsonl(range(500_000, 501_000)))
        with pytest.raises(SourceChangedError, match=f"^AD302 {path} shrank: it had"):
            _take(loader, found)

    assert found == expected[: len(found)]


def _chmod(path: Path) -> None:
    path.chmod(0o640)


def _link(path: Path) -> None:
    path.with_name("link").hardlink_to(path)


def _rename(path: Path) -> None:
    path.rename(path.with_name("renamed"))


def _touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(_jsonl(range(900_000, 900_050)))


@pytest.mark.parametrize(
    ("change", "num_workers"),
    [(_chmod, 2), (_link, 2), (_rename, 0), (_touch, 2), (_append, 2)],  # a worker opens by name
)
@pytest.mark.parametrize("way", ["JSONL", "JSONL, by its index"])
def test_what_leaves_the_rows_alone_changes_nothing(tmp_path, way, change, num_workers):
    write, source_of, num_rows, knobs = WAYS[way]
    path = write(tmp_path, range(100_000, 100_000 + num_rows))
    expected, found = _order(source_of(path), **knobs), list[int]()

    with _loader(source_of(path), num_workers=num_workers, **knobs) as loader:
        _take(loader, found, 40)
        change(path)
        _take(loader, found)

    assert found == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_edit_of_one_row_of_a_large_file_is_found_by_its_time(tmp_path, num_workers):
    """Which the sample of its content would miss."""
    path = _write_jsonl(tmp_path, range(100_000, 108_000))
    before, expected, found = path.read_bytes(), _order(str(path)), list[int]()
    row = before.index(b"106500")
    sampled = file_digest(str(path), len(before))

    with _loader(str(path), num_workers=num_workers) as loader:
        _take(loader, found, 40)
        _write_over(path, before[:row] + b"999999" + before[row + 6 :], keeps_time=False)
        assert file_digest(str(path), len(before)) == sampled
        with pytest.raises(SourceChangedError, match="^AD303 .* was replaced or edited while it was read"):
            _take(loader, found)

    assert found == expected[: len(found)]
