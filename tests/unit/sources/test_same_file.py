"""Whether a file is the one of the start: each thing that ``stat`` says of it, alone and together, and its content."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from asyncdata.core.messages import Block, FileRef, Job
from asyncdata.sources.base import Files
from asyncdata.sources.fingerprint import WHOLE_BYTES, stamp
from asyncdata.sources.reader import FileChangedError
from asyncdata.sources.same_file import Looks, SameFile, is_same, looks_of
from asyncdata.sources.text.line_scanner import LineReader

if TYPE_CHECKING:
    from pathlib import Path

SMALL, LARGE = 100, WHOLE_BYTES + 1

# What differs -> whether the file is the same: with content that was not looked at, with the same sample of a large
# file, and with the same content of a small one.
VERDICTS = {
    "": (True, True, True),
    "ctime": (True, True, True),  # chmod, link, rename
    "inode": (True, True, True),  # made up by the file system
    "inode ctime": (False, True, True),  # a copy that kept its time
    "mtime": (False, False, True),
    "mtime ctime": (False, False, True),  # touched, or edited
    "inode mtime": (False, False, True),
    "inode mtime ctime": (False, False, True),  # a copy
    "size": (True, True, True),
    "size mtime ctime": (True, True, True),  # appended to
    "size inode": (False, True, True),
    "size inode mtime ctime": (False, True, True),  # written anew, with more rows
}


def now_of(file: FileRef, what: str) -> Looks:
    names = what.split()
    return Looks(
        file.num_bytes + 7 * ("size" in names),
        file.inode + ("inode" in names),
        file.mtime_ns + ("mtime" in names),
        file.ctime_ns + ("ctime" in names),
    )


def never() -> str:
    raise AssertionError("the content is read, and need not be")


@pytest.mark.parametrize("what", VERDICTS)
def test_the_kind_of_difference_decides_whether_a_file_is_the_same(what):
    unknown = FileRef("/a", SMALL, inode=5, mtime_ns=1000, ctime_ns=2000)
    large = msgspec.structs.replace(unknown, num_bytes=LARGE, digest="d")
    small = msgspec.structs.replace(unknown, digest="d")

    verdicts = (
        is_same(unknown, now_of(unknown, what), never),
        is_same(large, now_of(large, what), lambda: "d"),
        is_same(small, now_of(small, what), lambda: "d"),
    )

    assert verdicts == VERDICTS[what]


@pytest.mark.thorough
@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("what", [what for what in VERDICTS if what])
def test_other_content_is_never_the_same_file(what, num_bytes):
    file = FileRef("/a", num_bytes, inode=5, mtime_ns=1000, ctime_ns=2000, digest="d")

    assert not is_same(file, now_of(file, what), lambda: "e")


def test_a_file_that_nothing_happened_to_is_not_read_again():
    file = FileRef("/a", LARGE, inode=5, mtime_ns=1000, ctime_ns=2000, digest="d")

    assert is_same(file, now_of(file, ""), never)


def test_the_largest_file_that_is_digested_whole_may_have_another_time():
    file = FileRef("/a", WHOLE_BYTES, inode=5, mtime_ns=1000, ctime_ns=2000, digest="d")

    assert is_same(file, now_of(file, "mtime"), lambda: "d")


# An open file.


def ref_of(path: Path) -> FileRef:
    (ref,) = Files([stamp(str(path))], 99).refs
    return ref


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 1}\n')
    return path


def test_a_reference_has_the_stamp_and_the_digest_of_its_file(path):
    ref = ref_of(path)

    assert Looks(ref.num_bytes, ref.inode, ref.mtime_ns, ref.ctime_ns) == looks_of(path.stat())
    assert len(ref.digest) == 32


def test_content_is_looked_at_where_the_files_are_few(path, tmp_path):
    others = [tmp_path / str(number) for number in range(32)]
    for other in others:
        other.write_bytes(b"{}\n")
    stamps = [stamp(str(other)) for other in others]

    assert all(ref.digest for ref in Files(stamps, 99).refs)
    assert not any(ref.digest for ref in Files([*stamps, stamp(str(path))], 99).refs)


def replace(path: Path, data: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(data)
    other.replace(path)


def edit(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


@pytest.mark.parametrize("keeps_time", [False, True])
@pytest.mark.parametrize("change", [replace, edit])
def test_another_file_of_the_name_is_not_opened_in_its_place(path, change, keeps_time):
    file, times = ref_of(path), path.stat().st_mtime_ns
    with path.open("ab") as writer:
        writer.write(b'{"id": 2}\n')
    SameFile.checked(file).close()  # it has grown, and is the same

    change(path, b'{"id": 3}\n{"id": 2}\n')
    os.utime(path, ns=(0, times + (not keeps_time)))

    with pytest.raises(FileChangedError, match=r"^AD303 .*rows.jsonl was replaced or edited while it was read"):
        SameFile.checked(file)
    replace(path, b'{"id": 1}\n')
    SameFile.checked(file).close()  # its copy


def test_a_file_that_was_not_looked_at_is_only_held_against_its_size(path):
    file = FileRef(str(path), 10)
    edit(path, b'{"id": 3}\n')
    SameFile.checked(file).close()
    os.truncate(path, 9)

    with pytest.raises(
        FileChangedError, match=r"^AD302 .*rows.jsonl shrank: it had 10 bytes at the start, and ends at byte 9 now"
    ):
        SameFile.checked(file)


def test_a_changed_time_is_looked_into_once(path, monkeypatch):
    """A writer that appends all the time would have the sample read for every block."""
    file = SameFile(ref_of(path))
    path.chmod(0o640)
    file.check()
    monkeypatch.setattr("asyncdata.sources.same_file.content_digest", lambda *_: never())

    file.check()
    file.close()


# A reader.


def reader_of(paths: list[Path]) -> LineReader:
    files = Files([stamp(str(path)) for path in paths], 99).refs
    return LineReader(Job(files=files, tokenize=None, max_row_bytes=99, block_bytes=10, slack_bytes=0))


def test_a_reader_checks_the_files_that_it_has_read_since_the_last_check(path):
    reader = reader_of([path])
    reader.check()
    reader.read_block(Block(0, 0, 10), 99)
    reader.check()
    edit(path, b'{"id": 2}\n')
    reader.check()  # nothing was read since

    reader.read_block(Block(0, 0, 10), 99)
    with pytest.raises(FileChangedError, match="^AD303"):
        reader.check()
    reader.close()


def test_a_file_that_is_closed_to_make_room_is_looked_at_before(path, tmp_path):
    others = [tmp_path / str(number) for number in range(64)]
    for other in others:
        other.write_bytes(b'{"id": 1}\n')
    reader = reader_of([path, *others])
    reader.read_block(Block(0, 0, 10), 99)
    edit(path, b'{"id": 2}\n')
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))

    with pytest.raises(FileChangedError, match="^AD303 .*rows.jsonl"):
        for number in range(1, 65):
            reader.read_block(Block(number, 0, 10), 99)
    reader.close()
