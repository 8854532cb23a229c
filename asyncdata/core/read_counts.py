"""Counts of requests to stores, in memory that processes may share. Runs without numpy."""

from __future__ import annotations

import struct
import threading

READ_COUNTS = struct.Struct("=QQQQ")


class ReadCounts:
    """How many requests were answered or tried again, and what the local disk had. Any thread may count.

    :param memory: 32 bytes, with the counts so far; None: memory of its own. One process writes there at a time.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._numbers = memoryview(bytearray(READ_COUNTS.size) if memory is None else memory).cast("B").cast("Q")
        self._lock = threading.Lock()

    @property
    def num_reads(self) -> int:
        """Requests that were answered."""
        return self._numbers[0]

    @property
    def num_retried(self) -> int:
        """Tries that failed and were followed by another."""
        return self._numbers[1]

    @property
    def num_cached(self) -> int:
        """Blocks that were read from the local disk instead."""
        return self._numbers[2]

    @property
    def num_cache_failures(self) -> int:
        """Blocks that could not be read from the local disk or kept there, or were damaged."""
        return self._numbers[3]

    def add_cached(self, *, has_failed: bool = False) -> None:
        """Count one block of the local disk."""
        with self._lock:
            self._numbers[2 + has_failed] += 1

    def add(self, *, is_retry: bool) -> None:
        """Count one request."""
        with self._lock:
            self._numbers[is_retry] += 1
