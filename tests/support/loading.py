"""Rows whose tokens are their ids, functions that workers import by path, and the order D without the engine."""

import json
import os
import signal
import time
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


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


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


Row = dict[str, Any]


def row_id(row: Row) -> dict[str, Any]:
    """One token: the row's ``id``. What was delivered is then read off the tokens."""
    return {"input_ids": [row["id"]], "label": row["id"]}


def characters(row: Row) -> dict[str, Any]:
    """One token per character of the prompt."""
    return {"input_ids": [ord(char) for char in row["prompt"]], "prompt": row["prompt"]}


def every_third_dropped(row: Row) -> list[int] | None:
    """Drops the rows whose id is a multiple of three."""
    return None if row["id"] % 3 == 0 else [row["id"]]


def all_dropped(row: Row) -> str:
    """Drops every row, with a reason."""
    return "nothing is good enough"


def fails_on_13(row: Row) -> list[int]:
    """Raises for the row with id 13."""
    if row["id"] == 13:
        raise KeyError("thirteen")

    return [row["id"]]


def kills_on_13(row: Row) -> list[int]:
    """Brings down its worker at the row with id 13."""
    if row["id"] == 13:
        os.kill(os.getpid(), signal.SIGSEGV)

    return [row["id"]]


def hangs_on_13(row: Row) -> list[int]:
    """Never returns for the row with id 13."""
    while row["id"] == 13:
        time.sleep(3600)
    return [row["id"]]


def is_starved_on_13(row: Row) -> list[int]:
    """0.15 s of work for row 13, politely, on a core that others use as well."""
    if row["id"] == 13:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os.nice(10)
        until = time.process_time() + 0.15
        while time.process_time() < until:
            pass
    return [row["id"]]


def waits_for_a_file(row: Row) -> list[int]:
    """Returns once the file that the row names in ``gate`` is there."""
    while "gate" in row and not Path(row["gate"]).exists():
        time.sleep(0.01)
    return [row["id"]]


def id_and_text(row: Row) -> list[int]:
    """The row's id, and a token for each character of its ``pad``."""
    return [row["id"], *map(ord, row["pad"])]


def in_batches(rows: list[Row]) -> list[list[int]]:
    """The same as :func:`row_id`, for many rows in one call."""
    return [[row["id"]] for row in rows]


in_batches.batched = True  # type: ignore[attr-defined]


def kills_on_13_in_batches(rows: list[Row]) -> list[list[int]]:
    """The same as :func:`kills_on_13`, for many rows in one call: which row it was is not known."""
    return [kills_on_13(row) for row in rows]


kills_on_13_in_batches.batched = True  # type: ignore[attr-defined]


def drops_marked(row: Row) -> list[int] | str:
    """Drops the rows that are marked, with a reason."""
    return "marked" if row["is_dropped"] else [row["id"]]


def tokens_of(row: Row) -> list[int]:
    """``n`` tokens, each of which tells the row and its own place."""
    return [1000 * row["id"] + place for place in range(row["n"])]


def numbered(row: Row) -> dict[str, Any] | str:
    """A row without tokens is dropped."""
    return {"input_ids": tokens_of(row), "label": row["id"]} if row["n"] else "empty"


def with_one_more(row: Row) -> list[int] | None:
    """One token more than before, once the gate is there."""
    return [*tokens_of(row), 7] if _is_open(row) else tokens_of(row) or None


def kills(row: Row) -> list[int] | None:
    """Brings down its worker, once the gate is there."""
    if _is_open(row):
        os.kill(os.getpid(), signal.SIGKILL)

    return tokens_of(row) or None


def logged(row: Row) -> dict[str, Any] | str:
    """Each call is a line of the file that the row names as ``log``."""
    with open(row["log"], "a", encoding="ascii") as log:
        log.write(f"{row['id']}\n")
    return numbered(row)


def _is_open(row: Row) -> bool:
    return "gate" in row and Path(row["gate"]).exists()


for function in (numbered, with_one_more, kills, logged):
    function.version = 1  # type: ignore[attr-defined]
