"""torchtitan's own loader, configuration and checkpoints, from the folder that ASYNCDATA_TORCHTITAN names.

That may have torchtitan 0.3, as ``pip install torchtitan`` has it, or the interface after that: the new one.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.support.frameworks.killed_runs import kill_and_resume, main

VARIABLE = "ASYNCDATA_TORCHTITAN"
NEEDS = {VARIABLE: "torchtitan/components/checkpointer/dcp.py"}
PACKAGES = ("torch", "tyro", "torchdata", "datasets", "spmd_types")
ROWS = 60
TOKENS = 64
FIRST_ID = 1000
CONTEXT = 32


def is_new() -> bool:
    return Path(os.environ[VARIABLE], "torchtitan/components/data").is_dir()


def runtime() -> dict[str, Any]:
    """What torchtitan's trainer gives to a loader beside its ranks and its tokenizer."""
    if is_new():
        return {"max_context_length": CONTEXT, "num_tokens_per_batch": TOKENS}
    return {"seq_len": TOKENS, "local_batch_size": 1, "snapshot_every_n_steps": 1}


def write_rows(folder: Path) -> Path:
    """Rows of 3 to 30 tokens; the first one says which row it is."""
    lengths = random.Random(3)
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"tokens": [FIRST_ID + number, *range(1, lengths.randint(3, 30))]}) + "\n"
            for number in range(ROWS)
        )
    )
    return path


def tokenize(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": row["tokens"]}


def ours(folder: Path, **changes: Any) -> Any:
    from asyncdata.integrations.torchtitan import AsyncDataLoader

    knobs = {"shuffle": "full", "cache": {"folder": str(folder / "index")}, "timeout_s": 240}
    return AsyncDataLoader.Config(
        dataset=str(folder / "rows.jsonl"),
        tokenize_fn="tests.support.frameworks.torchtitan:tokenize",
        knobs=knobs,
        **changes,
    )


class Counted:
    """A state beside the loader's: how many steps there were, or nothing."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Run:
    """A loader, built and checkpointed by torchtitan's own code, of one or more ranks."""

    def __init__(self, folder: Path, config: Any, num_ranks: int = 1) -> None:
        import torch
        from torchtitan.components.checkpointer.dcp import CheckpointManager

        given = {"dp_world_size": num_ranks, "tokenizer": None, **runtime()}
        self.loaders = [config.build(dp_rank=rank, **given) for rank in range(num_ranks)]
        counted = [Counted() for _ in self.loaders]
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
            for loader, train_state in zip(self.loaders, counted, strict=True)
        ]
        for manager in self.managers:
            manager.load()
        self.train_state = counted[0]
        self.iterators = list(map(iter, self.loaders))
        self.last: Any = None

    @property
    def step(self) -> int:
        return self.train_state.step

    @step.setter
    def step(self, step: int) -> None:
        self.train_state.step = step

    def take(self) -> list[Any]:
        self.last = [next(iterator) for iterator in self.iterators]
        return [found for inputs, labels in self.last for found in _ids(inputs, labels)]

    def save(self) -> None:
        assert self.managers[0].save(self.step)


def _ids(inputs: dict[str, Any], labels: Any) -> list[int]:
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


def drive(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, os.environ[VARIABLE])
    for name in ("checkpointer.dcp", "data" if is_new() else "dataloader"):  # before the forks
        importlib.import_module(f"torchtitan.components.{name}")
    write_rows(folder)

    def opens(place: Path, num_ranks: int = 1) -> Run:
        return Run(place, ours(folder, num_workers=1), num_ranks)

    runs = kill_and_resume(opens, folder / "ours", num_batches=40, saves=[1, 8, 25], rows=ROWS)
    two = opens(folder / "ours" / "killed_8", num_ranks=2)
    continued = sorted(row for _ in range(4) for row in two.take())
    same = {"two ranks after one": [continued, sorted(row for batch in runs["whole"][8:16] for row in batch)]}
    return {"runs": {"ours": runs}, "same": same}


if __name__ == "__main__":
    main(drive)
