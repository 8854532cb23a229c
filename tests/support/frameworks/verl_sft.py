"""verl's own SFT trainer: its data set, sampler, loader and checkpoints, from the folder that ASYNCDATA_VERL names.

Stand-ins: ``verl.workers`` (engines, which need a GPU) and ``verl.models`` (needs an older transformers). A run has
all its ranks in one process: a trainer for each, with the sampler and the file ``data_N.pt`` of its rank.
"""

# ruff: noqa: SLF001 - what a trainer of verl does with its loader is in methods of its own

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.frameworks.killed_runs import KILLED_AFTER, blocks_of, kill_and_resume, main
from tests.support.frameworks.stand_ins import stand_in_for

VARIABLE = "ASYNCDATA_VERL"
NEEDS = {VARIABLE: "verl/trainer/sft_trainer.py"}
PACKAGES = ("torch", "torchdata", "hydra", "tensordict", "transformers", "pandas", "yaml")
ROWS = 40
BATCH = 4
EPOCHS = 3
STEPS = EPOCHS * ROWS // BATCH
BATCHES = STEPS + KILLED_AFTER  # those after the training have no rows
FIRST_NUMBER = 10  # of a row; smaller tokens are words of the template

_TEMPLATE = (
    "{% if tools %}tools {{ tools | length }} {{ tools[0].function.name }} {% endif %}"
    "{% for message in messages %}<s> {{ message.role }} {% if enable_thinking %}think {% endif %}"
    "{{ message.content }} </s> {% endfor %}{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def write_rows(folder: Path) -> dict[str, Any]:
    """Two files of training data and one of validation data, with all columns that verl's class knows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def row(number: int) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": str(FIRST_NUMBER + number % 3)}}
        answer = [{"role": "assistant", "content": f"{number + 1} " * (number % 5 + 1)}]
        return {
            "messages": [{"role": "user", "content": str(number)}, *answer * (number % 2 + 1)],
            "tools": [tool] * (number % 3),
            "enable_thinking": number % 4 == 0,
            "source": "sums",
        }

    names = {"first": range(25), "second": range(25, ROWS), "validation": range(ROWS, ROWS + 10)}
    for name, numbers in names.items():
        rows = [row(FIRST_NUMBER + number) for number in numbers]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=8)
    return {
        "train_files": [str(folder / "first.parquet"), str(folder / "second.parquet")],
        "val_files": str(folder / "validation.parquet"),
    }


def _tokenizer() -> Any:
    """A word is a token, and a number is itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "user", "assistant", "think", "tools", "1", "2", "3"]
    numbers = map(str, range(FIRST_NUMBER, FIRST_NUMBER + 2 * ROWS))
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*words, *numbers])}))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", chat_template=_TEMPLATE)


def configuration(folder: Path, changes: dict[str, Any]) -> Any:
    """verl's own defaults, and what a run needs besides; ``changes`` are those of a user."""
    from omegaconf import OmegaConf

    base = OmegaConf.load(Path(os.environ[VARIABLE]) / "verl/trainer/config/sft_trainer_engine.yaml")
    data = {"train_batch_size": BATCH, "enable_thinking_default": None}
    trainer = {"default_local_dir": str(folder), "device": "cpu"}
    return OmegaConf.merge(base, {"data": data, "trainer": trainer, "model": {}}, changes)


class _Engine:
    """An engine of one of several data-parallel ranks; weights are no matter here."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._ranks = ranks

    def get_data_parallel_rank(self) -> int:
        return self._rank

    def get_data_parallel_size(self) -> int:
        return self._ranks

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def reset(self) -> None: ...

    def save_checkpoint(self, local_path: str, **_: Any) -> None:
        Path(local_path).mkdir(parents=True, exist_ok=True)

    def load_checkpoint(self, *_: Any, **__: Any) -> None: ...


def _trainer(config: Any, rank: int = 0, ranks: int = 1) -> Any:
    """verl's ``SFTTrainer`` with the steps of its constructor, but those that make a model and an engine."""
    from verl.trainer.sft_trainer import SFTTrainer

    trainer: Any = object.__new__(SFTTrainer)
    trainer.config, trainer.rank = config, rank
    trainer.engine = trainer.training_client = _Engine(rank, ranks)
    trainer.model_config = SimpleNamespace(tokenizer=_tokenizer(), processor=None)
    trainer.optimizer_config = SimpleNamespace()
    trainer._build_dataset()
    trainer._build_dataloader()
    trainer._init_engine()
    trainer._build_ckpt_handler()
    trainer.resume_global_step = trainer.ckpt_handler.load_checkpoint()
    return trainer


