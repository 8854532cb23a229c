"""Locks on files: one owner or several that share, and no waiting; a file system without locks is never "free"."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from asyncdata.core.file_lock import lock, locked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "file").touch()
    return str(tmp_path / "file")


@pytest.fixture
def fds(path: str) -> Iterator[list[int]]:
    opened = [os.open(path, os.O_RDONLY) for _ in range(3)]
    yield opened
    for fd in opened:
        os.close(fd)


def test_only_one_owner_has_the_lock_until_it_closes_the_file(path, fds):
    mine = os.open(path, os.O_RDONLY)
    assert lock(mine)
    assert not lock(fds[0])
    assert not lock(fds[1], is_shared=True)

    os.close(mine)
    assert lock(fds[0])


def test_a_shared_lock_excludes_only_one_that_is_not_shared(fds):
    assert lock(fds[0], is_shared=True)
    assert lock(fds[1], is_shared=True)
    assert not lock(fds[2])


def test_the_lock_of_a_block_ends_with_it(path, fds):
    with locked(path) as is_free:
        assert is_free
        assert not lock(fds[0])
    assert lock(fds[0])

    with locked(path) as is_free:
        assert not is_free


def test_a_folder_can_be_locked_and_a_link_is_not_followed(tmp_path):
    with locked(str(tmp_path)) as is_free:
        assert is_free
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"symbolic|levels"), locked(str(tmp_path / "link")):
        pass


def test_a_file_system_without_locks_is_an_error_and_never_free(path, fds, monkeypatch):
    def without_locks(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(OSError, match="not supported"):
        lock(fds[0])
    with locked(path) as is_free:
        assert not is_free
