"""How well an order mixes: the design effect of a batch, for labels that are constant on long runs of rows.

deff = variance of batch means / variance of the means of independent batches: how many times fewer independent rows a
batch is worth. 1 is a full permutation; a batch of one topic has deff = batch size.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.inputs import made

NUM_ROWS, RUN_ROWS, BATCH = 1_000_000, 5_000, 256
NUM_LABELLINGS = 80
OURS = "asyncdata, 1024 x 32 KiB"


def deff(order: np.ndarray[Any, np.dtype[np.int32]], rng: np.random.Generator) -> float:
    """The design effect of ``order`` (row numbers, in the order of delivery), over random labels of the runs."""
    batches = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH) // RUN_ROWS
    values = []
    for _ in range(NUM_LABELLINGS):
        label = rng.standard_normal(NUM_ROWS // RUN_ROWS)
        values.append(((label[batches].mean(axis=1) - label.mean()) ** 2).mean() / (label.var() / BATCH))
    return float(np.mean(values))


def shuffle_quality(
    folder: Path, probe: Callable[..., dict[str, float]], seeds: Sequence[int] = (1, 2)
) -> dict[str, tuple[float, float]]:
    """``{order: (deff of the epoch, of its last 1 %)}``; ours is read off what a loader delivers from a real file."""
    rng = np.random.default_rng(0)
    path, out = _numbered_rows(folder), str(folder / "delivered.i32")
    orders: dict[str, list[np.ndarray[Any, np.dtype[np.int32]]]] = {OURS: []}
    for seed in seeds:
        probe("delivered_ids", path=str(path), out=out, seed=seed, num_workers=2, buffer_size=8192)
        orders[OURS].append(np.fromfile(out, np.int32))
    assert all(np.array_equal(np.sort(order), np.arange(NUM_ROWS)) for order in orders[OURS])
    orders["a shuffle buffer of 10,000 rows"] = [_buffer_shuffle(rng) for _ in seeds]
    orders["a full permutation"] = [rng.permutation(NUM_ROWS).astype(np.int32) for _ in seeds]
    tail = NUM_ROWS // 100
    means = [
        [float(np.mean([deff(one[-n:], rng) for one in found])) for n in (NUM_ROWS, tail)] for found in orders.values()
    ]
    return {name: (whole, last) for name, (whole, last) in zip(orders, means, strict=True)}


def _buffer_shuffle(rng: np.random.Generator, size: int = 10_000) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Rows in file order through a buffer from which a random one is taken, as streaming loaders do."""
    buffer, out = np.arange(size, dtype=np.int32), np.empty(NUM_ROWS, np.int32)
    picks = rng.integers(0, size, NUM_ROWS - size)
    for number, pick in enumerate(picks):
        out[number] = buffer[pick]
        buffer[pick] = number + size
    out[NUM_ROWS - size :] = rng.permutation(buffer)
    return out


def _numbered_rows(folder: Path) -> Path:
    """A file of a million rows of 860 bytes, each with its number."""
    rows = (json.dumps({"id": number, "text": ""}) for number in range(NUM_ROWS))
    return made(folder / "numbered_rows.jsonl", ((row[:-2] + "x" * (859 - len(row)) + '"}\n').encode() for row in rows))
