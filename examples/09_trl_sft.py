"""SFT with TRL: a model is trained on packed chats, killed with SIGKILL after step 9, and resumed from step 8.

The trainer's own checkpoint has the loader's state. The resumed run trains on the rows of a run that was never
interrupted, with the same losses. Needs ``trl``; the chats are made of docstrings, and the model is tiny and random.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _docstring_data import write_chats

from asyncdata import ChatTokenizeFn, DataLoader, PackedCollator, SoftPacking
from asyncdata.demo import tokenizer_folder

try:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
    from trl import SFTConfig, SFTTrainer
except ImportError as error:
    sys.exit(f"this example needs trl ({error}): pip install trl")

from asyncdata.integrations.torch import ranks
from asyncdata.integrations.transformers import attach, placeholder

LENGTH = 256
STEPS, SAVE_STEPS, KILLED_AT = 12, 4, 9


class Rows(TrainerCallback):
    """Notes what each step was trained on, and kills the process after a step."""

    def __init__(self, collate: PackedCollator, killed_at: int | None) -> None:
        self.collate, self.killed_at = collate, killed_at
        self.tokens: list[Any] = []

    def __call__(self, packs: Any) -> Any:
        batch = self.collate(packs)
        self.tokens.append(batch["input_ids"].tolist())
        return batch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(chats: str, folder: str, *, resume: bool = False, killed_at: int | None = None) -> tuple[Any, Any]:
    """The tokens of each step, and the loss of each step."""
    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder())
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    arguments = SFTConfig(
        output_dir=folder,
        max_steps=STEPS,  # a loader has no length
        save_steps=SAVE_STEPS,
        logging_steps=1,
        learning_rate=3e-3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = Rows(PackedCollator(max_length=LENGTH, keys="transformers"), killed_at)
    trainer = SFTTrainer(
        model, args=arguments, train_dataset=placeholder(), processing_class=tokenizer, callbacks=[rows]
    )
    loader = DataLoader(
        chats,
        tokenize_fn=ChatTokenizeFn(tokenizer_folder()),
        packing=SoftPacking(max_length=LENGTH),
        collate_fn=rows,
        batch_size=1,
        num_workers=2,
        ranks=ranks(),
    )
    attach(trainer, loader)
    with loader:
        trainer.train(resume_from_checkpoint=resume)
    return rows.tokens, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: Path) -> None:
    chats = str(folder / "chats.jsonl")
    write_chats(Path(chats), num_rows=500)
    tokens, losses = train(chats, str(folder / "whole"))

    done = subprocess.run([sys.executable, __file__, chats, str(folder / "killed")], stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    print(f"killed after step {KILLED_AT}; the last checkpoint is of step {KILLED_AT // SAVE_STEPS * SAVE_STEPS}")

    resumed_tokens, resumed_losses = train(chats, str(folder / "killed"), resume=True)
    first = KILLED_AT // SAVE_STEPS * SAVE_STEPS
    assert resumed_tokens[: STEPS - first] == tokens[first:STEPS]  # the loader may have collated more than was used
    assert resumed_losses == losses
    print(f"resumed: steps {first + 1} to {STEPS} trained on the same rows, with the same losses")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(*sys.argv[1:], killed_at=KILLED_AT)
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
