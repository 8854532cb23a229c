"""verl's own data set, sampler, loader, checkpoint and fetch, from the folder that ASYNCDATA_VERL names."""

# ruff: noqa: SLF001 - what a trainer of verl does with its loader is in methods of its own

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.support.frameworks.killed_runs import kill_and_resume, main

VARIABLE = "ASYNCDATA_VERL"
ROWS = 40
BATCH = 4


def _png(number: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (2, 2), (number % 256, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_rows(folder: Path) -> dict[str, Any]:
    """Two files of training data and one of validation data, with all that a row of verl may have."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def row(number: int) -> dict[str, Any]:
        images = [{"bytes": _png(number), "path": None}] if number % 3 == 0 else []
        tools = {"calculate": {"create_kwargs": {"ground_truth": str(number)}}} if number % 2 else None
        return {
            "data_source": "openai/gsm8k",
            "prompt": [
                {"role": "system", "content": "Täglich 😀"},
                {"role": "user", "content": f"{'<image>' * len(images)}{number} + 1?"},
            ],
            "images": images,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1), "weight": number / 7},
            "extra_info": {"index": number, "split": "train", "need_tools_kwargs": bool(tools), "tools_kwargs": tools},
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


def fields(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The rows of verl's own data set and of ours, for the same files, as Python shows them."""
    from verl.trainer.ppo.utils import create_rl_dataset

    own = configuration(folder, {"data": {**changes["data"], "custom_cls": {"path": None, "name": None}}})
    ours = configuration(folder, changes)
    found = {}
    for name, data in (("own", own.data), ("ours", ours.data)):
        train, validation = (
            create_rl_dataset(files, data, None, object(), max_samples=most)
            for files, most in ((data.train_files, -1), (data.val_files, 6))
        )
        found[name] = {
            "train": {repr(row["index"]): _shown(row) for row in map(train.__getitem__, range(len(train)))},
            "validation": [_shown(validation[index]) for index in (*range(len(validation)), 0, 3)],
        }
        is_a_place = name == "ours"
        if is_a_place:
            found["places"] = [train[index]["extra_info"]["asyncdata_id"] for index in range(3)]
    first = create_rl_dataset(ours.data.train_files, ours.data, None, object(), max_samples=10)
    found["first"] = [row["index"] for row in first.__getitems__(list(range(len(first))))]
    return found


def _shown(row: dict[str, Any]) -> dict[str, str]:
    shown = {key: re.sub(r" at 0x\w+", "", repr(value)) for key, value in row.items()}
    shown["extra_info"] = repr({key: row["extra_info"][key] for key in row["extra_info"] if key != "asyncdata_id"})
    return shown


def drive(folder: Path, *, changes: dict[str, Any], runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each of ``runs``: its trainer, its settings beside ``changes``, and where it saves."""
    from omegaconf import OmegaConf

    sys.path.insert(0, os.environ[VARIABLE])
    import verl.trainer.ppo.ray_trainer
    import verl.trainer.ppo.v1.trainer_base  # noqa: F401 - before the forks

    found = {"fields": fields(folder, changes)}
    for name, settings in runs.items():
        kind = {"v1": V1, "v0": V0}[settings["trainer"]]
        own = OmegaConf.merge(changes, settings["changes"])

        def opens(place: Path, kind: Any = kind, own: Any = own) -> Any:
            return kind(configuration(place, own))

        found[name] = kill_and_resume(opens, folder / name, num_batches=27, saves=settings["saves"])
    return found


if __name__ == "__main__":
    main(drive)
