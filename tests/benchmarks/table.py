"""The suite's results as tables for the docs: ``python -m tests.benchmarks.table results.json``."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from tests.benchmarks.contestants import OURS, PEERS
from tests.benchmarks.framework import Row, show

__all__ = ("contest_table", "goals_table")

COLUMNS = {
    "first_batch_s": "first batch, s",
    "steady_rows_per_s": "steady, rows/s",
    "end_to_end_rows_per_s": "end to end, rows/s",
    "peak_pss_mb": "memory, MB",
}


def goals_table(content: dict[str, Any]) -> str:
    """Every row that has a goal, and every one that was not measured."""
    lines = ["| | what | goal | result | |", "|---|---|---|---|---|"]
    for figure in content["figures"].values():
        for row in (Row(**one) for one in figure["rows"]):
            if row.goal or row.note:
                verdict = {True: "reached", False: "missed", None: ""}[row.is_reached]
                result = f"{show(row.values)} {row.unit}".strip() if row.values else row.note
                lines.append(f"| {row.code} | {row.what} | {row.goal} | {result} | {verdict} |")
    return "\n".join(lines)


def contest_table(results: dict[str, dict[str, list[float]]]) -> str:
    """Medians of everyone who went through a file."""
    lines = [f"| | {' | '.join(COLUMNS.values())} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, found in results.items():
        cells = [f"{statistics.median(found[key]):,.{_digits(key)}f}" for key in COLUMNS]
        lines.append(f"| {_label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _digits(key: str) -> int:
    return 2 if key == "first_batch_s" else 0


def _label(name: str) -> str:
    kind, _, backend = name.partition(" ")
    return PEERS[name][0] if name in PEERS else f"asyncdata, {backend or 'hf'}" if kind == OURS else name


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="what the suite wrote")
    content = json.loads(parser.parse_args().results.read_text())
    where = f"{content['cpus']} CPUs, Python {content['python']}, asyncdata {content['asyncdata']}"
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    print(f"{where}; {versions}\n\n{goals_table(content)}")
    if contest := content["figures"].get("S3", {}).get("data", {}).get("contest"):
        print(f"\n{contest_table(contest)}")
    for backend, found in content["figures"].get("S4", {}).get("data", {}).items():
        for size, results in found.items():
            print(f"\n{backend}, {size} input\n\n{contest_table(results)}")


if __name__ == "__main__":
    main()
