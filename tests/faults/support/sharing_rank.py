"""One rank of a run whose ranks share something: ``python -m tests.faults.support.sharing_rank SETTINGS``.

It writes a line for each step: the tokens of its pack, and the state after it.
"""

from __future__ import annotations

import json
import sys
import time
from multiprocessing.connection import Client
from pkgutil import resolve_name
from typing import Any

from asyncdata import DataLoader, Ranks
from asyncdata.errors import AsyncDataError
from tests.faults.support.sharing import SMALL, WAYS


def main(settings: dict[str, Any]) -> str:
    """What is said at the end: an error's code, or nothing."""
    for name, value in SMALL.items():  # so that a few rows fill dozens of blocks, and many scans
        module, _, attribute = name.rpartition(".")
        setattr(resolve_name(module), attribute, value)
    rank, world_size = settings["rank"], settings["world_size"]
    hub = Client(settings["hub"])
    hub.send(rank)

    def exchange(data: bytes) -> list[bytes]:
        hub.send_bytes(data)
        return [hub.recv_bytes() for _ in range(world_size)]

    knobs = {**WAYS[settings["way"]], "num_workers": settings["num_workers"], "timeout_s": 240}
    knobs |= {"cache": {"folder": settings["cache"]}, "tokenize_fn": "tests.support.planned_fns:numbered"}
    try:
        with (
            open(settings["log"], "w", encoding="utf-8") as log,
            DataLoader(
                settings["path"], ranks=Ranks(rank=rank, world_size=world_size, exchange=exchange), **knobs
            ) as loader,
        ):
            if settings["state"] is not None:
                loader.load_state_dict(settings["state"])
            for (pack,) in loader:
                tokens = [int(token) for document in pack for token in document.tokens]
                log.write(json.dumps([tokens, loader.state_dict()]) + "\n")
                log.flush()
                time.sleep(0.002)  # a step of the trainer
    except AsyncDataError as error:
        return str(error).split()[0]
    return ""


if __name__ == "__main__":
    sys.stdout.write(main(json.loads(sys.argv[1])))
