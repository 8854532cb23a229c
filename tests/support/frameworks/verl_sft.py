"""verl's own SFT trainer: its data set, sampler, loader and checkpoints, without a model.

A run has all its ranks in one process: a trainer for each, with the sampler and the file ``data_N.pt`` of its rank.
"""

import os
from pathlib import Path
from types import SimpleNamespace

from tests.support.frameworks import verl as rl
from tests.support.frameworks.killed_runs import KILLED_AFTER, blocks_of

PACKAGES = rl.PACKAGES
EPOCHS = 3
STEPS = EPOCHS * rl.ROWS // rl.BATCH
BATCHES = STEPS + KILLED_AFTER  # those after the training have no rows
FIRST_NUMBER = 10  # of a row; smaller tokens are words of the template

_TEMPLATE = (
    "{% if tools %}tools {{ tools | length }} {{ tools[0].function.name }} {% endif %}"
    "{% for message in messages %}<s> {{ message.role }} {% if enable_thinking %}think {% endif %}"
    "{{ message.content }} </s> {% endfor %}{% if add_generation_prompt %}<s> assistant {% endif %}"
)


def row_of(place):
    """With all columns that verl's class knows."""
    number = FIRST_NUMBER + place
    tool = {"type": "function", "function": {"name": str(FIRST_NUMBER + number % 3)}}
    answer = [{"role": "assistant", "content": f"{number + 1} " * (number % 5 + 1)}]
    return {
        "messages": [{"role": "user", "content": str(number)}, *answer * (number % 2 + 1)],
        "tools": [tool] * (number % 3),
        "enable_thinking": number % 4 == 0,
        "source": "sums",
    }


def tokenizer():
    """A word is a token, and a number is itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "user", "assistant", "think", "tools", "1", "2", "3"]
    numbers = map(str, range(FIRST_NUMBER, FIRST_NUMBER + 2 * rl.ROWS))
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*words, *numbers])}))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", chat_template=_TEMPLATE)


def configuration(folder, changes):
    """verl's own defaults, and what a run needs besides; ``changes`` are those of a user."""
    from omegaconf import OmegaConf

    base = rl.defaults("sft_trainer_engine.yaml")
    data = {"train_batch_size": rl.BATCH, "enable_thinking_default": None}
    trainer = {"default_local_dir": str(folder), "device": "cpu"}
    return OmegaConf.merge(base, {"data": data, "trainer": trainer, "model": {}}, changes)


class _Engine(rl.Actor):
    """An engine of one of several data-parallel ranks."""

    def __init__(self, rank, ranks):
        self.get_data_parallel_rank, self.get_data_parallel_size = (lambda: rank), (lambda: ranks)

    def is_mp_src_rank_with_outputs(self):
        return True

    def reset(self): ...

    def save_checkpoint(self, local_path, **_):
        super().save_checkpoint(local_path)


def _trainer(config, rank=0, ranks=1):
    """verl's ``SFTTrainer`` with the steps of its constructor, but those that make a model and an engine."""
    from verl.trainer.sft_trainer import SFTTrainer

    trainer = object.__new__(SFTTrainer)
    trainer.config, trainer.rank = config, rank
    trainer.engine = trainer.training_client = _Engine(rank, ranks)
    trainer.model_config = SimpleNamespace(tokenizer=tokenizer(), processor=None)
    trainer.optimizer_config = SimpleNamespace()
    trainer._build_dataset()
    trainer._build_dataloader()
    trainer._init_engine()
    trainer._build_ckpt_handler()
    trainer.resume_global_step = trainer.ckpt_handler.load_checkpoint()
    return trainer


def number_of(tokens):
    """Which row it is: the word after ``user`` or ``think`` is its number."""
    from_user = tokens.tolist()[tokens.tolist().index(3) + 1 :]
    return next(token for token in from_user if token >= FIRST_NUMBER) - FIRST_NUMBER


class Run:
    """A training on some data-parallel ranks; a batch's rows are told in the order of the sampler's sequence."""

    def __init__(self, config, ranks):
        import torch

        group = Path(config.trainer.default_local_dir) / f"group_{os.getpid()}"
        torch.distributed.init_process_group("gloo", init_method=f"file://{group}", rank=0, world_size=1)
        self._trainers = [_trainer(config, rank, ranks) for rank in range(ranks)]
        [self.step] = {trainer.resume_global_step for trainer in self._trainers}
        self._batches = [self._fit(trainer) for trainer in self._trainers]

    def _fit(self, trainer):
        """The loops of its ``fit``; after the training, batches without rows."""
        start = trainer.resume_global_step // trainer.steps_per_epoch
        for epoch in range(start, trainer.config.trainer.total_epochs):
            trainer.train_sampler.set_epoch(epoch=epoch)
            for batch in trainer.train_dataloader:
                yield list(map(number_of, batch["input_ids"].unbind()))
        while True:
            yield []

    def take(self):
        of_ranks = [next(batches) for batches in self._batches]
        return [number for numbers in zip(*of_ranks, strict=True) for number in numbers]

    def save(self):
        for trainer in self._trainers:
            trainer.ckpt_handler.save_checkpoint(self.step)


def drive(folder):
    import verl.trainer.sft_trainer  # noqa: F401 - before the forks
    import yaml

    changes = yaml.safe_load(blocks_of(rl.PAGE, "yaml")[1])
    changes["data"] |= rl.write_parquet(folder, row_of, range(rl.ROWS, rl.ROWS + 10))
    changes["data"]["asyncdata"] |= {"cache": {"folder": str(folder / "index")}, "rows_per_epoch": EPOCHS * rl.ROWS}
    saves = [1, rl.ROWS // rl.BATCH, 13, STEPS - 1, STEPS]
    cases = {  # of so many ranks
        "one rank": (1, {}, saves),
        "two ranks": (2, {}, saves),
        "a row a batch": (4, {}, [13]),
        "in the order of the files": (2, rl.IN_FILE_ORDER, [13]),
    }
    opens = lambda place, kind, changes: Run(configuration(place, changes), ranks=kind)  # noqa: E731
    runs = rl.run_each(opens, folder, cases, changes, num_batches=BATCHES)
    one = runs["one rank"]["whole"]
    return {"runs": runs, "same": {f"rows of {name}": [runs[name]["whole"], one] for name in list(runs)[1:3]}}
