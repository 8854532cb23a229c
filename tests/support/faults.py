"""What the fault tests share: rounds, programs that are watched, delays, interrupts; and the figures R1 to R14.

Tests :func:`record` counts. A count of bad things must be 0, or every test that finds one fails; what takes time or
memory is reported and not asserted, as the machine may be busy. ``tests/conftest.py`` gathers what the workers of xdist
have found, writes all to a file and ends the run with the table; ``python -m tests.support.faults FILE...`` prints it.
"""

from __future__ import annotations

import _weakrefset
import asyncio
import dis
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import msgspec
import psutil

import asyncdata
from tests.support.loading import NEVER_S

ROOT = Path(__file__).parents[2]
GONE_S = 30.0
"""How long the workers of a dead process may take to be gone, where the CPUs are busy; what they took is a figure."""
MARK = "ASYNCDATA_FAULT_MARK"
"""An environment variable that a program hands down to all it starts, so that none is overlooked."""


def num_rounds(quick: int, full: int, long: int | None = None) -> int:
    """Rounds of a test: ``quick``, or what ASYNCDATA_FAULT_ROUNDS says: a number, ``full`` or ``long``, ten times
    it."""
    wanted = os.environ.get("ASYNCDATA_FAULT_ROUNDS", "")
    named = {"": quick, "quick": quick, "full": full, "long": 10 * full if long is None else long}
    return named[wanted] if wanted in named else int(wanted)


def until(condition: Any, seconds: float = NEVER_S, why: str = "it never came") -> None:
    """Until another process has done its part; polled, as there is nothing to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    """Zombies are not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Program:
    """``python`` with these arguments, and everything that it has started; one that coverage may measure too."""

    def __init__(self, *arguments, own_group=False, is_measured=True, options=()):
        self._mark = f"{MARK}={uuid.uuid4().hex}".encode()
        name, value = self._mark.decode().split("=")
        self._said = tempfile.TemporaryFile()
        places = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        inherited = {key: text for key, text in os.environ.items() if is_measured or key != "COVERAGE_PROCESS_CONFIG"}
        self.process = subprocess.Popen(
            [sys.executable, *options, *arguments],
            env={**inherited, "PYTHONPATH": places, name: value},
            stdin=subprocess.DEVNULL,
            stdout=self._said,  # no pipe: it is not read while the process runs
            stderr=subprocess.STDOUT,
            start_new_session=own_group,
            cwd=ROOT,
        )

    @classmethod
    def of(cls, module: str, settings: dict[str, Any], **how: Any) -> Program:
        """``tests.faults.support.<module>``, run with settings."""
        return cls("-m", f"tests.faults.support.{module}", json.dumps(settings), **how)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self._said.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.wait(NEVER_S)

    def kill_when(self, is_due: Callable[[], bool] | None, pause: Callable[[], object]) -> bool:
        """Kill it once ``is_due``, after a pause; None: let it end. Return whether it was killed before its own end,
        which must be a good one. Nothing of it is left."""
        was_killed = False
        if is_due is not None:
            until(lambda: is_due() or self.has_ended)
            pause()
            was_killed = not self.has_ended
            self.kill()
        if not was_killed:
            self.said()
        self.assert_gone()
        return was_killed

    def end(self, seconds: float = NEVER_S) -> tuple[int, str]:
        """Wait for its end by itself; status and what it said."""
        status = self.process.wait(seconds)
        self._said.seek(0)
        return status, self._said.read().decode(errors="replace")

    def said(self, seconds: float = NEVER_S) -> str:
        """What it said; it must have ended well."""
        status, said = self.end(seconds)
        assert status == 0, said[-5000:]
        return said

    def wait_until_said(self, word: str) -> None:
        """Until it has written ``word``; its output must not be buffered."""
        until(lambda: word.encode() in os.pread(self._said.fileno(), 1 << 16, 0) or self.has_ended)

    def alive(self) -> list[int]:
        """The pids of all that bear its mark, itself included; zombies do not."""
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and self._is_ours(name)]

    def _is_ours(self, pid: str) -> bool:
        try:
            return self._mark in Path("/proc", pid, "environ").read_bytes()
        except OSError:
            return False

    def assert_gone(self, *but: int) -> float:
        """Nothing of it is left after :data:`GONE_S`; the seconds that took."""
        began = time.monotonic()
        until(lambda: set(self.alive()) <= set(but), GONE_S, f"processes left behind by {self.process.args}")
        return time.monotonic() - began


