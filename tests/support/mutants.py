"""Mutation testing of folders of the package, *rooms*: do the quick tests, and those of properties, notice a fault?

``python -m tests.support.mutants ROOM...``, as ``tox -e mutation -- ROOM...`` runs it. mutmut makes the mutants.
The tests that reach each are run here, the fastest first, in a child of a process that has collected them: mutmut's own
run does not see what worker processes reach, and brings them down. Of most rooms a seeded sample is tried, as all would
take hours. With ``--seconds`` the tests of a mutant are only so many: then the score is a lower bound. The share that
is noticed must not be smaller than the recorded one, in ``tests/mutation_scores.json``; ``--record`` writes it there.
"""

import argparse
import contextlib
import gc
import io
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
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


WHOLE = ("checkpoint", "delivery", "order")
"""Rooms of which all mutants are tried."""

SCORES = Path(__file__).parents[1] / "mutation_scores.json"
SURVIVORS = Path("mutants/survivors.txt")
FATES = Path("mutants/fates.json")
"""What became of each mutant that was tried, to compare two runs."""

FOUND = ("killed", "timeout", "segfault")
"""A test has failed, has not come to its end, or has brought Python down: the mutant was noticed."""

SOURCE_TESTS = ("architecture", "dependencies", "docs", "examples", "hot_paths", "public_api", "selection")
"""Tests that look at the text of the package or the project, or count calls: mutmut changes both."""


def percent(fates: Counter[str]) -> float:
    """How many mutants of a hundred were noticed."""
    return 100 * sum(fates[fate] for fate in FOUND) / max(1, fates.total())


def table(fates_of: dict[str, str]) -> str:
    """A line for each module and one for all. What is neither killed nor timed out has survived."""
    rows: dict[str, Counter[str]] = {}
    for name, fate in sorted(fates_of.items()):
        rows.setdefault(name.removeprefix("asyncdata.").rpartition(".")[0], Counter())[fate] += 1
    rows["all"] = sum(rows.values(), Counter())
    lines = [f"{'module':<40} {'mutants':>8} {'killed':>8} {'survived':>8} {'timeouts':>8} {'score':>8}"]
    for module, fates in rows.items():
        num_left = fates.total() - sum(fates[fate] for fate in FOUND)
        killed = fates["killed"] + fates["segfault"]
        counts = f"{fates.total():>8,} {killed:>8,} {num_left:>8,} {fates['timeout']:>8,}"
        lines.append(f"{module:<40} {counts} {percent(fates):>6.1f} %")
    return "\n".join(lines)


def chosen(names: list[str], size: int, seed: int) -> list[str]:
    """The mutants to try: ``size`` of them, or all if it is 0."""
    names = sorted(names)
    return random.Random(seed).sample(names, size) if 0 < size < len(names) else names


def first_tests(durations: dict[str, float], tests: set[str], seconds: float) -> list[str]:
    """The tests to run against a mutant: the fastest first, at least one, and no more than take ``seconds``."""
    kept, total = [], 0.0
    for test in sorted(tests, key=lambda test: (durations.get(test, 0.0), test)):
        total += durations.get(test, 0.0)
        if kept and total > seconds:
            break
        kept.append(test)
    return kept


def tests_by_function(reached: Reached) -> dict[str, dict[str, float]]:
    """The tests that reach each function, with their seconds; only those that pass."""
    found: dict[str, dict[str, float]] = {}
    for test, (passed, seconds, functions) in reached.items():
        for function in functions if passed else ():
            found.setdefault(function, {})[test] = seconds
    return found


def _mutmut() -> Any:
    """mutmut, which makes the mutants of what lies in the working directory."""
    # The package and the tests are imported from the folder of mutants, so they must not be imported from here.
    here = Path.cwd()
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    for name in [name for name in sys.modules if name.partition(".")[0] in {"asyncdata", "tests"}]:
        del sys.modules[name]
    from mutmut import __main__ as mutmut  # where it is installed, and not when a test imports this file

    return mutmut


