"""GRPO with prime-rl on two GPUs, and the same again after a kill. In a checkout of prime-rl::

    uv pip install path/to/asyncdata
    uv run python train_prime_rl.py

It writes ``rl.toml`` and starts prime-rl's ``rl``, with ``--resume.step`` if there is a checkpoint. This file is also
the taskset: questions about docstrings. Arguments are those of ``rl``, such as ``--model.name my/model``. A copy of
this file is a start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncdata.demo import write_docstring_prompts

try:
    import prime_rl.entrypoints  # noqa: F401
    import verifiers.v1 as vf
except ImportError as error:
    sys.exit(f"this example needs prime-rl ({error}): run it in a checkout of PrimeIntellect-ai/prime-rl, with uv run")

from asyncdata.integrations.prime_rl import Rows, RowsConfig

__all__ = ["DocstringRows"]  # verifiers looks here for the taskset

FOLDER = Path("asyncdata_prime_rl").resolve()
PROMPTS = FOLDER / "prompts.jsonl"
RUN = "docstrings"

CONFIG = f"""
max_steps = 100
seq_len = 2048
output_dir = {json.dumps(str(FOLDER / "runs"))}
run.name = "{RUN}"
model.name = "Qwen/Qwen3-0.6B"
ckpt.interval = 10
trainer.optim.lr = 3e-6
inference = {{}}

[orchestrator]
batch_size = 64  # a multiple of group_size, so that a batch has whole groups
group_size = 4
train.sampling.max_completion_tokens = 512

[[orchestrator.train.source]]
env.agent.harness.id = "null"
env.agent.runtime.type = "subprocess"

[orchestrator.train.source.env.taskset]
id = "{Path(__file__).stem}"
data_path = {json.dumps(str(PROMPTS))}
asyncdata = {{ num_workers = 2, seed = 1 }}
"""


class DocstringData(vf.TaskData):
    answer: str


class DocstringTask(vf.Task[DocstringData]):
    @vf.reward
    async def has_name(self, trace: vf.Trace) -> float:
        """Which share of the full name's parts the answer has."""
        parts = self.data.answer.split(".")
        return sum(part in trace.last_reply for part in parts) / len(parts)


class DocstringRows(Rows, vf.Taskset[DocstringTask, RowsConfig]):
    def task(self, row: dict[str, Any], idx: int) -> DocstringTask:
        return DocstringTask(DocstringData(idx=idx, prompt=row["input"], answer=row["label"]), self.config.task)


def resume_words(arguments: list[str]) -> list[str]:
    """How to continue: from the newest checkpoint that is whole; without one, a killed run's files are removed."""
    if any(word.split("=")[0].split(".")[0] == "--resume" for word in arguments):
        return []

    steps = (FOLDER / "runs" / RUN / "checkpoints").glob("step_*")
    parts = "trainer/.metadata", "orchestrator/progress.pt"  # each is the last that its process writes
    whole = [int(step.name.removeprefix("step_")) for step in steps if all((step / part).exists() for part in parts)]
    return ["--resume.step", str(max(whole))] if whole else ["--clean"]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    if not PROMPTS.exists():  # the same file after a restart
        write_docstring_prompts(PROMPTS, 2000)
    config = FOLDER / "rl.toml"
    config.write_text(CONFIG)
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    own = sys.argv[1:]
    words = [sys.executable, "-m", "prime_rl.entrypoints.rl", "@", str(config), *resume_words(own), *own]
    sys.exit(subprocess.call(words, env=os.environ | {"PYTHONPATH": path}))


if __name__ == "__main__":
    main()
