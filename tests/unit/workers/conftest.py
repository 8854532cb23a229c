"""Rows for executors, whose tokens are their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def rows(jsonl_file) -> Callable[..., Path]:
    """A function that writes rows 0 to n-1, each with its special fields."""

    def write(number: int, special: dict[int, dict[str, Any]] | None = None) -> Path:
        return jsonl_file([{"id": i, **(special or {}).get(i, {})} for i in range(number)])

    return write
