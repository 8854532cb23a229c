"""Runs of a framework's loader that save, are killed some batches later, and start again from what was saved.

A framework takes a minute to import. So one process imports it, and forks each run.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).parents[3]
KILLED_AFTER = 3
"""Batches between the save and the kill: they are trained on, and lost with the weights."""

TIMEOUT_S = 120


class Run(Protocol):
    """A training run of a framework, with what its folder has of an earlier one loaded by the framework's code."""

    step: int

    def take(self) -> list[Any]:
        """The ids of the next batch's rows."""

    def save(self) -> None:
        """Save as the framework does it after a step."""


def checkout(variable: str, file: str, packages: Iterable[str] = ()) -> str:
    """The folder that an environment variable names. Skips the test where there is no such checkout."""
    folder = os.environ.get(variable, "")
    if not Path(folder or "/no folder", file).is_file():
        pytest.skip(f"nothing to run: {variable} names no checkout with a {file}")

    for package in packages:
        pytest.importorskip(package, reason=f"its code needs {package}")
    return folder


def block_of(page: str, language: str) -> str:
    """The first block of this language on a how-to page."""
    return blocks_of(page, language)[0]


def blocks_of(page: str, language: str) -> list[str]:
    """All blocks of this language on a how-to page."""
    text = (ROOT / "docs/how-to" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_block(page: str, names: dict[str, Any]) -> None:
    """Execute the Python lines that a how-to page tells a user to write, with and into these names."""
    exec(block_of(page, "py"), names)  # noqa: S102 - the project's own pages


def run_driver(module: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """The results of ``main`` of a module of this folder, in a process of its own."""
    answer = folder / "answer.json"
    words = [sys.executable, "-W", "ignore", "-m", module, json.dumps({"folder": str(folder), **settings}), str(answer)]
    path = os.pathsep.join([str(ROOT), *(name for name in sys.path if name)])
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def run_trainer(
    module: str, folder: Path, name: str, *, resume: bool = False, kill_at: int | None = None, **settings: Any
) -> dict[str, Any]:
    """The batches that a training of its own process took, and what it reported, unless it was killed at a step.

    The module is run with its settings as JSON. It writes a batch's rows to each line of ``seen``, and its ``report``.
    """
    files = {key: str(folder / f"{name}.{key}") for key in ("folder", "report")}
    settings |= {**files, "seen": str(folder / f"{name}.{kill_at}.{resume}"), "rows": str(folder / "rows.jsonl")}
    path = os.pathsep.join([str(ROOT), *(place for place in sys.path if place)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, json.dumps({**settings, "resume": resume, "kill_at": kill_at})],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    assert done.returncode == (-signal.SIGKILL if kill_at else 0), done.stdout[-1000:] + done.stderr[-4000:]
    seen = [json.loads(line) for line in Path(settings["seen"]).read_text().splitlines()]
    return {"seen": seen} | ({} if kill_at else json.loads(Path(files["report"]).read_text()))


def kill_and_resume(
    open_run: Callable[[Path], Run], folder: Path, *, num_batches: int, saves: list[int], **told: Any
) -> Any:
    """The batches of a run that is left alone, and those of runs killed :data:`KILLED_AFTER` batches after a save.

    :param told: what is added for the test, such as the number of ``rows`` of an epoch.
    """
    whole = _forked(open_run, folder / "whole", num_batches)
    resumed = []
    for save_at in saves:
        place = folder / f"killed_{save_at}"
        killed = _forked(open_run, place, num_batches, save_at=save_at, kill_at=save_at + KILLED_AFTER)
        assert len(killed) == save_at + KILLED_AFTER
        after = _forked(open_run, place, num_batches, starts_at=save_at)
        resumed.append([save_at, killed[:save_at] + after])
    return {"whole": whole, "resumed": resumed, **told}


def _forked(open_run: Callable[[Path], Run], folder: Path, until: int, **times: int) -> list[list[Any]]:
    """The batches that a forked process took."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "batches.jsonl"
    log.write_text("")
    pid = os.fork()
    if not pid:
        try:
            _take(open_run(folder), log, until, **times)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == (-signal.SIGKILL if "kill_at" in times else 0), f"the run ended with {status}"
    return [json.loads(line) for line in log.read_text().splitlines()]


def _take(run: Run, log: Path, until: int, *, starts_at: int = 0, save_at: int = 0, kill_at: int = 0) -> None:
    assert run.step == starts_at, f"the framework continues at step {run.step}, not at {starts_at}"
    with log.open("a") as file:
        while run.step < until:
            ids = run.take()
            run.step += 1
            file.write(json.dumps(ids) + "\n")
            file.flush()
            if run.step == save_at:
                run.save()
            if run.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


class Stepped:
    """A training in a thread, which waits after each step for what it shall do: a run of a framework with a loop."""

    step: int

    def __init__(self) -> None:
        self.orders: queue.Queue[str] = queue.Queue()
        self.answers: queue.Queue[Any] = queue.Queue()
        self._must_order = self._has_ended = False

    def start(self, train: Callable[[], Any]) -> None:
        """Start the training."""
        threading.Thread(target=self._run, args=(train,), daemon=True).start()

    def _run(self, train: Callable[[], Any]) -> None:
        try:
            train()
            self.answers.put(None)
        except BaseException as error:
            self.answers.put(error)

    def is_to_save(self) -> bool:
        """Called by the training after a step, which waits here."""
        return self.orders.get(timeout=TIMEOUT_S) == "save"

    def answer(self) -> Any:
        """What the training tells next."""
        found = self.answers.get(timeout=TIMEOUT_S)
        if isinstance(found, BaseException):
            raise found
        return found

    def take(self) -> list[Any]:
        """The next batch; an empty one after the end of the training."""
        if self._has_ended:
            return []

        if self._must_order:
            self.orders.put("go on")
        self._must_order = True
        found = self.answer()
        self._has_ended = found is None
        return found or []

    def save(self) -> None:
        self.orders.put("save")
        assert self.answer() == "saved"
        self._must_order = False


def message_of(call: Callable[[], Any]) -> str:
    """What the error of a call says."""
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing"


def main(drive: Callable[..., dict[str, Any]]) -> None:
    """The driver's command line: settings as JSON, and the file for the answer."""
    settings = json.loads(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps(drive(Path(settings.pop("folder")), **settings)))
