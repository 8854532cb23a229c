"""Chats, and templates that are hard to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def name(small_tokenizer: Path) -> str:
    return str(small_tokenizer)
