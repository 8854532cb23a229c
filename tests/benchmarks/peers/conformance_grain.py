"""Grain's dataset API: rows by number, a global shuffle, workers by ``mp_prefetch``; an iterator for each epoch."""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grain

from tests.conformance.lab import EpochByEpoch, Knobs, Rows, Seen


def seen(row: dict[str, Any]) -> tuple[int, int]:
    """A row, and the process that made it."""
    return row["row"], os.getpid()


def all_seen(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [seen(row) for row in rows]


def is_kept(number: int, row: dict[str, Any]) -> bool:
    return row["row"] % number == 0


class Grain:
    """A ``MapDataset``, and an ``IterDataset`` of it."""

    name = "Grain"
    version = f"grain {grain.__version__}"
    lacks: Mapping[str, str] = {
        "bad_rows": "a row for which a function raises ends the epoch",
        "outcomes": "it has no feedback from the trainer",
    }

    def open(self, rows: Rows, knobs: Knobs) -> Any:
        return _Loader(rows, knobs)


class _Loader(EpochByEpoch):
    def __init__(self, rows: Rows, knobs: Knobs) -> None:
        self._parts = [[json.loads(line) for line in Path(path).read_text().splitlines()] for path in rows.paths]
        self._knobs = knobs

    def begin(self) -> Any:
        knobs = self._knobs
        if knobs.weights:
            parts = [grain.MapDataset.source(part).repeat().to_iter_dataset() for part in self._parts]
            mixed = grain.IterDataset.mix(parts, list(knobs.weights)).map(seen)
            return iter(mixed.batch(knobs.batch_size, batch_fn=list))

        found = grain.MapDataset.source(sum(self._parts, []))
        if knobs.shuffle:
            found = found.shuffle(seed=knobs.seed + self.epoch)
        if knobs.keep_every > 1:
            found = found.filter(partial(is_kept, knobs.keep_every))
        if knobs.transform_rows > 1:
            some = found.to_iter_dataset().batch(knobs.transform_rows, drop_remainder=False, batch_fn=list)
            found = grain.experimental.FlatMapIterDataset(some.map(all_seen), _Flat(knobs.transform_rows))
        else:
            found = found.map(seen).to_iter_dataset()
        found = found.batch(knobs.batch_size, drop_remainder=False, batch_fn=list)
        if knobs.num_workers:
            buffer = max(1, knobs.read_ahead // knobs.batch_size // knobs.num_workers)
            options = grain.MultiprocessingOptions(num_workers=knobs.num_workers, per_worker_buffer_size=buffer)
            found = found.mp_prefetch(options)
        return iter(found)

    def next_batch(self) -> list[Seen]:
        return [Seen(row, worker) for row, worker in super().next_batch()]

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "iterator": self.batches.get_state()}

    def load_state_dict(self, state: Any) -> None:
        self.epoch = state["epoch"]
        self.batches.set_state(state["iterator"])

    def close(self) -> None:
        getattr(self._batches, "close", bool)()


class _Flat(grain.experimental.FlatMapTransform):
    """Single rows again."""

    def __init__(self, max_fan_out: int) -> None:
        self.max_fan_out = max_fan_out

    def flat_map(self, element: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return element
