"""A process of its own that prints one JSON object, and the memory of it and all its children, seen from outside.

Memory is proportional set size, looked at up to five times a second, for at most 2 % of the time: looking costs time.
What is mapped from a memfd is in it.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
LOOK_EVERY_S, LOOKING_SHARE = 0.2, 0.02
MAX_WORDS_OF_ERROR = 1500


class MeasurementError(Exception):
    """What was measured ended with an error, and what it said."""

    @property
    def last_words(self) -> str:
        return next((line for line in reversed(str(self).splitlines()) if line.strip()), "")[:120]


def _tree_pss(root: psutil.Process) -> int:
    """Proportional set size of a process and all its children, in bytes."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # ended since, or about to
            total += process.memory_full_info().pss
    return total


def _watch(pid: int, peak: list[int], done: threading.Event) -> None:
    pause_s = LOOK_EVERY_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while not done.wait(pause_s):
            began = time.perf_counter()
            peak[0] = max(peak[0], _tree_pss(psutil.Process(pid)))
            pause_s = max(LOOK_EVERY_S, (time.perf_counter() - began) / LOOKING_SHARE)


def measured(
    command: list[str], environment: dict[str, str] | None = None, *, watched: bool = False, timeout_s: float = 900
) -> dict[str, Any]:
    """What ``command`` prints as its last line; watched, with ``peak_pss_mb``.

    :raises MeasurementError: if it ends with an error, or not in time.
    """
    peak, done = [0], threading.Event()
    options: dict[str, Any] = {"cwd": ROOT, "env": os.environ | (environment or {}), "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True, **options) as process,
    ):
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, done))
        if watched:
            watcher.start()
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers too
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

            raise MeasurementError(f"{' '.join(command)} took more than {timeout_s} s") from None
        finally:
            done.set()
            if watched:
                watcher.join()
        errors.seek(0)
        if process.returncode:
            raise MeasurementError(f"{' '.join(command)} failed:\n{errors.read()[-MAX_WORDS_OF_ERROR:]}")

    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found | ({"peak_pss_mb": peak[0] / 1e6} if watched else {})
