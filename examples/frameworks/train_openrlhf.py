"""REINFORCE++ with OpenRLHF on one GPU: ``python train_openrlhf.py``, and the same again after a kill.

OpenRLHF has no hook for its prompts: the function that makes its loader of them is replaced. The state is in
``data_loader_state_dict`` of OpenRLHF's checkpoints. The prompts are made of docstrings. Arguments are those of
OpenRLHF, such as ``--actor.model_name_or_path my/model``. Copy this file and ``_shared.py``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from _shared import Batches, need, write

from asyncdata import DataLoader, RowFn, Sample
from asyncdata.demo import docstring_prompts

FOLDER = Path("asyncdata_openrlhf").resolve()
PROMPTS = FOLDER / "prompts.jsonl"

ARGUMENTS = {
    "--data.prompt_dataset": PROMPTS,
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
    "--rollout.batch_size": 64,  # leave out vllm_generate_batch_size: a larger one is buffered in no checkpoint
    "--train.batch_size": 64,
    "--rollout.max_new_tokens": 64,
}


def batch_of(samples: list[Sample]) -> tuple[list[Any], ...]:
    """Sources, prompts, labels and images."""
    prompts = [sample.extra["input"] for sample in samples]
    return ["docstrings"] * len(prompts), prompts, [sample.extra["label"] for sample in samples], [None] * len(prompts)


def prepare_datasets(strategy: Any, tokenizer: Any) -> tuple[Batches, None, int]:
    """In place of OpenRLHF's function: the loaders of the training and of the evaluation, and the steps."""
    args = strategy.args
    loader = DataLoader(args.data.prompt_dataset, tokenize_fn=RowFn(), shuffle="full", seed=1, num_workers=2)
    steps = loader.num_rows() * args.rollout.n_samples_per_prompt // args.train.batch_size
    return Batches(loader, 1, batch_of), None, steps * args.train.num_episodes * args.train.max_epochs


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **_: Any) -> Any:
    """Which share of the full name's parts an answer has."""
    import torch

    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    parts = [label.split(".") for label in labels]
    shares = [sum(part in answer for part in names) / len(names) for answer, names in zip(answers, parts, strict=True)]
    return {"rewards": torch.tensor(shares), "scores": torch.tensor(shares)}


def plug_in() -> None:
    try:
        from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    except ImportError as error:
        sys.exit(f"this example needs OpenRLHF ({error}): pip install openrlhf[vllm]")

    for trainer in (ppo_trainer, ppo_trainer_async):
        need("OpenRLHF 0.11", trainer, "prepare_datasets")
        trainer.prepare_datasets = prepare_datasets  # also in Ray's actors, which get the trainer with what it calls


if __name__ == "__main__":
    plug_in()
    write(PROMPTS, docstring_prompts())
    sys.argv[1:1] = [str(word) for pair in ARGUMENTS.items() for word in pair if word is not None]
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
