"""GRPO with prime-rl on two GPUs; after a kill the same with ``--resume``. In a checkout of prime-rl::

    uv run --with path/to/asyncdata python train_prime_rl.py

This file is also the taskset: questions about docstrings. The state is in ``orchestrator/progress.pt`` of prime-rl's
checkpoints; tasks whose rollouts were not complete come again first. Arguments are those of ``rl``, such as
``--model.name my/model``. Copy this file and ``_shared.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from _shared import need, start, write

from asyncdata import DataLoader, RowFn
from asyncdata.demo import docstring_prompts

try:
    import verifiers.v1 as vf
    from prime_rl.orchestrator import train_source
    from prime_rl.orchestrator.curriculum import Curriculum, TaskSampler
except ImportError as error:
    sys.exit(f"this example needs prime-rl ({error}): run it in a checkout of PrimeIntellect-ai/prime-rl, with uv run")

__all__ = ["DocstringRows"]  # verifiers looks here for the taskset
need("prime-rl 0.8.0", train_source, "Curriculum")
need("prime-rl 0.8.0", TaskSampler, "observe", "state_dict", "load_state_dict")
FOLDER = Path("asyncdata_prime_rl").resolve()
PROMPTS = FOLDER / "prompts.jsonl"
CONFIG = f"""
max_steps = 100
trainer.optim.lr = 3e-6
output_dir = "{FOLDER}/runs"
run.name = "docstrings"
model.name = "Qwen/Qwen3-0.6B"
ckpt.interval = 10
inference = {{}}
orchestrator.batch_size = 64  # a multiple of group_size, so that a batch has whole groups
orchestrator.group_size = 4
orchestrator.train.sampling.max_completion_tokens = 512
[[orchestrator.train.source]]
env.agent.harness.id = "null"
env.agent.runtime.type = "subprocess"
env.taskset.id = "{Path(__file__).stem}"
"""


class DocstringData(vf.TaskData):
    answer: str


class DocstringTask(vf.Task[DocstringData]):
    @vf.reward
    async def has_name(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class DocstringRows(vf.Taskset[DocstringTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Tasks:
        return Tasks(self.config.task)

    def __iter__(self) -> Any:  # otherwise a generator, which has no state
        return self.load() if self.transform is None else super().__iter__()


class Tasks(TaskSampler):
    def __init__(self, config: Any) -> None:
        self.config, self.waiting = config, {}  # tasks that await rollouts
        self.loader = DataLoader(str(PROMPTS), tokenize_fn=RowFn(), shuffle="full", seed=1, commit="on_ack")
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

    def __next__(self) -> DocstringTask:
        [sample] = self.loader.get_next_batch(1)
        row, number = sample.extra, sample.group_index  # the number is in the task's key: each epoch has other keys
        task = DocstringTask(DocstringData(idx=number, prompt=row["input"], answer=row["label"]), self.config)
        self.waiting[task.key] = sample
        return task

    def observe(self, group: list[vf.Episode]) -> None:
        self.loader.ack([self.waiting.pop(group[0].task.key)])  # its rollouts are complete


def curriculum(config: Any, tasks: Any) -> Curriculum:
    made = Curriculum(config, tasks)
    if isinstance(tasks, Tasks):
        made.sampler = tasks  # in place of one that counts tasks, and takes as many again after a restart
    return made


train_source.Curriculum = curriculum

if __name__ == "__main__":
    write(PROMPTS, docstring_prompts())
    (FOLDER / "rl.toml").write_text(CONFIG)
    start("prime_rl.entrypoints.rl", "@", str(FOLDER / "rl.toml"))
