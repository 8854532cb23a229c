"""A conformance kit for resumable loaders: checks a loader for the sixteen resume bugs that others had.

::

    from asyncdata.testing import run_checks
    from asyncdata.testing.ours import AsyncData

    print(run_checks(AsyncData()).table())

It needs only Python, and no test runner. ``python -m asyncdata.testing package.module:Adapter`` does the same.
"""

from __future__ import annotations

from asyncdata.testing.checks import CHECKS, Check, Outcome, Report, run_checks
from asyncdata.testing.lab import FEATURES, Adapter, Knobs, Lab, Loader, NotApplicableError, ReportingLoader, Rows, Seen

__all__ = (
    "CHECKS",
    "FEATURES",
    "Adapter",
    "Check",
    "Knobs",
    "Lab",
    "Loader",
    "NotApplicableError",
    "Outcome",
    "Report",
    "ReportingLoader",
    "Rows",
    "Seen",
    "run_checks",
)
