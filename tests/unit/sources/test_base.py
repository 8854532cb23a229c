"""FileBlocks: byte blocks by arithmetic alone, and whether the files are still the ones they were."""

from __future__ import annotations

import os
from itertools import accumulate
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from asyncdata import SourceChangedError, SourceLocation
from asyncdata.core.messages import Block
from asyncdata.sources.base import FileBlocks
from asyncdata.sources.fingerprint import FileStamp, data_fingerprint, stamp

if TYPE_CHECKING:
    from pathlib import Path

MAX_ROW_BYTES = 1000
CONTENT = b'{"id": 1}\n' * 100


def imagined(*sizes: int, block_bytes: int = 10) -> FileBlocks:
    """Files that exist by their sizes only: nothing is read."""
    stamps = [FileStamp(f"/nowhere/{number}", size, 0, number) for number, size in enumerate(sizes)]
    return FileBlocks(stamps, block_bytes, MAX_ROW_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(CONTENT)
    return path


def blocks_of(*paths: Path) -> FileBlocks:
    """The files as at the start of a run, whose fingerprint a snapshot has looked at."""
    files = FileBlocks([stamp(str(path)) for path in paths], 64, MAX_ROW_BYTES)
    files.fingerprint()
    return files


def touch(path: Path, seconds: int = 5) -> None:
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + seconds * 10**9))


def replace(path: Path, data: bytes) -> None:
    """Another file of that name, as an editor or a download makes it."""
    new = path.with_name("new")
    new.write_bytes(data)
    new.replace(path)
    touch(path)


def edit(path: Path, data: bytes) -> None:
    """The same file, written over."""
    path.write_bytes(data)
    touch(path)


# Blocks.


def test_blocks_are_numbered_across_all_files():
    files = imagined(25, 0, 10, 1)

    assert files.num_blocks == 5
    assert files.num_bytes == 36
    assert files.blocks(range(5)) == [
        Block(0, 0, 10),
        Block(0, 10, 20),
        Block(0, 20, 25),
        Block(2, 0, 10),
        Block(3, 0, 1),
    ]


def test_blocks_come_in_the_order_asked_for():
    assert imagined(25, 12).blocks(np.array([4, 0, 3])) == [Block(1, 10, 12), Block(0, 0, 10), Block(1, 0, 10)]


def test_no_blocks_are_no_blocks():
    assert imagined(25).blocks([]) == []


def test_files_are_told_by_path_and_size():
    found = [(file.path, file.num_bytes) for file in imagined(25, 0).files]

    assert found == [("/nowhere/0", 25), ("/nowhere/1", 0)]


def test_a_location_has_its_files_path():
    assert imagined(25, 30).location(1, 7, 9) == SourceLocation("/nowhere/1", 7, 9)


def test_petabytes_cost_nothing():
    files = imagined(2**60, 2**59, block_bytes=4096)

    assert files.num_blocks == 2**48 + 2**47
    assert files.blocks([2**48 - 1, 2**48]) == [Block(0, 2**60 - 4096, 2**60), Block(1, 0, 4096)]


@pytest.mark.thorough
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8), block_bytes=st.integers(1, 60))
def test_blocks_cover_every_byte_of_every_file_once(sizes, block_bytes):
    files = imagined(*sizes, block_bytes=block_bytes)
    blocks = files.blocks(range(files.num_blocks))

    assert [(b.file_id, byte) for b in blocks for byte in range(b.start, b.stop)] == [
        (number, byte) for number, size in enumerate(sizes) for byte in range(size)
    ]
    assert all(0 < block.stop - block.start <= block_bytes for block in blocks)


