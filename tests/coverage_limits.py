"""How much of the package tests reach, folder by folder, and whether that is enough: run after ``coverage combine``.

A module that nothing imports counts in full. Ends with status 1 below a limit.
"""

import io
import sys
from collections import defaultdict
from pathlib import Path

from coverage import Coverage

from tests.unit.test_architecture import FILES, FOLDERS, PACKAGE

OVERALL = 95.0
CORE, CORE_FOLDERS = 99.5, ("core", "order")
"""The values that everything else is built of. Short of 100: a race, and ends that no process records."""


def folder_of(path: Path) -> str:
    """The folder of a file of the package, as the layering test knows it."""
    folder = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "asyncdata" if folder == "__init__" else FILES.get(folder, folder)


def percentages() -> tuple[float, dict[str, float]]:
    """Lines and branches that were reached, of all that there are: overall, and of each folder."""
    files = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        files[folder_of(path)].append(str(path))
    measured = Coverage()
    measured.load()
    measured.get_data().touch_files(path for paths in files.values() for path in paths)
    folders = {folder: measured.report(include=files[folder], file=io.StringIO()) for folder in FOLDERS}
    return measured.report(file=sys.stdout), folders


def shortfalls(overall: float, folders: dict[str, float]) -> list[str]:
    """What is below its limit."""
    limits = {"overall": (overall, OVERALL)} | {name: (folders[name], CORE) for name in CORE_FOLDERS}
    return [f"{name} {found:.2f} %, less than {least:g}" for name, (found, least) in limits.items() if found < least]


def main() -> int:
    """The table, and the verdict as an exit status."""
    overall, folders = percentages()
    for folder, reached in {**folders, "overall": overall}.items():
        print(f"{folder:<12} {reached:7.2f} %")  # noqa: T201 - what it is for
    short = shortfalls(overall, folders)
    print("\n".join(short))  # noqa: T201
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
