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
from unittest.mock import patch

import pytest
import structlog

from tests.support.cached import Delivered, facts, loader, segments, wait_until_stored
from tests.support.faults import num_rounds
from tests.support.loading import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache import worker
from asyncdata.prefetch.token_cache.segment import Segment

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

NUM_ROWS = 90
SEGMENT_BYTES = 4096
CALLS = ("open", "mkdir", "write", "pwrite", "unlink")


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_MAX_SEGMENT_BYTES", SEGMENT_BYTES)


def verify_segments(cache: Path) -> None:
    for path in segments(cache):
        with contextlib.closing(Segment(str(path))) as segment:
            segment.verify()


def path_of(target: Any) -> str:
    if isinstance(target, int):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{target}")
    return str(target)


@contextlib.contextmanager
def intercepted(cache: Path, act: Callable[[int, str], object] = lambda *_: None) -> Iterator[list[str]]:
    """Call ``act`` with the number and name of each call that may change something in the cache; these calls."""
    seen: list[str] = []

    def wrap(name: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "dir_fd" in kwargs or path_of(args[0]).startswith(str(cache)):
                seen.append(name)
                act(len(seen), name)
            return really(*args, **kwargs)

        return call

    with patch.multiple(os, **{name: wrap(name, getattr(os, name)) for name in CALLS}):
        yield seen


def verify(path: Path, cache: Path, expected: list[Any]) -> int:
    """The same is delivered, what is in the cache is whole; how many rows of it there are."""
    verify_segments(cache)
    found = Delivered(loader(path, cache), settle=True)
    assert found.samples == expected
    again = Delivered(loader(path, cache))
    assert again.samples == expected
    assert again.cached == [NUM_ROWS], "what was left does not keep it from being written"
    (folder,) = cache.iterdir()
    names = {name for file in segments(cache) for name in (file.name, file.with_suffix(".index").name)}
    assert {file.name for file in folder.iterdir()} == names | {"about.json", "writer.lock"}
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


def die_everywhere(folder: Path) -> dict[str, int]:
    path = write_rows(folder / "rows.jsonl", NUM_ROWS)
    counted, told = folder / "counted", folder / "told.json"

    def count() -> None:
        with intercepted(counted) as seen:
            Delivered(loader(path, counted), settle=True)
        told.write_text(json.dumps([len(seen), sorted(sys.modules)]))

    assert in_a_child(count) == 0
    total, modules = json.loads(told.read_text())
    for module in modules:  # here, and not in each child: that would take longer than all that a child does
        if module.startswith(("asyncdata.", "anyio.", "pandas", "pyarrow.")):
            importlib.import_module(module)
    step = max(1, total // num_rounds(24, total))
    halves = 0
    for place in range(1, total + 1, step):
        cache = folder / f"cache-{place}"

        def die(place: int = place, cache: Path = cache) -> None:
            with intercepted(cache, lambda number, _: os._exit(9) if number == place else None):
                Delivered(loader(path, cache), settle=True)

        status = in_a_child(die)
        assert status in (0, 9), (place, status)

        def check(cache: Path = cache) -> None:
            found = Delivered(loader(path, None)).samples
            os._exit(10 + (0 < verify(path, cache, found) < NUM_ROWS))

        status = in_a_child(check)
        assert status in (10, 11), (place, status)
        halves += status == 11
    return {"calls": total, "halves": halves}


def test_killed_at_any_call_what_was_stored_is_there_and_whole(tmp_path):
    """In a process of its own, as this one has threads and must not fork."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["calls"] > 15
    assert found["halves"] > 3, "some were killed between two blocks"


def test_workers_that_are_killed_lose_nothing_and_leave_no_damage(tmp_path):
    path, cache, rng = write_rows(tmp_path / "rows.jsonl", 1500), tmp_path / "cache", random.Random(1)
    expected = Delivered(loader(path, None, epochs=3), 3).samples
    found: list[Any] = []
    # 128 rows from kill to kill, also from epoch to epoch, and 100 are read ahead: no request is hit twice, as a row is
    # to blame that two workers die of.
    num_batches = itertools.count()
    with loader(path, cache, epochs=3, num_workers=2, buffer_size=100) as data:
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
    assert Delivered(loader(path, cache)).samples == expected[: len(expected) // 3]


# Refused


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE])
def test_refused_by_the_disk_at_any_call_the_run_goes_on_without_writing(tmp_path, code):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    expected = Delivered(loader(path, None)).samples
    with intercepted(tmp_path / "counted") as seen:
        Delivered(loader(path, tmp_path / "counted"), settle=True)
    for place in range(6, len(seen) + 2, max(1, len(seen) // num_rounds(12, len(seen)))):
        cache = tmp_path / f"cache-{place}"

        def refuse(number: int, name: str, place: int = place) -> None:
            if number >= place and name != "unlink":
                raise OSError(code, os.strerror(code))

        with structlog.testing.capture_logs() as events, intercepted(cache, refuse):
            found = Delivered(loader(path, cache), settle=True)

        assert found.samples == expected
        refusals = [event["reason"] for event in events if event["event"] == "token_cache.not_written"]
        assert len(refusals) <= 1
        assert all(os.strerror(code) in reason for reason in refusals)
        assert (verify(path, cache, expected) == NUM_ROWS) == (place > len(seen))
        assert bool(refusals) == (place <= len(seen))


if __name__ == "__main__":
    import pyarrow  # noqa: F401 - here, and not in each child

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    worker._MAX_SEGMENT_BYTES = SEGMENT_BYTES  # noqa: SLF001 - as the fixture does
    result = die_everywhere(Path(sys.argv[1]))
    sys.stdout.write(json.dumps(result))
