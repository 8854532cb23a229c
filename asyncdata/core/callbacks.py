"""Callbacks that are set later, or do nothing."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def no_op(*_: object) -> None:
    """The callback before another one is set: does nothing."""


def identity(value: T) -> T:
    """The callback that returns what it is given."""
    return value


def alone(value: T) -> tuple[T]:
    """The callback that returns what it is given as the only one of a tuple."""
    return (value,)
