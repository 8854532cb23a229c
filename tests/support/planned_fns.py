"""Tokenize functions for rows ``{"id": ..., "n": ...}``; a file that a row names as ``gate`` changes what they do."""

import os
import signal
from pathlib import Path
from typing import Any

Row = dict[str, Any]


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
