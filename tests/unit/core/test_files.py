"""Files of the library: whole at every instant, locked by one owner, believed only from us; folders of one run."""

import errno
import fcntl
import gc
import os
import stat
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from subprocess import PIPE
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import SourceLocation
from asyncdata.core import checksummed_file, identity
from asyncdata.core.checksummed_file import pack
from asyncdata.core.files import lock, locked
from asyncdata.errors import ConfigError, SnapshotError
from asyncdata.tokenization.encoders.equivalence_records import find, keep
from tests.support import parts
from tests.support.loaders import state_after
from tests.support.loading import NEVER_S
from tests.support.tokenizers import Fake, install

# Whole at every instant; tests/unit/checkpoint has what a snapshot's file asks of them


def test_all_that_a_killed_writer_leaves_is_known_as_such_later(tmp_path, monkeypatch):
    path = str(tmp_path / "s")
    parts.replace_file(path, [b"old"], 3)
    with monkeypatch.context() as killed:
        for name in ("replace", "unlink"):
            killed.setattr(os, name, Mock(side_effect=OSError(errno.EIO, "killed")))
        with pytest.raises(OSError, match="killed"):
            parts.replace_file(path, [b"new"], 3)
    left = [entry for entry in os.scandir(tmp_path) if entry.name != "s"]
    assert len(left) == 2, "what is half written, and a second name of the old file"
    for entry in left:
        os.utime(entry, (0, 0))
    (tmp_path / "kept.tmp").touch()

    parts.replace_file(path, [b"newer"], 1)
    parts.remove_left_over(path)

    assert (sorted(os.listdir(tmp_path)), (tmp_path / "s").read_bytes()) == (["kept.tmp", "s"], b"newer")


def test_an_older_file_that_another_writer_replaces_during_the_link_is_kept(tmp_path, monkeypatch):
    """The kernel's answer to the link is ENOENT then, with a file in place (`vfs_link` in Linux)."""
    path = str(tmp_path / "s")
    parts.replace_file(path, [b"old"], 3)
    link, others = os.link, [b"other's", b"other's second"]

    def link_after_the_other_writer(source: str, target: str) -> None:
        if others:
            parts.replace_file(path, [others.pop(0)], 1)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        link(source, target)

    monkeypatch.setattr(os, "link", link_after_the_other_writer)
    parts.replace_file(path, [b"new"], 3)

    assert ((tmp_path / "s").read_bytes(), (tmp_path / "s.1").read_bytes()) == (b"new", b"other's second")
    assert sorted(os.listdir(tmp_path)) == ["s", "s.1"]


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path, payload = tmp_path / "state", b"x" * (1 << 20)
    path.write_bytes(pack(payload, "msgpack", schema=1, library="0") + payload)
    assert bytes(parts.unpack_file(str(path))[1]) == payload
    memory = checksummed_file._memory  # noqa: SLF001 - called between the header and the payload

    def shrinking(num_bytes: int) -> memoryview:
        os.truncate(path, path.stat().st_size - 1)
        return memory(num_bytes)

    parts.change(monkeypatch, memory_for_a_file=shrinking)
    with pytest.raises(SnapshotError, match="it was cut off while it was read"):
        parts.unpack_file(str(path))


# Locks: one owner, or several that share; no waiting; a file system without locks is never "free"


def test_a_file_system_without_locks_is_an_error_and_never_free(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(95, "Operation not supported")))
    with (tmp_path / "file").open("w") as file, pytest.raises(OSError, match="not supported"):
        lock(file.fileno())
    with locked(str(tmp_path / "file")) as is_free:
        assert not is_free


# What another user may have written in a cache folder is never believed


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not root cannot: this process looks like another user then."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def writable_by_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