@pytest.mark.thorough
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8), data=st.data())
def test_a_block_alone_is_the_block_among_all(sizes, data):
    files = imagined(*sizes)
    first_blocks = [0, *accumulate(-(-size // 10) for size in sizes)]
    if not files.num_blocks:
        return
    number = data.draw(st.integers(0, files.num_blocks - 1))

    (block,) = files.blocks([number])

    assert first_blocks[block.file_id] + block.start // 10 == number


@pytest.mark.thorough
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6), block_bytes=st.integers(1, 60))
def test_a_block_is_known_by_its_first_byte_and_by_no_other(sizes, block_bytes):
    """The token cache finds by it what it holds: another block's samples would be delivered."""
    files = imagined(*sizes, block_bytes=block_bytes)
    blocks = files.blocks(range(files.num_blocks))
    known = {(block.file_id, block.start): number for number, block in enumerate(blocks)}
    places = [(file_id, start) for file_id in range(len(sizes)) for start in range(120)]

    found = files.numbers(*np.array(places).T)

    assert found.tolist() == [known.get(place, -1) for place in places]


# Fingerprint.


def test_the_fingerprint_is_that_of_the_files_in_their_order(path, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_bytes(b"{}\n")
    found = blocks_of(path, other).fingerprint()

    assert found == data_fingerprint([stamp(str(path)), stamp(str(other))])
    assert found != blocks_of(other, path).fingerprint()


def test_the_fingerprint_is_computed_once(path):
    files = blocks_of(path)
    before = files.fingerprint()
    edit(path, b"x" * len(CONTENT))

    assert files.fingerprint() is before


# Whether they are what they were.


def test_untouched_files_are_unchanged(path):
    blocks_of(path).check_unchanged()


def test_files_that_are_untouched_are_not_read_again(path, monkeypatch):
    files = FileBlocks([stamp(str(path))], 64, MAX_ROW_BYTES)
    path.chmod(0)
    path.chmod(0o600)
    monkeypatch.setattr("asyncdata.sources.base.file_digest", lambda *_: "other content")

    with pytest.raises(SourceChangedError):
        files.check_unchanged()
    FileBlocks([stamp(str(path))], 64, MAX_ROW_BYTES).check_unchanged()  # stat() says that nothing happened


def test_an_edit_that_sets_the_time_back_is_a_change(path):
    files = FileBlocks([stamp(str(path))], 64, MAX_ROW_BYTES)
    times = path.stat().st_mtime_ns
    path.write_bytes(b"x" * len(CONTENT))
    os.utime(path, ns=(times, times))

    with pytest.raises(SourceChangedError, match=f"^AD303 {path} was replaced or edited while it was read"):
        files.check_unchanged()


def test_a_file_whose_mode_changes_is_unchanged_though_its_content_was_never_looked_at(path, tmp_path):
    others = [tmp_path / f"{number}.jsonl" for number in range(40)]
    for other in others:
        other.write_bytes(CONTENT)
    files = FileBlocks([stamp(str(each)) for each in (path, *others)], 64, MAX_ROW_BYTES)
    path.chmod(0o640)

    files.check_unchanged()
    assert files.fingerprint() is files.fingerprint()
    edit(path, CONTENT.replace(b"1", b"2"))
    with pytest.raises(SourceChangedError, match=f"^AD303 {path} was replaced or edited while it was read"):
        files.check_unchanged()


def test_a_touched_file_is_unchanged(path):
    files = blocks_of(path)
    touch(path)

    files.check_unchanged()


def test_a_file_that_has_grown_is_unchanged(path):
    """What is new belongs to a later run: rows are read to the size of the start."""
    files = blocks_of(path)
    edit(path, CONTENT + b'{"id": 2}\n')

    files.check_unchanged()


def test_a_file_replaced_by_its_copy_is_unchanged(path):
    files = blocks_of(path)
    replace(path, CONTENT)

    files.check_unchanged()


@pytest.mark.parametrize("change", [edit, replace])
def test_other_content_of_the_same_size_is_a_change(path, change):
    files = blocks_of(path)
    change(path, CONTENT.replace(b"1", b"2"))

    with pytest.raises(SourceChangedError, match=f"^AD303 {path} was replaced or edited while it was read"):
        files.check_unchanged()


@pytest.mark.parametrize("change", [edit, replace])
def test_a_shorter_file_is_a_change_and_both_sizes_are_told(path, change):
    files = blocks_of(path)
    change(path, CONTENT[:-10])

    with pytest.raises(SourceChangedError, match=f"^AD302 {path} shrank from 1000 to 990 bytes"):
        files.check_unchanged()


def test_a_file_that_is_gone_is_a_change(path):
    files = blocks_of(path)
    path.unlink()

    with pytest.raises(SourceChangedError, match=f"^AD304 {path} .*No such file or directory"):
        files.check_unchanged()


def test_the_one_of_many_that_changed_is_named(path, tmp_path):
    others = [tmp_path / f"{number}.jsonl" for number in range(4)]
    for other in others:
        other.write_bytes(CONTENT)
    files = blocks_of(path, *others)
    touch(others[1])
    edit(others[2], CONTENT.replace(b"1", b"2"))

    with pytest.raises(SourceChangedError, match=r"AD303 .*/2\.jsonl "):
        files.check_unchanged()
