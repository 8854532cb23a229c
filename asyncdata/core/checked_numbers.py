"""Numbers as users give them: seconds that every clock can count, and whole numbers."""

from __future__ import annotations

import math
import operator
import threading
from typing import Any

from asyncdata.core.errors import ConfigError

__all__ = ("checked_timeout", "whole_number")

_FOR_EVER_S = threading.TIMEOUT_MAX / 2
"""More than a hundred years. No lock and no loop can wait for infinity."""


def checked_timeout(value: Any) -> float | None:
    """``timeout_s`` of a loader or of a call, in seconds; infinity is the longest wait there is.

    :raises ConfigError: if it is not a number.
    """
    if value is None:
        return None

    try:
        seconds = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    except OverflowError:
        seconds = math.inf
    if math.isnan(seconds):
        raise ConfigError(f"`timeout_s` is a number of seconds, or None for no limit; got {value!r}")

    return min(seconds, _FOR_EVER_S)


def whole_number(value: Any) -> int:
    """The number as an int, also if it is one of numpy; -1 if it is not a whole number."""
    try:
        return operator.index(value)
    except TypeError:
        return -1