REASONS = {
    give_away: r"belongs to another user \(uid ", writable_by_all: "can be written by every user", a_link: "or a link",
}  # fmt: skip


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("change", REASONS)
def test_what_is_not_ours_is_refused_and_says_why(tmp_path, monkeypatch, change, is_folder):
    path = tmp_path / "kept"
    parts.check_ours(str(path), "Cache(folder=...)", is_folder=is_folder)  # nothing is there
    path.mkdir(0o700) if is_folder else path.write_bytes(b"")
    parts.check_ours(str(path), "Cache(folder=...)", is_folder=is_folder)
    with pytest.raises(ConfigError, match="^AD611 .* is no "):
        parts.check_ours(str(path), "Cache(folder=...)", is_folder=not is_folder)

    change(path, monkeypatch)

    with pytest.raises(ConfigError, match=f"^AD611 {path} .*{REASONS[change]}.* choose a folder of your own by Cache"):
        parts.check_ours(str(path), "Cache(folder=...)", is_folder=is_folder)


def test_a_group_may_write_where_its_owner_lets_it(tmp_path):
    """As volumes of a cluster are mounted."""
    tmp_path.chmod(0o2770)

    parts.check_ours(str(tmp_path), "Cache(folder=...)", is_folder=True)


@pytest.mark.thorough
@pytest.mark.parametrize("change", REASONS)
@pytest.mark.parametrize("suffix", [".index", ".places", ".rows"])
def test_a_row_index_that_another_user_may_have_written_is_refused(tmp_path, monkeypatch, suffix, change):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"id": list(range(50))}), tmp_path / "rows.parquet")

    knobs = {"shuffle": "full", "cache": {"folder": str(tmp_path / "cache")}}
    state_after(tmp_path / "rows.parquet", 50, **knobs)
    (kept,) = (tmp_path / "cache" / "index").glob(f"*{suffix}")

    change(kept, monkeypatch)

    with pytest.raises(ConfigError, match=f"^AD611 {kept} .*{REASONS[change]}.*choose a folder of your own by Cache"):
        state_after(tmp_path / "rows.parquet", 1, **knobs)


@pytest.mark.parametrize("name", ["abc.index", "abc.places"])
@pytest.mark.parametrize("change", [give_away, writable_by_all])
def test_an_index_file_that_changes_hands_while_it_is_opened_is_not_read(tmp_path, monkeypatch, change, name):
    parts.IndexFile(str(tmp_path), "abc").close()
    change(tmp_path / name, monkeypatch)

    with pytest.raises(PermissionError, match=REASONS[change]):
        parts.IndexFile(str(tmp_path), "abc")


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch, small_tokenizer: Path) -> parts.Subject:
    files = parts.TokenizerFiles(str(small_tokenizer))
    right = Fake(files.load(), lambda _: False)
    install(monkeypatch, {"gigatoken": lambda: right})
    found = parts.subject_of(files, "gigatoken")
    assert found is not None
    return found


@pytest.mark.parametrize("change", REASONS)
def test_a_proof_that_another_user_may_have_written_is_none(subject, monkeypatch, change):
    keep(parts.Proof(subject=subject, proven=[(5, 7)]))
    path = Path(subject.path)
    assert find(subject) is not None

    change(path, monkeypatch)

    assert find(subject) is None
    with pytest.raises((SnapshotError, OSError)):
        parts.unpack_file(str(path), must_be_ours=True)


# The line of a byte: the right one, and no part of a file is read twice for it


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    parts.change(monkeypatch, step_bytes_of_lines=7)
    parts.change(monkeypatch, most_files_of_lines=2)
    parts.change(monkeypatch, remembered_lines=OrderedDict())


@given(st.lists(st.sampled_from([b"\n", b"x", b"\r\n", b"yyyy", b"\xef\xbb\xbf"])), st.lists(st.floats(0, 2)))
def test_a_line_is_one_more_than_the_newlines_before_it_and_few_files_are_remembered(tmp_path_factory, pieces, places):
    """Also beyond the end, where a file has shrunk."""
    data, path = b"".join(pieces), tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(data)

    for offset in [int(place * len(data)) for place in places]:
        assert SourceLocation(str(path), offset, 1).line_number() == data[:offset].count(b"\n") + 1
    assert len(identity._counts) <= 2  # noqa: SLF001


