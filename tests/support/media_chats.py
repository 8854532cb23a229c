"""Loaders of chats with pictures, sounds or videos, and such media with a damage."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from asyncdata import ChatTokenizeFn, DataLoader, Processor

__all__ = ("ANSWER", "assert_only_some_are_bad", "asks", "damaged", "loaded", "loader_of", "written")

ANSWER = {"role": "assistant", "content": "yes"}


def asks(*parts: Any) -> dict[str, Any]:
    """A row whose user says these parts."""
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def written(folder: Path, rows: Iterable[Any]) -> Path:
    """A file of these rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def loader_of(folder: Path, name: str, *rows: Any, knobs: Any = None, fn: Any = None, **settings: Any) -> DataLoader:
    """Of these rows in their order, by a tokenizer with its processor, which has these settings.

    :param knobs: of the loader.
    :param fn: more settings of its function.
    """
    tokenize_fn = ChatTokenizeFn(name, processor=Processor(**settings), **(fn or {}))
    knobs = {"num_workers": 0, "shuffle": False, "epochs": 1} | (knobs or {})
    return DataLoader(written(folder, rows), tokenize_fn=tokenize_fn, **knobs)


def loaded(folder: Path, name: str, *rows: Any, **settings: Any) -> Any:
    """The samples of these rows."""
    with loader_of(folder, name, *rows, **settings) as loader:
        return loader.get_next_batch(len(rows))


def damaged(rng: random.Random, medium: bytes, spoil_header: Callable[[random.Random, bytearray], None]) -> bytes:
    """A picture or a sound, cut, with other bytes, with another header, or of another type."""
    data = bytearray(medium)
    kind = rng.randrange(4)
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        for _ in range(rng.randint(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:
        spoil_header(rng, data)
    else:
        data[: rng.randint(4, 64)] = rng.randbytes(64)
    return bytes(data)


def assert_only_some_are_bad(loader: DataLoader, number: int) -> None:
    """Of so many rows, each is a sample or bad as its medium is, and no worker is lost."""
    with loader:
        num_samples = sum(len(batch) for batch in loader)
        now = loader.statistics()
    assert set(now.dropped_total) == {"bad row AD457"}
    assert num_samples + now.bad_rows_total == number
    assert now.worker_restarts_total == 0
    assert 0 < num_samples < number