def _numbers(batch: dict[str, Any]) -> list[int]:
    """The rows of a batch: the word after ``user`` or ``think`` is a row's number."""
    from_user = [row.tolist()[row.tolist().index(3) + 1 :] for row in batch["input_ids"].unbind()]
    return [next(token for token in row if token >= FIRST_NUMBER) - FIRST_NUMBER for row in from_user]


class Run:
    """A training on some data-parallel ranks; a batch's rows are told in the order of the sampler's sequence."""

    def __init__(self, config: Any, ranks: int) -> None:
        import torch

        group = Path(config.trainer.default_local_dir) / f"group_{os.getpid()}"
        torch.distributed.init_process_group("gloo", init_method=f"file://{group}", rank=0, world_size=1)
        self._trainers = [_trainer(config, rank, ranks) for rank in range(ranks)]
        [self.step] = {trainer.resume_global_step for trainer in self._trainers}
        self._batches = [self._fit(trainer) for trainer in self._trainers]

    def _fit(self, trainer: Any) -> Any:
        """The loops of its ``fit``; after the training, batches without rows."""
        start = trainer.resume_global_step // trainer.steps_per_epoch
        for epoch in range(start, trainer.config.trainer.total_epochs):
            trainer.train_sampler.set_epoch(epoch=epoch)
            yield from map(_numbers, trainer.train_dataloader)
        while True:
            yield []

    def take(self) -> list[Any]:
        of_ranks = [next(batches) for batches in self._batches]
        return [number for numbers in zip(*of_ranks, strict=True) for number in numbers]

    def save(self) -> None:
        for trainer in self._trainers:
            trainer.ckpt_handler.save_checkpoint(self.step)


def drive(folder: Path) -> dict[str, Any]:
    import yaml
    from omegaconf import OmegaConf

    stand_in_for("verl.models", "verl.workers")
    sys.path.insert(0, os.environ[VARIABLE])
    import verl.trainer.sft_trainer  # noqa: F401 - before the forks

    changes = yaml.safe_load(blocks_of("use-it-with-verl.md", "yaml")[1])
    changes["data"] |= write_rows(folder)
    changes["data"]["asyncdata"] |= {"cache": {"folder": str(folder / "index")}, "rows_per_epoch": EPOCHS * ROWS}
    in_file_order = {"data": {"asyncdata": {"shuffle": False}}}
    runs: dict[str, Any] = {}
    for name, ranks, settings, saves in (
        ("one rank", 1, {}, [1, ROWS // BATCH, 13, STEPS - 1, STEPS]),
        ("two ranks", 2, {}, [1, ROWS // BATCH, 13, STEPS - 1, STEPS]),
        ("a row a batch", 4, {}, [13]),
        ("in the order of the files", 2, in_file_order, [13]),
    ):
        own = OmegaConf.merge(changes, settings)

        def opens(place: Path, ranks: int = ranks, own: Any = own) -> Any:
            return Run(configuration(place, own), ranks)

        order = "files" if settings is in_file_order else "own"
        runs[name] = kill_and_resume(opens, folder / name, num_batches=BATCHES, saves=saves, rows=ROWS, order=order)
    same = {
        f"rows of {name}": [runs[name]["whole"], runs["one rank"]["whole"]] for name in ("two ranks", "a row a batch")
    }
    return {"runs": runs, "same": same}


if __name__ == "__main__":
    main(drive)
