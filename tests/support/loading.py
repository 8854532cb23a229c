"""Rows whose tokens are their ids, and the order D in which they must come, worked out without the engine."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncdata import Sample, Shuffle
from asyncdata.order.order import Order

NEVER_S = 240.0
"""A deadline that only a test which has failed reaches."""

NUM_ROWS = 200

SHUFFLE = Shuffle(block_bytes=1024, window_blocks=4)
"""Small enough that a few hundred rows fill several windows."""


def write_rows(path: Path, num_rows: int, special: dict[int, dict[str, Any]] | None = None) -> Path:
    """Rows 0 to ``num_rows`` - 1, of many lengths; each with what is given for it."""
    rows = ({"id": i, "pad": "x" * (i * 37 % 90), **(special or {}).get(i, {})} for i in range(num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def order_of(path: Path | list[Path], num_epochs: int = 1, *, seed: int = 42, shuffle: Shuffle = SHUFFLE) -> list[int]:
    """D: the ids of the first ``num_epochs`` epochs. Reads every file whole, and knows nothing of chunks or workers."""
    blocks = [block for file in (path if isinstance(path, list) else [path]) for block in _blocks_of(file, shuffle)]
    order = Order(shuffle, seed, len(blocks))
    found: list[int] = []
    for epoch in range(num_epochs):
        for window in range(order.num_windows):
            rows = [row for block in order.blocks(epoch, window) for row in blocks[block]]
            found += [rows[i] for i in order.rows(epoch, window, len(rows))]
    return found


def _blocks_of(path: Path, shuffle: Shuffle) -> list[list[int]]:
    data = path.read_bytes()
    blocks: list[list[int]] = [[] for _ in range(0, len(data), shuffle.block_bytes)]
    start = 0
    for line in data.splitlines(keepends=True):
        blocks[start // shuffle.block_bytes].append(json.loads(line)["id"])
        start += len(line)
    return blocks


def ids(samples: Iterable[Sample]) -> list[int]:
    """Which rows they are."""
    return [int(sample.tokens[0]) for sample in samples]


def line_of(path: Path, row: int) -> tuple[int, int]:
    """The line of a row, counted from 1, and its byte offset."""
    lines = path.read_bytes().splitlines(keepends=True)
    return row + 1, sum(map(len, lines[:row]))
