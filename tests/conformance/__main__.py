"""``python -m tests.conformance package.module:Adapter``: runs the checks on a loader."""

import argparse
import contextlib
import sys

from tests.conformance.checks import CHECKS, run_checks
from tests.conformance.lab import named


def main(argv=None):
    """Run the checks and print the report; the exit status."""
    about = "Run the checks on a loader. Exit status 1: a check failed."
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=about)
    parser.add_argument("adapter", metavar="MODULE:NAME", help="the class of the loader's adapter")
    parser.add_argument("--check", action="append", choices=list(CHECKS), help="only this one; may be repeated")
    args = parser.parse_args(argv)
    with contextlib.redirect_stdout(sys.stderr):  # loaders may print
        report = run_checks(named(args.adapter)(), args.check)
    sys.stdout.write(f"{report.table()}\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
