"""The figures R1 to R14 of reliability: what each has to be, and what the fault tests have found it to be.

Tests :func:`record` counts. A count of bad things must be 0, or every test that finds one fails; what takes time or
memory is reported and not asserted, as the machine may be busy. ``tests/conftest.py`` gathers what the workers of xdist
have found, writes all to a file and ends the run with the table; ``python -m tests.support.figures FILE...`` prints it.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

__all__ = ("TARGETS", "Figure", "Target", "record", "recorded", "table", "total")


class Target(msgspec.Struct, frozen=True):
    """What a figure has to be.

    :ivar title: what is measured.
    :ivar at_least: how much must have been tried, by the name of the count.
    :ivar at_most: what must not be exceeded.
    """

    title: str
    at_least: dict[str, float] = {}
    at_most: dict[str, float] = {}


class Figure(msgspec.Struct, frozen=True):
    """What one test has found.

    :ivar name: ``R1`` and so on.
    :ivar of: what it was measured on.
    """

    name: str
    of: str
    counts: dict[str, float]


_IN_ORDER: dict[str, float] = {"lost": 0, "repeated": 0, "out_of_order": 0}

TARGETS = {
    "R1": Target("kill -9 and SIGSTOP of random workers", {"kills": 200}, _IN_ORDER),
    "RAY": Target(
        "kill -9 of actors on a Ray cluster, and lost nodes", {"kills": 60, "nodes": 10}, {**_IN_ORDER, "left": 0}
    ),
    "R2": Target("SIGKILL of the whole process, and resume", {"kills": 200}, _IN_ORDER),
    "R3": Target("one order: workers x dp x buffer x batch x loop", {"settings": 324}, {"other_digests": 0}),
    "R4": Target("a snapshot's writer dies at each of its calls", {"deaths": 1000}, {"unreadable": 0, "too_old": 0}),
    "R5": Target(
        "damaged and foreign files given to restore",
        {"files": 10_000},
        {"accepted": 0, "other_errors": 0, "code_runs": 0, "peak_mb": 50},
    ),
    "R7": Target("SIGKILL of the trainer; its workers are gone", {"kills": 100}, {"left": 0, "gone_s": 2}),
    "R8": Target(
        "cancelled at each await of each public coroutine",
        {"cancels": 1000},
        {"lost": 0, "repeated": 0, "leaked_tasks": 0, "hangs": 0},
    ),
    "R9": Target("KeyboardInterrupt and timeouts in a call", {"interrupts": 1000}, _IN_ORDER),
    "R10": Target(
        "a long run: memory and everything that can leak",
        {"samples": 1_000_000},
        {"rss_mb_per_100k": 1, "fds": 0, "threads": 0, "children": 0, "shared_memory": 0, "temporary_files": 0},
    ),
    "R11": Target("a program ends, in whatever way", {"exits": 100}, {"hangs": 0, "left": 0, "exit_s": 1}),
    "R12": Target("restore at position 10 M; a snapshot's pause", {"position": 1e7}, {"restore_s": 1, "pause_ms": 5}),
    "R13": Target(
        "a hang is an error that names it; a row is tried twice", {"hangs": 3}, {"beyond_timeout_s": 1, "unnamed": 0}
    ),
    "R14": Target("steps of state machines, each beside its model", {"steps": 1_000_000}, {"counterexamples": 0}),
    "WAKE": Target(
        "restarts in random places, with delays at every await and every callback",
        {"restarts": 1000},
        {"out_of_order": 0, "hangs": 0, "left": 0},
    ),
    "IO": Target(
        "reads that fail, come short, late or changed", {"faults": 500}, {"lost": 0, "repeated": 0, "unnamed": 0}
    ),
    "STORE": Target(
        "requests to a store that fail, are cut, or are answered with other bytes",
        {"faults": 500, "kills": 20},
        {"lost": 0, "repeated": 0, "unnamed": 0},
    ),
}
_WORST = ("_mb_per_100k", "_ms", "_mb", "_s", "position")
"""Counts whose names end so are not added up: the largest of them counts."""

_recorded: list[Figure] = []


def record(name: str, of: str, **counts: float) -> None:
    """Add what a test has found."""
    assert name in TARGETS, name
    _recorded.append(Figure(name, of, counts))


def recorded() -> list[Figure]:
    """All that was found in this process."""
    return list(_recorded)


def total(figures: Iterable[Figure]) -> dict[str, dict[str, float]]:
    """The counts of each figure: added up, or the worst of them."""
    totals: dict[str, dict[str, float]] = {}
    for figure in figures:
        counts = totals.setdefault(figure.name, {})
        for name, value in figure.counts.items():
            is_worst = name.endswith(_WORST)
            counts[name] = max(counts.get(name, value), value) if is_worst else counts.get(name, 0) + value
    return totals


def table(figures: Iterable[Figure]) -> str:
    """Each figure with its target, what was reached, and whether that is enough."""
    totals = total(figures)
    lines = []
    for name, target in TARGETS.items():
        counts = totals.get(name, {})
        missed = [count for count, most in target.at_most.items() if counts.get(count, 0) > most]
        few = [count for count, least in target.at_least.items() if counts.get(count, 0) < least]
        verdict = f"MISSED, {missed}" if missed else f"so far, with few {few}" if few else "reached"
        wanted = [f">= {least:,.15g} {count}" for count, least in target.at_least.items()]
        wanted += [f"<= {most:,.15g} {count}" for count, most in target.at_most.items()]
        reached = [f"{value:,.{3 if value % 1 else 15}g} {count}" for count, value in counts.items()]
        lines.append(f"{name:<4} {target.title}: {verdict if counts else 'not measured'}")
        lines += [f"       target   {', '.join(wanted)}", f"       reached  {', '.join(reached) or '-'}"]
    return "\n".join(lines)


if __name__ == "__main__":
    found = [msgspec.json.decode(Path(path).read_bytes())["figures"] for path in sys.argv[1:]]
    sys.stdout.write(table(msgspec.convert(sum(found, []), list[Figure])) + "\n")
