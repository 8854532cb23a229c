"""What the ranks of a node share: a folder of claims and replies, of which nothing is left; and words between them."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from asyncdata.prefetch.node_share import folder as folders
from asyncdata.prefetch.node_share.folder import NodeFolder, place_of
from tests.support.faults import ROOT
from tests.support.other_users import give_away

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


JOB = "0123456789abcdef" * 2


DYING = """
import os, signal, sys
from asyncdata.prefetch.node_share.folder import NodeFolder
folder = NodeFolder(sys.argv[1], sys.argv[2])
folder.claim("chunk.0"), folder.claim("open.0")
folder.publish("chunk.0", [b"reply"])
os.kill(os.getpid(), signal.SIGKILL)
"""


def die_as_a_member(root: Path, job: str = JOB) -> None:
    """A process joins, claims two chunks, publishes one, and is killed."""
    subprocess.run([sys.executable, "-c", DYING, str(root), job], cwd=ROOT, check=False)


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[[], NodeFolder]]:
    """A function that makes one more member; all leave at the end."""
    members: list[NodeFolder] = []

    def joined() -> NodeFolder:
        members.append(NodeFolder(str(tmp_path), JOB))
        return members[-1]

    yield joined
    for member in members:
        member.leave()
    assert os.listdir(tmp_path) == []


def test_a_chunk_is_claimed_by_one_member_and_the_others_are_told_by_whom_and_what(
    join: Callable[[], NodeFolder],
) -> None:
    first, second = join(), join()

    assert first.claim("chunk.0") == ""
    assert second.claim("chunk.0") == first.claim("chunk.0") == f"{first.member}/chunk.0"
    assert first.claim("page", "32") == ""
    assert second.claim("page", "64") == f"{first.member}/32", "a number is agreed on by who comes first"


def test_a_reply_is_read_by_all_once_it_is_whole_until_its_chunk_is_dropped(join: Callable[[], NodeFolder]) -> None:
    first, second = join(), join()
    first.claim("chunk.0")
    assert second.read("chunk.0") is None
    assert second.read("never claimed.0") is None

    assert first.publish("chunk.0", [b"re", memoryview(b"ply")]) == 5
    first.claim("empty.0")
    assert first.publish("empty.0", []) == 0
    assert [bytes(member.read("chunk.0") or b"") for member in (first, second)] == [b"reply"] * 2
    assert second.read("empty.0") == b""

    first.drop("chunk.0")
    assert second.read("chunk.0") is None
    assert second.claim("chunk.0") == ""


def test_a_reply_that_the_disk_has_no_room_for_leaves_nothing(
    join: Callable[[], NodeFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = join()
    member.claim("chunk.0")
    monkeypatch.setattr(os, "writev", lambda fd, pieces: os.write(fd, b"half"))

    with pytest.raises(OSError, match="No space left"):
        member.publish("chunk.0", [b"all of the reply"])

    assert member.read("chunk.0") is None
    assert sorted(os.listdir(member.own)) == ["at"]


def test_members_see_how_far_the_others_are(join: Callable[[], NodeFolder]) -> None:
    first, second = join(), join()
    assert second.others() == [first.member]
    at = second.reached_by(first.member)
    assert place_of(at) == (0, 0, 0)

    first.reach((1, 2, 1 << 40))

    assert place_of(at) == (1, 2, 1 << 40)
    at.close()


def test_replies_of_a_member_that_left_stay_until_the_last_one_leaves(tmp_path: Path) -> None:
    first, second = NodeFolder(str(tmp_path), JOB), NodeFolder(str(tmp_path), JOB)
    first.claim("chunk.0")
    first.publish("chunk.0", [b"reply"])

    first.leave()
    assert second.read("chunk.0") == b"reply"

    second.leave()
    assert os.listdir(tmp_path) == []


def test_a_member_that_finds_no_room_to_join_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(mmap, "mmap", is_full)
    with pytest.raises(OSError, match="No space left"):
        NodeFolder(str(tmp_path), JOB)

    assert os.listdir(tmp_path) == []


def test_only_this_user_can_read_the_folder(join: Callable[[], NodeFolder]) -> None:
    before = os.umask(0)
    try:
        member = join()
        member.claim("chunk.0")
        member.publish("chunk.0", [b"reply"])
    finally:
        os.umask(before)

    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (member.path, member.own, f"{member.own}/chunk.0")]
    assert modes == [0o700, 0o700, 0o600]


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"asyncdata-ranks-{JOB[:16]}"
    path.mkdir()
    (path / "theirs").touch()
    give_away(path, monkeypatch)

    with pytest.raises(PermissionError, match="belongs to another user"):
        NodeFolder(str(tmp_path), JOB)

    assert os.listdir(path) == ["theirs"]


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"asyncdata-ranks-{JOB[:16]}").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="asyncdata-ranks"):
        NodeFolder(str(tmp_path), JOB)

    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.thorough
def test_what_a_killed_member_published_is_read_by_the_others_and_goes_with_them_or_with_the_next_start(
    tmp_path: Path,
) -> None:
    member = NodeFolder(str(tmp_path), JOB)
    die_as_a_member(tmp_path)
    assert member.read("chunk.0") == b"reply"
    assert member.claim("open.0") != ""
    assert member.claim("open.1") == ""
    member.leave()
    assert os.listdir(tmp_path) == []

    die_as_a_member(tmp_path)
    other = NodeFolder(str(tmp_path), "f" * 32)
    left = os.listdir(tmp_path)
    other.leave()
    assert left == [os.path.basename(other.path)], "of another job"


@pytest.mark.thorough
def test_many_killed_members_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_MAX_DEAD", 1)
    member = NodeFolder(str(tmp_path), JOB)
    die_as_a_member(tmp_path)
    die_as_a_member(tmp_path)

    with_new = NodeFolder(str(tmp_path), JOB)

    assert with_new.others() == [member.member]
    assert with_new.claim("chunk.0") == "", "a claim of a dead member is removed with it"
    member.leave()
    with_new.leave()
    assert os.listdir(tmp_path) == []


def test_a_member_that_joins_while_the_last_one_leaves_makes_the_folder_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, num_removed = folders._locked, 0  # noqa: SLF001

    def removed_first(path: str, name: str) -> int | None:
        nonlocal num_removed
        if num_removed < 3:
            num_removed += 1
            os.rmdir(os.path.dirname(path))
        return made(path, name)

    monkeypatch.setattr(folders, "_locked", removed_first)
    member = NodeFolder(str(tmp_path), JOB)

    assert member.claim("chunk.0") == ""
    assert num_removed == 3
    member.leave()
    assert os.listdir(tmp_path) == []
