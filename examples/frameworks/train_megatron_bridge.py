"""SFT with Megatron-Bridge: ``torchrun --nproc_per_node=1 train_megatron_bridge.py``, and the same again after a kill.

The state is in the folder ``energon`` of the checkpoints, a file for each data-parallel rank, all the same. The chats
are made of docstrings, and the model is small and random. Copy this file and ``_shared.py``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from _shared import chats, need, write
from tokenizers import Tokenizer

from asyncdata import ChatTokenizeFn, DataLoader, FixedCollator, Ranks
from asyncdata.demo import tokenizer_folder
from asyncdata.integrations.torch import StatefulDataLoader

try:
    from megatron.bridge.data.base import DatasetProvider
    from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
except ImportError as error:
    sys.exit(f"this example needs Megatron-Bridge ({error}): pip install megatron-bridge")

need("Megatron-Bridge 067f987d", checkpointing, "maybe_save_dataloader_state", "maybe_load_dataloader_state")
FOLDER = Path("asyncdata_megatron_bridge").resolve()
CHATS = FOLDER / "chats.jsonl"
LENGTH, MICRO_BATCH = 512, 2


def collate(samples: Any) -> dict[str, Any]:
    """What Megatron-Bridge's forward step of a GPT reads, of shape (micro-batch, length)."""
    batch = FixedCollator(length=LENGTH, shift_labels=True)(samples)
    labels = batch["shifted_labels"]
    is_trained = labels != -100
    read = {"tokens": batch["input_ids"], "position_ids": batch["position_ids"]}
    return {**read, "labels": labels * is_trained, "loss_mask": is_trained.astype("float32")}


class MicroBatches:
    """Micro-batches epoch after epoch, with the two methods by which Megatron-Bridge keeps a state."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = StatefulDataLoader(loader)
        self.save_state = self.loader.state_dict
        self.rest = chain.from_iterable(repeat(self.loader))

    def restore_state(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self.rest = chain.from_iterable(repeat(self.loader))

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> Any:
        return next(self.rest)


@dataclass
class Chats(DatasetProvider):
    seq_length: int = LENGTH
    dataloader_type: str = "external"

    def build_datasets(self, context: Any) -> Any:
        group = context.pg_collection.dp  # tensor-, pipeline- and context-parallel processes get the same rows
        loader = DataLoader(
            str(CHATS),
            tokenize_fn=ChatTokenizeFn(tokenizer_folder(), max_length=LENGTH),
            collate_fn=collate,
            batch_size=MICRO_BATCH,
            num_workers=2,
            ranks=Ranks(rank=group.rank(), world_size=group.size()),
        )
        return MicroBatches(loader), None, None


def main() -> None:
    write(CHATS, chats())
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
    pretrain(config, forward_step)


if __name__ == "__main__":
    main()
