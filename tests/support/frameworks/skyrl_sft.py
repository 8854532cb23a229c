"""SkyRL's own SFT trainer, sampler hook and checkpoints. Stood in are the model, as in the driver of its PPO."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from tests.support.frameworks.killed_runs import ROOT, block_of, kill_and_resume, main
from tests.support.frameworks.skyrl import EPOCHS, FIRST, ROWS, TRACKER, Models, Stepped, import_skyrl, message_of

if TYPE_CHECKING:
    from pathlib import Path

BATCHES = 36  # more than the training has


class Run(Stepped):
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

    def _train_on(self, batch: Any, step: int) -> dict[str, Any]:
        kept = len(batch["sequences"]) - batch.metadata.get("pad_size", 0)
        self.trains_on([int(token) - FIRST for token in batch["sequences"][:kept, -1]])
        return {"loss": 0.0, "grad_norm": 0.0, "timings": {}}


def words_of_page() -> list[str]:
    """The settings that the page tells a user to add to the command of SkyRL's SFT."""
    return shlex.split(block_of("use-it-with-skyrl.md", "text"))


def drive(folder: Path, *, runs: dict[str, Any]) -> dict[str, Any]:
    """Each of ``runs``: whether it is ours, its batch size, and where it saves."""
    import_skyrl()
    from skyrl.train.config.sft_config import SFTConfig

    rows = folder / "rows.jsonl"
    lines = [{"input_ids": [1, 2, FIRST + n], "loss_mask": [0, 0, 1]} for n in range(ROWS)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer: dict[str, Any] = {"runs": {}}
    for name, (is_ours, batch, saves) in runs.items():
        words = [
            f"pretokenized_dataset_paths=['{rows}']",
            f"model.path={ROOT / 'asyncdata/assets/demo_tokenizer'}",
            "strategy=fsdp",
            "placement.num_gpus_per_node=1",
            "micro_train_batch_size_per_gpu=1",
            f"batch_size={batch}",
            f"num_epochs={EPOCHS}",
            "enable_ray_gpu_monitor=false",
            "resume_from=latest",
            *(words_of_page() if is_ours else ()),
        ]

        def opens(place: Path, words: list[str] = words) -> Run:
            return Run(SFTConfig.from_cli_overrides([*words, f"ckpt_path={place}"]))

        answer["runs"][name] = kill_and_resume(opens, folder / name, num_batches=BATCHES, saves=saves)
        if is_ours and "refused" not in answer:
            place = folder / name / f"killed_{saves[0]}"
            answer["refused"] = message_of(opens(place, [*words, "sampler_kwargs={seed: 2}"]).take)
    return answer


if __name__ == "__main__":
    main(drive)
