"""The suite's results as tables for the docs: ``python -m tests.benchmarks.table results.json``."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.contestants import OURS, PEERS
from tests.benchmarks.framework import Row

COLUMNS = {
    "first_batch_s": ("first batch, s", ",.2f"),
    "steady_rows_per_s": ("steady, rows/s", ",.0f"),
    "end_to_end_rows_per_s": ("end to end, rows/s", ",.0f"),
    "peak_pss_mb": ("memory, MB", ",.0f"),
}


def goals_table(content: dict[str, Any]) -> str:
    """Every row that has a goal, and every one that was not measured."""
    rows = [Row(**one) for figure in content["figures"].values() for one in figure["rows"]]
    shown = [
        f"{row.code} | {row.what} | {row.goal} | {row.result} | {row.verdict}" for row in rows if row.goal or row.note
    ]
    return "\n".join(["| | what | goal | result | |", "|---|---|---|---|---|", *(f"| {row} |" for row in shown)])


def contest_table(results: dict[str, dict[str, list[float]]]) -> str:
    """Medians of everyone who went through a file."""
    titles = [title for title, _ in COLUMNS.values()]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, found in results.items():
        cells = [format(statistics.median(found[key]), form) for key, (_, form) in COLUMNS.items()]
        lines.append(f"| {_label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _label(name: str) -> str:
    kind, _, backend = name.partition(" ")
    return PEERS[name][0] if name in PEERS else f"asyncdata, {backend or 'hf'}" if kind == OURS else name


def main(path: str) -> None:
    content = json.loads(Path(path).read_text())
    where = f"{content['cpus']} CPUs, Python {content['python']}, asyncdata {content['asyncdata']}"
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    print(f"{where}; {versions}\n\n{goals_table(content)}")
    data = {code: figure.get("data", {}) for code, figure in content["figures"].items()}
    if contest := data.get("S3", {}).get("contest"):
        print(f"\n{contest_table(contest)}")
    for backend, found in data.get("S4", {}).items():
        for size, results in found.items():
            print(f"\n{backend}, {size} input\n\n{contest_table(results)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
