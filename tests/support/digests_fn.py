"""A tokenize function that cannot be relied on."""

from __future__ import annotations

from typing import Any

last = 7


def unsteady(row: dict[str, Any]) -> list[int]:
    """Its tokens change, and its version does not."""
    return [row["id"], last]
