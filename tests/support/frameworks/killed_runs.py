"""Runs of a framework's loader that save, are killed some batches later, and start again from what was saved.

``python -m tests.support.frameworks.killed_runs DRIVER SETTINGS ANSWER`` runs a driver of this folder. A framework
takes a minute to import: so one process imports it, and forks each run.
"""

import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest


class Anything:
    """What such a package would have: it can be imported from it, made, and called, as a decorator is."""

    def __init__(self, *_, **__): ...

    def __call__(self, *_, **__):
        return self


class _Finder:
    def __init__(self, packages):
        self._packages = packages

    def find_spec(self, name, *_):
        if not any(name == package or name.startswith(f"{package}.") for package in self._packages):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = lambda name: _attribute(spec.name, name)
        return module

    def exec_module(self, module): ...


def _attribute(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Anything,), {"__module__": module})


def stand_in_for(*packages):
    """Let these packages be imported from now on, with all their modules, whether or not they are installed."""
    sys.meta_path.insert(0, _Finder(packages))


def stand_in_module(patch, name, **attributes):
    """For a test: a module with nothing but this, in packages that are made where they are not imported."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules or depth == len(parts):
            patch.setitem(sys.modules, path, ModuleType(path))
        if depth > 1:
            patch.setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[path], raising=False)
    vars(sys.modules[name]).update(attributes)


ROOT = Path(__file__).parents[3]
EXAMPLES = str(ROOT / "examples/frameworks")
DEMO_TOKENIZER = str(ROOT / "asyncdata/assets/demo_tokenizer")
KILLED_AFTER = 3
"""Batches between the save and the kill: they are trained on, and lost with the weights."""


def needs(*packages):
    """Skip the test where one of these is not installed. None is imported."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def checkout(variable, file):
    """The folder that an environment variable names. Skips the test where there is no such checkout."""
    folder = os.environ.get(variable, "")
    if not Path(folder or "/no folder", file).is_file():
        pytest.skip(f"nothing to run: {variable} names no checkout with a {file}")
    return folder


def blocks_of(page, language):
    """The blocks of this language on a how-to page, or ``page#section`` of it, which tell a user what to write."""
    page, _, heading = page.partition("#")
    text = (ROOT / "docs/how-to" / page).read_text(encoding="utf-8")
    if heading:
        text = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def write_rows(folder, rows, name="rows.jsonl"):
    """The path of a file of these rows."""
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run_python(folder, *words, places=(), status=0, **variables):
    """What Python prints, started in this folder. It looks for modules in ``places`` too, after ours."""
    path = os.pathsep.join([str(ROOT), *places, *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path} | variables
    command = [sys.executable, "-W", "ignore", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def run_driver(name, folder, **settings):
    """The results of ``drive`` of a module of this folder, in a process of its own."""
    answer = folder / "answer.json"
    words = ("-m", __name__, name, json.dumps(settings), str(answer))
    run_python(folder, *words, places=[EXAMPLES], XDG_CACHE_HOME=str(folder / "cache"))
    return json.loads(answer.read_text())


def kill_and_resume(open_run, folder, *, num_batches, saves, **told):
    """The batches of a run that is left alone, and those of runs killed :data:`KILLED_AFTER` batches after a save.

    :param open_run: opens a run in a folder, with what the folder has of an earlier one loaded by the framework's code.
        A run has its ``step``, ``take()`` for the ids of the next batch's rows, and ``save()``.
    :param told: what is added for the test, such as the number of ``rows`` of an epoch.
    """
    whole = _batches(open_run, folder / "whole", num_batches)
    resumed = []
    for save_at in saves:
        place = folder / f"killed_{save_at}"
        killed = _batches(open_run, place, num_batches, save_at=save_at, kill_at=save_at + KILLED_AFTER)
        assert len(killed) == save_at + KILLED_AFTER
        after = _batches(open_run, place, num_batches, starts_at=save_at)
        resumed.append([save_at, killed[:save_at] + after])
    return {"whole": whole, "resumed": resumed, **told}


def _batches(open_run, folder, until, *, starts_at=0, save_at=0, kill_at=0):
    """The batches that a forked process took."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "batches.jsonl"
    log.write_text("")

    def work():
        run = open_run(folder)
        assert run.step == starts_at, f"the framework continues at step {run.step}, not at {starts_at}"
        while run.step < until:
            ids = run.take()
            run.step += 1
            with log.open("a") as file:
                file.write(json.dumps(ids) + "\n")
            if run.step == save_at:
                run.save()
            if run.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    status = in_fork(work)
    assert status == (-signal.SIGKILL if kill_at else 0), f"the run ended with {status}"
    return [json.loads(line) for line in log.read_text().splitlines()]


def in_fork(work):
    """The exit status of a fork that does this."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(driver, settings, answer):
    drive = importlib.import_module(f"tests.support.frameworks.{driver}").drive
    Path(answer).write_text(json.dumps(drive(Path.cwd(), **json.loads(settings))))


if __name__ == "__main__":
    main(*sys.argv[1:])
