"""Shared by this folder: run a tokenize function as a worker does, and read its reply as the trainer does."""

import json
from collections.abc import Iterable
from typing import Any

from asyncdata import Position, SourceLocation
from tests.support.parts import BatchTokenizer, Chunk, ColumnWriter


class Nowhere:
    def location(self, row: int) -> SourceLocation:
        return SourceLocation("rows.jsonl", row, 1)


def run(tokenizer: BatchTokenizer, rows: Iterable[dict[str, Any] | bytes]) -> Chunk:
    """The samples of ``rows``; bytes are rows as they lie in a file."""
    raws = [memoryview(row if isinstance(row, bytes) else json.dumps(row).encode()) for row in rows]
    out = ColumnWriter()
    tokenizer(raws, out)
    return Chunk(out.finish(len(raws), 0.0), Position(), len(raws), Nowhere(), ends_epoch=False)


def token_ids(chunk: Chunk) -> list[list[int]]:
    return [chunk.tokens_of(sample).tolist() for sample in range(chunk.num_samples)]


def values(chunk: Chunk, column: str) -> list[Any]:
    return [chunk.value(column, sample) for sample in range(chunk.num_samples)]


def faults(chunk: Chunk) -> list[tuple[int, str]]:
    return [(error.row, error.code) for error in chunk.errors]


def drops(chunk: Chunk) -> dict[str, list[int]]:
    return {drop.reason: drop.rows.tolist() for drop in chunk.drops}


def notes(chunk: Chunk) -> dict[str, list[int]]:
    return {note.name: note.rows.tolist() for note in chunk.notes}


def outcomes(chunk: Chunk) -> dict[int, Any]:
    """What became of each row."""
    columns = ("prompt", "label", "metadata", "spans", "extra")
    found: dict[int, Any] = {
        chunk.row_of(sample): (ids, [chunk.value(column, sample) for column in columns])
        for sample, ids in enumerate(token_ids(chunk))
    }
    found |= {row: reason for reason, rows in drops(chunk).items() for row in rows}
    return found | {error.row: (error.code, error.reason) for error in chunk.errors}
