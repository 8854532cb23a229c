"""Starts ``asyncdata run`` in a process of its own, and can kill it: the demo is made of such runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.cli.progress import Reading
from asyncdata.core.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import Self

__all__ = ("RunProcess", "environment")


def environment() -> dict[str, str]:
    """The variables with which a new Python process imports what this process can, in the same order."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}


class RunProcess:
    """A run. It ends with the ``with`` block, at the latest.

    :param arguments: those of ``asyncdata run``.
    :ivar first_batch_s: seconds from the start of the process to its first batch; None before that.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.first_batch_s: float | None = None
        self._began = time.monotonic()
        self._talk: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "asyncdata", "run", *arguments, "--progress", "json", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def readings(self) -> Iterator[Reading]:
        """How far the run is, until it ends."""
        for line in self._process.stderr or ():
            try:
                reading = msgspec.json.decode(line, type=Reading)
            except msgspec.DecodeError:
                self._talk.append(line.rstrip())
                continue

            if self.first_batch_s is None:
                self.first_batch_s = time.monotonic() - self._began
            yield reading

    def kill(self) -> int:
        """End it with SIGKILL; its exit status."""
        self._process.kill()
        return self._process.wait()

    def report(self) -> dict[str, Any]:
        """What it printed, once it has ended.

        :raises WorkerError: if it failed.
        """
        printed, _ = self._process.communicate()
        if self._process.returncode != 0:
            said = "\n".join(self._talk) or "it said nothing"
            raise WorkerError(f"a run ended with exit status {self._process.returncode}: {said}")

        report: dict[str, Any] = json.loads(printed)
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
