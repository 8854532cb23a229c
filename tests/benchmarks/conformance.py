"""The conformance kit, run on ours and on the peers: the tables of docs/explanation/resume-conformance.md.

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
from typing import Any, NamedTuple

from asyncdata.testing import CHECKS
from tests.benchmarks.peers.environments import AbsentError, environment

ROOT = Path(__file__).parents[2]
PEERS = Path(__file__).parent / "peers"
LIMIT_S = 180
SYMBOLS = {"passed": "passed", "failed": "**failed**", "not applicable": "-"}


class Subject(NamedTuple):
    """A loader that is put through the checks.

    :ivar environment: of its peer; empty for ours.
    """

    adapter: str
    environment: str = ""


SUBJECTS = (
    Subject("asyncdata.testing.ours:AsyncData"),
    Subject("conformance_hf:HfStreaming", "hf"),
    Subject("conformance_torchdata:StreamedStateful", "torchdata"),
    Subject("conformance_torchdata:IndexedStateful", "torchdata"),
    Subject("conformance_grain:Grain", "grain"),
)


def report_of(subject: Subject, python: str) -> dict[str, Any]:
    """The report of all checks, as ``Report.to_dict`` gives it."""
    found: dict[str, Any] = {}
    for check in CHECKS:
        one = _check(subject, python, check)
        outcomes = [*found.get("outcomes", []), *one["outcomes"]]
        found = {"name": found.get("name") or one["name"], "version": found.get("version") or one["version"]}
        found["outcomes"] = outcomes
    return found


def _check(subject: Subject, python: str, check: str) -> dict[str, Any]:
    command = [python, "-m", "asyncdata.testing", subject.adapter, "--check", check, "--json"]
    paths = os.pathsep.join([str(ROOT), str(PEERS)])
    environ = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    print(f"{subject.adapter} {check}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, env=environ, cwd=PEERS, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return _failed(check, f"no answer in {LIMIT_S} s")
    except (IndexError, ValueError):
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        return _failed(check, f"its process ended with status {done.returncode}: {said[-1].strip()}")

    return report


def _failed(check: str, detail: str) -> dict[str, Any]:
    return {"name": "", "version": "", "outcomes": [{"check": check, "result": "failed", "detail": detail}]}


def tables(reports: list[dict[str, Any]]) -> str:
    """As Markdown: who passes what, and what came where one failed or could not be asked."""
    head = ["check", *(report["name"] for report in reports)]
    lines = [_row(head), "|---" * len(head) + "|"]
    for number, check in enumerate(CHECKS):
        results = [SYMBOLS[report["outcomes"][number]["result"]] for report in reports]
        lines.append(_row([f"`{check}`", *results]))
    lines += ["", "Versions:", ""]
    lines += [f"- {report['name']}: {report['version']}" for report in reports]
    lines += ["", "| loader | check | what came |", "|---|---|---|"]
    for report in reports:
        for outcome in report["outcomes"]:
            if outcome["result"] != "passed":
                is_asked = outcome["result"] == "failed"
                words = outcome["detail"] if is_asked else f"not applicable: {outcome['detail']}"
                lines.append(_row([report["name"], f"`{outcome['check']}`", words]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main() -> None:
    """Run all, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, required=True, metavar="DIR", help="where their environments are kept")
    args = parser.parse_args()
    reports = []
    for subject in SUBJECTS:
        try:
            python = environment(subject.environment, args.peers) if subject.environment else sys.executable
        except AbsentError as reason:
            print(f"{subject.adapter} is absent: {reason}", file=sys.stderr, flush=True)
            continue

        reports.append(report_of(subject, python))
    print(tables(reports))


if __name__ == "__main__":
    main()
