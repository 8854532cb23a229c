"""What mixtures of data sets can do, ours and the peers': the first table of docs/explanation/mixtures.md.

``python -m tests.benchmarks.mixture_table --python PYTHON`` runs the peers' checks with a Python in which they are
installed; ``--torchtitan DIR`` names a checkout of torchtitan. A peer that cannot be imported is left out, by name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).parent / "peers"
LIMIT_S = 600

OURS = "mixture_asyncdata"
THEIRS = ("mixture_hf", "mixture_grain", "mixture_torchtitan", "mixture_energon", "mixture_mosaic")
LINES = {
    "counts": "a part's count from its share, at most",
    "moved": "parts whose order moves when a part is",
    "resumed": "resume in the middle of an epoch",
    "other_weights": "resume with other weights",
    "tokens": "shares of tokens",
    "ends": "a part of 10 rows is over",
    "size": "characters of the state",
}


def checked(module: str, python: str, paths: list[str]) -> dict[str, Any] | str:
    """The cells of a library; a text if it could not be run."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PEERS), str(ROOT), *paths]), "HF_HUB_OFFLINE": "1"}
    command = [python, str(PEERS / "mixture_checks.py"), module]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        found: dict[str, Any] = json.loads(
            next(line for line in done.stdout.splitlines() if line.startswith('{"name"'))
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {LIMIT_S} s"
    except StopIteration:
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-1]

    return found


def table(columns: list[dict[str, Any]]) -> str:
    """As Markdown, with the versions below."""
    rows = [["", *(column["name"] for column in columns)]]
    rows += [[words, *(column["cells"][check] for column in columns)] for check, words in LINES.items()]
    lines = [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    lines.insert(1, "|---" * (len(columns) + 1) + "|")
    return "\n".join([*lines, "", f"Versions: {', '.join(_version(column) for column in columns)}.", ""])


def _version(column: dict[str, Any]) -> str:
    is_ours = column["name"] == "asyncdata"
    return f"asyncdata {column['version']}" if is_ours else str(column["version"])


def main() -> None:
    """Run all that can be run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", metavar="PYTHON", help="a Python in which the peers are installed")
    parser.add_argument("--torchtitan", metavar="DIR", help="a checkout of torchtitan")
    args = parser.parse_args()
    columns = []
    for module in (OURS, *(THEIRS if args.python else ())):
        found = checked(module, sys.executable if module == OURS else args.python, [args.torchtitan or ""])
        if isinstance(found, str):
            print(f"{module} could not be run: {found}", file=sys.stderr)
        else:
            columns.append(found)
    print(table(columns))


if __name__ == "__main__":
    main()
