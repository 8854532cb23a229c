"""How many rows go to a worker at once: few at first, so that the first batch is soon there, then a fixed time's
work.
"""

from __future__ import annotations

__all__ = ("MAX_CHUNK_ROWS", "ChunkPacer", "chunk_limit")

MAX_CHUNK_ROWS = 1024
_FIRST_ROWS = 32
_TARGET_S = 0.03
"""Below this the cost of a chunk, about 0.3 ms, shows; above it a lost worker, or the end of a window, costs more."""


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
        """A worker took ``busy_s`` seconds for ``num_rows`` rows."""
        if num_rows < 1:
            return

        row_s = busy_s / num_rows
        self._row_s = row_s if self._row_s is None else 0.8 * self._row_s + 0.2 * row_s
        wanted = int(_TARGET_S / self._row_s) if self._row_s > 0 else self._limit
        self.num_rows = max(1, min(self._limit, wanted, 2 * self.num_rows))
