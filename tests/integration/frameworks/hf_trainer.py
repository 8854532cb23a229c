"""A tiny model under a trainer of transformers or TRL, over a loader; killed at a step if asked to.

``python -m tests.integration.frameworks.hf_trainer SETTINGS`` writes a report: the loss of each step, and what the
trainer was given. With the variables that ``torchrun`` sets it is one rank of several, with a report of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from asyncdata import (
    ChatTokenizeFn,
    DataLoader,
    PackedCollator,
    PaddedCollator,
    PreferenceCollator,
    PreferenceTokenizeFn,
    RowFn,
    SoftPacking,
)
from asyncdata.integrations.torch import ranks
from asyncdata.integrations.transformers import attach, placeholder

MAX_LENGTH = 128
MAX_STEPS = 8
SAVE_STEPS = 4
REACHED = "the step is reached"
RANK = int(os.environ.get("RANK", "0"))
LAYOUT_BATCHES = 9  # more than a generation batch is used


class _Killed(TrainerCallback):
    """Kills the process after a step, as the out-of-memory killer does.

    One of several ranks waits for its end: a dead rank would be an error for the others, which end by themselves.
    """

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            if args.world_size > 1:
                print(REACHED, flush=True)  # noqa: T201 - the parent waits for it
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)


def _config(tokenizer: Any, **more: Any) -> Any:
    set_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **more)


def _model(tokenizer: Any) -> Any:
    return LlamaForCausalLM(_config(tokenizer))


def _reward_model(tokenizer: Any) -> Any:
    config = _config(tokenizer, num_labels=1, pad_token_id=0)
    return LlamaForSequenceClassification(config)


def _arguments(kind: type, settings: dict[str, Any], **more: Any) -> Any:
    length = {"num_train_epochs": settings["epochs"]} if "epochs" in settings else {"max_steps": MAX_STEPS}
    return kind(
        output_dir=settings["folder"],
        **length,
        save_steps=settings.get("save_steps", SAVE_STEPS),
        logging_steps=1,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        disable_tqdm=True,
        **more,
        **settings.get("arguments", {}),
    )


def _recorded(collate: Any, seen: list[Any]) -> Any:
    def collated(items: list[Any]) -> Any:
        batch = collate(items)
        seen.append([row.tolist() for row in batch["input_ids"]])
        return batch

    return collated


def _chats(settings: dict[str, Any], seen: list[Any]) -> DataLoader:
    if settings["packed"]:
        collate = PackedCollator(max_length=MAX_LENGTH, keys="transformers")
        knobs: dict[str, Any] = {"packing": SoftPacking(max_length=MAX_LENGTH), "batch_size": 1}
    else:
        collate, knobs = PaddedCollator(), {"batch_size": 2}
    return DataLoader(
        settings["rows"],
        tokenize_fn=ChatTokenizeFn(settings["tokenizer"], max_length=MAX_LENGTH),
        collate_fn=_recorded(collate, seen),
        num_workers=0,
        timeout_s=240,
        **knobs,
        **settings.get("knobs", {}),
        ranks=ranks(),
    )


def _sft(settings: dict[str, Any], tokenizer: Any, seen: list[Any], trainer: type, arguments: Any) -> Any:
    evaluated = {"eval_dataset": placeholder()} if settings.get("evaluates") else {}
    made = trainer(_model(tokenizer), args=arguments, train_dataset=placeholder(), **evaluated)
    return made, _chats(settings, seen)


def _grpo(settings: dict[str, Any], tokenizer: Any, seen: list[Any], dataset: Any = None) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[Any], number: list[int], **_: Any) -> list[float]:
        seen.append(list(number))
        return [float(len(completion[0]["content"]) % 7) for completion in completions]

    arguments = _arguments(
        GRPOConfig,
        settings,
        per_device_train_batch_size=4,
        num_generations=2,
        num_iterations=2,
        max_completion_length=8,
        shuffle_dataset=False,
    )
    loader = DataLoader(settings["rows"], tokenize_fn=RowFn(), num_workers=0, timeout_s=240)
    made = GRPOTrainer(
        _model(tokenizer),
        reward_funcs=reward,
        args=arguments,
        train_dataset=placeholder() if dataset is None else dataset,
        processing_class=tokenizer,
    )
    return made, loader


def _layout(settings: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The rows of this rank's first batches: of TRL's own loader and sampler, and of ours, for the same order."""
    from datasets import Dataset

    with DataLoader(settings["rows"], tokenize_fn=RowFn(), num_workers=0, timeout_s=240) as ordered:
        rows = [sample.extra for sample in ordered.get_next_batch(settings["num_rows"])]
    trainer, loader = _grpo(settings, tokenizer, [], Dataset.from_list(rows))

    def numbers() -> list[list[int]]:
        batches = islice(trainer.get_train_dataloader(), LAYOUT_BATCHES)
        return [[row["number"] for row in batch] for batch in batches]

    own = numbers()
    attach(trainer, loader)
    with loader:
        return {"own": own, "ours": numbers()}


