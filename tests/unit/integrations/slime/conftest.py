"""Data sources of slime over ten prompts, and a folder for their checkpoints."""

import pytest

from tests.support.slime_source import no_rollout, write_prompts

__all__ = ("no_rollout",)


@pytest.fixture(autouse=True)
def nothing_is_generated(no_rollout):
    """At the start of each test."""


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", 10)


@pytest.fixture
def given(tmp_path):
    """Saved and loaded in one folder, two samples a group."""
    folder = str(tmp_path / "run")
    return {"save": folder, "load": folder, "n_samples_per_prompt": 2}
