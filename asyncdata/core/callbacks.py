"""Callbacks that are set later."""

from __future__ import annotations

__all__ = ("no_op",)


def no_op(*_: object) -> None:
    """The callback before another one is set: does nothing."""
