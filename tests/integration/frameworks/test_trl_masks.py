"""Which tokens are trained: those of TRL's own trainers, where TRL is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.frameworks.killed_runs import run_driver

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Path) -> dict[str, Any]:
    for package in ("torch", "trl"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = tmp_path_factory.mktemp("trl")
    return run_driver("tests.support.frameworks.trl_masks", folder, name=str(small_tokenizer))


@pytest.mark.parametrize("kind", ["all", "assistant"])
def test_chats_are_trained_as_sft_trainer_does_it(found: dict[str, Any], kind: str) -> None:
    assert found[kind]["ours"] == found[kind]["trl"]


@pytest.mark.parametrize("kind", ["chats", "chats without a prompt", "texts", "texts without one"])
def test_pairs_are_trained_as_dpo_trainer_does_it(found: dict[str, Any], kind: str) -> None:
    assert found[kind]["ours"] == found[kind]["trl"]
