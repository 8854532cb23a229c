"""Rows that brought down workers are in the snapshot's journal: no kind of window sends them again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, RowShuffle
from tests.support.loading import NEVER_S, ids
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 40
KILLER = 11


@pytest.fixture
def path(jsonl_file) -> Path:
    return jsonl_file([{"id": number} for number in range(NUM_ROWS)])


def loader_of(path: Path, **knobs: Any) -> DataLoader:
    settings = {
        "tokenize_fn": row_id,
        "shuffle": "full",
        "num_workers": 0,
        "timeout_s": NEVER_S,
        "cache": {"folder": ""},
    }
    return DataLoader(path, **settings | knobs)


def with_journal(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a run in which one row had brought down its workers."""
    offset = sum(len(line) for line in path.read_bytes().splitlines(keepends=True)[:KILLER])
    return {**json.loads(json.dumps(state)), "journal": [[0, offset]]}


@pytest.mark.thorough
@pytest.mark.parametrize("is_index_known", [True, False])
@pytest.mark.parametrize("shuffle", ["full", RowShuffle(method="slime"), RowShuffle(method="none"), True], ids=str)
def test_a_row_of_the_journal_is_left_out_in_every_epoch(path, shuffle, is_index_known):
    with loader_of(path, shuffle=shuffle) as loader:
        start = with_journal(path, loader.state_dict())
        expected = [row for row in ids(loader.get_next_batch(3 * NUM_ROWS)) if row != KILLER]
    assert len(expected) == 3 * (NUM_ROWS - 1)

    with loader_of(path, shuffle=shuffle) as loader:
        if is_index_known:
            loader.get_next_batch(1)
        loader.load_state_dict(start)

        assert ids(loader.get_next_batch(len(expected))) == expected


def test_no_other_row_is_left_out_where_delivery_begins_anew_in_another_epoch(path):
    """The window of the other epoch is ready at once, as the index is complete by then."""
    with loader_of(path) as loader:
        start = with_journal(path, loader.state_dict())
        expected = [row for row in ids(loader.get_next_batch(3 * NUM_ROWS))[2 * NUM_ROWS :] if row != KILLER]

    with loader_of(path) as loader:
        loader.load_state_dict(start)
        loader.get_next_batch(1)
        loader.set_epoch(2)

        assert ids(loader.get_next_batch(NUM_ROWS - 1)) == expected