def test_what_was_read_before_is_not_read_again_unless_the_file_has_changed(tmp_path, monkeypatch):
    path, read, seen = tmp_path / "rows.jsonl", os.pread, list[int]()
    path.write_bytes(b"a\n" * 500)
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: seen.append(size) or read(fd, size, offset))

    assert (parts.line_number(str(path), 900), sum(seen)) == (451, 900)
    seen.clear()
    assert [parts.line_number(str(path), offset) for offset in (10, 500, 899)] == [6, 251, 450]
    assert sum(seen) <= 3 * 7

    path.write_bytes(b"abc\n" * 250 + b"x")
    assert parts.line_number(str(path), 90) == 23


def test_a_file_that_hangs_or_is_gone_has_no_line_and_delays_nothing(tmp_path, monkeypatch):
    path, read, goes_on = tmp_path / "rows.jsonl", os.pread, threading.Event()
    path.write_bytes(b"a\n" * 500)
    assert parts.line_number_within(str(path), 10, 60) == 6
    assert parts.line_number_within(str(path.with_name("gone")), 10, 60) is None
    with pytest.raises(FileNotFoundError):
        parts.line_number(str(path.with_name("gone")), 3)

    monkeypatch.setattr(os, "pread", lambda fd, size, offset: goes_on.wait(240) and read(fd, size, offset))
    assert parts.line_number_within(str(path), 10, 0.01) is None
    goes_on.set()
    assert parts.line_number_within(str(path), 10, 60) == 6


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


def test_a_folder_is_private_and_gone_when_it_is_closed_or_garbage(place):
    folder, other = parts.TemporaryFolder("rows"), parts.TemporaryFolder("rows")
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
    killed.communicate(timeout=NEVER_S)
    assert (left / "copy").exists()
    assert left.is_relative_to(place)

    folder = parts.TemporaryFolder("copy")
    assert {path.resolve() for path in place.iterdir()} == {used.resolve(), Path(folder.path).resolve()}
    assert (used / "copy").read_text() == "rows"

    folder.close()
    living.communicate(timeout=NEVER_S)
    assert list(place.iterdir()) == []


def test_a_forked_child_removes_nothing(place):
    child = "import os; pid = os.fork(); pid and (os.waitpid(pid, 0), print(pid, flush=True), sys.stdin.read())"
    process, folder = owner(place, OWNER.replace("sys.stdin.read()", child))
    assert int(str(said(process))) > 0, "the child is gone"
    parts.TemporaryFolder("copy").close()
    assert (folder / "copy").exists()
    process.communicate(timeout=NEVER_S)
    assert list(place.iterdir()) == []


def test_what_is_not_surely_left_stays(place, monkeypatch):
    made = parts.TemporaryFolder("rows")
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

    parts.TemporaryFolder("rows").close()
    assert set(place.iterdir()) == {*kept, target, link, file}

    link.unlink()
    link.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    parts.TemporaryFolder("rows").close()
    assert link.exists(), "another user's"
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    parts.TemporaryFolder("rows").close()
    assert set(place.iterdir()) == {*kept, target, file}


@pytest.mark.parametrize(
    "lacks",
    [
        "import fcntl; fcntl.flock = lambda *_: (_ for _ in ()).throw(OSError(95, 'Operation not supported'))",
        "import asyncdata.core.files; asyncdata.core.files._BOOT_ID = '/of no machine'",
    ],
    ids=["locks", "a name of the machine"],
)
def test_where_it_cannot_be_told_whether_a_folder_is_in_use_only_its_owner_removes_it(place, lacks):
    (ends, one), (killed, other) = (owner(place, f"{lacks}\n{OWNER}") for _ in range(2))
    parts.TemporaryFolder("rows").close()
    assert (one / "copy").exists()
    assert (other / "copy").exists()

    killed.kill()
    killed.communicate(timeout=NEVER_S)
    ends.communicate(timeout=NEVER_S)
    parts.TemporaryFolder("rows").close()
    assert [path.resolve() for path in place.iterdir()] == [other.resolve()]
