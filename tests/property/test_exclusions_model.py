"""Whatever the workers do, and wherever a run is resumed: what is delivered is D without the rows that were solved."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import NoSamplesError, PassRate
from asyncdata.delivery.outcomes.memory import OutcomeMemory, RowReport
from asyncdata.delivery.outcomes.rows import NO_IDS
from tests.support.loading import write_rows
from tests.support.still_loader import StillLoader
from tests.support.tokenize_fns import every_third_dropped, row_id

pytestmark = pytest.mark.thorough

POLICY = PassRate(drop_above=0.5, revisit_every=3)
NUM_ROWS = 14


class Memory:
    """The memory as the coordinator asks it."""

    def __init__(self) -> None:
        self.memory = OutcomeMemory()

    def decide(self, epoch: int) -> Any:
        return self.memory.decide(epoch, POLICY)

    def excluded(self, epoch: int) -> Any:
        return self.memory.excluded.get(epoch, NO_IDS)


class Model:
    """D, a row after the other, without what the policy excluded when the epoch's first row was taken."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.epoch = self.at = 0
        self.last: dict[int, tuple[int, bool]] = {}  # the epoch of a row's last score, and whether it is solved
        self.excluded: dict[int, set[int]] = {}

    def next(self) -> tuple[int, int] | None:
        """The next row and its epoch; None if its epoch is empty."""
        for _ in range(2):
            while self.at < len(self.rows):
                excluded = self.excluded.setdefault(self.epoch, self._solved())
                row = self.rows[self.at]
                self.at += 1
                if row not in excluded:
                    return row, self.epoch
            if len(self.excluded.get(self.epoch, ())) == len(self.rows):
                return None

            self.epoch, self.at = self.epoch + 1, 0
        return None

    def _solved(self) -> set[int]:
        return {row for row, (epoch, is_solved) in self.last.items() if is_solved and self.epoch - epoch < 3}

    def report(self, row: int, epoch: int, is_solved: bool) -> None:
        if epoch > self.last.get(row, (-1, False))[0]:
            self.last[row] = epoch, is_solved

    def saved(self) -> Any:
        return self.epoch, self.at, dict(self.last), dict(self.excluded)

    def restore(self, saved: Any) -> None:
        self.epoch, self.at, last, excluded = saved
        self.last, self.excluded = dict(last), dict(excluded)


@given(
    data=st.data(),
    capacity=st.integers(1, 30),
    group_size=st.sampled_from([1, 3]),
    function=st.sampled_from([row_id, every_third_dropped]),
)
def test_what_is_delivered_is_the_order_without_what_was_solved(data, capacity, group_size, function):
    with tempfile.TemporaryDirectory() as folder:
        path = write_rows(Path(folder, "rows.jsonl"), NUM_ROWS)
        ids = row_ids_of(path)
        rows = [row for row in range(NUM_ROWS) if function is row_id or row % 3]
        remembered, model = Memory(), Model(rows)
        settings = {"outcomes": remembered, "capacity": capacity, "samples_per_group": group_size}
        with StillLoader(path, function, **settings) as loader:
            states = [(loader.snapshot(), remembered.memory.base(), model.saved())]
            for _ in range(data.draw(st.integers(1, 12))):
                for _ in range(data.draw(st.integers(0, 4))):
                    if loader.num_tasks:
                        loader.work(data.draw(st.integers(0, loader.num_tasks - 1)))
                if data.draw(st.integers(0, 5)) == 0:
                    snapshot, base, saved = data.draw(st.sampled_from(states))
                    remembered.memory = OutcomeMemory()
                    remembered.memory.apply(base)
                    model.restore(saved)
                    loader.restore(snapshot)
                number = data.draw(st.integers(1, 9))
                before = model.saved()
                wanted = [model.next() for _ in range(number)]
                if None in wanted:
                    model.restore(before)
                    with pytest.raises(NoSamplesError, match="excluded"):
                        loader.take(number)
                    return

                groups = loader.groups(number)
                found = [(int(group[0].tokens[0]), group[0].position.epoch) for group in groups]
                assert found == wanted
                solved = data.draw(st.lists(st.booleans(), min_size=number, max_size=number))
                for (row, epoch), is_solved in zip(found, solved, strict=True):
                    remembered.memory.report([RowReport(ids[row], epoch, [(0, float(is_solved))])], 1)
                    model.report(row, epoch, is_solved)
                states.append((loader.snapshot(), remembered.memory.base(), model.saved()))


def row_ids_of(path: Path) -> list[int]:
    """The ids of the rows: where their lines begin."""
    lengths = [len(line) for line in path.read_bytes().splitlines(keepends=True)]
    return [0, *np.cumsum(lengths).tolist()]
