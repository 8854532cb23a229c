"""The file of a row index, and what is evicted; which rows have a number is in ``test_row_orders.py``. The pacer."""

import contextlib
import os
import stat
from array import array
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdata import RowShuffle
from tests.support import parts


def ints(numbers: Iterable[int]) -> bytes:
    return array("i", numbers).tobytes()


KEPT, NO_SAMPLE, NO_OBJECT = 0, 1, 2
PIECES: Any = SimpleNamespace(
    num_blocks=6, are_arrays=(), blocks=lambda ids: [parts.Block(number // 3, 100 * (number % 3), 0) for number in ids]
)
"""Blocks of two files, each of 100 bytes."""


def part(marks: list[int]) -> parts.Indexed:
    """What a worker finds in a block: rows at 0, 10, 20 ..., as long as their number, of three tokens more each."""
    numbers = range(len(marks))
    num_tokens = ints(3 * row if mark == KEPT else 0 for row, mark in enumerate(marks))
    found = ints([len(marks)]), ints(10 * row for row in numbers), ints(numbers), bytes(marks) if any(marks) else b""
    return parts.Indexed(*found, 0, num_tokens=num_tokens)


def index_of(*all_found: parts.Indexed) -> parts.RowIndex:
    index = parts.RowIndex(PIECES, RowShuffle(only_kept=True))
    for found in all_found:
        index.append(found)
    return index


every_mark = st.lists(st.lists(st.sampled_from([KEPT, KEPT, NO_SAMPLE, NO_OBJECT]), max_size=5), min_size=6, max_size=6)


@settings(max_examples=50)
@given(every_mark, st.lists(st.integers(0, 40), min_size=6, max_size=6))
def test_rows_are_taken_from_the_file_as_far_as_it_has_them_and_they_are_equal(blocks, written):
    all_found = [part(block) for block in blocks]
    rows = np.concatenate(list(map(parts.rows_of, all_found)))
    expected, index = index_of(*all_found), index_of()
    for found, num_written in zip(all_found, sorted(written), strict=True):
        index.append(found)
        is_all = index.adopt(rows[:num_written])
        assert is_all == (num_written >= index.num_found)
        others = rows.copy()
        others[num_written:] += 1
        assert index.adopt(others) == is_all

    numbers = np.arange(expected.num_rows)
    for mine, whole in zip(index.places(numbers)[:4], expected.places(numbers)[:4], strict=True):
        assert mine.tolist() == whole.tolist()
    assert index.num_tokens.tolist() == expected.num_tokens.tolist()


def indexed(n: int, marks: bytes) -> parts.Indexed:
    lengths, num_tokens = ints([7] * n), ints([0] * n if marks else range(n))
    errors = [parts.RowError(0, "AD101", "cut")]
    return parts.Indexed(bytes(4 * n), ints(range(n)), lengths, marks, n, {"max_length": n}, errors, num_tokens)


PARTS = list(map(indexed, range(5), (b"", b"", bytes([1, 255]), b"", bytes([2, 0, 0, 5]))))
IDENTITY = "0123456789abcdef"


def opened(folder: Path | str) -> Any:
    return contextlib.closing(parts.IndexFile(str(folder), IDENTITY))


def read(folder: Path | str) -> list[parts.Indexed]:
    with opened(folder) as file:
        return list(file.parts())


def write(folder: Path | str, all_found: list[parts.Indexed]) -> str:
    with opened(folder) as file:
        list(file.parts())
        for one in all_found:
            file.append(one)
        return str(file.path)


@settings(max_examples=50)
@given(st.data())
def test_a_file_that_was_cut_or_damaged_anywhere_gives_a_beginning_and_can_be_written_on(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("index")
    write(folder, PARTS[:2])
    path = write(folder, PARTS[2:])
    assert read(folder) == PARTS
    path = os.path.splitext(path)[0] + data.draw(st.sampled_from([".index", ".places"]))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    at = data.draw(st.integers(0, os.path.getsize(path) - 1))
    with open(path, "r+b") as file:
        if data.draw(st.booleans()):
            file.truncate(at)
        else:
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ data.draw(st.integers(1, 255))]), at)

    whole = read(folder)
    assert whole == PARTS[: len(whole)]
    assert len(whole) < len(PARTS)

    write(folder, PARTS[len(whole) :])
    assert read(folder) == PARTS


def test_the_folder_is_where_caches_are_and_files_that_are_no_index_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert parts.cache_folder() == "/caches/asyncdata"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert parts.cache_folder() == "/home/me/.cache/asyncdata"

    (tmp_path / "notes.txt").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "row").write_text("mine")
    (tmp_path / f"{identity(1)}.rows").symlink_to(elsewhere)

    with pytest.raises(OSError, match="symbolic|directory|links"):
        parts.make_room(str(tmp_path), 0, keep="")
    assert parts.make_room(str(tmp_path / "absent"), 0, keep="") == []
    assert (elsewhere / "row").exists()
    assert (tmp_path / "notes.txt").exists()


