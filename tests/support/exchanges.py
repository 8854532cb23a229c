"""Exchanges between ranks that are threads of this process."""

import threading
from collections.abc import Callable

WAIT_S = 120
"""Nothing takes so long: a rank that is waited for has been lost."""


class Meeting:
    """A call of each rank returns what all ranks sent.

    :ivar num_bytes: what each rank has sent so far.
    :ivar num_calls: the calls of all ranks together that were answered.
    """

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._sent = [b""] * world_size
        self.num_bytes = [0] * world_size
        self.num_calls = 0

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        """The exchange of one rank."""

        def exchange(data: bytes) -> list[bytes]:
            self._sent[rank] = data
            self.num_bytes[rank] += len(data)
            self._barrier.wait(WAIT_S)
            answers = list(self._sent)
            self._barrier.wait(WAIT_S)  # no call begins before all have their answers of this one
            self.num_calls += 1
            return answers

        return exchange

    def end(self) -> None:
        """Every call fails from now on."""
        self._barrier.abort()
