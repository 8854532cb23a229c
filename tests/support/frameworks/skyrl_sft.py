"""SkyRL's own SFT trainer, sampler hook and checkpoints. Stood in are the model, as in the driver of its PPO."""

import shlex

from tests.support.frameworks.killed_runs import DEMO_TOKENIZER, blocks_of, kill_and_resume_each, write_rows
from tests.support.frameworks.skyrl import EPOCHS, FIRST, PAGE, ROWS, TRACKER, VARIABLE, Models, SkyRLRun, import_skyrl
from tests.support.frameworks.skyrl import PACKAGES as PACKAGES  # a test asks each driver for its own

NEEDS = {VARIABLE: "skyrl/train/sft_trainer.py"}
BATCHES = 36  # more than the training has
CASES = {
    # The last, short batch is trained on, and saved with the end of the epoch; after whole batches that is unseen.
    "a short last batch": ({"batch": 4}, [3, 11, 13]),
    "whole batches": ({"batch": 6}, [3, 7, 9]),
}


class Run(SkyRLRun):
    """``train`` of SkyRL's SFT trainer."""

    def __init__(self, cfg):
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

    def _train_on(self, batch, step):
        kept = len(batch["sequences"]) - batch.metadata.get("pad_size", 0)
        self.trains_on([int(token) - FIRST for token in batch["sequences"][:kept, -1]])
        return {"loss": 0.0, "grad_norm": 0.0, "timings": {}}


def drive(folder):
    import_skyrl()
    from skyrl.train.config.sft_config import SFTConfig

    rows = write_rows(folder, [{"input_ids": [1, 2, FIRST + n], "loss_mask": [0, 0, 1]} for n in range(ROWS)])
    words = [f"pretokenized_dataset_paths=['{rows}']", f"model.path={DEMO_TOKENIZER}", f"num_epochs={EPOCHS}"]
    words += "strategy=fsdp placement.num_gpus_per_node=1 micro_train_batch_size_per_gpu=1".split()
    words += "enable_ray_gpu_monitor=false resume_from=latest".split()
    words += shlex.split(blocks_of(PAGE, "text")[0])

    def opens(place, batch):
        return Run(SFTConfig.from_cli_overrides([*words, f"batch_size={batch}", f"ckpt_path={place}"]))

    return {"runs": kill_and_resume_each(opens, folder, CASES, num_batches=BATCHES, rows=ROWS)}
