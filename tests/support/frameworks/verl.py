"""verl's own data set, sampler, loader, checkpoint and fetch, from the folder that ASYNCDATA_VERL names."""

# ruff: noqa: SLF001 - what a trainer of verl does with its loader is in methods of its own

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.support.frameworks.killed_runs import block_of, kill_and_resume, main

VARIABLE = "ASYNCDATA_VERL"
NEEDS = {VARIABLE: "verl/utils/dataset/rl_dataset.py"}
PACKAGES = ("torch", "ray", "tensordict", "transfer_queue", "yaml")
ROWS = 40
BATCH = 4
STEPS = ROWS // BATCH


def write_rows(folder: Path) -> dict[str, Any]:
    """Two files of training data and one of validation data."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def row(number: int) -> dict[str, Any]:
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{number} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number, "split": "train"},
            "agent_name": "single_turn_agent",
        }

    names = {"first": range(25), "second": range(25, ROWS), "validation": range(1000, 1010)}
    for name, numbers in names.items():
        pq.write_table(pa.Table.from_pylist(list(map(row, numbers))), folder / f"{name}.parquet", row_group_size=8)
    return {
        "train_files": [str(folder / "first.parquet"), str(folder / "second.parquet")],
        "val_files": str(folder / "validation.parquet"),
    }


def configuration(folder: Path, changes: dict[str, Any]) -> Any:
    """verl's own defaults for ``data``, and what a run of it needs besides; ``changes`` are those of a user."""
    from omegaconf import OmegaConf

    tree = Path(os.environ[VARIABLE])
    base = {
        "data": OmegaConf.load(tree / "verl/trainer/config/data/legacy_data.yaml"),
        "algorithm": {"filter_groups": None},
        "actor_rollout_ref": {"actor": {"checkpoint": {}}},
        "trainer": {
            "v1": {"sampler": {}},
            "total_epochs": 3,
            "total_training_steps": None,
            "default_local_dir": str(folder),
            "default_hdfs_dir": None,
            "resume_mode": "auto",
            "del_local_ckpt_after_load": False,
        },
    }
    data = {"train_batch_size": BATCH, "cache": {"folder": str(folder / "cache")}}
    return OmegaConf.merge(base, {"data": data}, changes)


class Actor:
    """The worker group of the actor; weights are no matter here."""

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    def load_checkpoint(self, *_: Any, **__: Any) -> None: ...


def _trainer(kind: Any, config: Any) -> Any:
    """A trainer of verl without its constructor, which starts Ray and a model."""
    made: Any = type(kind.__name__, (kind,), {})
    made.__abstractmethods__ = frozenset()  # what a trainer does with samples of its rollouts
    trainer = object.__new__(made)
    settings = {"config": config, "tokenizer": None, "processor": object(), "actor_rollout_wg": Actor()}
    settings |= {"use_critic": False, "global_steps": 0, "parameter_sync_step": 1, "trainer_mode": "sync"}
    for name, value in settings.items():
        setattr(trainer, name, value)
    return trainer


class V1:
    """The trainer of ``trainer.use_v1: true``, the default."""

    def __init__(self, config: Any) -> None:
        from verl.trainer.ppo.v1.trainer_base import PPOTrainer

        self.trainer = _trainer(PPOTrainer, config)
        self.trainer._init_dataloader()
        self.trainer._load_checkpoint()
        self.step = self.trainer.global_steps

    def take(self) -> list[Any]:
        batch = self.trainer._next_train_batch()
        return [info["index"] for info in batch["extra_info"].tolist()]

    def save(self) -> None:
        self.trainer.global_steps = self.step
        self.trainer._save_checkpoint()


class V0:
    """The older ``RayPPOTrainer``, which does not restore its loader at the end of an epoch."""

    def __init__(self, config: Any) -> None:
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        self.trainer = _trainer(RayPPOTrainer, config)
        self.trainer._create_dataloader(None, None, None, None)
        self.trainer._load_checkpoint()
        self.step = self.trainer.global_steps
        self.batches = self._batches()

    def _batches(self) -> Any:
        """The loops of its ``fit``."""
        trainer = self.trainer
        for _ in range(trainer.global_steps // len(trainer.train_dataloader), trainer.config.trainer.total_epochs):
            yield from trainer.train_dataloader

    def take(self) -> list[Any]:
        return [info["index"] for info in next(self.batches)["extra_info"]]

    def save(self) -> None:
        self.trainer.global_steps = self.step
        self.trainer._save_checkpoint()


def drive(folder: Path) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf

    sys.path.insert(0, os.environ[VARIABLE])
    import verl.trainer.ppo.ray_trainer
    import verl.trainer.ppo.v1.trainer_base  # noqa: F401 - before the forks

    changes = yaml.safe_load(block_of("use-it-with-verl.md", "yaml"))
    changes["data"] |= write_rows(folder)
    changes["data"]["asyncdata"]["cache"] = {"folder": str(folder / "index")}
    one_epoch = {"data": {"asyncdata": {"rows_per_epoch": 3 * ROWS}}, "trainer": {"total_epochs": 1}}
    in_file_order = {"data": {"asyncdata": {"shuffle": False}}}
    found = {}
    for name, kind, settings, saves in (
        ("v1", V1, {}, [7, STEPS, 13]),
        ("v1, a prompt a fetch", V1, {"data": {"gen_batch_size": 1}}, [7, STEPS]),
        ("v1, in the order of the files", V1, in_file_order, [13]),
        ("v0", V0, one_epoch, [7, STEPS, 13]),
    ):
        own = OmegaConf.merge(changes, settings)

        def opens(place: Path, kind: Any = kind, own: Any = own) -> Any:
            return kind(configuration(place, own))

        order = "files" if settings is in_file_order else "own"
        found[name] = kill_and_resume(opens, folder / name, num_batches=27, saves=saves, rows=ROWS, order=order)
    return {"runs": found}


if __name__ == "__main__":
    main(drive)
