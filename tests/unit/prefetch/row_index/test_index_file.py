"""A row index on disk: what a killed run found is there, what is not whole is not, and one process writes."""

from __future__ import annotations

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata.core.cache_dir import cache_folder
from asyncdata.core.messages import Indexed, RowError
from asyncdata.prefetch.row_index.index_file import IndexFile

PARTS = [
    Indexed(bytes(4 * n), bytes(8), b"x" * n, b"", n, {"max_length": n}, [RowError(0, "AD101", "cut off")], b"lens" * n)
    for n in range(5)
]
IDENTITY = "0123456789abcdef"


def read(folder: str, identity: str = IDENTITY) -> list[Indexed]:
    file = IndexFile(folder, identity)
    try:
        return list(file.parts())
    finally:
        file.close()


def write(folder: str, parts: list[Indexed]) -> str:
    file = IndexFile(folder, IDENTITY)
    list(file.parts())
    for part in parts:
        file.append(part)
    file.close()
    return str(file.path)


def test_what_was_written_is_read_again(tmp_path):
    write(str(tmp_path), PARTS[:2])
    path = write(str(tmp_path), PARTS[2:])

    assert read(str(tmp_path)) == PARTS
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.thorough
@given(st.data())
def test_a_file_that_was_cut_or_damaged_anywhere_gives_a_beginning_and_can_be_written_on(tmp_path_factory, data):
    folder = str(tmp_path_factory.mktemp("index"))
    path = write(folder, PARTS)
    size = os.path.getsize(path)
    at = data.draw(st.integers(0, size - 1))
    with open(path, "r+b") as file:
        if data.draw(st.booleans()):
            file.truncate(at)
        else:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ data.draw(st.integers(1, 255))]))

    whole = read(folder)
    assert whole == PARTS[: len(whole)]
    assert len(whole) < len(PARTS)

    write(folder, PARTS[len(whole) :])
    assert read(folder) == PARTS


def test_an_appended_part_overwrites_a_part_that_was_refused(tmp_path):
    write(str(tmp_path), PARTS)
    file = IndexFile(str(tmp_path), IDENTITY)
    for part in file.parts():
        if part == PARTS[2]:
            file.refuse()
            break
    file.append(PARTS[4])
    file.finish()
    file.close()

    assert read(str(tmp_path)) == [*PARTS[:2], PARTS[4]]


def test_another_process_reads_and_does_not_write(tmp_path):
    first = IndexFile(str(tmp_path), IDENTITY)
    first.append(PARTS[0])

    second = IndexFile(str(tmp_path), IDENTITY)
    assert list(second.parts()) == [PARTS[0]]
    second.append(PARTS[1])
    second.finish()
    second.close()
    first.append(PARTS[2])
    first.finish()
    first.close()

    assert read(str(tmp_path)) == [PARTS[0], PARTS[2]]


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / f"{IDENTITY}.index").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="symbolic"):
        IndexFile(str(tmp_path), IDENTITY)


def test_the_folder_is_where_caches_are(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == "/caches/asyncdata"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == "/home/me/.cache/asyncdata"
