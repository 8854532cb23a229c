"""Mutation testing of one folder of the package, a *room*: do the quick tests notice a fault in it?

``python -m tests.support.mutants ROOM``, as ``tox -e mutation -- ROOM`` runs it. mutmut makes the mutants, and runs the
tests that reach each. Of most rooms a seeded sample is tried, as all would take hours. The share that is noticed must
not be smaller than the recorded one, in ``tests/mutation_scores.json``; ``--record`` writes it there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

__all__ = ("FOUND", "Results", "SCORES", "chosen", "percent", "read", "table")

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

Results = dict[str, dict[str, str]]
"""What became of each mutant: by module, then by the mutant's name."""


def read(lines: list[str]) -> Results:
    """What ``mutmut results --all true`` prints: ``name: what became of it``, without mutants that were not tried."""
    results: Results = {}
    for line in lines:
        mutant, colon, fate = line.strip().partition(": ")
        if colon and fate != "not checked":
            module = mutant.removeprefix("asyncdata.").rpartition(".")[0]
            results.setdefault(module, {})[mutant] = fate
    return results


def percent(fates: Counter[str]) -> float:
    """How many mutants of a hundred were noticed."""
    return 100 * sum(fates[fate] for fate in FOUND) / max(1, fates.total())


def table(results: Results) -> str:
    """A line for each module and one for all. What is neither killed nor timed out has survived."""
    rows = {module: Counter(mutants.values()) for module, mutants in sorted(results.items())}
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


def _try(room: str, size: int, seed: int, jobs: int, tests: list[str]) -> tuple[int, Results]:
    """How many mutants the room has, and what became of those that were tried."""
    # mutmut imports the package and the tests from its folder of mutants, so they must not be imported from here.
    here = Path.cwd()
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    for name in [name for name in sys.modules if name.partition(".")[0] in {"asyncdata", "tests"}]:
        del sys.modules[name]
    from mutmut import __main__ as mutmut  # where it is installed, and not when a test imports this file
    from mutmut.configuration import config

    shutil.rmtree("mutants", ignore_errors=True)
    config().only_mutate = [f"asyncdata/{room}/*"]
    if tests:
        config().pytest_add_cli_args_test_selection = tests
    config().pytest_add_cli_args += [f"--ignore=tests/unit/test_{name}.py" for name in SOURCE_TESTS]
    mutmut.create_mutants(jobs)
    names = [name for meta in Path("mutants").rglob("*.meta") for name in json.loads(meta.read_text())[_NAMES]]
    mutmut.cli.main(["run", f"--max-children={jobs}", *chosen(names, size, seed)], standalone_mode=False)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        mutmut.cli.main(["results", "--all", "true"], standalone_mode=False)
    results = read(output.getvalue().splitlines())
    with SURVIVORS.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        for name in (name for mutants in results.values() for name, fate in mutants.items() if fate not in FOUND):
            mutmut.cli.main(["show", name], standalone_mode=False)
    FATES.write_text(json.dumps({name: fate for each in results.values() for name, fate in each.items()}, indent=0))
    return len(names), results


_NAMES = "exit_code_by_key"
"""In mutmut's file of a module: its mutants, by name."""


def main() -> int:
    """0 if as many mutants of a hundred were noticed as the record says, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("room", help="a folder of asyncdata/")
    parser.add_argument(
        "--sample", type=int, help="mutants to try; 0: all. Default: 300; order, delivery, checkpoint: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--tests", nargs="+", default=[], help="files or folders of tests, instead of all quick ones")
    parser.add_argument("--record", action="store_true", help="write the score to tests/mutation_scores.json")
    options = parser.parse_args()
    size = options.sample if options.sample is not None else 0 if options.room in WHOLE else 300
    num_mutants, results = _try(options.room, size, options.seed, options.jobs, options.tests)
    fates = sum((Counter(mutants.values()) for mutants in results.values()), Counter())
    sys.stdout.write(f"{table(results)}\nof {num_mutants:,} mutants; survivors: {SURVIVORS}; all fates: {FATES}\n")
    scores = json.loads(SCORES.read_text())
    recorded = scores.get(options.room, {}).get("percent", 0.0)
    if options.record:
        scores[options.room] = {"percent": round(percent(fates), 1), "tried": fates.total(), "mutants": num_mutants}
        SCORES.write_text(json.dumps(dict(sorted(scores.items())), indent=2) + "\n")
    return 0 if options.record or round(percent(fates), 1) >= recorded else 1


if __name__ == "__main__":
    sys.exit(main())
