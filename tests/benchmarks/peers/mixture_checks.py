"""What a mixture of data sets can do, found by running it: the checks, and what an adapter of a library gives them.

Run by a peer's own Python, so it imports nothing but the standard library. ``python mixture_checks.py MODULE`` prints
one JSON object. The table is made by ``tests.benchmarks.mixture_table``.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS = 1000
WEIGHTS = {"chat": 5, "code": 3, "math": 2}
OTHER_WEIGHTS = {"chat": 1, "code": 1, "math": 8}
FEW_ROWS = 200
STOPPED_AT = 137
"""Samples before a resume: in the middle of an epoch, and at no multiple of anything."""


class Setup(NamedTuple):
    """What is mixed, and how.

    :ivar files: of each part, one JSON object with ``part``, ``row`` and ``tokens`` a line.
    :ivar end: what happens when a part is over: one of the adapter's ``ends``.
    """

    files: dict[str, str]
    weights: dict[str, int]
    end: str
    by_tokens: bool = False


class Rows(Protocol):
    """An open mixture: an iterator of ``(part, row)``."""

    def __next__(self) -> tuple[str, int]:
        """The next sample."""
        ...

    def state(self) -> Any:
        """What a checkpoint would hold."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from a checkpoint."""
        ...


class Library(Protocol):
    """A library, as its documentation recommends to mix with it.

    :ivar ends: what can happen when a part is over; the first is used where nothing must end.
    :ivar unable: cells that no setting of it can change, with the words for the table.
    """

    name: str
    version: str
    ends: tuple[str, ...]
    unable: dict[str, str]

    def open(self, setup: Setup) -> Rows:
        """Open the mixture."""
        ...


class Bench:
    """A library, and the files that its mixtures are made of."""

    def __init__(self, library: Library, folder: Path) -> None:
        self.library = library
        self._folder = folder

    def parts(self, names: Any, num_rows: int = ROWS, tokens: dict[str, int] | None = None) -> dict[str, str]:
        files = {}
        for name in names:
            path = self._folder / f"{name}_{num_rows}_{(tokens or {}).get(name, 1)}.jsonl"
            if not path.exists():
                rows = ({"part": name, "row": n, "tokens": (tokens or {}).get(name, 1)} for n in range(num_rows))
                path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            files[name] = str(path)
        return files

    def open(self, weights: dict[str, int], files: dict[str, str] | None = None, **how: Any) -> Rows:
        files = files or self.parts(weights)
        return self.library.open(Setup(files, weights, **{"end": self.library.ends[0], **how}))

    def take(self, rows: Rows, number: int) -> list[tuple[str, int]]:
        return list(islice(_iterated(rows), number))


def _iterated(rows: Rows) -> Iterator[tuple[str, int]]:
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return


def _of_parts(samples: list[tuple[str, int]]) -> dict[str, list[int]]:
    return {part: [row for name, row in samples if name == part] for part in sorted({name for name, _ in samples})}


def counts(bench: Bench) -> str:
    """How far a part's number of samples is from its share, at most, at any time."""
    samples, seen = bench.take(bench.open(WEIGHTS), ROWS), Counter[str]()
    total, worst = sum(WEIGHTS.values()), Fraction(0)
    for number, (part, _) in enumerate(samples, 1):
        seen[part] += 1
        worst = max(worst, *(abs(seen[name] - Fraction(weight * number, total)) for name, weight in WEIGHTS.items()))
    at_end = max(abs(seen[name] - Fraction(weight * ROWS, total)) for name, weight in WEIGHTS.items())
    return f"{float(worst):.1f} samples; {float(at_end):.1f} after {ROWS}"


def moved(bench: Bench) -> str:
    """How many parts get another order when a part is added before them, and when one is removed."""
    before = _of_parts(bench.take(bench.open(WEIGHTS), ROWS))
    changes = {"added": {"bench": 2, **WEIGHTS}, "removed": {name: WEIGHTS[name] for name in ("code", "math")}}
    found = []
    for what, weights in changes.items():
        after = _of_parts(bench.take(bench.open(weights), ROWS))
        others = sorted(set(before) & set(after))
        shared = {name: min(len(before[name]), len(after[name]), 100) for name in others}
        count = sum(before[name][: shared[name]] != after[name][: shared[name]] for name in others)
        found.append(f"{what}: {count} of {len(others)}")
    return "; ".join(found)