def _make(rooms: Iterable[str], jobs: int) -> list[str]:
    """Make the mutants of some rooms; their names."""
    mutmut = _mutmut()
    from mutmut.configuration import config
    from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir

    shutil.rmtree("mutants", ignore_errors=True)
    config().only_mutate = [f"asyncdata/{room}/*" for room in rooms]
    with contextlib.redirect_stdout(io.StringIO()):
        copy_src_dir()
        copy_also_copy_files()
        mutmut.create_mutants(jobs)
    with Path("mutants/asyncdata/__init__.py").open("a", encoding="utf-8") as file:
        file.write(RECORDER)
    return [name for meta in Path("mutants").rglob("*.meta") for name in json.loads(meta.read_text())[_NAMES]]


def _reach(tests: list[str], jobs: int) -> Reached:
    """Run the tests without a mutant, and see what each of them reaches."""
    folder = Path("mutants/reached").resolve()
    (folder / "before").mkdir(parents=True)
    told = {"MUTANT_UNDER_TEST": "stats", "MUTANTS_REACHED": str(folder), "MUTANTS_OF_TEST": str(folder / "before")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), *_SELECT, *tests]
    subprocess.run(command, cwd="mutants", env=os.environ | told, check=False)
    return {test: tuple(each) for path in folder.glob("*.json") for test, each in json.loads(path.read_text()).items()}


def _start(name: str, session: Any, items: list[Any], seconds: float) -> int:
    """Run tests against a mutant in a child of this process, which has imported and collected them already."""
    pid = os.fork()
    if pid:
        return pid

    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    os.environ["MUTANT_UNDER_TEST"] = name
    status = 1
    try:
        session.config.pluginmanager.unregister(name="terminalreporter")  # it writes to a copy of the output
        signal.alarm(math.ceil(_LEAST_S + _TIMES * seconds))
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                break
        status = int(session.testsfailed > 0)
    finally:
        os._exit(status)


def _ended(running: dict[int, str], fates: dict[str, str]) -> None:
    """Wait for one of the children, and note what became of its mutant."""
    pid, status = os.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what a mutant left
    if pid in running:
        code = os.waitstatus_to_exitcode(status)
        fates[running.pop(pid)] = "timeout" if code == -signal.SIGALRM else _FATES.get(code, "segfault")


class Tries:
    """A plugin of pytest that, instead of running what was collected, runs the right part of it for each mutant.

    A function that no test is seen to reach is tried with those that start worker processes.
    """

    def __init__(self, names: list[str], reached: Reached, options: argparse.Namespace) -> None:
        self.fates: dict[str, str] = {}
        self._names, self._options = names, options
        self._by_function = tests_by_function(reached)
        found = sorted(self._by_function.items())
        self._others = next((tests for name, tests in found if _STARTS_WORKERS in name), {})

    def pytest_runtestloop(self, session: Any) -> bool:
        items = {item.nodeid: item for item in session.items}
        gc.freeze()  # so that children do not copy the pages of what is collected
        running: dict[int, str] = {}
        deadline = time.monotonic() + 60 * self._options.minutes
        for name in itertools.takewhile(lambda _: time.monotonic() < deadline, self._names):
            durations = self._by_function.get(name.rpartition("__mutmut_")[0], self._others)
            tests = first_tests(durations, durations.keys() & items.keys(), self._options.seconds)
            if not tests:
                self.fates[name] = "no tests"
                continue
            while len(running) >= self._options.jobs:
                _ended(running, self.fates)
            seconds = sum(map(durations.__getitem__, tests))
            running[_start(name, session, [items[test] for test in tests], seconds)] = name
        while running:
            _ended(running, self.fates)
        return True


def _try(names: list[str], reached: Reached, tests: list[str], options: argparse.Namespace) -> dict[str, str]:
    """What became of each of these mutants, or of those that were tried in the time that there is."""
    import pytest

    os.chdir("mutants")
    sys.path.insert(0, str(Path.cwd()))
    tries = Tries(names, reached, options)
    pytest.main(["-qqq", *_SELECT, *tests], plugins=[tries])
    os.chdir("..")
    return tries.fates


