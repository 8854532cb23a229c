"""SkyRL's own SFT trainer, sampler hook and checkpoints. Stood in are the model, as in the driver of its PPO."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from tests.support.frameworks.killed_runs import ROOT, block_of, kill_and_resume, main
from tests.support.frameworks.skyrl import (
    EPOCHS,
    FIRST,
    ROWS,
    TRACKER,
    VARIABLE,
    Models,
    SkyRLRun,
    import_skyrl,
)
from tests.support.frameworks.skyrl import PACKAGES as PACKAGES  # a test asks each driver for its own

if TYPE_CHECKING:
    from pathlib import Path

NEEDS = {VARIABLE: "skyrl/train/sft_trainer.py"}
BATCHES = 36  # more than the training has


class Run(SkyRLRun):
    """``train`` of SkyRL's SFT trainer."""

    def __init__(self, cfg: Any) -> None:
        from skyrl.train.sft_trainer import SFTTrainer
        from skyrl.utils.tok import get_tokenizer

        super().__init__(cfg)
        trainer = SFTTrainer(cfg)
        trainer.tokenizer = get_tokenizer(cfg.model.path, padding_side="left")
        trainer.collator = trainer._build_collator(trainer.tokenizer)  # noqa: SLF001 - as SkyRL's setup()
        trainer.tracker = TRACKER
        trainer.dispatch = Models()
        trainer.train_step = self._train_on
        trainer.save_checkpoint = self.saves(trainer.save_checkpoint)
        trainer.load_checkpoint = self.loads(trainer.load_checkpoint, lambda found: found)
        self.start(trainer.train)
        self.step = self.answer()

    def _train_on(self, batch: Any, step: int) -> dict[str, Any]:
        kept = len(batch["sequences"]) - batch.metadata.get("pad_size", 0)
        self.trains_on([int(token) - FIRST for token in batch["sequences"][:kept, -1]])
        return {"loss": 0.0, "grad_norm": 0.0, "timings": {}}


def drive(folder: Path) -> dict[str, Any]:
    """The last, short batch is trained on, and saved with the end of the epoch; after whole batches that is unseen."""
    import_skyrl()
    from skyrl.train.config.sft_config import SFTConfig

    rows = folder / "rows.jsonl"
    lines = [{"input_ids": [1, 2, FIRST + n], "loss_mask": [0, 0, 1]} for n in range(ROWS)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        f"pretokenized_dataset_paths=['{rows}']",
        f"model.path={ROOT / 'asyncdata/assets/demo_tokenizer'}",
        "strategy=fsdp",
        "placement.num_gpus_per_node=1",
        "micro_train_batch_size_per_gpu=1",
        f"num_epochs={EPOCHS}",
        "enable_ray_gpu_monitor=false",
        "resume_from=latest",
        *shlex.split(block_of("use-it-with-skyrl.md", "text")),
    ]

    runs: dict[str, Any] = {}
    for name, batch, saves in (("a short last batch", 4, [3, 11, 13]), ("whole batches", 6, [3, 7, 9])):

        def opens(place: Path, batch: int = batch) -> Run:
            return Run(SFTConfig.from_cli_overrides([*words, f"batch_size={batch}", f"ckpt_path={place}"]))

        runs[name] = kill_and_resume(opens, folder / name, num_batches=BATCHES, saves=saves, rows=ROWS)
    return {"runs": runs}


if __name__ == "__main__":
    main(drive)
