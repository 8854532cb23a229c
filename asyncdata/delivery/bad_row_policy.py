"""What is done with a bad row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.core.errors import BadRowError

__all__ = ("BadRowPolicy",)


class BadRowPolicy(NamedTuple):
    """What is done with a bad row.

    :ivar stops: whether it may not be passed over.
    :ivar is_raised: whether none may be passed over, so that the row's own error is raised; else the limit is reached.
    :ivar max: bad rows that may be passed over; None: no limit.
    :ivar shows_row: whether errors may quote the row.
    :ivar pass_over: called with the error of a row that is passed over.
    """

    stops: bool
    is_raised: bool
    max: int | None
    shows_row: bool
    pass_over: Callable[[BadRowError], object]
