"""One rank of a job of torchrun: ``torchrun ... -m tests.faults.support.torchrun_rank PATH WAY...``.

Each pair of ranks is a run of its own that ends in one of the ways; or all ranks are one run, with the only way.
"""

import signal
import sys
import time
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import pytest
import torch.distributed as dist

from asyncdata.integrations.torch import exchange, ranks
from tests.support.parts import change
from tests.support.ranks import WAYS, make

NUM_STEPS = 40


class SlowEnd:
    """Is garbage when the interpreter ends, which takes long, as with a GPU."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1.5)


def main(path: str, *ways: str) -> None:
    """Train, and end as ``ways`` say."""
    dist.init_process_group("gloo")
    number, group = dist.get_rank(), None
    if len(ways) > 1:
        group = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)][number // 2]
    way, rank = ways[number // 2 if group else 0], dist.get_rank(group)
    if way in ("stuck", "killed") and rank != 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends ranks beside one that has failed
    soon = dict.fromkeys(("patience_with_ranks_s", "end_of_calls_s", "end_of_threads_s"), 0.5)
    change(pytest.MonkeyPatch(), ranks_at_start=1, **(soon if way == "stuck" else {}))
    share, calls = exchange(group), count()

    def shares(data: bytes) -> list[bytes]:
        if way == "stuck" and rank == 1 and next(calls) == 10:
            time.sleep(1000)
        return share(data)

    _train(make(path, ranks=ranks(group, exchange=shares), **WAYS["soft"]), way, rank)
    if way.endswith("destroyed"):
        dist.destroy_process_group()
    sys.stdout.write("done")
    if rank == 0:
        sys.slow_end = SlowEnd()
    if way == "stuck":
        sys.exit(3)


def _train(loader: Any, way: str, rank: int) -> None:
    steps = enumerate(islice(loader, NUM_STEPS * (1 + rank) if way == "other numbers" else NUM_STEPS))
    if way.startswith("left open"):
        for _ in steps:
            continue
        return

    with loader:
        for step, _ in steps:
            if way == "raises" and rank == 0 and step == NUM_STEPS // 2:
                raise ValueError("of the trainer")
            if way == "killed" and rank == 1 and step == NUM_STEPS // 2:
                signal.raise_signal(signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
