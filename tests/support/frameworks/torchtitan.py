"""torchtitan's own loader, configuration and checkpoints, of 0.3 or of the interface after that, the new one."""

import importlib
import random
from importlib.util import find_spec

from tests.support.frameworks.killed_runs import kill_and_resume, write_rows

PACKAGES = ("torchtitan", "torchdata")
ROWS = 60
TOKENS = 64
FIRST_ID = 1000
CONTEXT = 32


def is_new():
    return find_spec("torchtitan.components.data") is not None


def runtime():
    """What torchtitan's trainer gives to a loader beside its ranks and its tokenizer."""
    if is_new():
        return {"max_context_length": CONTEXT, "num_tokens_per_batch": TOKENS}
    return {"seq_len": TOKENS, "local_batch_size": 1, "snapshot_every_n_steps": 1}


def tokenize(row):
    return {"tokens": row["tokens"]}


class Counted:
    """A state beside the loader's: how many steps there were, or nothing."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Run:
    """A loader, built and checkpointed by torchtitan's own code, of one or more ranks."""

    def __init__(self, folder, config, num_ranks=1):
        import torch
        from torchtitan.components.checkpointer.dcp import CheckpointManager

        given = {"dp_world_size": num_ranks, "tokenizer": None, **runtime()}
        loaders = [config.build(dp_rank=rank, **given) for rank in range(num_ranks)]
        counted = [Counted() for _ in loaders]
        self.managers = [
            CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0).build(
                dataloader=loader,
                model_parts=[torch.nn.Linear(2, 2)],
                optimizers=Counted(),
                lr_schedulers=Counted(),
                states={"train_state": train_state},
                sd_adapter=None,
                base_folder=str(folder),
            )
            for loader, train_state in zip(loaders, counted, strict=True)
        ]
        for manager in self.managers:
            manager.load()
        self.train_state = counted[0]
        self.iterators = list(map(iter, loaders))

    @property
    def step(self):
        return self.train_state.step

    @step.setter
    def step(self, step):
        self.train_state.step = step

    def take(self):
        return [found for iterator in self.iterators for found in _ids(*next(iterator))]

    def save(self):
        assert self.managers[0].save(self.step)


def _ids(inputs, labels):
    """Which rows are in a batch, and that it is one as torchtitan's trainer takes it."""
    import torch

    found = inputs["input"], inputs["positions"], labels
    shape = (TOKENS,) if is_new() else (1, TOKENS)
    assert all(value.shape == shape and value.dtype == torch.int64 for value in found)
    tokens, positions, labels = (value.flatten() for value in found)
    starts = positions == 0
    ends = torch.cat([starts[1:], torch.tensor([True])])
    known = (labels != -100) & ~ends
    assert torch.equal(labels[known], tokens[1:][known[:-1]]), "a label is the next token of its document"
    assert int(positions.max()) < (CONTEXT if is_new() else TOKENS)
    return [int(token) - FIRST_ID for token in tokens[starts] if token >= FIRST_ID]


def drive(folder):
    for name in ("checkpointer.dcp", "data" if is_new() else "dataloader"):  # before the forks
        importlib.import_module(f"torchtitan.components.{name}")
    from asyncdata.integrations.torchtitan import AsyncDataLoader

    lengths = random.Random(3)  # of 3 to 30 tokens; the first one says which row it is
    rows = write_rows(folder, [{"tokens": [FIRST_ID + n, *range(1, lengths.randint(3, 30))]} for n in range(ROWS)])
    knobs = {"shuffle": "full", "cache": {"folder": str(folder / "index")}, "timeout_s": 240}

    def opens(place, num_ranks=1):
        settings = {"dataset": rows, "tokenize_fn": f"{__name__}:tokenize", "knobs": knobs, "num_workers": 1}
        return Run(place, AsyncDataLoader.Config(**settings), num_ranks)

    runs = kill_and_resume(opens, folder / "ours", num_batches=40, saves=[1, 8, 25], rows=ROWS)
    two = opens(folder / "ours" / "killed_8", num_ranks=2)
    continued = sorted(row for _ in range(4) for row in two.take())
    same = {"two ranks after one": [continued, sorted(row for batch in runs["whole"][8:16] for row in batch)]}
    return {"runs": {"ours": runs}, "same": same}
