"""A data set of a hub that answers late: speed by the reads in flight, waits, first batch; and very many objects."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from tests.benchmarks.clock import seconds
from tests.benchmarks.probes.loading import BATCH, byte_tokens

if TYPE_CHECKING:
    from asyncdata.sources.remote.store import ObjectStamp

ADDRESS = "hf://datasets/bench/rows@main/data/rows.jsonl"
OBJECT_BYTES, ROW_BYTES = 10_000_000, 1000


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


def _wait(
    batches: Iterable[list[Any]], mb_per_s: float, span_s: float, waited_s: Callable[[], float] | None = None
) -> dict[str, float]:
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


class ManyObjects:
    """A store that makes up its listing and its bytes: ``s3://HOW_MANY`` has so many objects of 10,000 rows each."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        from asyncdata.sources.paths import GivenAddress

        self._root = GivenAddress.parse(url).address

    def pinned(self, key: str) -> str:
        """As it is."""
        return key

    def head(self, key: str) -> ObjectStamp:
        """One of them."""
        from asyncdata.sources.remote.store import ObjectStamp

        return ObjectStamp(self._root.with_key(key), OBJECT_BYTES, f'"{key}"')

    def list(self, prefix: str) -> Iterator[ObjectStamp]:
        """All of them, as a store lists them: in pages."""
        return (self.head(f"data/part-{number:07}.jsonl") for number in range(int(self._root.bucket)))

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        """Rows of a fixed length, with their numbers."""
        first = start // ROW_BYTES
        rows = b"".join(
            json.dumps({"id": row, "input": "x"}).encode().ljust(ROW_BYTES - 1) + b"\n"
            for row in range(first, -(-stop // ROW_BYTES))
        )
        return rows[start - first * ROW_BYTES : stop - first * ROW_BYTES]

    def close(self) -> None:
        """Nothing is open."""


def many_objects(num_objects: int, num_workers: int) -> dict[str, float]:
    """Seconds from this process's first statement to the first batch, and the size of a state then."""
    from asyncdata import DataLoader, JsonlSource

    store = {"store": "tests.benchmarks.probes.remote:ManyObjects"}
    source = JsonlSource(f"s3://{num_objects}/data/*.jsonl", storage_options=store)
    function = "tests.benchmarks.probes.loading:byte_tokens"
    with DataLoader(source, tokenize_fn=function, num_workers=num_workers) as loader:
        loader.get_next_batch(BATCH)
        return {"first_batch_s": seconds(), "state_bytes": len(json.dumps(loader.state_dict()))}