identity = "{:032x}".format


def make(folder: str, number: int, *, rows: int = 0, used_s: int | None = None) -> int:
    """An index that was last used at a time; its size, with a copied row of so many bytes."""
    file = parts.IndexFile(folder, identity(number))
    file.append(parts.Indexed(bytes(4), bytes(4), bytes(4), b"", 0))
    file.close()
    copy = parts.part_path(f"{folder}/{identity(number)}.rows", 0)
    if rows:
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        parts.write_part(copy, [b"x" * rows])
    if used_s is not None:
        os.utime(file.path, (used_s, used_s))
    places = file.path.with_suffix(".places")
    return os.path.getsize(file.path) + os.path.getsize(places) + (os.path.getsize(copy) if rows else 0)


def names(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.iterdir()}


@settings(max_examples=30)
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
    removed = parts.make_room(str(folder), max_bytes, identity(keep))
    assert names(folder) == {identity(number) for number in expected}
    assert sum(index.num_bytes for index in removed) == sum(sizes.values()) - left


def test_another_process_reads_and_does_not_write(tmp_path):
    with opened(tmp_path) as first:
        first.append(PARTS[0])
        with opened(tmp_path) as second:
            assert list(second.parts()) == [PARTS[0]]
            second.append(PARTS[1])
            second.finish()
            first.append(PARTS[2])
            first.finish()
            second.read_on()
            expected = [*parts.rows_of(PARTS[0]).tolist(), *parts.rows_of(PARTS[2]).tolist()]
            assert second.rows.tolist() == first.rows.tolist() == expected
    assert read(tmp_path) == [PARTS[0], PARTS[2]]


@pytest.mark.parametrize("in_use", ["written", "read in single rows"])
def test_one_that_is_in_use_stays(tmp_path, in_use):
    make(str(tmp_path), 1, rows=10, used_s=1)
    make(str(tmp_path), 2, used_s=2)
    if in_use == "written":
        writer = parts.IndexFile(str(tmp_path), identity(1))
        os.utime(writer.path, (1, 1))
    else:
        held = parts.hold_rows(f"{tmp_path}/{identity(1)}.rows")
    parts.make_room(str(tmp_path), 1, keep="")
    assert names(tmp_path) == {identity(1)}
    writer.close() if in_use == "written" else os.close(held)
    parts.make_room(str(tmp_path), 1, keep="")
    assert names(tmp_path) == set()


MANY = 1 << 20


def learn(pacer: parts.ChunkPacer, row_s: float, number: int) -> list[int]:
    """The sizes of so many chunks, of rows that take so long."""
    sizes = []
    for _ in range(number):
        sizes.append(pacer.num_rows)
        pacer.learn(pacer.num_rows, pacer.num_rows * row_s)
    return [*sizes, pacer.num_rows]


def test_first_chunks_are_small_each_may_be_twice_as_large_and_one_slow_chunk_does_not_decide():
    assert learn(parts.ChunkPacer(MANY, num_workers=2), 0.0, 7) == [32, 64, 128, 256, 512, 1024, 1024, 1024]
    pacer = parts.ChunkPacer(MANY, num_workers=2)
    pacer.learn(0, 5.0)
    assert pacer.num_rows == 32
    for row_s in [*[0.0005] * 10, 0.001]:
        pacer.learn(100, 100 * row_s)
    assert pacer.num_rows == int(0.05 / (0.8 * 0.0005 + 0.2 * 0.001))


@pytest.mark.parametrize(("row_s", "num_rows"), [(0.0001, 500), (0.001, 50), (0.01, 5), (0.05, 1), (10.0, 1)])
def test_a_chunk_grows_or_shrinks_to_fifty_milliseconds_of_work(row_s, num_rows):
    assert abs(learn(parts.ChunkPacer(MANY, num_workers=2), row_s, 20)[-1] - num_rows) <= 1


@pytest.mark.parametrize(
    ("capacity", "num_workers", "num_rows"),
    [(1, 1, 1), (1, 8, 1), (8, 1, 4), (64, 2, 16), (64, 8, 4), (1000, 1, 500), (MANY, 2, 1024)],
)
def test_every_worker_can_have_two_chunks_of_the_channel_also_of_another_size(capacity, num_workers, num_rows):
    pacer = parts.ChunkPacer(capacity, num_workers)
    assert learn(pacer, 0.0, 12)[-1] == num_rows
    pacer.resize(capacity, 4 * num_workers)
    assert pacer.num_rows == max(1, min(capacity // (8 * num_workers), 1024))
    pacer.resize(4 * capacity, num_workers)
    assert learn(pacer, 0.0, 12)[-1] == max(1, min(2 * capacity // num_workers, 1024))
