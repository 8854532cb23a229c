"""Buffer filters that are named by an import path."""

from __future__ import annotations

from typing import Any


def newest_first(buffer: list[list[Any]], num_groups: int) -> list[list[Any]]:
    """The groups that were given back last."""
    return buffer[::-1][:num_groups]
