"""REINFORCE++ with OpenRLHF on one GPU: ``python train_openrlhf.py``, and the same again after a kill.

The prompts are made of docstrings. Arguments are those of OpenRLHF, such as ``--actor.model_name_or_path my/model``. A
copy of this file is a start.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from asyncdata.demo import write_docstring_prompts

FOLDER = Path("asyncdata_openrlhf").resolve()
PROMPTS = FOLDER / "prompts.jsonl"

ARGUMENTS = {
    "--data.prompt_dataset": PROMPTS,
    "--data.input_key": "input",
    "--data.label_key": "label",
    "--ckpt.path": FOLDER / "checkpoints",
    "--ckpt.output_dir": FOLDER / "model",
    "--ckpt.save_steps": 10,
    "--ckpt.load_enable": None,
    "--actor.model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "--reward.remote_url": Path(__file__).resolve(),  # OpenRLHF calls this file's reward_func
    "--algo.advantage.estimator": "reinforce",
    "--actor.num_gpus_per_node": 1,
    "--ref.num_gpus_per_node": 1,
    "--vllm.num_engines": 1,
    "--train.colocate_all": None,
    "--vllm.gpu_memory_utilization": 0.4,
    "--vllm.enable_sleep": None,
    "--rollout.batch_size": 64,
    "--train.batch_size": 64,
    "--rollout.max_new_tokens": 64,
}


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **_: Any) -> Any:
    """Which share of the full name's parts an answer has."""
    import torch

    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    parts = [label.split(".") for label in labels]
    shares = [sum(part in answer for part in names) / len(names) for answer, names in zip(answers, parts, strict=True)]
    return {"rewards": torch.tensor(shares), "scores": torch.tensor(shares)}


def main() -> None:
    try:
        import openrlhf  # noqa: F401
    except ImportError as error:
        sys.exit(f"this example needs OpenRLHF ({error}): pip install openrlhf[vllm]")
    from asyncdata.integrations.openrlhf import plug_in

    if not PROMPTS.exists():  # the same file after a restart
        FOLDER.mkdir(exist_ok=True)
        write_docstring_prompts(PROMPTS, 2000)
    plug_in(num_workers=2, seed=1)
    words = [str(word) for pair in ARGUMENTS.items() for word in pair if word is not None]
    sys.argv = ["train_ppo_ray", *words, *sys.argv[1:]]
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


if __name__ == "__main__":
    main()
