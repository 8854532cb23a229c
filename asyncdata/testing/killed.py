"""The only check that needs processes: a loader in its own process is killed, and another one resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from asyncdata.core.import_path import resolve_path
from asyncdata.testing.adapters import Knobs, Rows
from asyncdata.testing.lab import NotApplicableError, difference, saved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdata.testing.lab import Lab

__all__ = ("main", "resumes_after_a_kill")

_LIMIT_S = 120.0
_NUM_BATCHES = 3


def resumes_after_a_kill(lab: Lab, rows: Rows, knobs: Knobs) -> str | None:
    """What is wrong with a run that is killed with SIGKILL after some batches and then resumed; None: nothing."""
    lab.require(*sorted(knobs.needs()))
    whole = lab.run(rows, knobs, 1).rows
    before: list[int] = []
    state = None
    with _child(lab, rows, knobs, None) as lines:
        for line in lines:
            batch = json.loads(line)
            before += batch["rows"]
            state = batch["state"]
            if len(before) >= _NUM_BATCHES * knobs.batch_size:
                break  # and is killed

    if state is None:
        return "the process that was to be killed delivered nothing"

    after: list[int] = []
    with _child(lab, rows, knobs, state) as lines:
        for line in lines:
            after += json.loads(line)["rows"]
            if len(before) + len(after) >= len(whole):
                break

    found = difference(whole, before + after)
    return f"killed after {len(before)} rows and resumed: {found}" if found else None


@contextmanager
def _child(lab: Lab, rows: Rows, knobs: Knobs, state: str | None) -> Iterator[Iterator[str]]:
    """The lines that a process prints, one per batch. It is killed at the end of the block."""
    kind = type(lab.adapter)
    if kind.__module__ == "__main__" or "<" in kind.__qualname__:
        raise NotApplicableError(f"{kind.__qualname__} cannot be imported by another process")

    path = [os.path.abspath(entry) for entry in sys.path]
    told = [f"{kind.__module__}:{kind.__qualname__}", rows._asdict(), knobs._asdict(), state, path]
    command = [sys.executable, "-c", _BOOT, json.dumps(told)]
    errors = os.path.join(lab.folder, "errors.txt")
    with open(errors, "ab") as file:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True)
    alarm = threading.Timer(_LIMIT_S, child.kill)
    alarm.start()
    try:
        yield iter(child.stdout or ())
    finally:
        alarm.cancel()
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
        with suppress(ProcessLookupError):  # workers that outlived it must not disturb the next check
            os.killpg(child.pid, signal.SIGTERM)


_BOOT = """\
import json, sys
told = json.loads(sys.argv[1])
sys.path[:] = told.pop()
from asyncdata.testing.killed import main
if __name__ == "__main__":
    main(*told)
"""


def main(path: str, rows: dict[str, Any], knobs: dict[str, Any], state: str | None) -> None:
    """In the new process: take all batches, and print each with the state after it."""
    told = os.dup(1)
    os.dup2(2, 1)  # what the loader prints goes to stderr
    loader = resolve_path(path)().open(Rows(**rows), Knobs(**knobs))
    if state is not None:
        loader.load_state_dict(json.loads(state))
    while True:
        try:
            found = [seen.row for seen in loader.next_batch()]
        except StopIteration:
            continue

        os.write(told, json.dumps({"rows": found, "state": saved(loader)}).encode() + b"\n")
