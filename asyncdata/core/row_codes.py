"""The negative numbers in the packed columns of rows, and what they mean; which drops are too many. Runs without numpy.

A column of int32 says two things of a row: a number that is not negative, or that the row is a special case. Every
function takes an int, or an array of numpy.
"""

from __future__ import annotations

from typing import Any

NOT_IN_SLOT = -1
"""The start of a row whose text is not, or not completely, in the slot: it is read by its place."""

TOO_LONG = -1
"""The length of a row that is longer than ``max_row_bytes``."""

EXCLUDED = -2
"""The length of a row that is left out: it is not read, and a reply says nothing of it."""

EXCLUDED_REASON = "excluded"
"""The reason under which such rows are counted."""

JOURNAL_REASON = "journal"
"""The reason of a row that killed workers before, according to the journal in the snapshot."""

ON_PURPOSE = frozenset({EXCLUDED_REASON, JOURNAL_REASON, "drop_last"})
"""Reasons of rows that a setting leaves out by name, or of which the log has told before."""

_MASS_SHARE, _MASS_LEAST = 0.05, 20


def reason_mark(number: int) -> int:
    """How the row index marks a row that yields no sample, for reason ``number`` of its reply."""
    return min(number + 2, 255) if number else 1


def is_mass(num_dropped: Any, num_rows: Any) -> Any:
    """Whether so many rows must not be dropped without a word."""
    return (num_dropped >= _MASS_LEAST) & (num_dropped > _MASS_SHARE * num_rows)


def expected_elsewhere(num_tokens: Any) -> Any:
    """The expected number of tokens of a row that another rank tokenizes."""
    return -1 - num_tokens


def is_elsewhere(expected: Any) -> Any:
    """Whether another rank tokenizes the row."""
    return expected < 0


def num_expected_elsewhere(expected: Any) -> Any:
    """The number of tokens that :func:`expected_elsewhere` was given."""
    return -1 - expected
