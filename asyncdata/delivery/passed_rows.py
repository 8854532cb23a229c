"""Bad rows that a delivery passed over, or stopped at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.errors import TooManyBadRowsError
from asyncdata.delivery.bad_rows import bad_row_error

if TYPE_CHECKING:
    from asyncdata.core.errors import BadRowError
    from asyncdata.delivery.bad_row_policy import BadRowPolicy
    from asyncdata.delivery.channel import BadRowItem
    from asyncdata.delivery.next_delivery import BadRowStop

__all__ = ("PassedRows",)


class PassedRows:
    """Tells users of bad rows, each once.

    :param policy: for rows without a policy of their own.
    """

    def __init__(self, policy: BadRowPolicy) -> None:
        self._policy = policy
        self._is_over_budget = False

    def add(self, bad: BadRowItem) -> None:
        """A bad row was passed over."""
        policy = bad.policy or self._policy
        policy.pass_over(bad_row_error(bad, shows_row=policy.shows_row))

    def stopped_by(self, stop: BadRowStop) -> BadRowError | TooManyBadRowsError:
        """The error of a delivery that a bad row has stopped."""
        policy = stop.bad.policy or self._policy
        error = bad_row_error(stop.bad, shows_row=policy.shows_row)
        if policy.is_raised:
            return error

        # Once, though every call fails from now on.
        for bad in () if self._is_over_budget else (*stop.passed, stop.bad):
            self.add(bad)
        self._is_over_budget = True
        return TooManyBadRowsError(f"a bad row, after BadRows(max={policy.max}) of them: {error}")
