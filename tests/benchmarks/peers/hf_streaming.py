"""Hugging Face streaming as slime's users were offered it: a shuffle buffer of 10,000 rows, one thread, one queue.

The thread tokenizes 256 rows at a time, which the tokenizer may do on as many cores as ours has workers.
"""

from __future__ import annotations

from contest import BATCH, SEED, encoded, main  # isort: skip - the clock starts before anything else

import queue
import threading
from typing import TYPE_CHECKING, Any

from datasets import load_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS_AT_ONCE = 256
QUEUE_ROWS = 1000


class HfStreaming:
    """A streaming dataset behind a queue that one thread fills."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._tokenizer = settings["tokenizer"], settings["backend"]
        rows = load_dataset("json", data_files=settings["path"], split="train", streaming=True)
        self._rows = rows.shuffle(seed=SEED, buffer_size=10_000)
        self._queue: queue.Queue[Any] = queue.Queue(QUEUE_ROWS)

    def _fill(self) -> None:
        rows = []
        for row in self._rows:
            rows.append(row)
            if len(rows) == ROWS_AT_ONCE:
                self._put(rows)
                rows = []
        self._put(rows)
        self._queue.put(None)

    def _put(self, rows: list[dict[str, Any]]) -> None:
        for row, ids in zip(rows, encoded([row["input"] for row in rows], *self._tokenizer), strict=True):
            self._queue.put((ids, row["label"], row["metadata"]))

    def __iter__(self) -> Iterator[list[Any]]:
        threading.Thread(target=self._fill, daemon=True).start()
        batch = []
        while (sample := self._queue.get()) is not None:
            batch.append(sample)
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def states(self, stops: list[int]) -> Iterator[Any]:
        """The rows to skip. A state of its own it has as well, but what is in the shuffle buffer is not in it: 10,000
        rows would be lost, and in the last of a file all that is left."""
        yield from stops

    def restore(self, state: Any) -> None:
        self._rows = self._rows.skip(state)


if __name__ == "__main__":
    main(HfStreaming)
