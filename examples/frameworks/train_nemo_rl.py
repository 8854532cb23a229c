"""GRPO with NeMo-RL, run in a checkout of it: ``uv run python train_nemo_rl.py``, and the same again after a kill.

It is NeMo-RL's own ``examples/run_grpo.py`` with one line more. The prompts are sums, which NeMo-RL's environment for
mathematics checks. Arguments are those of NeMo-RL, such as ``policy.model_name=my/model``. A copy of this file is a
start.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

FOLDER = Path("asyncdata_nemo_rl").resolve()
PROMPTS = FOLDER / "prompts.jsonl"
PROGRAM = Path("examples/run_grpo.py")

ARGUMENTS = [
    # What asyncdata needs:
    "data.shuffle=false",
    "data.num_workers=0",
    "data.train.dataset_name=asyncdata.integrations.nemo_rl.RowDataset",
    f"+data.train.data_path={PROMPTS}",
    "+data.train.asyncdata={num_workers: 2, seed: 1}",
    # The rest is a training as any other:
    "data.train.split_validation_size=0",
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=-1",
    "grpo.val_at_start=false",
    "policy.train_global_batch_size=32",
    "checkpointing.enabled=true",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=10",
    f"checkpointing.checkpoint_dir={FOLDER}/checkpoints",
]


def write_prompts() -> None:
    FOLDER.mkdir(exist_ok=True)
    draw = random.Random(1)
    with PROMPTS.open("w") as file:
        for _ in range(2000):
            left, right = draw.randrange(1000), draw.randrange(1000)
            file.write(json.dumps({"input": f"What is {left} + {right}?", "output": str(left + right)}) + "\n")


def main() -> None:
    try:
        import nemo_rl.data.utils as data
    except ImportError as error:
        sys.exit(f"this example needs NeMo-RL ({error}): run it in a checkout of NVIDIA-NeMo/RL, with uv run")
    from asyncdata.integrations.nemo_rl import with_state

    if not PROMPTS.exists():  # the same file after a restart
        write_prompts()
    own = data.setup_response_data

    def setup_response_data(*args: Any, **more: Any) -> Any:
        dataset, *others = own(*args, **more)
        return with_state(dataset), *others

    data.setup_response_data = setup_response_data
    sys.argv = [str(PROGRAM), *ARGUMENTS, *sys.argv[1:]]
    runpy.run_path(str(PROGRAM), run_name="__main__")


if __name__ == "__main__":
    main()
