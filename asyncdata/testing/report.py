"""Runs the checks, and reports their results."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.core.errors import ConfigError
from asyncdata.testing.checks import CHECKS
from asyncdata.testing.lab import Lab, NotApplicableError, raised

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncdata.testing.adapters import Adapter
    from asyncdata.testing.checks import Check

__all__ = ("FAILED", "NOT_APPLICABLE", "PASSED", "Outcome", "Report", "run_checks")

PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"


class Outcome(NamedTuple):
    """The result of a check.

    :ivar check: its name.
    :ivar result: ``passed``, ``failed`` or ``not applicable``.
    :ivar detail: the first difference, or why it is not applicable.
    """

    check: str
    result: str
    detail: str = ""


class Report(NamedTuple):
    """The results of all checks.

    :ivar name: of the loader.
    :ivar version: of the loader.
    """

    name: str
    version: str
    outcomes: list[Outcome]

    @property
    def failures(self) -> list[Outcome]:
        """The checks that failed."""
        return [outcome for outcome in self.outcomes if outcome.result == FAILED]

    def count(self, result: str) -> int:
        """The number of checks with this result."""
        return sum(outcome.result == result for outcome in self.outcomes)

    def table(self) -> str:
        """For a terminal: a line for each check."""
        width = max((len(outcome.check) for outcome in self.outcomes), default=0)
        lines = [f"{one.check:<{width}}  {one.result:<14}  {one.detail}".rstrip() for one in self.outcomes]
        counts = ", ".join(f"{self.count(result)} {result}" for result in (PASSED, FAILED, NOT_APPLICABLE))
        return "\n".join([f"{self.name} {self.version}: {counts}", *lines])

    def to_dict(self) -> dict[str, Any]:
        """As plain builtins that JSON has."""
        outcomes = [outcome._asdict() for outcome in self.outcomes]
        return {"name": self.name, "version": self.version, "outcomes": outcomes}


def run_checks(adapter: Adapter, checks: Iterable[str] | None = None) -> Report:
    """Run the checks on a loader.

    :param checks: their names, in the order in which they are run; None: all.
    :raises ConfigError: for an unknown check.
    """
    names = list(CHECKS if checks is None else checks)
    for name in names:
        if name not in CHECKS:
            raise ConfigError(f"there is no check {name!r}; there are {', '.join(CHECKS)}")

    return Report(adapter.name, adapter.version, [_outcome(CHECKS[name], adapter) for name in names])


def _outcome(check: Check, adapter: Adapter) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="asyncdata-testing-") as folder:
        try:
            problem = check.body(Lab(adapter, folder))
        except NotApplicableError as reason:
            return Outcome(check.name, NOT_APPLICABLE, str(reason))
        except Exception as error:  # an error of the loader is a failure of the check
            problem = raised(error)
    return Outcome(check.name, FAILED, problem) if problem else Outcome(check.name, PASSED)
