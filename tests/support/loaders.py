"""Loaders as the integration tests open them, and what several of those tests ask of one."""

from pathlib import Path
from typing import Any

import pytest

from asyncdata import DataLoader
from asyncdata.errors import BadRowError
from tests.support.loading import SHUFFLE, ids, write_rows
from tests.support.tokenize_fns import row_id


def make(source: Any, tokenize_fn: Any = row_id, face: Any = DataLoader, **knobs: Any) -> Any:
    """A loader that fails rather than hangs, inline where nothing else is asked for."""
    knobs = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240} | knobs
    return face(source, tokenize_fn=tokenize_fn, **knobs)


def gated(tmp_path: Path, row: int, num_rows: int = 200) -> tuple[Path, Path]:
    """Rows of which one waits for a file, and the file."""
    gate = tmp_path / "gate"
    return write_rows(tmp_path / "gated.jsonl", num_rows, {row: {"gate": str(gate)}}), gate


def num_waiting(loader: Any) -> int:
    """How many calls wait for samples."""
    return len(loader._engine.coordinator._requests)  # noqa: SLF001 - nothing public counts them


def is_wanted(loader: Any) -> bool:
    """Whether a call waits for more than is there."""
    return bool(loader._engine.coordinator.channel.demand)  # noqa: SLF001 - nothing public tells


def path_waited_for(loader: Any) -> str:
    """The file of the row that holds up all others; empty if there is none."""
    entry = loader._engine._read_ahead.oldest_in_flight  # noqa: SLF001 - nothing public tells before a call times out
    return "" if entry is None or entry.location is None else entry.location(0).path


def rows_of_parts(loader: Any) -> dict[str, int]:
    """How many rows of each part of a mixture were tokenized."""
    return {part.name: part.reading.pacer.total_rows for part in loader._engine._read_ahead._parts}  # noqa: SLF001


def is_next_window_there(loader: Any) -> bool:
    """Whether the window after the current one has been read."""
    ahead = loader._engine._read_ahead._ahead  # noqa: SLF001 - nothing public tells
    return ahead is not None and ahead.is_kept


def slots_in_use(loader: Any) -> int:
    """How many slots of memory cannot be filled anew: they are held, or have requests under way."""
    slots = loader._engine.executor.slots  # noqa: SLF001 - as above
    return sum(map(any, zip(slots._is_held, slots._num_requests, strict=True)))  # noqa: SLF001


def bad_row_at(loader: DataLoader) -> tuple[list[int], BadRowError]:
    """What is delivered one by one before a bad row stops it, and how; twice, as nothing may be passed."""
    seen = []
    with pytest.raises(BadRowError) as caught:
        while True:
            seen += ids(loader.get_next_batch(1))
    with pytest.raises(BadRowError) as again:
        loader.get_next_batch(1)
    assert str(again.value) == str(caught.value)
    return seen, caught.value


def state_after(source: Any, number: int, tokenize_fn: Any = row_id, **knobs: Any) -> dict[str, Any]:
    """The state of a run that has delivered so many samples."""
    with make(source, tokenize_fn, **knobs) as loader:
        if number:
            loader.get_next_batch(number)
        return loader.state_dict()


def resumed(
    source: Any, state: dict[str, Any], number: int, tokenize_fn: Any = row_id, allow_changed: Any = (), **knobs: Any
) -> list[int]:
    """The ids of so many samples of a run that resumes from ``state``."""
    with make(source, tokenize_fn, **knobs) as loader:
        loader.load_state_dict(state, allow_changed=allow_changed)
        return ids(loader.get_next_batch(number))
