"""Folders for one run: removed with their owner, however it ended, and never while they are in use."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from unittest.mock import Mock

import pytest

from tests.support.parts import TemporaryFolder

ROOT = Path(__file__).parents[3]
OWNER = """
import sys
from asyncdata.core.files import TemporaryFolder
folder = TemporaryFolder("rows")
open(f"{folder.path}/copy", "w").write("rows")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def owner(place: Path, code: str = OWNER) -> tuple[subprocess.Popen[str], Path]:
    """A process that runs it, and the folder that it has said it has."""
    environment = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    process = subprocess.Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True)
    return process, said(process)


def said(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=240)


def test_a_folder_is_private_and_gone_when_it_is_closed_or_garbage(place):
    folder, other = TemporaryFolder("rows"), TemporaryFolder("rows")
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    assert set(place.iterdir()) == {Path(folder.path), Path(other.path)}

    folder.close()
    folder.close()
    del other
    gc.collect()
    assert list(place.iterdir()) == []


def test_what_a_killed_process_left_goes_when_the_next_folder_is_made_and_a_living_ones_stays(place):
    (killed, left), (living, used) = owner(place), owner(place)
    killed.kill()
    end(killed)
    assert (left / "copy").exists()
    assert left.is_relative_to(place)

    folder = TemporaryFolder("copy")
    assert {path.resolve() for path in place.iterdir()} == {used.resolve(), Path(folder.path).resolve()}
    assert (used / "copy").read_text() == "rows"

    folder.close()
    end(living)
    assert list(place.iterdir()) == []


def test_a_forked_child_removes_nothing(place):
    child = "import os; pid = os.fork(); pid and (os.waitpid(pid, 0), print(pid, flush=True), sys.stdin.read())"
    process, folder = owner(place, OWNER.replace("sys.stdin.read()", child))
    assert int(str(said(process))) > 0, "the child is gone"
    TemporaryFolder("copy").close()
    assert (folder / "copy").exists()
    end(process)
    assert list(place.iterdir()) == []


def test_what_is_not_surely_left_stays(place, monkeypatch):
    made = TemporaryFolder("rows")
    begin, _, name = Path(made.path).name.rpartition("-")
    made.close()
    elsewhere = begin.rpartition("-")[0]
    kept = [place / f"{elsewhere}-00000000-{name}", place / f"{elsewhere}-{name}", place / f"{begin}-more-{name}"]
    for folder in kept:
        folder.mkdir()
    target = place / "of the user"
    target.mkdir()
    link, file = place / f"{begin}-{name}", place / f"{begin}-abcdefgh"
    link.symlink_to(target)
    file.write_text("no folder")

    TemporaryFolder("rows").close()
    assert set(place.iterdir()) == {*kept, target, link, file}

    link.unlink()
    link.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    TemporaryFolder("rows").close()
    assert link.exists(), "another user's"
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    TemporaryFolder("rows").close()
    assert set(place.iterdir()) == {*kept, target, file}


@pytest.mark.parametrize("lacks", ["a name of the machine", "locks"])
def test_there_it_is_removed_by_its_owner(place, monkeypatch, lacks):
    if lacks == "locks":
        monkeypatch.setattr("asyncdata.core.files.lock", Mock(side_effect=OSError("no locks available")))
    else:
        monkeypatch.setattr("asyncdata.core.files._BOOT_ID", "/of no machine")
    folder = TemporaryFolder("rows")
    assert list(place.iterdir()) == [Path(folder.path)]
    folder.close()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "lacks",
    [
        "import fcntl; fcntl.flock = lambda *_: (_ for _ in ()).throw(OSError(95, 'Operation not supported'))",
        "import asyncdata.core.files; asyncdata.core.files._BOOT_ID = '/of no machine'",
    ],
    ids=["locks", "a name of the machine"],
)
def test_where_it_cannot_be_told_whether_a_folder_is_in_use_it_is_never_taken_for_left(place, lacks):
    process, folder = owner(place, f"{lacks}\n{OWNER}")
    TemporaryFolder("rows").close()
    assert (folder / "copy").exists()

    process.kill()
    end(process)
    TemporaryFolder("rows").close()
    assert (folder / "copy").exists()
