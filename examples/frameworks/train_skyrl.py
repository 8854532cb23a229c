"""GRPO with SkyRL on one GPU, and the same again after a kill. In a checkout of SkyRL, with a copy of this file::

    uv run --extra fsdp --with asyncdata python train_skyrl.py

The prompts are sums, which SkyRL's environment for GSM8K checks. Arguments are those of SkyRL, such as
``trainer.policy.model.path=my/model``. A copy of this file is a start.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

FOLDER = Path.home() / "asyncdata_skyrl"  # not in the checkout, which Ray copies to its workers under "uv run"
PROMPTS = FOLDER / "prompts.jsonl"

ARGUMENTS = [
    # What asyncdata needs:
    "trainer.override_entrypoint=asyncdata.integrations.skyrl",
    "asyncdata.num_workers=2",
    "asyncdata.seed=1",
    # The rest is a training as any other:
    f"data.train_data=['{PROMPTS}']",
    "data.val_data=[]",
    "environment.env_class=gsm8k",
    "trainer.algorithm.advantage_estimator=grpo",
    "trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "trainer.epochs=5",
    "trainer.train_batch_size=64",
    "trainer.policy_mini_batch_size=64",
    "trainer.micro_train_batch_size_per_gpu=8",
    "trainer.micro_forward_batch_size_per_gpu=8",
    "trainer.max_prompt_length=256",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=-1",
    "trainer.logger=console",
    "trainer.ckpt_interval=10",
    f"trainer.ckpt_path={FOLDER}/checkpoints",
    f"trainer.export_path={FOLDER}/exports",
    "generator.n_samples_per_prompt=4",
    "generator.sampling_params.max_generate_length=128",
    "generator.inference_engine.gpu_memory_utilization=0.5",
]


def write_prompts() -> None:
    FOLDER.mkdir(exist_ok=True)
    draw = random.Random(1)
    with PROMPTS.open("w") as file:
        for _ in range(2000):
            left, right = draw.randrange(1000), draw.randrange(1000)
            question = f'What is {left} + {right}? End with "####" and the number, such as "#### 7".'
            row = {
                "prompt": [{"role": "user", "content": question}],
                "reward_spec": {"method": "rule", "ground_truth": str(left + right)},
            }
            file.write(json.dumps(row) + "\n")


def main() -> None:
    try:
        import skyrl.train  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"this example needs SkyRL ({error}): run it in a checkout of NovaSky-AI/SkyRL, with uv run --extra fsdp"
        )

    if not PROMPTS.exists():  # the same file after a restart
        write_prompts()
    words = [sys.executable, "-m", "skyrl.train.entrypoints.main_base", *ARGUMENTS, *sys.argv[1:]]
    sys.exit(subprocess.call(words))


if __name__ == "__main__":
    main()
