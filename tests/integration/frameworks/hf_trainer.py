"""A tiny model under a trainer of transformers or TRL, over a loader; stopped at a step if asked to.

``python -m tests.integration.frameworks.hf_trainer`` reads a training a line, and answers with the exit statuses of its
ranks. Each rank is a fork, as trainers take long to import, and writes a report: the loss of each step, and what the
trainer was given.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from itertools import islice
from pathlib import Path

import torch
import transformers

import asyncdata
from asyncdata.integrations.torch import ranks
from asyncdata.integrations.transformers import attach, placeholder

MAX_LENGTH = 128
MAX_STEPS = 8
SAVE_STEPS = 4
LAYOUT_BATCHES = 9  # more than a generation batch is used
KNOBS = {"num_workers": 0, "timeout_s": 240}


class _Stops(transformers.TrainerCallback):
    """Says that a step is reached, and waits for its end: the parent kills all ranks together."""

    def __init__(self, step, told):
        self._step, self._told = step, told

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self._step:
            os.write(self._told, b"x")
            signal.pause()


def config_of(tokenizer, **more):
    transformers.set_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **more)


def model_of(tokenizer):
    return transformers.LlamaForCausalLM(config_of(tokenizer))


def arguments_of(kind, settings, **more):
    length = {"num_train_epochs": settings["epochs"]} if "epochs" in settings else {"max_steps": MAX_STEPS}
    steps = {"save_steps": settings.get("save_steps", SAVE_STEPS), "logging_steps": 1, "gradient_accumulation_steps": 2}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    quiet["ddp_backend"] = "gloo" if "RANK" in os.environ else None
    given = {**length, **steps, **quiet, "learning_rate": 1e-2, **more, **settings.get("arguments", {})}
    return kind(output_dir=settings["folder"], **given)


def _recorded(collate, seen):
    def collated(items):
        batch = collate(items)
        seen.append([row.tolist() for row in batch["input_ids"]])
        return batch

    return collated


def chats_of(settings, seen):
    knobs = {"collate_fn": asyncdata.PaddedCollator(), "batch_size": 2}
    if settings["packed"]:
        collate = asyncdata.PackedCollator(max_length=MAX_LENGTH, keys="transformers")
        knobs = {"collate_fn": collate, "packing": asyncdata.SoftPacking(max_length=MAX_LENGTH), "batch_size": 1}
    knobs["collate_fn"] = _recorded(knobs["collate_fn"], seen)
    fn = asyncdata.ChatTokenizeFn(settings["tokenizer"], max_length=MAX_LENGTH)
    return asyncdata.DataLoader(
        settings["rows"], tokenize_fn=fn, **KNOBS, **knobs, **settings.get("knobs", {}), ranks=ranks()
    )


def _pairs(settings, seen, **knobs):
    """With a mask of the answers but for RewardTrainer, whose model takes none."""
    collate = _recorded(asyncdata.PreferenceCollator(completion_mask=settings["trainer"] == "DPOTrainer"), seen)
    fn = asyncdata.PreferenceTokenizeFn(settings["tokenizer"], max_length=MAX_LENGTH)
    return asyncdata.DataLoader(settings["rows"], tokenize_fn=fn, collate_fn=collate, **KNOBS, **knobs, ranks=ranks())


def _trainer_of_chats(settings, tokenizer, seen, given):
    kind, arguments = transformers.Trainer, transformers.TrainingArguments
    if settings["trainer"] == "SFTTrainer":
        import trl

        kind, arguments = trl.SFTTrainer, trl.SFTConfig
        given["processing_class"] = tokenizer
    return kind(model_of(tokenizer), args=arguments_of(arguments, settings), **given), chats_of(settings, seen)


def _grpo(settings, tokenizer, seen, given):
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions, number, **_):
        seen.append(list(number))
        return [float(len(completion[0]["content"]) % 7) for completion in completions]

    groups = {"num_generations": 2, "num_iterations": 2, "max_completion_length": 8, "shuffle_dataset": False}
    args = arguments_of(GRPOConfig, settings, per_device_train_batch_size=4, **groups)
    made = GRPOTrainer(model_of(tokenizer), reward_funcs=reward, args=args, processing_class=tokenizer, **given)
    return made, asyncdata.DataLoader(settings["rows"], tokenize_fn=asyncdata.RowFn(), **KNOBS)


def _trainer_of_pairs(settings, tokenizer, seen, given):
    import trl

    loader = _pairs(settings, seen, batch_size=2)
    given["processing_class"] = tokenizer
    if settings["trainer"] == "RewardTrainer":
        model = transformers.LlamaForSequenceClassification(config_of(tokenizer, num_labels=1, pad_token_id=0))
        return trl.RewardTrainer(model, args=arguments_of(trl.RewardConfig, settings), **given), loader
    # The reference has to be named here only because the model comes from no folder.
    arguments, reference = arguments_of(trl.DPOConfig, settings), model_of(tokenizer)
    return trl.DPOTrainer(model_of(tokenizer), ref_model=reference, args=arguments, **given), loader


TRAINERS = {
    **dict.fromkeys(("Trainer", "SFTTrainer"), _trainer_of_chats),
    **dict.fromkeys(("DPOTrainer", "RewardTrainer"), _trainer_of_pairs),
    "GRPOTrainer": _grpo,
}


def _evaluation(settings):
    """The arguments of ``attach`` for a loader of its own to evaluate on, if the settings ask for one."""
    if not settings.get("evaluates"):
        return {}
    if settings["trainer"] == "DPOTrainer":
        return {"eval_loader": _pairs(settings, [], batch_size=4)}
    return {"eval_loader": chats_of(settings | {"knobs": {"seed": 7}}, [])}


def _layout(settings, tokenizer, _):
    """The rows of this rank's first batches: of TRL's own loader and sampler, and of ours, for the same order."""
    from datasets import Dataset

    with asyncdata.DataLoader(settings["rows"], tokenize_fn=asyncdata.RowFn(), **KNOBS) as ordered:
        rows = [sample.extra for sample in ordered.get_next_batch(settings["num_rows"])]
    trainer, loader = _grpo(settings, tokenizer, [], {"train_dataset": Dataset.from_list(rows)})

    def numbers():
        batches = islice(trainer.get_train_dataloader(), LAYOUT_BATCHES)
        return [[row["number"] for row in batch] for batch in batches]

    own = numbers()
    attach(trainer, loader)
    with loader:
        return {"own": own, "ours": numbers()}


def _trained(settings, tokenizer, told):
    seen, given = [], {"train_dataset": placeholder()}
    if settings.get("evaluates"):
        given["eval_dataset"] = placeholder()
    if "evaluates_rows" in settings:
        from datasets import Dataset

        chats = [json.loads(line)["messages"] for line in Path(settings["rows"]).read_text().splitlines()]
        given["eval_dataset"] = Dataset.from_list([{"messages": chat} for chat in chats[: settings["evaluates_rows"]]])
    trainer, loader = TRAINERS[settings["trainer"]](settings, tokenizer, seen, given)
    evaluation = _evaluation(settings)
    attach(trainer, loader, **evaluation, batches_per_epoch=settings.get("batches_per_epoch"))
    trainer.add_callback(_Stops(settings["kill_at"], told))
    with loader, contextlib.ExitStack() as opened:
        for each in evaluation.values():
            opened.enter_context(each)
        trainer.train(resume_from_checkpoint=settings["resume"])
    history = trainer.state.log_history
    return {
        "losses": {entry["step"]: entry["loss"] for entry in history if "loss" in entry},
        "seen": seen,
        "weights": float(torch.cat([each.double().flatten() for each in trainer.model.parameters()]).sum()),
        "evaluated": [[entry["step"], entry["eval_loss"]] for entry in history if "eval_loss" in entry],
        "metrics": [entry for entry in history if "data/wait_share" in entry],
        "rates": [[entry["epoch"], entry["learning_rate"]] for entry in history if "learning_rate" in entry],
    }


def run(settings, told):
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["tokenizer"])
    report = (_layout if settings["trainer"] == "layout" else _trained)(settings, tokenizer, told)
    Path(f"{settings['report']}.{os.environ.get('RANK', '0')}").write_text(json.dumps(report))


def started(settings, variables):
    """The process of a rank, and a pipe that it writes to when it has reached the step, and closes at its end."""
    told, telling = os.pipe()
    pid = os.fork()
    if pid:
        os.close(telling)
        return pid, told
    try:
        os.environ |= variables
        log = os.open(f"{settings['report']}.log{variables.get('RANK', '0')}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run(settings, telling)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main():
    from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer  # noqa: F401 - before the forks

    for line in sys.stdin:
        settings, ranks = json.loads(line)
        processes = [started(settings, variables) for variables in ranks]
        if all([os.read(told, 1) for _, told in processes]):  # noqa: C419 - of each: it may be the last one that fails
            for pid, _ in processes:
                os.kill(pid, signal.SIGKILL)
        for _, told in processes:
            os.close(told)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in processes]
        print(json.dumps(statuses), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