def _write(settings: dict[str, Any], report: dict[str, Any]) -> None:
    name = f"{settings['report']}.{RANK}" if "RANK" in os.environ else settings["report"]
    Path(name).write_text(json.dumps(report))


def _of_pairs(settings: dict[str, Any], tokenizer: Any, seen: list[Any]) -> Any:
    """DPOTrainer, or RewardTrainer, whose model takes no mask of the answers."""
    import trl

    is_dpo = settings["trainer"] == "DPOTrainer"
    arguments = _arguments(trl.DPOConfig if is_dpo else trl.RewardConfig, settings)
    loader = DataLoader(
        settings["rows"],
        tokenize_fn=PreferenceTokenizeFn(settings["tokenizer"], max_length=MAX_LENGTH),
        collate_fn=_recorded(PreferenceCollator(completion_mask=is_dpo), seen),
        num_workers=0,
        timeout_s=240,
        batch_size=2,
        ranks=ranks(),
    )
    given = {"args": arguments, "train_dataset": placeholder(), "processing_class": tokenizer}
    if settings.get("evaluates"):
        given["eval_dataset"] = placeholder()
    if not is_dpo:
        return trl.RewardTrainer(_reward_model(tokenizer), **given), loader

    # The reference has to be named here only because the model comes from no folder.
    return trl.DPOTrainer(_model(tokenizer), ref_model=_model(tokenizer), **given), loader


def _evaluation(settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``attach`` for a loader of its own to evaluate on, if the settings ask for one."""
    if not settings.get("evaluates"):
        return {}
    if settings["trainer"] != "DPOTrainer":
        return {"eval_loader": _chats(settings | {"knobs": {"seed": 7}}, [])}
    pairs = DataLoader(
        settings["rows"],
        tokenize_fn=PreferenceTokenizeFn(settings["tokenizer"], max_length=MAX_LENGTH),
        collate_fn=PreferenceCollator(),
        num_workers=0,
        timeout_s=240,
        batch_size=4,
    )
    return {"eval_loader": pairs}


def main(settings: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"])
    seen: list[Any] = []
    if settings["trainer"] == "layout":
        _write(settings, _layout(settings, tokenizer))
        return

    if settings["trainer"] == "Trainer":
        arguments = _arguments(TrainingArguments, settings)
        trainer, loader = _sft(settings, tokenizer, seen, Trainer, arguments)
    elif settings["trainer"] == "SFTTrainer":
        from trl import SFTConfig, SFTTrainer

        arguments = _arguments(SFTConfig, settings)

        def sft_trainer(model: Any, **more: Any) -> Any:
            return SFTTrainer(model, processing_class=tokenizer, **more)

        trainer, loader = _sft(settings, tokenizer, seen, sft_trainer, arguments)
    elif settings["trainer"] == "GRPOTrainer":
        trainer, loader = _grpo(settings, tokenizer, seen)
    else:
        trainer, loader = _of_pairs(settings, tokenizer, seen)
    evaluation = _evaluation(settings)
    attach(trainer, loader, **evaluation, batches_per_epoch=settings.get("batches_per_epoch"))
    trainer.add_callback(_Killed(settings.get("kill_at")))
    with loader, contextlib.ExitStack() as opened:
        for each in evaluation.values():
            opened.enter_context(each)
        trainer.train(resume_from_checkpoint=settings["resume"])
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    weights = float(torch.cat([parameter.double().flatten() for parameter in trainer.model.parameters()]).sum())
    history = trainer.state.log_history
    evaluated = [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry]
    rates = [[entry["epoch"], entry["learning_rate"]] for entry in history if "learning_rate" in entry]
    report = {"losses": losses, "seen": seen, "weights": weights, "evaluated": evaluated, "rates": rates}
    _write(settings, report)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
