"""Whichever process is killed, and whatever the disk refuses: the same is delivered, and the cache is never damaged."""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from tests.support.cached import Delivered, facts, loader, segments, wait_until_stored
from tests.support.faults import num_rounds
from tests.support.loading import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache import row_cache
from asyncdata.prefetch.token_cache.inventory import opened_segment

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

NUM_ROWS = 90
SEGMENT_ROWS = 32
CALLS = ("open", "mkdir", "write", "pwrite", "fsync", "rename", "unlink", "ftruncate", "rmdir")


ORDERS: dict[str, dict[str, Any]] = {"blocks": {}, "rows": {"shuffle": "full"}}


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_cache, "_MAX_ROWS", SEGMENT_ROWS)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Segments of blocks, and of single rows."""
    return ORDERS[request.param]


def verify_segments(cache: Path) -> None:
    for segment in segments(cache):
        opened = opened_segment(str(segment))
        opened.verify()
        opened.close()


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_rows(folder / "rows.jsonl", NUM_ROWS)


def intercept(cache: Path, act: Callable[[int, str], None]) -> tuple[Callable[[], None], list[str]]:
    """Call ``act`` with the number and name of each call that may change something in the cache; a way back."""
    real, seen = {name: getattr(os, name) for name in CALLS}, []

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "dir_fd" in kwargs or path_of(args[0]).startswith(str(cache)):
                seen.append(name)
                act(len(seen), name)
            return real[name](*args, **kwargs)

        return call

    def path_of(target: Any) -> str:
        if isinstance(target, int):
            with contextlib.suppress(OSError):
                return os.readlink(f"/proc/self/fd/{target}")
        return str(target)

    def undo() -> None:
        for name, function in real.items():
            setattr(os, name, function)

    for name in CALLS:
        setattr(os, name, wrap(name))
    return undo, seen


def run(path: Path, cache: Path, order: dict[str, Any]) -> Delivered:
    return Delivered(loader(path, cache, **order), settle=True)


def verify(path: Path, cache: Path, expected: list[Any], order: dict[str, Any]) -> int:
    """The same is delivered, what is in the cache is whole; how many rows of it there are."""
    verify_segments(cache)
    found = run(path, cache, order)
    assert found.samples == expected
    again = Delivered(loader(path, cache, **order))
    assert again.samples == expected
    assert again.cached == [NUM_ROWS], "what was left does not keep it from being written"
    (folder,) = cache.iterdir()
    assert {name for name in os.listdir(folder) if not name.endswith((".arrow", ".rows"))} == {
        "about.json",
        "writer.lock",
    }
    return found.cached[0]


# Killed


def in_a_child(function: Callable[[], object]) -> int:
    """The exit status of a forked child; this process has no threads yet."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def import_early(modules: list[str]) -> None:
    """Here, and not in each child: that would take longer than all that a child does."""
    for name in modules:
        if name.startswith(("asyncdata.", "anyio.", "pandas", "pyarrow.")):
            importlib.import_module(name)


