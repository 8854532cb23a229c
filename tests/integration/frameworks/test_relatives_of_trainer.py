"""axolotl with its example, LLaMA-Factory and ms-swift with the lines of their page, over a loader."""

import json
import shutil
import signal

import pytest

from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, EXAMPLES, blocks_of, needs, run_python, write_rows
from tests.support.frameworks.relatives import PAGE, ROWS, SAVE_STEPS, STEPS

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # three processes, which import a framework each


@pytest.mark.parametrize("framework", ["axolotl", "llamafactory", "swift"])
def test_a_killed_training_continues_with_exactly_the_next_batch(tmp_path, framework):
    """By its files it was killed in a save: the newest checkpoint has no state of the trainer. A loader may have
    collated a batch more than the trainer used.
    """
    needs(framework, "torch", "transformers", "datasets", "peft")
    rows = write_rows(tmp_path, [{"number": number} for number in range(ROWS)])

    def run(name, *, resume=False, kill_at=None):
        files = {key: tmp_path / f"{name}.{key}" for key in ("folder", "report")}
        files["seen"] = tmp_path / f"{name}.{kill_at}.{resume}"
        settings = {key: str(path) for key, path in files.items()} | {"framework": framework, "rows": rows}
        words = (
            "-m",
            "tests.support.frameworks.relatives",
            json.dumps(settings | {"resume": resume, "kill_at": kill_at}),
        )
        status = -signal.SIGKILL if kill_at else 0
        run_python(tmp_path, *words, places=[EXAMPLES], status=status, OMP_NUM_THREADS="1")
        seen = [json.loads(line) for line in files["seen"].read_text().splitlines()]
        return seen, None if kill_at else json.loads(files["report"].read_text())["losses"]

    whole, losses = run("whole")
    before, _ = run("killed", kill_at=SAVE_STEPS + 2)
    saved, torn = (tmp_path / "killed.folder" / f"checkpoint-{step}" for step in (SAVE_STEPS, SAVE_STEPS + 2))
    shutil.copytree(saved, torn, ignore=shutil.ignore_patterns("trainer_state.json"))
    after, losses_of_resumed = run("killed", resume=True)

    assert (before[:SAVE_STEPS] + after)[:STEPS] == whole[:STEPS]
    assert losses_of_resumed == losses


def test_the_loader_of_the_page_gives_batches(tmp_path):
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2."}]
    path = write_rows(tmp_path, [{"messages": chat}] * 8)
    code = blocks_of(PAGE, "py")[0].replace('"chats.jsonl"', repr(path)).replace('"my/model"', repr(DEMO_TOKENIZER))
    names = {}

    exec(code, names)  # noqa: S102 - the project's own pages

    with names["make_loader"]() as loader:
        assert len(next(iter(loader))["input_ids"])
