"""What an epoch of a mixture's part waits for before its first sample: which rows it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncdata.delivery.outcomes.policy import Ids

__all__ = ("PartDecisions",)


class PartDecisions(Protocol):
    """Decides, once for each epoch of a part, which of its rows come.

    ``decide`` is called under the coordinator's lock, when a request waits for the epoch's first sample.
    """

    def is_decided(self, epoch: int) -> bool:
        """Whether samples of ``epoch`` may be taken."""
        ...

    def decide(self, epoch: int) -> bool:
        """Decide. False: it would have no row, so it does not begin yet, and is asked again later."""
        ...

    def excluded(self, epoch: int) -> Ids:
        """The ids of the rows that ``epoch`` leaves out, ascending, if it is decided; else none."""
        ...
