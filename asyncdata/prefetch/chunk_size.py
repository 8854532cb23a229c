"""How many rows go to a worker at once: few at first, so that the first batch is soon there, then a fixed time's
work.
"""

from __future__ import annotations

__all__ = ("MAX_CHUNK_ROWS", "ChunkPacer", "chunk_limit")

MAX_CHUNK_ROWS = 1024
_FIRST_ROWS = 32
_TARGET_S = 0.05
"""Of work. Below this the cost of a chunk shows; above it a lost worker, or a wait for the row that is next in the
order, costs more. CPU time a row, all processes, two workers with a Hugging Face tokenizer on a machine with much else
to do, medians: 5 ms 685 us, 10 ms 572, 20 ms 522, 30 ms 520, 50 ms 477, 100 ms 486. A function of 13 us a row is at
1024 rows before it matters: 15.9 us at 5 ms, 15.1 from 20 ms on."""


def chunk_limit(capacity: int, num_workers: int) -> int:
    """Rows that a chunk may have at most, where every worker is to have two of them in the channel."""
    return max(1, min(MAX_CHUNK_ROWS, capacity // (2 * num_workers)))


class ChunkPacer:
    """Learns the time of a row from what workers report.

    :param capacity: samples the channel holds; a chunk takes no more of it than every worker can have twice.
    """

    def __init__(self, capacity: int, num_workers: int) -> None:
        self._limit = chunk_limit(capacity, num_workers)
        self._row_s: float | None = None
        self.num_rows = min(_FIRST_ROWS, self._limit)

    def resize(self, capacity: int, num_workers: int) -> None:
        """The channel holds another number of samples now, or other workers are there."""
        self._limit = chunk_limit(capacity, num_workers)
        self.num_rows = min(self.num_rows, self._limit)

    def learn(self, num_rows: int, busy_s: float) -> None:
        """There were ``busy_s`` seconds of work in ``num_rows`` rows."""
        if num_rows < 1:
            return

        row_s = busy_s / num_rows
        self._row_s = row_s if self._row_s is None else 0.8 * self._row_s + 0.2 * row_s
        wanted = int(_TARGET_S / self._row_s) if self._row_s > 0 else self._limit
        self.num_rows = max(1, min(self._limit, wanted, 2 * self.num_rows))
