"""GRPO with verl on one GPU: ``python train_verl.py``, and the same again after a kill. A copy of this file is a start.

The prompts are made of docstrings. Arguments are those of verl, such as ``actor_rollout_ref.model.path=my/model``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncdata.demo import docstring_prompts

FOLDER = Path("asyncdata_verl").resolve()
ROWS = {"train": range(2000), "validation": range(2000, 2050)}

ARGUMENTS = [
    # What asyncdata needs:
    "data.custom_cls.path=pkg://asyncdata.integrations.verl",
    "data.custom_cls.name=RLDataset",
    "data.shuffle=false",
    "data.dataloader_num_workers=0",
    "data.validation_shuffle=false",
    "data.filter_overlong_prompts=false",
    "+data.asyncdata={num_workers: 2, shuffle: full, seed: 1}",
    # The rest is a training as any other:
    f"data.train_files={FOLDER}/train.jsonl",
    f"data.val_files={FOLDER}/validation.jsonl",
    "data.train_batch_size=64",
    "data.max_prompt_length=1024",
    "data.max_response_length=64",
    "data.truncation=left",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    f"reward.custom_reward_function.path={Path(__file__).resolve()}",
    "reward.custom_reward_function.name=reward",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[console]",
    "trainer.total_epochs=1",
    "trainer.save_freq=10",
    "trainer.val_before_train=false",
    f"trainer.default_local_dir={FOLDER}/checkpoints",
]


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Which share of the full name's parts the answer has."""
    parts = ground_truth.split(".")
    return sum(part in solution_str for part in parts) / len(parts)


def write_rows() -> None:
    FOLDER.mkdir(exist_ok=True)
    prompts = list(zip(range(2050), docstring_prompts(), strict=False))
    for name, numbers in ROWS.items():
        with (FOLDER / f"{name}.jsonl").open("w") as file:
            for number, prompt in prompts[numbers.start : numbers.stop]:
                row = {
                    "data_source": "docstrings",
                    "prompt": [{"role": "user", "content": prompt["input"]}],
                    "reward_model": {"style": "rule", "ground_truth": prompt["label"]},
                    "extra_info": {"index": number},
                }
                file.write(json.dumps(row) + "\n")


def main() -> None:
    try:
        import verl  # noqa: F401
    except ImportError as error:
        sys.exit(f"this example needs verl ({error}): pip install verl")

    if not FOLDER.exists():  # the same files after a restart
        write_rows()
    sys.exit(subprocess.call([sys.executable, "-m", "verl.trainer.main_ppo", *ARGUMENTS, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
