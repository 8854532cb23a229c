"""What the examples of this folder share. Copy it with the one that you need."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdata.demo import docstring_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from asyncdata import DataLoader, Sample


def need(version: str, owner: Any, *names: str) -> None:
    """End with a line that says what has moved, where a framework lacks a name that an example replaces or overrides.

    :param version: of the framework for which the example was written.
    """
    for name in names:
        if not hasattr(owner, name):
            owned = getattr(owner, "__name__", type(owner).__name__)
            sys.exit(f"{owned} has no {name}: this example was written for {version}")


class Batches:
    """A framework's loader: an iteration is an epoch, or the rest of it. Rows that fill no batch begin the next one.

    :param collate: makes a batch of a list of samples.
    """

    def __init__(self, loader: DataLoader, batch_size: int, collate: Callable[[list[Sample]], Any]) -> None:
        self.loader, self.batch_size, self.collate = loader, batch_size, collate
        self.start = self.taken = 0  # batches of the epoch

    def __len__(self) -> int:
        return self.loader.num_rows() // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for number in range(start, len(self)):
            self.taken = number + 1
            yield self.collate(self.loader.get_next_batch(self.batch_size))

    def state_dict(self) -> dict[str, Any]:
        return {"asyncdata": self.loader.state_dict(), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the next batch; after a state at an epoch's end, the rest of that epoch is empty."""
        self.loader.load_state_dict(state["asyncdata"])
        self.start = self.taken = state["taken"]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write the first 2000 rows once: a restart needs the same file."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in islice(rows, 2000)))


def chats() -> Iterator[dict[str, Any]]:
    for row in docstring_prompts():
        turns = [("user", row["input"]), ("assistant", row["label"])]
        yield {"messages": [{"role": role, "content": text} for role, text in turns]}


def sums() -> Iterator[tuple[str, str]]:
    """Questions and their answers."""
    draw = random.Random(1)
    while True:
        left, right = draw.randrange(1000), draw.randrange(1000)
        yield f"What is {left} + {right}?", str(left + right)


def start(module: str, *words: str) -> None:
    """Run a module of Python that can import the example, with these words and those of the command line."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, *words, *sys.argv[1:]]
    sys.exit(subprocess.call(command, env=os.environ | {"PYTHONPATH": path}))
