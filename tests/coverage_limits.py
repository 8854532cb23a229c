"""How much of the package the tests reach, level by level, and whether that is enough: run after ``coverage combine``.

A module that nothing imports counts in full. Ends with status 1 below a limit.
"""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

from coverage import Coverage

from tests.unit.test_architecture import LEVELS, PACKAGE

if TYPE_CHECKING:
    from pathlib import Path

OVERALL = 95.0
CORE, CORE_LEVEL = 100.0, 1
"""The values that everything else is built of: levels 0 and 1."""


def level_of(path: Path) -> int:
    """The level of a file of the package: its own, or its folder's."""
    room = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return LEVELS["asyncdata" if room == "__init__" else room]


def percentages() -> tuple[float, dict[int, float]]:
    """Lines and branches that were reached, of all that there are: overall, and of each level."""
    files = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        files[level_of(path)].append(str(path))
    measured = Coverage()
    measured.load()
    measured.get_data().touch_files(path for paths in files.values() for path in paths)
    levels = {level: measured.report(include=files[level], file=io.StringIO()) for level in sorted(files)}
    return measured.report(file=sys.stdout), levels


def shortfalls(overall: float, levels: dict[int, float]) -> list[str]:
    """What is below its limit."""
    found = [f"overall {overall:.2f} %, less than {OVERALL:g}"] if overall < OVERALL else []
    return found + [
        f"level {level} {reached:.2f} %, less than {CORE:g}"
        for level, reached in levels.items()
        if level <= CORE_LEVEL and reached < CORE
    ]


def main() -> int:
    """The table, and the verdict as an exit status."""
    overall, levels = percentages()
    for level, reached in levels.items():
        print(f"level {level:>2} {reached:7.2f} %")  # noqa: T201 - what it is for
    print(f"overall  {overall:7.2f} %")  # noqa: T201
    short = shortfalls(overall, levels)
    print("\n".join(short))  # noqa: T201
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