def die_everywhere(folder: Path, order: dict[str, Any]) -> dict[str, int]:
    path = make(folder)
    counted, told = folder / "counted", folder / "told.json"

    def count() -> None:
        undo, seen = intercept(counted, lambda *_: None)
        run(path, counted, order)
        undo()
        told.write_text(json.dumps([len(seen), sorted(sys.modules)]))

    assert in_a_child(count) == 0
    total, modules = json.loads(told.read_text())
    import_early(modules)
    step = max(1, total // num_rounds(24, total))
    halves = 0
    for place in range(1, total + 1, step):
        cache = folder / f"cache-{place}"

        def die(place: int = place, cache: Path = cache) -> None:
            intercept(cache, lambda number, _: os._exit(9) if number == place else None)
            run(path, cache, order)

        status = in_a_child(die)
        assert status in (0, 9), (place, status)

        def check(cache: Path = cache) -> None:
            found = Delivered(loader(path, None, **order)).samples
            os._exit(10 + (0 < verify(path, cache, found, order) < NUM_ROWS))

        status = in_a_child(check)
        assert status in (10, 11), (place, status)
        halves += status == 11
    return {"calls": total, "halves": halves}


@pytest.mark.parametrize("name", ORDERS)
def test_killed_at_any_call_what_was_committed_is_there_and_whole(tmp_path, name):
    """In a process of its own, as this one has threads and must not fork."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, str(tmp_path), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["calls"] > 40
    assert found["halves"] > 3, "some were killed between two segments"


def test_workers_that_are_killed_lose_nothing_and_leave_no_damage(tmp_path, order):
    path, cache, rng = write_rows(tmp_path / "rows.jsonl", 1500), tmp_path / "cache", random.Random(1)
    expected = Delivered(loader(path, None, epochs=3, **order), 3).samples
    found: list[Any] = []
    # 128 rows from kill to kill, also from epoch to epoch, and 100 are read ahead: no request is hit twice, as a row is
    # to blame that two workers die of.
    num_batches = itertools.count()
    with loader(path, cache, epochs=3, num_workers=2, buffer_size=100, **order) as data:
        for _ in range(3):
            for batch in data:
                found += map(facts, batch)
                pids = [worker.pid for worker in data.statistics().workers if worker.pid and worker.state != "starting"]
                if next(num_batches) % 8 == 3 and pids:
                    with contextlib.suppress(ProcessLookupError):  # it is dead, and that is not known yet
                        os.kill(rng.choice(pids), signal.SIGKILL)
        wait_until_stored(data)

    assert found == expected
    verify_segments(cache)
    assert Delivered(loader(path, cache, **order)).samples == expected[: len(expected) // 3]


# Refused


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE])
def test_refused_by_the_disk_at_any_call_the_run_goes_on_without_writing(tmp_path, code, order):
    path = make(tmp_path)
    expected = Delivered(loader(path, None, **order)).samples
    undo, seen = intercept(tmp_path / "counted", lambda *_: None)
    run(path, tmp_path / "counted", order)
    undo()
    named = len(seen) - seen[::-1].index("rename")
    for place in range(6, len(seen) + 1, max(1, len(seen) // num_rounds(12, len(seen)))):
        cache = tmp_path / f"cache-{place}"

        def refuse(number: int, name: str, place: int = place) -> None:
            if number >= place and name not in ("unlink", "rmdir"):
                raise OSError(code, os.strerror(code))

        with structlog.testing.capture_logs() as events:
            undo, _ = intercept(cache, refuse)
            try:
                found = run(path, cache, order)
            finally:
                undo()

        assert found.samples == expected
        refusals = [event["reason"] for event in events if event["event"] == "token_cache.not_written"]
        assert len(refusals) <= 1
        assert all(os.strerror(code) in reason for reason in refusals)
        # With its name a segment is stored; that it outlives a power cut is known once its folder is synced.
        assert (verify(path, cache, expected, order) == NUM_ROWS) == (place > named)
        assert bool(refusals) == (place <= named + len(("open", "fsync")))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_disk_that_is_really_full_stops_nothing_but_the_writing(tmp_path, num_workers, order):
    path, disk = write_rows(tmp_path / "rows.jsonl", 1000), tmp_path / "disk"
    expected = Delivered(loader(path, None, epochs=2, **order), 2).samples
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this system allows no mount")

    try:
        with structlog.testing.capture_logs() as events:
            data = loader(path, disk / "cache", epochs=2, num_workers=num_workers, **order)
            found = Delivered(data, 2, settle=True)
        again = Delivered(loader(path, disk / "cache", **order))
        verify_segments(disk / "cache")
    finally:
        subprocess.run(["umount", str(disk)], check=True)

    assert found.samples == expected
    assert again.samples == expected[: len(expected) // 2]
    assert [event["reason"] for event in events if event["event"] == "token_cache.not_written"]


if __name__ == "__main__":
    import pyarrow  # noqa: F401 - here, and not in each child

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    row_cache._MAX_ROWS = SEGMENT_ROWS  # noqa: SLF001 - as the fixture does
    result = die_everywhere(Path(sys.argv[1]), ORDERS[sys.argv[2]])
    sys.stdout.write(json.dumps(result))
