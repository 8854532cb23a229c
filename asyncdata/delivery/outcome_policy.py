"""Policies: which rows an epoch leaves out, from what was reported of them. And the setting that names one.

Imported without numpy, as the settings of a loader are.
"""

from __future__ import annotations

import math
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description, Exchange, resolve_path

if TYPE_CHECKING:
    import numpy as np

    from asyncdata.delivery.chunk import Ids

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]
    Bools = np.ndarray[Any, np.dtype[np.bool_]]


Positive = Annotated[int, msgspec.Meta(ge=1)]
_SAME = 1e-10
"""A mean that is below a limit by less than this part of it is at the limit: 0.7 + 0.7 + 0.7 is less than 2.1."""
_SAME_AS_ZERO = 1e-12


class OutcomeTable(NamedTuple):
    """What was reported of each row, one entry a row, each array of shape (num_rows,).

    :ivar ids: uint64, ascending: the row's id (``rows.row_ids``).
    :ivar num_scores: int64, scores reported so far.
    :ivar mean: float64, their mean.
    :ivar last_mean: float64, the mean of the scores of the last epoch that has any.
    :ivar last_epoch: int64, that epoch.
    :ivar earlier: for a policy with an attribute ``epochs``, the means of so many epochs less one before that one, of
        those that have any, the latest first: each float64 of shape (num_rows,); NaN where there are not as many.
    """

    ids: Ids
    num_scores: Ints
    mean: Floats
    last_mean: Floats
    last_epoch: Ints
    earlier: tuple[Floats, ...] = ()


class Policy(Protocol):
    """Chooses the rows that an epoch leaves out. Rows of which nothing was reported always stay in."""

    def __call__(self, outcomes: OutcomeTable, epoch: int) -> Bools:
        """Whether ``epoch`` leaves the row out; bool of shape (num_rows,)."""
        ...


class PassRate(Description, frozen=True, kw_only=False):
    """Leaves out rows by the mean of their scores: those that are always solved, or never.

    Of the losses of SFT rows, those below the limits are learnt, and those above are never learnt.

    :ivar drop_below: leave out rows with a smaller mean; None: none.
    :ivar drop_above: leave out rows with this mean or a larger one; None: none.
    :ivar after: scores that a row needs before it may be left out.
    :ivar revisit_every: a row that is left out comes again this many epochs after its last scores; None: never.
    :ivar over: ``last``: the mean of the last epoch in which the row has scores; ``all``: of all its scores.
    :ivar key: of several rewards, the one whose scores are read; None: scores that were reported without a key.
    :ivar epochs: leave out rows that were below a limit, or not below one, in each of the last so many epochs in which
        they have scores.
    :raises ConfigError: for a value of the wrong type or out of range, or limits that leave no mean.
    """

    drop_below: float | None = None
    drop_above: float | None = None
    after: Positive = 1
    revisit_every: Positive | None = None
    over: Literal["last", "all"] = "last"
    key: str | None = None
    epochs: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1

    def check(self) -> None:
        """Whether some mean is between the limits."""
        low, high = self.drop_below, self.drop_above
        if any(limit is not None and not math.isfinite(limit) for limit in (low, high)):
            raise ConfigError(f"PassRate: drop_below={low} and drop_above={high} must be finite numbers or None")

        if low is None and high is None:
            raise ConfigError("PassRate: without limits it leaves no row out: give drop_below, drop_above, or both")

        if low is not None and high is not None and low >= high:
            raise ConfigError(f"PassRate: drop_below={low} and drop_above={high} leave no row: the first is the lower")

        if self.epochs > 1 and self.over == "all":
            raise ConfigError(
                f'PassRate: epochs={self.epochs} is of single epochs, and over="all" is of all: leave one out'
            )

    def __call__(self, outcomes: OutcomeTable, epoch: int) -> Bools:
        """Whether ``epoch`` leaves the row out; bool of shape (num_rows,)."""
        low, high = self.sides(outcomes, epoch)
        return low | high

    def sides(self, outcomes: OutcomeTable, epoch: int) -> tuple[Bools, Bools]:
        """Whether ``epoch`` leaves the row out as one below ``drop_below``, and as one not below ``drop_above``."""
        known = outcomes.num_scores >= self.after
        if self.revisit_every is not None:
            known &= epoch - outcomes.last_epoch < self.revisit_every
        low = -math.inf if self.drop_below is None else self.drop_below - _rounding(self.drop_below)
        high = math.inf if self.drop_above is None else self.drop_above - _rounding(self.drop_above)
        is_low, is_high = known, known
        last = outcomes.last_mean if self.over == "last" else outcomes.mean
        for mean in (last, *outcomes.earlier[: self.epochs - 1]):  # NaN is neither
            is_low, is_high = is_low & (mean < low), is_high & (mean >= high)
        return is_low, is_high


def _rounding(limit: float) -> float:
    """By how much the float mean of decimal scores may be below ``limit`` where the mean of the decimals is not."""
    return _SAME * abs(limit) or _SAME_AS_ZERO


class Outcomes(Description, frozen=True, kw_only=True):
    """What a loader remembers of each row: the scores that ``report`` was given.

    Each state has them, 46 bytes of text a row.

    :ivar policy: which rows the next epochs leave out: a :class:`PassRate`, or the import path of a function of
        (outcomes, epoch) that returns a bool for each row. None: rows are only remembered. Of several rewards, the
        function gets the one that its attribute ``key`` names.
    :ivar exchange: with ``Ranks``, a function as in :class:`~asyncdata.Ranks`, and not the same: by it, ``report``
        counts the scores of all ranks.
    :raises ConfigError: for a value of the wrong type.
    """

    policy: PassRate | str | None = None
    exchange: Exchange = None

    def check(self) -> None:
        """Whether the exchange can be called."""
        if not (self.exchange is None or callable(self.exchange)):
            raise ConfigError(f"Outcomes: exchange is a function of bytes; got {self.exchange!r}")


def policy_of(outcomes: Outcomes) -> Policy | None:
    """The policy, imported if it is named by its path.

    :raises ConfigError: if it cannot be imported (AD420), or cannot be called.
    """
    policy = outcomes.policy
    if not isinstance(policy, str):
        return policy

    found = resolve_path(policy)
    if not callable(found):
        raise ConfigError(f"AD420 Outcomes(policy={policy!r}) is a {type(found).__name__}, which cannot be called")

    return _checked(found, policy)


def _checked(function: Any, name: str) -> Policy:
    import numpy as np

    @wraps(function)  # also its attribute ``key``
    def call(outcomes: OutcomeTable, epoch: int) -> Bools:
        try:
            found = np.asarray(function(outcomes, epoch))
        except Exception as error:
            raise ConfigError(f"AD481 the policy {name} raised {error!r}; repair it, or leave it out") from error

        if found.dtype != np.bool_ or found.shape != outcomes.ids.shape:
            raise ConfigError(
                f"AD481 the policy {name} must return bool of shape {outcomes.ids.shape}, one for each row; it "
                f"returned {found.dtype} of shape {found.shape}"
            )

        return found

    return call
