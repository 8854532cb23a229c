"""Ends a mutation run: the table of its modules, the survivors with their diffs in a file, and the verdict.

``python -m tests.support.mutants``, where ``mutmut run`` has been. It asks mutmut's own commands.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from pathlib import Path

__all__ = ("FOUND", "Results", "percent", "read", "table")

LEAST_PERCENT = 90.0
SURVIVORS = Path("mutants/survivors.txt")

FOUND = ("killed", "timeout", "segfault")
"""A test has failed, has not come to its end, or has brought Python down: the mutant was noticed."""

Results = dict[str, dict[str, str]]
"""What became of each mutant: by module, then by the mutant's name."""


def read(lines: list[str]) -> Results:
    """What ``mutmut results --all true`` prints: ``name: what became of it``.

    A module of which no mutant was run is left out: it was not asked for. Of the others, all count.
    """
    results: Results = {}
    for line in lines:
        mutant, colon, fate = line.strip().partition(": ")
        if colon:
            module = mutant.removeprefix("asyncdata.").rpartition(".")[0]
            results.setdefault(module, {})[mutant] = fate
    return {module: mutants for module, mutants in results.items() if set(mutants.values()) != {"not checked"}}


def percent(fates: Counter[str]) -> float:
    """How many mutants of a hundred were noticed."""
    return 100 * sum(fates[fate] for fate in FOUND) / max(1, fates.total())


def table(results: Results) -> str:
    """A line for each module and one for all. What is neither killed nor timed out has survived."""
    rows = {module: Counter(mutants.values()) for module, mutants in sorted(results.items())}
    rows["all"] = sum(rows.values(), Counter())
    lines = [f"{'module':<28} {'mutants':>8} {'killed':>8} {'survived':>8} {'timeouts':>8} {'score':>8}"]
    for module, fates in rows.items():
        num_left = fates.total() - sum(fates[fate] for fate in FOUND)
        killed = fates["killed"] + fates["segfault"]
        counts = f"{fates.total():>8,} {killed:>8,} {num_left:>8,} {fates['timeout']:>8,}"
        lines.append(f"{module:<28} {counts} {percent(fates):>6.1f} %")
    return "\n".join(lines)


def _mutmut(*arguments: str) -> str:
    """What a command of mutmut prints. Called, not started: there may be hundreds of survivors to show."""
    from mutmut.__main__ import cli  # where it is installed, and not when a test imports this file

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cli.main(list(arguments), standalone_mode=False)
    return output.getvalue()


def main() -> int:
    """0 if enough mutants were noticed, else 1."""
    results = read(_mutmut("results", "--all", "true").splitlines())
    survivors = [name for mutants in results.values() for name, fate in mutants.items() if fate not in FOUND]
    SURVIVORS.write_text("\n".join(_mutmut("show", name) for name in survivors), encoding="utf-8")
    score = percent(sum((Counter(mutants.values()) for mutants in results.values()), Counter()))
    sys.stdout.write(f"{table(results)}\nsurvivors: {SURVIVORS}\n")
    return 0 if score >= LEAST_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
