"""GRPO with TRL: a model is trained on prompts, killed with SIGKILL after step 5, and resumed from step 4.

Each prompt has four completions, as TRL samples them. The resumed run trains on the prompts of a run that was never
interrupted, with the same losses. Needs ``trl``; the prompts are made of docstrings, and the model is tiny and random.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _docstring_data import write_rows

from asyncdata import DataLoader, RowFn
from asyncdata.demo import docstring_prompts, tokenizer_folder

try:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"this example needs trl ({error}): pip install trl")

from asyncdata.integrations.transformers import attach, placeholder

STEPS, SAVE_STEPS, KILLED_AT = 8, 4, 5


class Killed(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(prompts: str, folder: str, *, resume: bool = False, killed_at: int | None = None) -> tuple[Any, Any]:
    """The labels of the prompts of each generation, and the loss of each step."""
    asked: list[Any] = []

    def reward(completions: list[str], label: list[str], **_: Any) -> list[float]:
        asked.append(label)
        return [float(len(set(text))) for text in completions]

    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(), padding_side="left")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    arguments = GRPOConfig(
        output_dir=folder,
        max_steps=STEPS,  # a loader has no length
        save_steps=SAVE_STEPS,
        logging_steps=1,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=placeholder(),
        processing_class=tokenizer,
        callbacks=[Killed(killed_at)],
    )
    loader = DataLoader(prompts, tokenize_fn=RowFn())
    attach(trainer, loader)
    with loader:
        trainer.train(resume_from_checkpoint=resume)
    return asked, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: Path) -> None:
    prompts = folder / "prompts.jsonl"
    texts = zip(range(200), docstring_prompts(), strict=False)
    write_rows(prompts, ({"prompt": row["input"][:200], "label": row["label"]} for _, row in texts))
    asked, losses = train(str(prompts), str(folder / "whole"))

    done = subprocess.run([sys.executable, __file__, str(prompts), str(folder / "killed")], stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    print(f"killed after step {KILLED_AT}; the last checkpoint is of step {KILLED_AT // SAVE_STEPS * SAVE_STEPS}")

    resumed_asked, resumed_losses = train(str(prompts), str(folder / "killed"), resume=True)
    assert resumed_asked == asked[len(asked) - len(resumed_asked) :]
    assert resumed_losses == losses
    print(f"resumed: the prompts {json.dumps(sorted(set(resumed_asked[0])))} and all others are the same")
    print(f"the {len(losses)} losses are the same")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(*sys.argv[1:], killed_at=KILLED_AT)
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
