"""Snapshots of each schema, and what a refusal says."""

import os
from typing import Any

import numpy as np

from asyncdata import Position, Sample, SourceLocation, Status
from asyncdata.checkpoint.snapshot import Snapshot
from asyncdata.core.checksummed_file import pack

DATA = {"num_files": 2, "num_bytes": 30, "digest": "d1", "files": [["a.jsonl", 10, "x"], ["b.jsonl", 20, "y"]]}
ORDER = {"seed": 42, "shuffle": True, "block_bytes": 32768, "window_blocks": 1024, "num_blocks": 9}
FINGERPRINTS = {"data": DATA, "tokenizer": "t1", "template": "p1", "tokenize_fn": "f1"}


def sample(index: int) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": "2 + 2 = ?", "tokens": np.arange(5, dtype=np.int32), "position": Position(1, 2, 3)}
    row |= {"label": 4, "metadata": {"level": 1, "image": b"\x00\xff", "size": (3, 4)}}
    rollout: dict[str, Any] = {"response": "f\u00fcnf", "response_length": 2, "reward": {"exact": 0.5}}
    rollout |= {"loss_mask": [1, 0], "rollout_log_probs": [-0.25, float("-inf")], "status": Status.ABORTED}
    source = SourceLocation("a.jsonl", 10, 20)
    return Sample(index=index, group_index=index // 2, source=source, **row, **rollout).to_dict()


FULL = Snapshot(
    library="0.1.0",
    position=(1, 2, 3),
    counters={"num_groups": 7, "num_samples": 14, "drops": {"too_long": 3}},
    order=ORDER,
    fingerprints=FINGERPRINTS,
    buffer=[[sample(0), sample(1)], [sample(2), sample(3)]],
    leases=[[sample(4), sample(5)]],
    acked=[(1, 2, 5), (1, 3, 0)],
    journal=[(0, 123_456_789_012)],
    canaries=["c0", "c1"],
)
LEAST = Snapshot(position=(0, 0, 0))
GOLDEN_SNAPSHOT = Snapshot(
    library="0.1.0",
    position=(3, 14, 159),
    counters={"num_groups": 2, "drops": {"too_long": 1}},
    order={"seed": 42, "shuffle": True, "window_blocks": 1024},
    fingerprints={"data": {"num_files": 1, "num_bytes": 9, "digest": "d", "files": [["a", 9, "x"]]}, "tokenizer": "t"},
    buffer=[[{"index": 0, "tokens": {"__ndarray__": ["<i4", [2], "AQAAAAIAAAA="]}, "reward": -0.5, "label": None}]],
    leases=[[{"index": 1, "response": "f\u00fcnf"}]],
    acked=[(3, 14, 160)],
    journal=[(0, 4096)],
    canaries=["c"],
)


def wrapped(payload: bytes, *, encoding: str = "msgpack", schema: int = 1, library: str = "0.1.0") -> bytes:
    """A file that is whole, whatever its payload."""
    return pack(payload, encoding, schema=schema, library=library) + payload


def names(folder: os.PathLike[str]) -> list[str]:
    return sorted(os.listdir(folder))
