"""LLaMA-Factory and ms-swift over a loader, with the lines of their page."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.frameworks.attached import PAGE, SAVE_STEPS
from tests.support.frameworks.axolotl import ROWS, STEPS
from tests.support.frameworks.killed_runs import ROOT, assert_resumed, blocks_of, run_trainer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # three processes, which import a framework each
MODULE = "tests.support.frameworks.attached"


@pytest.mark.parametrize(("framework", "package"), [("llamafactory", "llamafactory"), ("swift", "ms-swift")])
def test_a_killed_training_continues_with_exactly_the_next_batch(tmp_path: Path, framework: str, package: str) -> None:
    for name in (framework, "torch", "transformers", "datasets", "peft"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{package if name == framework else name} is not installed")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"number": n}) + "\n" for n in range(ROWS)))

    whole = run_trainer(MODULE, tmp_path, "whole", framework=framework)
    killed = run_trainer(MODULE, tmp_path, "killed", framework=framework, kill_at=SAVE_STEPS + 2)
    resumed = run_trainer(MODULE, tmp_path, "killed", framework=framework, resume=True)

    assert_resumed(whole, killed, resumed, saved_at=SAVE_STEPS, steps=STEPS)


def test_the_loader_of_the_page_gives_batches(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 8)
    code = blocks_of(PAGE, "py")[0].replace('"chats.jsonl"', repr(str(tmp_path / "chats.jsonl")))
    names: dict[str, Any] = {}

    exec(code.replace('"my/model"', repr(str(ROOT / "asyncdata/assets/demo_tokenizer"))), names)  # noqa: S102 - ours

    with names["make_loader"]() as loader:
        assert len(next(iter(loader))["input_ids"]) == 8