class Target(msgspec.Struct, frozen=True):
    """What is measured, how much of each count must have been tried, and what must not be exceeded."""

    title: str
    at_least: dict[str, float] = {}
    at_most: dict[str, float] = {}


class Figure(msgspec.Struct, frozen=True):
    """What one test has found of a figure, as ``R1``, and on what."""

    name: str
    of: str
    counts: dict[str, float]


_IN_ORDER: dict[str, float] = {"lost": 0, "repeated": 0, "out_of_order": 0}
_LEAKS = ("fds", "threads", "children", "shared_memory", "temporary_files")
_NAMED: dict[str, float] = {"lost": 0, "repeated": 0, "unnamed": 0}

TARGETS = {
    "R1": Target("kill -9 and SIGSTOP of random workers", {"kills": 200}, _IN_ORDER),
    "RAY": Target(
        "kill -9 of actors on a Ray cluster, and lost nodes", {"kills": 60, "nodes": 10}, {**_IN_ORDER, "left": 0}),
    "R2": Target("SIGKILL of the whole process, and resume", {"kills": 200}, _IN_ORDER),
    "R3": Target("one order: workers x dp x buffer x batch x loop", {"settings": 324}, {"other_digests": 0}),
    "R4": Target("a snapshot's writer dies at each of its calls", {"deaths": 1000}, {"unreadable": 0, "too_old": 0}),
    "R5": Target("damaged and foreign files given to restore", {"files": 10_000},
                 {"accepted": 0, "other_errors": 0, "code_runs": 0, "peak_mb": 50}),
    "R7": Target("SIGKILL of the trainer; its workers are gone", {"kills": 100}, {"left": 0, "gone_s": 2}),
    "R8": Target("cancelled at each await of each public coroutine", {"cancels": 1000},
                 {"lost": 0, "repeated": 0, "leaked_tasks": 0, "hangs": 0}),
    "R9": Target("KeyboardInterrupt and timeouts in a call", {"interrupts": 1000}, _IN_ORDER),
    "R10": Target("a long run: memory and everything that can leak", {"samples": 1_000_000},
                  {"rss_mb_per_100k": 1, **dict.fromkeys(_LEAKS, 0)}),
    "R11": Target("a program ends, in whatever way", {"exits": 100}, {"hangs": 0, "left": 0, "exit_s": 1}),
    "R12": Target("restore at position 10 M; a snapshot's pause", {"position": 1e7}, {"restore_s": 1, "pause_ms": 5}),
    "R13": Target(
        "a hang is an error that names it; a row is tried twice", {"hangs": 3}, {"beyond_timeout_s": 1, "unnamed": 0}),
    "R14": Target("steps of state machines, each beside its model", {"steps": 1_000_000}, {"counterexamples": 0}),
    "WAKE": Target("restarts in random places, with delays at every await and every callback", {"restarts": 1000},
                   {"out_of_order": 0, "hangs": 0, "left": 0}),
    "IO": Target("reads that fail, come short, late or changed", {"faults": 500}, _NAMED),
    "STORE": Target("requests to a store that fail, are cut, or are answered with other bytes",
                    {"faults": 500, "kills": 20}, _NAMED),
}  # fmt: skip
_WORST = ("_mb_per_100k", "_ms", "_mb", "_s", "position")
"""Counts whose names end so are not added up: the largest of them counts."""

_recorded: list[Figure] = []


def record(name: str, of: str, **counts: float) -> None:
    """Add what a test has found."""
    assert name in TARGETS, name
    _recorded.append(Figure(name, of, counts))


def recorded() -> list[Figure]:
    """All that was found in this process."""
    return list(_recorded)


def total(figures: Iterable[Figure]) -> dict[str, dict[str, float]]:
    """The counts of each figure: added up, or the worst of them."""
    totals: dict[str, dict[str, float]] = {}
    for figure in figures:
        counts = totals.setdefault(figure.name, {})
        for name, value in figure.counts.items():
            is_worst = name.endswith(_WORST)
            counts[name] = max(counts.get(name, value), value) if is_worst else counts.get(name, 0) + value
    return totals


