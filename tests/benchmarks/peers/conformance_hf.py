"""Hugging Face streaming, as its documentation says: ``state_dict`` of the dataset, ``set_epoch`` by the training loop.

The loop keeps the number of the epoch beside the state, as trainers do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import datasets

from tests.conformance.lab import Seen

if TYPE_CHECKING:
    from tests.conformance.lab import Knobs, Rows


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

    def open(self, rows: Rows, knobs: Knobs) -> _Loader:
        return _Loader(streamed(rows, knobs), knobs.batch_size)


class _Loader:
    def __init__(self, rows: Any, batch_size: int) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self._epoch, self._iterator = 0, None

    def next_batch(self) -> list[Seen]:
        if self._iterator is None:
            self._rows.set_epoch(self._epoch)
            self._iterator = iter(self._rows)
        found = [Seen(row["row"], row["worker"]) for row in islice(self._iterator, self._batch_size)]
        if found:
            return found

        self._iterator = None
        self._epoch += 1
        raise StopIteration

    def state_dict(self) -> Any:
        return {"epoch": self._epoch, "rows": self._rows.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._epoch = state["epoch"]
        self._rows.set_epoch(self._epoch)
        self._rows.load_state_dict(state["rows"])

    def close(self) -> None:
        pass
