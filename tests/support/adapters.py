"""Each adapter, driven as its framework drives it, where that is installed.

An adapter is opened with a source of rows, which have a ``number``, and with knobs in place of :data:`KNOBS`. Those
that share rows out take ``rank`` and ``world_size`` too.
"""

import importlib
import io
import json
import warnings
from collections import namedtuple
from functools import partial
from itertools import chain, islice, repeat
from types import SimpleNamespace

import numpy as np
import torch

from asyncdata import DataLoader, LengthGrouping, PackedCollator, Ranks, RowFn, SoftPacking
from asyncdata.integrations.torch import AsyncDataset, OrderView, StatefulDataLoader
from asyncdata.integrations.torch.datasets import LoaderOrderView, view_of_rows
from asyncdata.integrations.xtuner_rl import PromptDataloader
from tests.support.frameworks import verl_sft as sft
from tests.support.frameworks.killed_runs import needs
from tests.support.frameworks.verl import PACKAGES, defaults

MAX_LENGTH = 96


def chat(number, length):
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{number} " * length}]


def write_chats(path):
    """Rows of many lengths; every seventh is too long, and is dropped."""
    lengths = [1 + number % 7 * 4 ** (number % 7 // 6) for number in range(150)]
    rows = [{"number": number, "messages": chat(number, length)} for number, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokenize(row):
    """As a chat, and many times as fast."""
    length = 5 + len(row["messages"][1]["content"].split())
    return {"tokens": [row["number"]] * length, "labels": [-100] * 5 + [row["number"]] * (length - 5)}


def short(row):
    return tokenize(row) if len(row["messages"][1]["content"].split()) < 20 else None


def knobs(**changes):
    return {
        "tokenize_fn": short,
        "packing": SoftPacking(max_length=MAX_LENGTH, window_samples=16, window_tokens=2 * MAX_LENGTH),
        "length_grouping": LengthGrouping(window=4),
        "collate_fn": PackedCollator(max_length=MAX_LENGTH),
        "batch_size": 1,
        "num_workers": 0,
        **changes,
    }


SAMPLES = {"packing": None, "length_grouping": None, "batch_size": 7}
SAMPLES["collate_fn"] = lambda samples: [sample.tokens for sample in samples]
KINDS = {"packed": {}, "samples": SAMPLES, "rank 1 of 2": {"ranks": {"rank": 1, "world_size": 2}}}


def plain(batch):
    """A batch as lists, to be compared."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor | np.ndarray) else batch


def take(batches, number):
    return [plain(batch) for batch in islice(batches, number)]


def run(loader, num_epochs):
    return [plain(batch) for _ in range(num_epochs) for batch in loader]


def of_torch_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def chain_epochs(loader):
    while True:
        yield from loader


NUM_ROWS = 20
STEPS = 24
KNOBS = {"shuffle": "full", "seed": 3, "num_workers": 0, "timeout_s": 240}
OFF = {"shuffle": False, "dataloader_num_workers": 0, "filter_overlong_prompts_workers": None}
"""Of verl's defaults, what the adapter refuses, and processes that filter prompts."""

Adapter = namedtuple("Adapter", ["steps", "state", "load", "close"])
"""One that is open, by functions. The first gives the numbers of the rows of each step, without an end; the second
what the framework's checkpoint gives back of the state.
"""


def class_of(module, name, *packages):
    """An adapter's class, whose base class is the framework's. Skips the test where that is not installed."""
    needs(*packages)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the framework's own imports
        return getattr(importlib.import_module(f"asyncdata.integrations.{module}"), name)


def number_of(row):
    if not isinstance(row, dict):
        return row.extra["number"]
    return sft.number_of(row["input_ids"]) if "input_ids" in row else row["number"]


def stored(of):
    """The state of an object, from a file of ``torch.save``."""
    return lambda: of_torch_load(of.state_dict())


def placed(knobs):
    """The knobs of a loader, and its ranks."""
    knobs = KNOBS | knobs
    ranks = Ranks(rank=knobs.pop("rank", 0), world_size=knobs.pop("world_size", 1))
    return knobs, ranks


def numbers_of(rows):
    return list(map(number_of, rows))


def loading(loader, numbers_of=numbers_of, close=None, epochs=chain_epochs):
    """One whose loader gives a step's rows, epoch after epoch, and has the state."""
    steps = lambda: map(numbers_of, epochs(loader))  # noqa: E731
    return Adapter(steps, stored(loader), loader.load_state_dict, close or loader.close)


def row_loader(source, ranks, knobs, kind=DataLoader):
    return kind(source, tokenize_fn=RowFn(), batch_size=4 // ranks.world_size, ranks=ranks, **knobs)


def stateful_loader(source, **changes):
    knobs, ranks = placed(changes)
    return loading(StatefulDataLoader(row_loader(source, ranks, knobs)))


def dataset(source, **changes):
    knobs, ranks = placed(changes)
    return loading(row_loader(source, ranks, knobs, AsyncDataset))


def indexed(rows, close, indices=None):
    """As torchdata's ``StatefulDataLoader``: it asks for batches of indices, and saves how many there were."""
    taken = SimpleNamespace(num=0)
    order = list(range(len(rows))) if indices is None else indices

    def steps():
        while True:
            first = taken.num % len(order)
            found = rows.__getitems__(order[first : first + 4])
            taken.num += 4
            yield numbers_of(found)

    def load(state):
        rows.load_state_dict(state.get("dataset", state))
        taken.num = state["num"]

    return Adapter(steps, lambda: {"dataset": stored(rows)(), "num": taken.num}, load, close)


def order_view(source, rows_per_epoch=None, **changes):
    view = OrderView(DataLoader(source, tokenize_fn=RowFn(), **KNOBS | changes), rows_per_epoch)
    return indexed(view, view.close)


def trainer_of(**changes):
    """What ``attach`` uses of transformers' ``Trainer``, which has sizes of its tensor (``tp``), context and sequence
    parallelism; with ``num_generations`` TRL's that group prompts."""
    arguments = {"max_steps": STEPS, "world_size": 1, "process_index": 0, "gradient_accumulation_steps": 1}
    arguments |= {"generation_batch_size": 4, "steps_per_generation": 1, "output_dir": "out", "num_train_epochs": 3}
    groups = {name: changes.pop(name) for name in ("num_generations", "num_iterations") if name in changes}

    sizes = {f"get_{name}_size": partial(int, changes.pop(name, 1)) for name in ("tp", "cp", "sp")}

    class Trainer(SimpleNamespace):
        def train(self, resume_from_checkpoint=None, trial=None):
            self.trained.append((resume_from_checkpoint, self.args.max_steps))

        def get_train_dataloader(self):
            raise AssertionError("it is replaced")

        def get_eval_dataloader(self, eval_dataset=None):
            return eval_dataset

        def log(self, logs, start_time=None):
            self.logged.append(logs)

    callbacks = []
    return Trainer(
        args=SimpleNamespace(**arguments | changes),
        callback_handler=SimpleNamespace(callbacks=callbacks),
        add_callback=callbacks.append,
        remove_callback=lambda kind: None,
        trained=[],
        logged=[],
        **sizes,
        **groups,
        **{"_step": 0} if groups else {},
    )


def tokens_of(row):
    """Four of them: two rows fill a batch of torchtitan."""
    return {"tokens": [row["number"], 0, 0, 0]}


def torchtitan(source, **changes):
    knobs, ranks = placed(changes)
    kind = class_of("torchtitan", "AsyncDataLoader", "torchtitan")
    settings = {name: knobs.pop(name) for name in ("seed", "num_workers")}
    config = kind.Config(dataset=source, tokenize_fn=tokens_of, knobs=knobs, **settings)
    lengths = {"max_context_length": 8, "num_tokens_per_batch": 8}
    loader = kind(config, dp_world_size=ranks.world_size, dp_rank=ranks.rank, **lengths)
    return loading(loader, lambda batch: batch[0]["input"][::4].tolist(), epochs=iter)


def verl_sft_rows(files, config, max_samples=-1):
    kind = class_of("verl_sft", "SFTDataset", *PACKAGES)
    return kind(files, sft.tokenizer(), config, max_samples=max_samples)


def verl_sft(source, **changes):
    """One epoch is the whole training, which torch's sampler shuffles."""
    from torch.utils.data import DistributedSampler

    rows = verl_sft_rows([str(source)], {"asyncdata": {**KNOBS, **changes, "rows_per_epoch": 4 * STEPS + 4}})
    return indexed(rows, rows.close, list(DistributedSampler(rows, 1, 0, drop_last=True)))


def verl_rows(files, config, tokenizer=None, **more):
    kind = class_of("verl", "RLDataset", *PACKAGES)
    from omegaconf import OmegaConf

    return kind(files, tokenizer, OmegaConf.merge(defaults("data/legacy_data.yaml"), OFF, config), **more)


def verl(source, **changes):
    rows = verl_rows([str(source)], {"asyncdata": KNOBS | changes})
    return indexed(rows, rows.close)


def xtuner_rl(source, **changes):
    """After a state at an epoch's end an iteration is empty: XTuner begins with that epoch again."""
    view = view_of_rows(LoaderOrderView, str(source), KNOBS | changes, item=number_of)
    loader = PromptDataloader(view)
    steps = lambda: chain.from_iterable(repeat(loader))  # noqa: E731
    return Adapter(steps, lambda: of_torch_load(loader.get_state_dict()), loader.load_state_dict, view.close)


def made_late(patch, module, name):
    """Make a class of an adapter again when it is asked for, and not keep it."""
    patch.setitem(vars(module), name, None)  # so that it is taken away at the end
    del vars(module)[name]
