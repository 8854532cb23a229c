"""Data sources of slime over ten prompts, and a folder for their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.slime_source import no_rollout, write_prompts

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("no_rollout",)


@pytest.fixture(autouse=True)
def nothing_is_generated(no_rollout: None) -> None:
    """At the start of each test."""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", 10)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Saved and loaded in one folder, two samples a group."""
    folder = str(tmp_path / "run")
    return {"save": folder, "load": folder, "n_samples_per_prompt": 2}
