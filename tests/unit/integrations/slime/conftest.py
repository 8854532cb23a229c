"""Data sources of slime over prompts."""

from __future__ import annotations

import pytest

from tests.support.slime_source import (
    write_prompts,
)


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", 10)
