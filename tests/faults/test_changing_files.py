"""Files grow, shrink, are replaced or deleted in the middle of an epoch: what comes is D, to its end or an error.

An error names the file. Nothing of another file is ever delivered in this one's name.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, EndOfData, Shuffle, SourceError
from tests.support.faults import num_rounds, say
from tests.support.figures import record
from tests.support.loading import NEVER_S
from tests.support.sources import KINDS, make_rows
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ROUNDS = num_rounds(quick=1, full=10)
NUM_ROWS = 250
EPOCHS = 3
SHUFFLE = Shuffle(block_bytes=1024, window_blocks=8)
CODES = ("AD302", "AD303", "AD304", "AD121", "AD122", "AD120", "AD128")


def grow(path: str, rewrite: Callable[[], object]) -> None:
    """As a writer that is still at it does; rows of its own."""
    with open(path, "ab") as file:
        file.write(b'{"id": 10000}\n' * 100)


def shrink(path: str, rewrite: Callable[[], object]) -> None:
    os.truncate(path, os.path.getsize(path) // 3)


def replace(path: str, rewrite: Callable[[], object]) -> None:
    rewrite()


def delete(path: str, rewrite: Callable[[], object]) -> None:
    os.unlink(path)


CHANGES = {"grows": grow, "shrinks": shrink, "is replaced": replace, "is deleted": delete}
WAYS = {
    "a JSONL file": ("a JSONL file", {}),
    "JSONL files": ("JSONL files", {}),
    "a JSONL file, by its index": ("a JSONL file", {"shuffle": "full", "cache": {"folder": ""}}),
    "Parquet files": ("Parquet files", {}),
    "a gzip file": ("a gzip file", {}),
    "zstd files": ("zstd files", {}),
    "a JSON array": ("a JSON array", {}),
}


def make(source: Any, **knobs: Any) -> DataLoader:
    settings = {"tokenize_fn": row_id, "shuffle": SHUFFLE, "epochs": EPOCHS, "num_workers": 0, "timeout_s": NEVER_S}
    return DataLoader(source, **settings | knobs)


def take_all(loader: DataLoader, found: list[int], stop: int | None = None) -> None:
    """Append ids until there are no more, or ``stop`` are there."""
    while stop is None or len(found) < stop:
        try:
            found += [int(sample.tokens[0]) for sample in loader.get_next_batch(5)]
        except EndOfData as end:
            found += [int(sample.tokens[0]) for sample in end.samples]
            return


def under_change(folder: Path, way: str, change: str, chance: random.Random) -> str:
    """One run, and what became of it: ``whole``, or the code of its error."""
    name, knobs = WAYS[way]
    folder.mkdir()
    kind = KINDS[name]
    source = kind.write(folder, make_rows(NUM_ROWS))
    expected: list[int] = []
    with make(source, **knobs) as loader:
        take_all(loader, expected)
    paths = [source] if isinstance(source, str) else source
    knobs = knobs | {"num_workers": chance.choice([0, 2]), "buffer_size": chance.choice([1, 50])}
    found: list[int] = []
    with make(source, **knobs) as loader:
        if chance.random() < 0.5:
            loader.state_dict()  # with the fingerprint of the content
        take_all(loader, found, chance.choice([5, 100, 240, 300]))
        CHANGES[change](chance.choice(paths), lambda: kind.write(folder, make_rows(NUM_ROWS, "y")[::-1]))
        try:
            take_all(loader, found)
        except SourceError as error:
            assert any(path in str(error) for path in paths), error
            assert str(error).startswith(CODES), error
            outcome = str(error)[:5]
        else:
            assert len(found) == len(expected)
            outcome = "whole"
    assert found == expected[: len(found)], (way, change)
    return outcome


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_delivered_is_what_was_there_at_the_start(tmp_path, way, change):
    for module in KINDS[WAYS[way][0]].needs:
        pytest.importorskip(module)
    chance = random.Random(f"{way} {change}")
    outcomes = [under_change(tmp_path / str(number), way, change, chance) for number in range(ROUNDS)]

    record("IO", f"{way} {change}", faults=ROUNDS, lost=0, repeated=0, unnamed=0)
    say(f"{way} {change}: {' '.join(outcomes)}")
