"""Hugging Face streaming, as it is documented: ``state_dict`` of the dataset, ``set_epoch`` by the training loop."""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import datasets

from tests.conformance.lab import EpochByEpoch, Knobs, Rows, Seen


def with_worker(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Which process made the rows."""
    return {"worker": [os.getpid()] * len(batch["row"])}


def is_kept(number: int, row: int) -> bool:
    return row % number == 0


def streamed(rows: Rows, knobs: Knobs) -> Any:
    """The streaming dataset; with weights, each file is one, and they are interleaved."""
    if knobs.weights:
        parts = [datasets.load_dataset("json", data_files=[path], split="train", streaming=True) for path in rows.paths]
        found = datasets.interleave_datasets(
            parts, probabilities=list(knobs.weights), seed=knobs.seed, stopping_strategy="all_exhausted"
        )
    else:
        found = datasets.load_dataset("json", data_files=rows.paths, split="train", streaming=True)
    if knobs.shuffle:
        found = found.shuffle(seed=knobs.seed, buffer_size=knobs.read_ahead)
    if knobs.keep_every > 1:
        found = found.filter(partial(is_kept, knobs.keep_every), input_columns=["row"])
    return found.map(with_worker, batched=True, batch_size=knobs.transform_rows)


class HfStreaming:
    """A streaming dataset, iterated as it is."""

    name = "HF datasets, streaming"
    version = f"datasets {datasets.__version__}"
    lacks: Mapping[str, str] = {
        "bad_rows": "a row for which a function raises ends the stream",
        "outcomes": "it has no feedback from the trainer",
        "read_ahead": "without a DataLoader nothing is read ahead",
        "workers": "it has none without a DataLoader",
    }

    def open(self, rows: Rows, knobs: Knobs) -> Any:
        return _Loader(streamed(rows, knobs), knobs.batch_size)


class _Loader(EpochByEpoch):
    def __init__(self, rows: Any, batch_size: int) -> None:
        self._rows, self._batch_size = rows, batch_size

    def begin(self) -> Iterator[list[Seen]]:
        self._rows.set_epoch(self.epoch)
        rows = iter(self._rows)
        while batch := [Seen(row["row"], row["worker"]) for row in islice(rows, self._batch_size)]:
            yield batch

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "rows": self._rows.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.epoch = state["epoch"]
        self._rows.set_epoch(self.epoch)
        self._rows.load_state_dict(state["rows"])