def table(figures: Iterable[Figure]) -> str:
    """Each figure with its target, what was reached, and whether that is enough."""
    totals = total(figures)
    lines = []
    for name, target in TARGETS.items():
        counts = totals.get(name, {})
        missed = [count for count, most in target.at_most.items() if counts.get(count, 0) > most]
        few = [count for count, least in target.at_least.items() if counts.get(count, 0) < least]
        verdict = f"MISSED, {missed}" if missed else f"so far, with few {few}" if few else "reached"
        wanted = [f">= {least:,.15g} {count}" for count, least in target.at_least.items()]
        wanted += [f"<= {most:,.15g} {count}" for count, most in target.at_most.items()]
        reached = [f"{value:,.{3 if value % 1 else 15}g} {count}" for count, value in counts.items()]
        lines.append(f"{name:<4} {target.title}: {verdict if counts else 'not measured'}")
        lines += [f"       target   {', '.join(wanted)}", f"       reached  {', '.join(reached) or '-'}"]
    return "\n".join(lines)


PACKAGE = str(Path(asyncdata.__file__).parent)
OFTEN, RARELY, TASKS = 0.25, 0.0005, 0.1
"""How many of the calls of a function are late while it was late less than ``ENOUGH`` times, and later; and how many of
the times that a loop wakes a task."""
ENOUGH = 200
LONGEST_S = 0.003


@contextmanager
def delayed(seed: int) -> Iterator[dict[Any, int]]:
    """In this thread, and in all that begin meanwhile. Gives how often each function was late so far."""
    chance, found, call_soon_in_time = random.Random(seed), dict[Any, int](), asyncio.BaseEventLoop.call_soon

    def pause_s() -> float:
        return chance.choice([0.0, 0.0, 0.1, 1.0]) * chance.random() * LONGEST_S

    def see(frame: Any, event: str, _: object) -> None:
        """A function is called, or a coroutine is resumed."""
        if event != "call":
            return

        number = found.get(code := frame.f_code, 0)
        if chance.random() < (OFTEN if number < ENOUGH else RARELY) and code.co_filename.startswith(PACKAGE):
            found[code] = number + 1
            time.sleep(pause_s())

    def call_soon(loop: Any, callback: Any, *args: Any, context: Any = None) -> Any:
        """A task that may go on does so later, after others; what threads send to the loop keeps its order."""
        if isinstance(getattr(callback, "__self__", None), asyncio.Task) and chance.random() < TASKS:
            return loop.call_later(pause_s(), callback, *args, context=context)

        return call_soon_in_time(loop, callback, *args, context=context)

    with mock.patch.object(asyncio.BaseEventLoop, "call_soon", call_soon):
        threading.setprofile(see)
        sys.setprofile(see)
        try:
            yield found
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


_WEAK = frozenset({_weakrefset.__file__, weakref.__file__})


class _Tracer:
    """Counts the instants, and raises at one of them."""

    def __init__(self, point: int) -> None:
        self.left = point
        self._last, self._callers = {}, set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        caller = frame.f_back
        self._callers.add(caller)
        if _is_ours(frame):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self._in_frame

        if caller is not None and _is_ours(caller) and not _is_finalizer(frame):
            self._pass()
        return None

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            before = self._last.get(frame, "RESUME")  # the call itself was that
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            is_from_python = frame in self._callers
            self._callers.discard(frame)
            has_returned = before.startswith("CALL") and not is_from_python
            if has_returned or before in {"RESUME", "JUMP_BACKWARD", "CALL_FUNCTION_EX"}:
                self._pass()
        return self._in_frame

    def _pass(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def _is_finalizer(frame: FrameType) -> bool:
    """Whether it runs in a finalizer, which Python lets no exception out of."""
    code = frame.f_code
    return code.co_name == "__del__" or code.co_filename in _WEAK


def interrupted_at(point: int, call: Callable[[], Any]) -> Any:
    """The result of ``call``, or KeyboardInterrupt if it has more than ``point`` such instants."""
    before = sys.gettrace()
    gc.disable()  # finalizers of what other tests left behind are not in question
    sys.settrace(_Tracer(point))
    try:
        return call()
    finally:
        sys.settrace(before)
        gc.enable()


if __name__ == "__main__":
    found = [msgspec.json.decode(Path(path).read_bytes())["figures"] for path in sys.argv[1:]]
    sys.stdout.write(table(msgspec.convert(sum(found, []), list[Figure])) + "\n")
