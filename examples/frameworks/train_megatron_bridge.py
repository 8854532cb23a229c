"""SFT with Megatron-Bridge: ``torchrun --nproc_per_node=1 train_megatron_bridge.py``, and the same again after a kill.

The chats are made of docstrings, and the model is small and random. A copy of this file is a start.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from asyncdata import ChatTokenizeFn, DataLoader, FixedCollator
from asyncdata.demo import docstring_prompts, tokenizer_folder
from asyncdata.integrations.megatron import MegatronIterator, ranks_of

try:
    from megatron.bridge.data.base import DatasetProvider
    from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
except ImportError as error:
    sys.exit(f"this example needs Megatron-Bridge ({error}): pip install megatron-bridge")

FOLDER = Path("asyncdata_megatron_bridge").resolve()
CHATS = FOLDER / "chats.jsonl"
LENGTH, MICRO_BATCH = 512, 2


class Collator:
    """What Megatron-Bridge's forward step of a GPT reads, of shape (micro-batch, length)."""

    def __init__(self) -> None:
        self.collate = FixedCollator(length=LENGTH, shift_labels=True)

    def __call__(self, samples: Any) -> dict[str, Any]:
        batch = self.collate(samples)
        is_trained = batch["shifted_labels"] != -100
        return {
            "tokens": batch["input_ids"],
            "labels": batch["shifted_labels"] * is_trained,
            "loss_mask": is_trained.astype("float32"),
            "position_ids": batch["position_ids"],
        }


@dataclass
class Chats(DatasetProvider):
    seq_length: int = LENGTH
    dataloader_type: str = "external"

    def build_datasets(self, context: Any) -> Any:
        loader = DataLoader(
            str(CHATS),
            tokenize_fn=ChatTokenizeFn(tokenizer_folder(), max_length=LENGTH),
            collate_fn=Collator(),
            batch_size=MICRO_BATCH,
            num_workers=2,
            ranks=ranks_of(context.pg_collection),
        )
        return MegatronIterator(loader, context.pg_collection), None, None


def write_chats() -> None:
    with CHATS.open("w") as file:
        for _, row in zip(range(2000), docstring_prompts(), strict=False):
            turns = [("user", row["input"]), ("assistant", row["label"])]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")


def configuration() -> Any:
    config = vanilla_gpt_pretrain_config()
    config.dataset = Chats()
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 4, 256, 8
    config.model.seq_length = LENGTH
    config.tokenizer.vocab_size = Tokenizer.from_file(f"{tokenizer_folder()}/tokenizer.json").get_vocab_size()
    config.train.micro_batch_size, config.train.global_batch_size, config.train.train_iters = MICRO_BATCH, 16, 100
    config.validation.eval_iters = 0
    config.scheduler.lr_warmup_iters = 10
    config.checkpoint.save = config.checkpoint.load = str(FOLDER / "checkpoints")
    config.checkpoint.save_interval = 20
    return config


def main() -> None:
    if not CHATS.exists():  # the same file after a restart
        FOLDER.mkdir(exist_ok=True)
        write_chats()
    pretrain(configuration(), forward_step)


if __name__ == "__main__":
    main()
