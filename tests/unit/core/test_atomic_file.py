"""Files that are whole at every instant; ``test_snapshot.py`` has what a snapshot's file asks of them."""

from __future__ import annotations

import errno
import os
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
