"""Many ranks in one process, with and without a shared row index: what each reads, tokenizes, hears and computes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tests.support.exchanges import Meeting

if TYPE_CHECKING:
    from asyncdata.sources.remote.store import ObjectStamp

ROW_BYTES, MEAN_TOKENS = 860, 500
calls: Counter[int] = Counter()


def made_up(row: dict[str, Any]) -> dict[str, Any]:
    """As many tokens as the row says, which cost nothing."""
    calls[row["id"]] += 1
    return {"input_ids": [row["id"]] * row["n"]}


made_up.version = "1"  # type: ignore[attr-defined]


def _row(number: int) -> bytes:
    row = json.dumps({"id": number, "n": MEAN_TOKENS // 2 + number * 7919 % MEAN_TOKENS})
    return row[:-1].encode().ljust(ROW_BYTES - 2) + b"}\n"


class MadeUpStore:
    """An object of rows of one length, ``s3://HOW_MANY_ROWS/rows.jsonl``, which answers after ``delay_s``."""

    num_bytes = num_requests = 0
    _lock = threading.Lock()

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        from asyncdata.sources.paths import GivenAddress

        self._root = GivenAddress.parse(url).address
        self._delay_s = float(options.get("delay_s", 0))

    def pinned(self, key: str) -> str:
        """As it is."""
        return key

    def head(self, key: str) -> ObjectStamp:
        """The object."""
        from asyncdata.sources.remote.store import ObjectStamp

        return ObjectStamp(self._root.with_key(key), int(self._root.bucket) * ROW_BYTES, '"1"')

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        """Late, and counted."""
        with self._lock:
            MadeUpStore.num_bytes += stop - start
            MadeUpStore.num_requests += 1
        time.sleep(self._delay_s)
        first = start // ROW_BYTES
        rows = b"".join(map(_row, range(first, -(-stop // ROW_BYTES))))
        return rows[start - first * ROW_BYTES : stop - first * ROW_BYTES]

    def close(self) -> None:
        """Nothing is open."""


def ranks(folder: str, world_size: int, num_rows: int, *, is_shared: bool, store: bool, **knobs: Any) -> dict[str, Any]:
    """One epoch of packs of 4,096 tokens of all ranks, inline.

    :returns: calls of the tokenize function and bytes read, both per row of the data; bytes that a rank hears per row;
        seconds of CPU of a rank until its first batch, and milliseconds for each further one.
    """
    import asyncdata

    if store:
        options = {"store": "tests.benchmarks.probes.ranks:MadeUpStore", "delay_s": 0.05}
        source: Any = asyncdata.JsonlSource(f"s3://{num_rows}/rows.jsonl", storage_options=options)
    else:
        source = os.path.join(folder, f"{num_rows}.jsonl")
        if not os.path.exists(source):
            with open(source, "wb") as file:
                file.writelines(map(_row, range(num_rows)))
    meeting = Meeting(world_size) if is_shared else None
    settings: dict[str, Any] = {"packing": asyncdata.HardPacking(max_length=4096), "plan_packs": True}
    settings |= {"shuffle": "full", "epochs": 1, "batch_size": 1, "num_workers": 0, "cache": {"folder": ""}, **knobs}
    with ExitStack() as stack:
        loaders = []
        for rank in range(world_size):
            own = asyncdata.Ranks(rank=rank, world_size=world_size, exchange=meeting and meeting.of(rank))
            loader = asyncdata.DataLoader(source, tokenize_fn=made_up, ranks=own, timeout_s=3000, **settings)
            loaders.append(stack.enter_context(loader))
        began = time.process_time()
        epochs = list(map(iter, loaders))
        for epoch in epochs:
            next(epoch)
        first = time.process_time()
        num_steps = sum(len(step) for step in zip(*epochs, strict=True))
        last = time.process_time()
    return {
        "calls_per_row": sum(calls.values()) / num_rows,
        "fetched_per_byte": MadeUpStore.num_bytes / (num_rows * ROW_BYTES),
        "num_requests": MadeUpStore.num_requests,
        "heard_bytes_per_row": sum(meeting.num_bytes) / num_rows if meeting else 0.0,
        "num_calls": meeting.num_calls if meeting else 0,
        "packs_per_rank": 1 + num_steps // world_size,
        "first_batch_cpu_s": (first - began) / world_size,
        "step_cpu_ms": 1000 * (last - first) / max(1, num_steps),
    }
