"""Files that are whole at every instant; ``test_snapshot.py`` has what a snapshot's file asks of them."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import pytest

from asyncdata.core.atomic_file import remove_left_over, replace_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("pieces", [[], [b""], [b"one"], [b"one", b"", b"and two"], [b"a", b"bc", b"def", b"g" * 5000]])
def test_a_file_has_all_its_pieces_end_to_end(tmp_path: Path, pieces: list[bytes]) -> None:
    replace_file(str(tmp_path / "s"), pieces, 1)

    assert (tmp_path / "s").read_bytes() == b"".join(pieces)
    assert os.listdir(tmp_path) == ["s"]


def test_all_that_a_killed_writer_leaves_is_known_as_such_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise OSError(errno.EIO, "killed")

    path = str(tmp_path / "s")
    replace_file(path, [b"old"], 3)
    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", never)
        killed.setattr(os, "unlink", never)
        with pytest.raises(OSError, match="killed"):
            replace_file(path, [b"new"], 3)
    left = [entry for entry in os.scandir(tmp_path) if entry.name != "s"]
    assert len(left) == 2, "what is half written, and a second name of the old file"
    for entry in left:
        os.utime(entry, (0, 0))
    (tmp_path / "kept.tmp").touch()

    replace_file(path, [b"newer"], 1)
    remove_left_over(path)

    assert sorted(os.listdir(tmp_path)) == ["kept.tmp", "s"]
    assert (tmp_path / "s").read_bytes() == b"newer"


def test_an_older_file_that_another_writer_replaces_in_the_middle_of_the_link_is_kept_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's answer to the link is ENOENT then, with a file in place (`vfs_link` in Linux)."""
    path = str(tmp_path / "s")
    replace_file(path, [b"old"], 3)
    link, others = os.link, [b"other's", b"other's second"]

    def link_after_the_other_writer(source: str, target: str) -> None:
        if others:
            replace_file(path, [others.pop(0)], 1)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        link(source, target)

    monkeypatch.setattr(os, "link", link_after_the_other_writer)
    replace_file(path, [b"new"], 3)

    assert (tmp_path / "s").read_bytes() == b"new"
    assert (tmp_path / "s.1").read_bytes() == b"other's second"
    assert sorted(os.listdir(tmp_path)) == ["s", "s.1"]


def test_writers_of_one_file_never_fail_each_other(tmp_path: Path) -> None:
    path, errors = str(tmp_path / "s"), []

    def write(content: bytes) -> None:
        try:
            for _ in range(50):
                replace_file(path, [content], 3)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not errors
    assert sorted(os.listdir(tmp_path)) == ["s", "s.1", "s.2"]
    assert {(tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} <= {b"a", b"b", b"c"}
