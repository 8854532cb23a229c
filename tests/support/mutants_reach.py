"""Which functions of the package each test reaches, and how long it takes: a plugin of pytest, ``-p``, in a folder of
mutants. Of worker processes, too: what they reach while a test runs is that test's.

Each process of the tests writes one file into the folder that ``MUTANTS_REACHED`` names, in :data:`Reached`'s form.
``MUTANT_UNDER_TEST`` must be "stats", and ``MUTANTS_OF_TEST`` an empty folder, for what is reached before any test.
"""

import json
import os
from pathlib import Path
from typing import Any

RECORDER = """
import os as _os

if _os.environ.get("MUTANT_UNDER_TEST") == "stats":
    from mutmut.mutation import trampoline as _trampoline

    _seen = set()

    def _note(name, caller=None, _open=_os.open, _write=_os.write, _close=_os.close, _pid=_os.getpid):
        if name not in _seen:
            _seen.add(name)
            flags = _os.O_WRONLY | _os.O_CREAT | _os.O_APPEND
            file = _open(f"{_os.environ['MUTANTS_OF_TEST']}/{_pid()}", flags, 0o600)
            _write(file, f"{name}\\n".encode())
            _close(file)

    _trampoline.record_trampoline_hit = _note
    _os.register_at_fork(after_in_child=_seen.clear)
"""
"""What is added to the package's ``__init__.py``: mutmut's own record is of the tests' process alone."""

Reached = dict[str, tuple[bool, float, list[str]]]
"""By test: whether it passed, its seconds, and the functions."""


class Recorder:
    """Takes what was written since the test before."""

    def __init__(self, folder: Path, name: str) -> None:
        self.found: Reached = {}
        self._file = folder / f"{name}.json"
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self._passed, self._seconds = True, 0.0
        os.environ["MUTANTS_OF_TEST"] = str(self._folder)

    def _names(self) -> list[str]:
        import asyncdata

        vars(asyncdata).get("_seen", set()).clear()
        names: set[str] = set()
        for path in self._folder.iterdir():
            names.update(path.read_text(encoding="utf-8").splitlines())
            path.unlink()
        return sorted(names)

    def pytest_runtest_logstart(self) -> None:
        self._passed, self._seconds = True, 0.0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._passed &= report.outcome == "passed"
        self._seconds += report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.found[nodeid] = self._passed, self._seconds, self._names()

    def pytest_sessionfinish(self) -> None:
        self._file.write_text(json.dumps(self.found), encoding="utf-8")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the quick tests, and those of properties, which are quick with few examples."""
    items[:] = [item for item in items if "property" in item.path.parts or not item.get_closest_marker("thorough")]


def pytest_configure(config: Any) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if "MUTANTS_REACHED" in os.environ and (worker or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Recorder(Path(os.environ["MUTANTS_REACHED"]), worker or "main"))
