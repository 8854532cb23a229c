"""SFT with axolotl: ``python train_axolotl.py``, and the same again after a kill.

It writes ``config.yaml`` and starts ``axolotl train``, which imports this file as a plugin. The state is in
``trainer_state.json`` of the trainer's checkpoints. The chats are made of docstrings. Arguments are those of ``axolotl
train``, such as ``--base-model my/model``. Copy this file and ``_shared.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from asyncdata import ChatTokenizeFn, DataLoader, PackedCollator, SoftPacking
from asyncdata.integrations.torch import ranks

try:
    from axolotl.common.datasets import TrainDatasetMeta
    from axolotl.integrations.base import BasePlugin
except ImportError as error:
    sys.exit(f"this example needs axolotl ({error}): pip install axolotl")

from _shared import chats, need, start, write

from asyncdata.integrations.transformers import attach, placeholder

FOLDER = Path("asyncdata_axolotl").resolve()
CHATS = FOLDER / "chats.jsonl"

CONFIG = {
    # What asyncdata needs. The loader packs: leave out sample_packing, streaming, val_set_size and test_datasets.
    "plugins": [f"{Path(__file__).stem}.LoaderPlugin"],
    "max_steps": 100,
    # The rest is a training as any other:
    "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
    "datasets": [{"path": str(CHATS), "type": "chat_template"}],  # axolotl asks for it, and does not read it
    "sequence_len": 1024,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "optimizer": "adamw_torch",
    "learning_rate": 1e-5,
    "lr_scheduler": "cosine",
    "bf16": "auto",
    "save_steps": 20,
    "auto_resume_from_checkpoints": True,
    "output_dir": str(FOLDER / "checkpoints"),
}

need("axolotl 0.18", BasePlugin, "load_datasets", "post_trainer_create")


class LoaderPlugin(BasePlugin):
    def load_datasets(self, cfg: Any, preprocess: bool = False) -> TrainDatasetMeta:
        return TrainDatasetMeta(placeholder(), None, cfg.max_steps)  # it is never read

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        attach(trainer, make_loader(cfg))


def make_loader(cfg: Any) -> DataLoader:
    length = cfg.sequence_len
    return DataLoader(
        str(CHATS),
        tokenize_fn=ChatTokenizeFn(cfg.base_model),
        packing=SoftPacking(max_length=length),
        collate_fn=PackedCollator(keys="transformers"),
        batch_size=1,
        num_workers=2,
        ranks=ranks(),
    )


if __name__ == "__main__":
    write(CHATS, chats())
    config = FOLDER / "config.yaml"
    config.write_text(json.dumps(CONFIG, indent=2))  # JSON is YAML
    start("axolotl.cli.main", "train", str(config))
