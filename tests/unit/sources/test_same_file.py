"""Whether a file is the one of the start: each thing that ``stat`` says of it, alone and together, and its content."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import SourceChangedError
from asyncdata.core.messages import Block, FileRef, Job
from asyncdata.sources.base import FileBlocks, Files
from asyncdata.sources.fingerprint import WHOLE_BYTES, stamp
from asyncdata.sources.reader import FileChangedError
from asyncdata.sources.same_file import Looks, SameFile, is_same
from asyncdata.sources.text.line_scanner import LineReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL, LARGE = WHOLE_BYTES, WHOLE_BYTES + 1

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


def file_of(num_bytes: int, digest: str) -> FileRef:
    return FileRef("/a", num_bytes, inode=5, mtime_ns=1000, ctime_ns=2000, digest=digest)


def now_of(file: FileRef, what: str) -> Looks:
    names = what.split()
    return Looks(
        file.num_bytes + 7 * ("size" in names),
        file.inode + ("inode" in names),
        file.mtime_ns + ("mtime" in names),
        file.ctime_ns + ("ctime" in names),
    )


def never(*_: object) -> str:
    raise AssertionError("the content is read, and need not be")


@pytest.mark.parametrize("what", VERDICTS, ids=lambda what: what or "nothing")
def test_the_kind_of_difference_decides_whether_a_file_is_the_same_and_other_content_never_is(what):
    unknown, large, small = file_of(SMALL, ""), file_of(LARGE, "d"), file_of(SMALL, "d")

    verdicts = (
        is_same(unknown, now_of(unknown, what), never),
        is_same(large, now_of(large, what), lambda: "d"),
        is_same(small, now_of(small, what), lambda: "d"),
    )

    assert verdicts == VERDICTS[what]
    if what:
        assert not any(is_same(file, now_of(file, what), lambda: "e") for file in (large, small))
    else:
        assert is_same(large, now_of(large, what), never), "nothing has happened to it"


# Files


ROWS = b'{"id": 1}\n' * 10


def replace(path: Path, data: bytes) -> None:
    """Another file of that name, as an editor or a download makes it."""
    new = path.with_name("new")
    new.write_bytes(data)
    new.replace(path)


def at(path: Path, seconds: int) -> None:
    """Set its time, after that of the start."""
    os.utime(path, ns=(0, MOMENT + seconds * 10**9))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"id": 2}\n')


MOMENT = 1_700_000_000 * 10**9
EDITED = ROWS.replace(b"1", b"2")
# How each is done, and the code of its error; empty: it is the same file, whose new rows belong to a later run.
CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: None, ""),
    "its mode": (lambda path: path.chmod(0o640), ""),
    "its time": (lambda path: at(path, 5), ""),
    "more rows": (append, ""),
    "its copy": (lambda path: (replace(path, ROWS), at(path, 5)), ""),
    "edited": (lambda path: (path.write_bytes(EDITED), at(path, 5)), "AD303"),
    "edited, and its time set back": (lambda path: (path.write_bytes(EDITED), at(path, 0)), "AD303"),
    "replaced": (lambda path: (replace(path, EDITED), at(path, 5)), "AD303"),
    "replaced, and its time set back": (lambda path: (replace(path, EDITED), at(path, 0)), "AD303"),
    "edited, with more rows": (lambda path: path.write_bytes(EDITED * 2), "AD303"),
    "cut": (lambda path: os.truncate(path, 90), "AD302"),
    "replaced by a shorter one": (lambda path: (replace(path, ROWS[:90]), at(path, 5)), "AD302"),
    "deleted": (lambda path: path.unlink(), "AD304"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ROWS)
    at(path, 0)
    return path


@pytest.fixture
def others(tmp_path: Path) -> list[Path]:
    """As many files as are looked at whole when a run starts."""
    found = [tmp_path / f"{number}.jsonl" for number in range(32)]
    for number, one in enumerate(found):
        one.write_bytes(b'{"other": %d}\n' % number * 10)
    return found


def blocks_of(*paths: Path) -> FileBlocks:
    return FileBlocks([stamp(str(path)) for path in paths], 64, 1000)


def ref_of(path: Path) -> FileRef:
    (found,) = Files([stamp(str(path))], 99).refs
    return found


def reader_of(*paths: Path) -> LineReader:
    files = Files([stamp(str(path)) for path in paths], 999).refs
    return LineReader(Job(files=files, tokenize=None, max_row_bytes=999, block_bytes=10, slack_bytes=0))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_one_of_many", [False, True])
def test_a_file_that_is_not_what_it_was_is_named_before_an_epoch(path, others, change, is_one_of_many):
    files = blocks_of(*others[:20], path, *others[20:]) if is_one_of_many else blocks_of(path)
    assert all(ref.digest for ref in files.refs) is not is_one_of_many
    files.fingerprint()  # of the content, which a snapshot has
    make, code = CHANGES[change]
    make(path)

    if not code:
        files.check_unchanged()
        return

    with pytest.raises(SourceChangedError, match=f"^{code} {path} ") as caught:
        files.check_unchanged()
    ends = {"AD302": "shrank from 100 to 90 bytes while it was read", "AD304": "It was there at the start."}
    assert ends.get(code, "was replaced or edited while it was read") in str(caught.value)


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "deleted"])
def test_a_file_that_is_not_what_it_was_is_not_opened_by_a_reader(path, change):
    file = ref_of(path)
    make, code = CHANGES[change]
    make(path)

    if not code:
        SameFile.checked(file).close()
        return

    with pytest.raises(
        FileChangedError, match=f"^{code} {path} (was replaced|shrank: it had 100 bytes at the start, )"
    ):
        SameFile.checked(file)


def test_what_happens_before_the_fingerprint_is_looked_at_by_stat_alone(path, others):
    files = blocks_of(path, *others)
    assert all(ref.digest for ref in blocks_of(*others).refs)
    path.chmod(0o640)

    files.check_unchanged()
    assert files.fingerprint() is files.fingerprint()
    path.write_bytes(EDITED)
    with pytest.raises(SourceChangedError, match=f"^AD303 {path} "):
        files.check_unchanged()
    touched = blocks_of(path, *others)
    at(path, 9)
    assert touched.fingerprint() is not touched.fingerprint(), "of what it is now: nothing to hold it against"


def test_files_that_nothing_happened_to_are_not_read_again(path, monkeypatch):
    files = blocks_of(path)
    monkeypatch.setattr("asyncdata.sources.base.file_digest", never)

    files.check_unchanged()
    path.chmod(0o640)
    with pytest.raises(AssertionError):
        files.check_unchanged()


def test_a_file_that_was_not_looked_at_is_only_held_against_its_size(path):
    file = FileRef(str(path), 100)
    path.write_bytes(EDITED)
    SameFile.checked(file).close()
    os.truncate(path, 99)

    with pytest.raises(FileChangedError, match="^AD302 .* it had 100 bytes at the start, and ends at byte 99 now"):
        SameFile.checked(file)


def test_a_changed_time_is_looked_into_once(path, monkeypatch):
    """A writer that appends all the time would have the sample read for every block."""
    file = SameFile(ref_of(path))
    path.chmod(0o640)
    file.check()
    monkeypatch.setattr("asyncdata.sources.same_file.content_digest", never)

    file.check()
    file.close()


def test_a_reader_checks_the_files_that_it_has_read_since_the_last_check(path):
    reader = reader_of(path)
    reader.check()
    reader.read_block(Block(0, 0, 10), 99)
    reader.check()
    path.write_bytes(EDITED)
    reader.check()  # nothing was read since

    reader.read_block(Block(0, 0, 10), 99)
    with pytest.raises(FileChangedError, match="^AD303"):
        reader.check()
    reader.close()


def test_a_file_that_is_closed_to_make_room_is_looked_at_before(path, others, monkeypatch):
    monkeypatch.setattr("asyncdata.sources.same_file._MAX_OPEN_FILES", 32)
    reader = reader_of(path, *others)
    reader.read_block(Block(0, 0, 10), 99)
    path.write_bytes(EDITED)

    with pytest.raises(FileChangedError, match=r"^AD303 .*rows\.jsonl"):
        for number in range(1, 33):
            reader.read_block(Block(number, 0, 10), 99)
    reader.close()


def test_what_is_known_of_a_file_is_its_stamp_and_the_digest_of_its_content(path):
    found, now = ref_of(path), os.stat(path)

    assert (found.path, found.num_bytes, found.inode) == (str(path), 100, now.st_ino)
    assert (found.mtime_ns, found.ctime_ns, len(found.digest)) == (now.st_mtime_ns, now.st_ctime_ns, 32)
