"""Ends a run of the fault tests with the table of what was reached; ASYNCDATA_FAULT_FIGURES names a file for it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncdata import __version__
from tests.support.figures import recorded, table

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table, and its JSON where that is asked for."""
    figures = recorded()
    if not figures:
        return

    terminalreporter.section("figures")
    terminalreporter.write_line(table(figures))
    path = os.environ.get("ASYNCDATA_FAULT_FIGURES")
    if path:
        run = {
            "asyncdata": __version__,
            "python": platform.python_version(),
            "rounds": os.environ.get("ASYNCDATA_FAULT_ROUNDS") or "quick",
            "figures": figures,
        }
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
        terminalreporter.write_line(f"written to {path}")
