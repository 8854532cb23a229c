"""Interpreters that end without ``close()``: in time, with their own status, with a warning, with nothing left."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from asyncdata import DataLoader
from tests.support.faults import GONE_S, Program, num_rounds, say
from tests.support.figures import record
from tests.support.loading import NEVER_S, SHUFFLE, write_rows

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]

ROUNDS = num_rounds(quick=1, full=15)
END_S = 120.0
"""How long a program may take from its first line to its end."""
ENDS = {
    "falls off the end": 0,
    "exception": 1,
    "sys.exit": 3,
    "os._exit": 4,
    "in a waiting thread": 0,
    "from a thread": 0,
    "garbage": 0,
}
WORK = {"reading": "tests.support.tokenize_fns:row_id", "busy in C": "tests.support.worker_fns:stuck_in_c"}


def settings_of(folder: Path, end: str, work: str) -> dict[str, str]:
    folder.mkdir()
    rows = {i: {"began": str(folder / "began")} for i in range(1000)}
    path = write_rows(folder / "rows.jsonl", 1000, rows)
    return {"end": end, "path": str(path), "tokenize_fn": WORK[work], "over_file": str(folder / "over")}


@pytest.mark.parametrize(
    ("end", "work"),
    [*((end, "reading") for end in ENDS), ("falls off the end", "busy in C"), ("exception", "busy in C")],
)
def test_it_ends_in_time_with_its_own_status(tmp_path, end, work):
    slowest = 0.0
    for number in range(ROUNDS if work == "reading" else 1):
        settings = settings_of(tmp_path / str(number), end, work)
        with Program.of("unclosed", settings) as program:
            status, said = program.end(END_S)
            ended = time.monotonic()
            program.assert_gone()
        slowest = max(slowest, ended - float(Path(settings["over_file"]).read_text()))
        assert status == ENDS[end], said
        if end not in ("os._exit", "in a waiting thread"):  # a frozen thread keeps its loader: no one is left to warn
            assert "ResourceWarning: unclosed DataLoader" in said, said
        assert "Fatal" not in said
        assert ("Traceback" in said) == (end == "exception"), said

    figures = {"exit_s": slowest} if work == "reading" else {}
    record("R11", f"{end}, workers {work}", exits=number + 1, hangs=0, left=0, **figures)
    say(f"exit without close, {end}, workers {work}: status {ENDS[end]}, 0 processes left; slowest {slowest:.1f} s")


def possessions() -> Counter[str]:
    """What a process has that a loader could leak."""
    threads = (thread.name for thread in threading.enumerate())
    return Counter(
        [
            *(os.readlink(fd).partition(":")[0] for fd in map("/proc/self/fd/{}".format, open_fds())),
            *(name for name in threads if not name.startswith(("AnyIO", "Trio"))),  # kept for a while, for the next one
            *(f"child {child.pid}" for child in psutil.Process().children(recursive=True)),
            *(name for name in os.listdir("/dev/shm") if "asyncdata" in name),
            *("map" for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:asyncdata" in line),
        ]
    )


def open_fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_closed_loaders_leave_nothing(tmp_path, num_workers, backend):
    path = write_rows(tmp_path / "rows.jsonl", 500)

    def use() -> None:
        with DataLoader(
            path,
            tokenize_fn="tests.support.tokenize_fns:row_id",
            shuffle=SHUFFLE,
            num_workers=num_workers,
            event_loop=backend,
            timeout_s=NEVER_S,
        ) as loader:
            loader.get_next_batch(700)

    use()  # what is imported and opened once stays
    before = possessions()
    for _ in range(3):
        use()
    deadline = time.monotonic() + GONE_S
    while possessions() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert possessions() - before == Counter()
    say(f"3 loaders opened and closed, {num_workers} workers, {backend}: descriptors, threads, children as before")
