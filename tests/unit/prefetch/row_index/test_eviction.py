"""The size of row indexes is limited: the least recently used are removed, and none that is in use."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.cli.main import main
from asyncdata.core.messages import Indexed
from asyncdata.prefetch.row_index.eviction import hold_rows, kept_indexes, make_room
from asyncdata.prefetch.row_index.index_file import IndexFile
from asyncdata.sources.spool import part_path, write_part

if TYPE_CHECKING:
    from pathlib import Path

PART = Indexed(bytes(4), bytes(4), bytes(4), b"", 0)


def identity(number: int) -> str:
    return f"{number:032x}"


def make(folder: str, number: int, *, rows: int = 0, used_s: int | None = None) -> int:
    """An index that was last used at a time; its size, with a copied row of so many bytes."""
    file = IndexFile(folder, identity(number))
    file.append(PART)
    file.close()
    copy = part_path(f"{folder}/{identity(number)}.rows", 0)
    if rows:
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        write_part(copy, [b"x" * rows])
    if used_s is not None:
        os.utime(file.path, (used_s, used_s))
    return os.path.getsize(file.path) + (os.path.getsize(copy) if rows else 0)


def names(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.iterdir()}


@pytest.mark.thorough
@given(
    ages=st.lists(st.integers(1, 50), min_size=1, max_size=6, unique=True),
    rows=st.integers(0, 500),
    share=st.floats(0, 1.2),
    keep=st.integers(0, 5),
)
def test_the_least_recently_used_indexes_are_removed_until_the_rest_fits(tmp_path_factory, ages, rows, share, keep):
    folder = tmp_path_factory.mktemp("index")
    sizes = {number: make(str(folder), number, rows=rows, used_s=1000 - age) for number, age in enumerate(ages)}
    max_bytes = round(share * sum(sizes.values()))

    left, expected = sum(sizes.values()), set(sizes)
    for number in sorted(sizes, key=lambda number: 1000 - ages[number]):
        if left > max_bytes and number != keep:
            left -= sizes[number]
            expected.remove(number)
    removed = make_room(str(folder), max_bytes, identity(keep))

    assert names(folder) == {identity(number) for number in expected}
    assert sum(index.num_bytes for index in removed) == sum(sizes.values()) - left
    assert sum(index.num_bytes for index in kept_indexes(str(folder))) == left


def test_reading_an_index_is_using_it(tmp_path):
    make(str(tmp_path), 1, used_s=1)
    make(str(tmp_path), 2, used_s=2)
    IndexFile(str(tmp_path), identity(1)).close()

    assert [index.name for index in kept_indexes(str(tmp_path))] == [identity(2), identity(1)]


@pytest.mark.parametrize("in_use", ["written", "read in single rows"])
def test_one_that_is_in_use_stays(tmp_path, in_use):
    make(str(tmp_path), 1, rows=10, used_s=1)
    make(str(tmp_path), 2, used_s=2)
    if in_use == "written":
        writer = IndexFile(str(tmp_path), identity(1))
        os.utime(writer.path, (1, 1))
        end = writer.close
    else:
        fd = hold_rows(f"{tmp_path}/{identity(1)}.rows")

        def end() -> None:
            os.close(fd)

    make_room(str(tmp_path), 1, keep="")
    assert names(tmp_path) == {identity(1)}

    end()
    make_room(str(tmp_path), 1, keep="")
    assert names(tmp_path) == set()


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> Any:
    capsys.readouterr()
    assert main(["cache", *map(str, words), "--row-index", "--json"]) == status
    structlog.reset_defaults()
    return json.loads(capsys.readouterr().out)


def test_they_are_listed_and_removed_by_their_keys(tmp_path, capsys):
    sizes = [make(str(tmp_path), number, rows=10 * number, used_s=number) for number in (2, 1)]
    listed = run(capsys, "ls", "--dir", tmp_path)
    assert listed == [
        {"key": identity(1), "num_bytes": sizes[1], "used_s": 1.0},
        {"key": identity(2), "num_bytes": sizes[0], "used_s": 2.0},
    ]
    assert main(["cache", "ls", "--row-index", "--dir", str(tmp_path)]) == 0
    assert identity(1)[:12] in capsys.readouterr().out

    assert "begin with '0'" in run(capsys, "rm", "0", "--dir", tmp_path, status=1)["error"]["message"]
    run(capsys, "rm", "--dir", tmp_path, status=1)
    writer = IndexFile(str(tmp_path), identity(2))
    assert "AD614" in run(capsys, "rm", identity(2), "--dir", tmp_path, status=1)["error"]["message"]
    writer.close()
    assert run(capsys, "rm", identity(2), "--dir", tmp_path) == {"removed": [identity(2)], "num_bytes": sizes[0]}
    assert names(tmp_path) == {identity(1)}
    run(capsys, "rm", "--all", "--dir", tmp_path)
    assert run(capsys, "ls", "--dir", tmp_path) == []


def test_files_that_are_no_index_are_left_alone_and_a_missing_folder_is_empty(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "row").write_text("mine")
    (tmp_path / f"{identity(1)}.rows").symlink_to(elsewhere)

    with pytest.raises(OSError, match="symbolic|directory|links"):
        make_room(str(tmp_path), 0, keep="")
    assert kept_indexes(str(tmp_path / "absent")) == []
    assert (elsewhere / "row").exists()
    assert (tmp_path / "notes.txt").exists()
