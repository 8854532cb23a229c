"""Stores that answer late or are made up: speed by the reads in flight, waits, very many objects, many ranks."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

from tests.benchmarks.clock import seconds
from tests.benchmarks.probes.loading import BATCH, byte_tokens
from tests.support.ranks import Meeting

ADDRESS = "hf://datasets/bench/rows@main/data/rows.jsonl"


def _loader(url: str, max_reads: int, **knobs: Any) -> Any:
    """Of a hub's data set, or of the file at an address."""
    from asyncdata import DataLoader, JsonlSource

    os.environ["HF_HUB_OFFLINE"] = "0"
    if url.endswith(".jsonl"):
        source = JsonlSource(url, storage_options={"max_reads": max_reads})
    else:
        source = JsonlSource(ADDRESS, storage_options={"endpoint": url, "token": "none", "max_reads": max_reads})
    return DataLoader(source, tokenize_fn="tests.benchmarks.probes.loading:byte_tokens", **knobs)


def _batches(loader: Any) -> Iterator[list[Any]]:
    while True:
        yield loader.get_next_batch(BATCH)


def _streamed(url: str) -> Iterator[list[Any]]:
    """Batches of Hugging Face's streaming, with a shuffle buffer of 10,000 rows."""
    os.environ |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url}
    from datasets import load_dataset

    rows = load_dataset("json", data_files=ADDRESS, split="train", streaming=True)
    it = iter(rows.shuffle(seed=0, buffer_size=10_000))
    while batch := list(islice(it, BATCH)):
        yield batch


def _num_bytes(batch: list[Any]) -> int:
    """Bytes of the text of a batch, about."""
    return sum(byte_tokens(row)[0] if isinstance(row, dict) else int(row.tokens[0]) for row in batch)


def _rate(batches: Iterable[list[Any]], num_mb: float) -> dict[str, float]:
    """From this process's first statement to the first batch, and MB/s after it."""
    it = iter(batches)
    next(it)
    first, began, num_bytes = seconds(), time.perf_counter(), 0
    for batch in it:
        num_bytes += _num_bytes(batch)
        if num_bytes >= num_mb * 1e6:
            break
    return {"first_batch_s": first, "mb_per_s": num_bytes / 1e6 / (time.perf_counter() - began)}


def _wait(batches, mb_per_s, span_s, waited_s=None):
    """A trainer that takes text at a fixed rate: the share of its time that it waits for data, the share that it is in
    calls at all, and the rate it has.

    :param waited_s: for how long calls have waited so far; None: all time in calls counts as waiting.
    """
    it = iter(batches)
    for _ in range(20):
        next(it)
    before = waited_s() if waited_s is not None else 0.0
    began = due = time.perf_counter()
    in_calls = num_bytes = 0.0
    while time.perf_counter() - began < span_s:
        time.sleep(max(0.0, due - time.perf_counter()))
        asked = time.perf_counter()
        batch = next(it, [])
        in_calls += time.perf_counter() - asked  # before the batch is looked at, which is the trainer's own time
        if not batch:
            break
        size = _num_bytes(batch)
        num_bytes += size
        due = max(due + size / 1e6 / mb_per_s, time.perf_counter() - 0.05)
    wall = time.perf_counter() - began
    waited = in_calls if waited_s is None else waited_s() - before
    return {"waited_share": waited / wall, "call_share": in_calls / wall, "mb_per_s": num_bytes / 1e6 / wall}


def remote_rate(url: str, max_reads: int, num_mb: float, **knobs: Any) -> dict[str, float]:
    """Ours at full speed."""
    with _loader(url, max_reads, **knobs) as loader:
        return _rate(_batches(loader), num_mb)


def remote_wait(url: str, max_reads: int, mb_per_s: float, span_s: float, **knobs: Any) -> dict[str, float]:
    """Ours at a fixed rate."""
    with _loader(url, max_reads, **knobs) as loader:
        return _wait(_batches(loader), mb_per_s, span_s, lambda: loader.statistics().data_wait_seconds_total)


def streaming_rate(url: str, num_mb: float) -> dict[str, float]:
    """Hugging Face's streaming at full speed."""
    return _rate(_streamed(url), num_mb)


def streaming_wait(url: str, mb_per_s: float, span_s: float) -> dict[str, float]:
    """Hugging Face's streaming at a fixed rate."""
    return _wait(_streamed(url), mb_per_s, span_s)


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
    _row = staticmethod(_row)

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        from asyncdata.sources.paths import GivenAddress

        self._root = GivenAddress.parse(url).address
        self._delay_s = float(options.get("delay_s", 0))
        self._object_bytes = int(self._root.bucket) * ROW_BYTES

    def pinned(self, key: str) -> str:
        return key

    def head(self, key: str) -> Any:
        from asyncdata.sources.remote.store import ObjectStamp

        return ObjectStamp(self._root.with_key(key), self._object_bytes, f'"{key}"')

    def read(self, found: Any, start: int, stop: int) -> bytes:
        """Late, and counted."""
        with self._lock:
            MadeUpStore.num_bytes += stop - start
            MadeUpStore.num_requests += 1
        time.sleep(self._delay_s)
        first = start // ROW_BYTES
        rows = b"".join(map(self._row, range(first, -(-stop // ROW_BYTES))))
        return rows[start - first * ROW_BYTES : stop - first * ROW_BYTES]

    def close(self) -> None: ...


class ManyObjects(MadeUpStore):
    """``s3://HOW_MANY`` lists so many objects of 10,000 rows each, in pages."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, options)
        self._object_bytes = 10_000 * ROW_BYTES

    def list(self, prefix: str) -> Iterator[Any]:
        return (self.head(f"data/part-{number:07}.jsonl") for number in range(int(self._root.bucket)))

    @staticmethod
    def _row(number: int) -> bytes:
        return json.dumps({"id": number, "input": "x"}).encode().ljust(ROW_BYTES - 1) + b"\n"


def ranks(folder: str, world_size: int, num_rows: int, *, is_shared: bool, store: bool, **knobs: Any) -> dict[str, Any]:
    """One epoch of packs of 4,096 tokens of all ranks, inline.

    :returns: calls of the tokenize function and bytes read, both per row of the data; bytes that a rank hears per row;
        seconds of CPU of a rank until its first batch, and milliseconds for each further one.
    """
    import asyncdata

    if store:
        options = {"store": "tests.benchmarks.probes.remote:MadeUpStore", "delay_s": 0.05}
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


def many_objects(num_objects: int, num_workers: int) -> dict[str, float]:
    """Seconds from this process's first statement to the first batch, and the size of a state then."""
    from asyncdata import DataLoader, JsonlSource

    store = {"store": "tests.benchmarks.probes.remote:ManyObjects"}
    source = JsonlSource(f"s3://{num_objects}/data/*.jsonl", storage_options=store)
    function = "tests.benchmarks.probes.loading:byte_tokens"
    with DataLoader(source, tokenize_fn=function, num_workers=num_workers) as loader:
        loader.get_next_batch(BATCH)
        return {"first_batch_s": seconds(), "state_bytes": len(json.dumps(loader.state_dict()))}
