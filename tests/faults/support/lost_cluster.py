"""A trainer whose whole cluster ends: ``python -m tests.faults.support.lost_cluster {"path": ..., "process": ...}``.

It prints the error. It is a process of its own, as Ray ends a process that uses what is lost.
"""

from __future__ import annotations

import json
import os
import sys

from asyncdata import AsyncDataError, DataLoader, RayExecutor
from tests.support.loading import SHUFFLE
from tests.support.ray_cluster import two_nodes
from tests.support.tokenize_fns import row_id


def main(path: str, process: str) -> None:
    """Kill the cluster's processes of that name, and ask for data, without ``timeout_s``."""
    with two_nodes() as nodes:
        executor = RayExecutor(num_workers=2, num_cpus=0.5)
        loader = DataLoader(path, tokenize_fn=row_id, shuffle=SHUFFLE, executor=executor)
        loader.get_next_batch(1)
        nodes.kill(process)
        try:
            while True:
                loader.get_next_batch(20)
        except AsyncDataError as error:
            sys.stdout.write(f"{error}\n")
        loader.close()
        sys.stdout.write("closed\n")
        sys.stdout.flush()
        nodes.stop()
        os._exit(0)  # Ray's own end could wait for what is lost


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
