"""``python -m asyncdata.testing package.module:Adapter``: runs the checks on a loader.

Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING

from asyncdata.core.import_path import resolve_path
from asyncdata.testing.checks import CHECKS, run_checks

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("main",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and print the report; the exit status."""
    about = "Run the checks on a loader. Exit status 1: a check failed."
    parser = argparse.ArgumentParser(prog="python -m asyncdata.testing", description=about)
    parser.add_argument("adapter", metavar="MODULE:NAME", help="the class of the loader's adapter")
    parser.add_argument("--check", action="append", choices=list(CHECKS), help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr):  # loaders may print
        report = run_checks(resolve_path(args.adapter)(), args.check)
    sys.stdout.write((json.dumps(report.to_dict()) if args.json else report.table()) + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
