"""axolotl, LLaMA-Factory and ms-swift over a loader, with the lines of their pages."""

from __future__ import annotations

import importlib.util
import json
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.frameworks.killed_runs import block_of, run_trainer
from tests.support.frameworks.relatives import DEMO_TOKENIZER, PAGE, PAGE_OF_AXOLOTL, ROWS, SAVE_STEPS, STEPS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # three processes, which import a framework each


@pytest.mark.parametrize("framework", ["axolotl", "llamafactory", "swift"])
def test_a_killed_training_continues_with_exactly_the_next_batch(tmp_path: Path, framework: str) -> None:
    """By its files it was killed in a save: the newest checkpoint has no state of the trainer. A loader may have
    collated a batch more than the trainer used.
    """
    for name in (framework, "torch", "transformers", "datasets", "peft"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"number": n}) + "\n" for n in range(ROWS)))

    def run(name: str, **changes: Any) -> dict[str, Any]:
        module = "tests.support.frameworks.relatives"
        return run_trainer(module, tmp_path, name, framework=framework, **changes)

    whole = run("whole")
    killed = run("killed", kill_at=SAVE_STEPS + 2)
    saved, torn = (tmp_path / "killed.folder" / f"checkpoint-{step}" for step in (SAVE_STEPS, SAVE_STEPS + 2))
    shutil.copytree(saved, torn, ignore=shutil.ignore_patterns("trainer_state.json"))
    resumed = run("killed", resume=True)

    assert (killed["seen"][:SAVE_STEPS] + resumed["seen"])[:STEPS] == whole["seen"][:STEPS]
    assert resumed["losses"] == whole["losses"]


@pytest.mark.parametrize("page", [PAGE, PAGE_OF_AXOLOTL])
def test_the_loader_of_the_page_gives_batches(tmp_path: Path, page: str) -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 8)
    code = block_of(page, "py").replace('"chats.jsonl"', repr(str(tmp_path / "chats.jsonl")))
    names: dict[str, Any] = {}

    exec(code.replace('"my/model"', repr(DEMO_TOKENIZER)), names)  # noqa: S102 - the project's own pages

    of_axolotl = (SimpleNamespace(sequence_len=64, base_model=DEMO_TOKENIZER),) if page == PAGE_OF_AXOLOTL else ()
    with names["make_loader"](*of_axolotl) as loader:
        assert len(next(iter(loader))["input_ids"])
