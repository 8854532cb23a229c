"""Prints the table of a run of the fault tests again: ``python -m tests.faults.table FILE [FILE ...]``.

Several files, as of several Pythons or machines, are added up.
"""

import sys
from pathlib import Path

import msgspec

from tests.support.figures import Figure, table


def figures_of(path: Path) -> list[Figure]:
    return msgspec.convert(msgspec.json.decode(path.read_bytes())["figures"], list[Figure])


if __name__ == "__main__":
    sys.stdout.write(table([figure for path in sys.argv[1:] for figure in figures_of(Path(path))]) + "\n")
