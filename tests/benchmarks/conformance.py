"""The conformance kit, run on ours and on the peers: the tables of docs/reference/testing.md.

``python -m tests.benchmarks.conformance --peers DIR`` makes the peers' environments where they are not there yet, and
prints the tables. Each check runs in a process of its own, so that one that hangs is a failure and not the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.environments import AbsentError, environment
from tests.benchmarks.watching import ROOT
from tests.conformance.checks import CHECKS

PEERS = Path(__file__).parent / "peers"
LIMIT_S = 180
SYMBOLS = {"passed": "passed", "failed": "**failed**", "not applicable": "-"}
SUBJECTS = {
    "tests.conformance.ours:AsyncData": "",
    "conformance_hf:HfStreaming": "hf",
    "conformance_torchdata:StreamedStateful": "torchdata",
    "conformance_torchdata:IndexedStateful": "torchdata",
    "conformance_grain:Grain": "grain",
}
"""The adapters of loaders that are put through the checks, and the environments of their peers."""


def report_of(adapter: str, python: str) -> dict[str, Any]:
    """The report of all checks, as ``Report.to_dict`` gives it."""
    found = [_check(adapter, python, check) for check in CHECKS]
    named = next((one for one in found if one["name"]), found[0])
    return {**named, "outcomes": [outcome for one in found for outcome in one["outcomes"]]}


def _check(adapter: str, python: str, check: str) -> dict[str, Any]:
    command = [python, "-m", "tests.conformance", adapter, "--check", check, "--json"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    how: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{PEERS}"} | offline, "cwd": PEERS}
    print(f"{adapter} {check}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, **how)
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        detail = f"no answer in {LIMIT_S} s"
    except (IndexError, ValueError):
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        detail = f"its process ended with status {done.returncode}: {said[-1].strip()}"
    else:
        return report

    return {"name": "", "version": "", "outcomes": [{"check": check, "result": "failed", "detail": detail}]}


def tables(reports: list[dict[str, Any]]) -> str:
    """As Markdown: who passes what, and what came where one failed or could not be asked."""
    head = ["check", *(report["name"] for report in reports)]
    lines = [_row(head), "|---" * len(head) + "|"]
    for number, check in enumerate(CHECKS):
        lines.append(_row([f"`{check}`", *(SYMBOLS[report["outcomes"][number]["result"]] for report in reports)]))
    lines += ["", "Versions:", "", *(f"- {report['name']}: {report['version']}" for report in reports)]
    lines += ["", "| loader | check | what came |", "|---|---|---|"]
    for report in reports:
        for outcome in report["outcomes"]:
            if outcome["result"] != "passed":
                words = ("" if outcome["result"] == "failed" else "not applicable: ") + outcome["detail"]
                lines.append(_row([report["name"], f"`{outcome['check']}`", words]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="where their environments are kept")
    args = parser.parse_args()
    reports = []
    for adapter, home in SUBJECTS.items():
        try:
            python = environment(home, args.peers) if home else sys.executable
        except AbsentError as reason:
            print(f"{adapter} is absent: {reason}", file=sys.stderr, flush=True)
        else:
            reports.append(report_of(adapter, python))
    print(tables(reports))


if __name__ == "__main__":
    main()
