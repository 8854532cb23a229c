"""What the fault tests share: how many rounds, how a program is started and watched, what it has left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.loading import NEVER_S

ROOT = Path(__file__).parents[2]
GONE_S = 30.0
"""How long the workers of a dead process may take to be gone, where the CPUs are busy; what they took is a figure."""
MARK = "ASYNCDATA_FAULT_MARK"
"""An environment variable that a program hands down to all it starts, so that none is overlooked."""


def num_rounds(quick: int, full: int, long: int | None = None) -> int:
    """Rounds of a test: ``quick``, or what ASYNCDATA_FAULT_ROUNDS says: a number, ``full`` or ``long``.

    :param long: None: ten times ``full``.
    """
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
    """A Python program of ours, and everything that it has started.

    :param arguments: what stands behind ``python`` on the command line.
    :param is_measured: whether a run under ``coverage`` measures it too.
    """

    def __init__(
        self, *arguments: str, own_group: bool = False, is_measured: bool = True, options: tuple[str, ...] = ()
    ) -> None:
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
        which must be a good one. Nothing of it is left.
        """
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