def resumed(bench: Bench) -> str:
    """Whether a resume in the middle of an epoch yields the same samples as no resume."""
    rows = bench.open(WEIGHTS)
    bench.take(rows, STOPPED_AT)
    state = rows.state()
    wanted, again = bench.take(rows, 300), bench.open(WEIGHTS)
    again.restore(state)
    got = bench.take(again, 300)
    if got == wanted:
        return "exact"

    lost = sum((Counter(wanted) - Counter(got)).values())
    return f"{lost} of 300 samples are others" if lost else "the same samples in another order"


def other_weights(bench: Bench) -> str:
    """Whether each part continues where it was, and the new weights hold, after a resume with other weights.

    Where rows have another order afterwards, it counts which rows of an epoch of the part ``math`` did not come in it.
    """
    files = bench.parts(WEIGHTS, FEW_ROWS)
    rows = bench.open(WEIGHTS, files)
    before = bench.take(rows, STOPPED_AT)
    state = rows.state()
    wanted = _of_parts(bench.take(rows, 10 * FEW_ROWS))
    again = bench.open(OTHER_WEIGHTS, files)
    again.restore(state)
    samples = bench.take(again, 3 * FEW_ROWS)
    got, num_new = _of_parts(samples), sum(part == "math" for part, _ in samples[-100:])
    words = "the new weights hold" if num_new > 50 else "the old weights stay"
    if all(mine == theirs for part in got for mine, theirs in zip(got[part], wanted[part], strict=False)):
        return f"each part continues; {words}"

    first = _of_parts(before)["math"]
    missed, usual = (FEW_ROWS - len(set((first + part["math"])[:FEW_ROWS])) for part in (got, wanted))
    return f"{missed} of {FEW_ROWS} rows missed ({usual} without a resume); {words}"


def tokens(bench: Bench) -> str:
    """How far the shares of tokens are from equal weights, where samples have 10, 20 and 70 tokens."""
    lengths, weights = {"chat": 10, "code": 20, "math": 70}, dict.fromkeys(WEIGHTS, 1)
    rows = bench.open(weights, bench.parts(weights, tokens=lengths), by_tokens=True)
    seen = Counter(part for part, _ in bench.take(rows, ROWS))
    total = sum(seen[part] * lengths[part] for part in lengths)
    worst = max(abs(seen[part] * lengths[part] / total - 1 / 3) for part in lengths)
    return f"yes: {100 * worst:.2f} % from the shares"


def ends(bench: Bench) -> str:
    """What the mixture does when its small part is over."""
    files = {**bench.parts(["small"], 10), **bench.parts(["large"], 100)}
    found = []
    for end in bench.library.ends:
        samples = bench.take(bench.open({"large": 1, "small": 1}, files, end=end), 400)
        small = sum(part == "small" for part, _ in samples)
        found.append(f"`{end}`: {small} small, {'endless' if len(samples) == 400 else f'{len(samples)} in all'}")
    return "; ".join(found)


def size(bench: Bench) -> str:
    """Characters of the state."""
    rows = bench.open(WEIGHTS)
    bench.take(rows, STOPPED_AT)
    return f"{len(json.dumps(rows.state(), default=repr)):,}"


CHECKS: dict[str, Callable[[Bench], str]] = {
    "counts": counts,
    "moved": moved,
    "resumed": resumed,
    "other_weights": other_weights,
    "tokens": tokens,
    "ends": ends,
    "size": size,
}


def main(module: str) -> None:
    """Run all checks; what a library raises is in its cell."""
    library: Library = importlib.import_module(module).LIBRARY
    cells = dict(library.unable)
    with tempfile.TemporaryDirectory() as folder:
        for name, check in CHECKS.items():
            if name in cells:
                continue

            try:
                cells[name] = check(Bench(library, Path(folder)))
            except Exception as error:
                words = str(error).strip().splitlines()
                cells[name] = f"{type(error).__name__}: {words[0][:100] if words else ''}"
    sys.stdout.write(json.dumps({"name": library.name, "version": library.version, "cells": cells}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
