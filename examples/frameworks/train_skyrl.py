"""GRPO with SkyRL on one GPU, and the same again after a kill. In a checkout of SkyRL, with copies of this file and
``_shared.py``::

    uv run --extra fsdp --with asyncdata python train_skyrl.py

The state is in ``data.pt`` of SkyRL's checkpoints. The prompts are sums, which SkyRL's environment for GSM8K checks.
Arguments are those of SkyRL, such as ``trainer.policy.model.path=my/model``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from _shared import Batches, need, sums, write

from asyncdata import DataLoader, RowFn, Sample

try:
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.trainer import RayPPOTrainer
    from skyrl.train.utils import validate_cfg
    from skyrl.train.utils.utils import initialize_ray
except ImportError as error:
    sys.exit(f"this example needs SkyRL ({error}): run it in a checkout of NovaSky-AI/SkyRL, with uv run --extra fsdp")

need("SkyRL a9564572", BasePPOExp, "get_train_dataset", "get_trainer")
need("SkyRL a9564572", RayPPOTrainer, "_build_train_dataloader_and_compute_training_steps", "load_checkpoints")
FOLDER = Path.home() / "asyncdata_skyrl"  # not in the checkout, which Ray copies to its workers under "uv run"
PROMPTS = FOLDER / "prompts.jsonl"

# train_batch_size times n_samples_per_prompt: a multiple of the data-parallel ranks, or SkyRL leaves prompts out.
ARGUMENTS = """
    data.val_data=[] environment.env_class=gsm8k generator.n_samples_per_prompt=4
    generator.sampling_params.max_generate_length=128 generator.inference_engine.gpu_memory_utilization=0.5
    trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct trainer.algorithm.advantage_estimator=grpo trainer.epochs=5
    trainer.train_batch_size=64 trainer.policy_mini_batch_size=64 trainer.micro_train_batch_size_per_gpu=8
    trainer.micro_forward_batch_size_per_gpu=8 trainer.max_prompt_length=256 trainer.eval_before_train=false
    trainer.eval_interval=-1 trainer.logger=console trainer.ckpt_interval=10
""".split()
ARGUMENTS += [f"data.train_data=['{PROMPTS}']", f"trainer.ckpt_path={FOLDER}/checkpoints"]


def batch_of(samples: list[Sample]) -> list[dict[str, Any]]:
    rows = [(dict(sample.extra), str(sample.position)) for sample in samples]
    return [{"prompt": row.pop("prompt"), "env_class": None, "env_extras": row, "uid": uid} for row, uid in rows]


class Prompts(Batches):
    """SkyRL's data set and its loader."""

    is_restored = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.start %= len(self)  # after a checkpoint at the end of an epoch, SkyRL begins the next one
        self.is_restored = True


class Trainer(RayPPOTrainer):
    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        self.train_dataloader = self.train_dataset
        self.total_training_steps = len(self.train_dataset) * self.cfg.trainer.epochs

    def load_checkpoints(self) -> Any:
        found = super().load_checkpoints()
        if found[0] and not self.train_dataset.is_restored:  # SkyRL only logs that, and begins with the first prompt
            raise RuntimeError("the checkpoint has no data.pt of this example: see SkyRL's log")
        return found


class Experiment(BasePPOExp):
    get_trainer = staticmethod(Trainer)

    def get_train_dataset(self) -> Prompts:
        files, size, seed = list(self.cfg.data.train_data), self.cfg.trainer.train_batch_size, self.cfg.trainer.seed
        loader = DataLoader(files, tokenize_fn=RowFn(), shuffle="full", seed=seed, num_workers=2)
        return Prompts(loader, size, batch_of)


def rows() -> Any:
    for question, answer in sums():
        prompt = [{"role": "user", "content": f'{question} End with "####" and the number, such as "#### 7".'}]
        yield {"prompt": prompt, "reward_spec": {"method": "rule", "ground_truth": answer}}


if __name__ == "__main__":
    write(PROMPTS, rows())
    cfg = SkyRLTrainConfig.from_cli_overrides([*ARGUMENTS, *sys.argv[1:]])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(lambda: Experiment(cfg).run()).remote())