def _show(names: Iterable[str]) -> None:
    """Write down what the mutants change that were not noticed."""
    from mutmut import __main__ as mutmut

    with SURVIVORS.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        for name in names:
            mutmut.cli.main(["show", name], standalone_mode=False)


def room_of(name: str) -> str:
    """The folder of a mutant: ``asyncdata.order.order.x__mutmut_1`` -> ``order``."""
    return name.removeprefix("asyncdata.").partition(".")[0]


_NAMES = "exit_code_by_key"
"""In mutmut's file of a module: its mutants, by name."""

_LEAST_S, _TIMES = 20.0, 5.0
"""How long tests may take against a mutant: so many seconds, and so many times what they take without."""

_FATES = {0: "survived", 1: "killed"}
"""By the exit status of a child; any other has brought Python down."""

_SELECT = ("-m", "not slow", "-p", "tests.support.mutants", "-p", "no:cacheprovider")
_STARTS_WORKERS = "asyncdata.workers.popen."
_ON_RAY = "asyncdata.workers.ray."
"""These are left out: the tests on a cluster are not among the quick ones."""


def main() -> int:
    """0 if in every room as many mutants of a hundred were noticed as the record says, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="+", metavar="room", help="folders of asyncdata/")
    parser.add_argument(
        "--sample", type=int, help="mutants to try of each; 0: all. Default: 300; order, delivery, checkpoint: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of tests for each mutant, the fastest first")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no more mutants are tried after so many")
    parser.add_argument("--tests", nargs="+", default=[], help="files or folders of tests, instead of all quick ones")
    parser.add_argument("--record", action="store_true", help="write the scores to tests/mutation_scores.json")
    options = parser.parse_args()
    default = {room: 0 if room in WHOLE else 300 for room in options.rooms}
    sizes = default if options.sample is None else dict.fromkeys(options.rooms, options.sample)
    selection = options.tests or ["tests/unit", "tests/property", "tests/integration"]
    selection += [f"--ignore=tests/unit/test_{name}.py" for name in SOURCE_TESTS]
    names = _make(sizes, options.jobs)
    numbers = Counter(map(room_of, names))
    reached = _reach(selection, options.jobs)
    sys.stdout.write(f"{len(reached):,} tests; left out, as they fail without a mutant, too, or skip:\n")
    sys.stdout.writelines(f"  {test}\n" for test, (passed, _, _) in sorted(reached.items()) if not passed)
    of_rooms = {room: [name for name in names if room_of(name) == room and _ON_RAY not in name] for room in sizes}
    samples = [chosen(of_rooms[room], size, options.seed) for room, size in sizes.items()]
    wanted = [name for one_of_each in itertools.zip_longest(*samples) for name in one_of_each if name]
    fates_of = _try(wanted, reached, selection, options)
    FATES.write_text(json.dumps(fates_of, indent=0), encoding="utf-8")
    sys.stdout.write(f"{table(fates_of)}\nsurvivors: {SURVIVORS}; all fates: {FATES}\n")
    scores, is_less = json.loads(SCORES.read_text()), False
    for room in options.rooms:
        fates = Counter(fate for name, fate in fates_of.items() if room_of(name) == room)
        found = round(percent(fates), 1)
        sys.stdout.write(f"{room}: {found} % of {fates.total():,} of {numbers[room]:,} mutants\n")
        is_less |= found < scores.get(room, {}).get("percent", 0.0)
        if options.record:
            scores[room] = {"percent": found, "tried": fates.total(), "mutants": numbers[room]}
    if options.record:
        SCORES.write_text(json.dumps(dict(sorted(scores.items())), indent=2) + "\n")
    sys.stdout.flush()
    _show(name for name, fate in fates_of.items() if fate not in FOUND)
    return 0 if options.record or not is_less else 1


if __name__ == "__main__":
    sys.exit(main())
