"""Tokenize functions that worker processes import by path."""

import os
import signal
import time
from pathlib import Path
from typing import Any

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
