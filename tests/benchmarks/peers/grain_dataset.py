"""Grain: rows by number out of the raw file, whose offsets are found first, in a global shuffle, in workers."""

from __future__ import annotations

from contest import BATCH, SEED, encoded, main, row_offsets  # isort: skip - the clock starts before anything else

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import grain

if TYPE_CHECKING:
    from collections.abc import Iterator


class Rows:
    """A random access source."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._offsets = row_offsets(path)
        self._file: int | None = None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> dict[str, Any]:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY)
        start, stop = self._offsets[number], self._offsets[number + 1]
        return json.loads(os.pread(self._file, stop - start, start))


def tokenized(rows: list[dict[str, Any]], tokenizer: str) -> list[Any]:
    """A batch of samples, made in a worker."""
    ids = encoded([row["input"] for row in rows], tokenizer)
    return [(tokens, row["label"], row["metadata"]) for row, tokens in zip(rows, ids, strict=True)]


class Grain:
    """Its dataset API."""

    def __init__(self, settings: dict[str, Any]) -> None:
        rows = grain.MapDataset.source(Rows(settings["path"])).shuffle(seed=SEED)
        batches = rows.batch(BATCH, drop_remainder=False, batch_fn=list)
        batches = batches.map(partial(tokenized, tokenizer=settings["tokenizer"]))
        options = grain.MultiprocessingOptions(num_workers=settings["num_workers"])
        self._batches = iter(batches.to_iter_dataset().mp_prefetch(options))

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches

    def states(self, stops: list[int]) -> Iterator[Any]:
        wanted = iter(stops)
        stop = next(wanted)
        for number, _ in enumerate(self._batches):
            if number * BATCH >= stop:
                yield self._batches.get_state()
                stop = next(wanted, 1 << 62)

    def restore(self, state: Any) -> None:
        self._batches.set_state(state)


if __name__ == "__main__":
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # grain's worker processes ask for them
    main(Grain)
