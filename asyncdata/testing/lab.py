"""The parts of a check: data, runs of a loader, resumed runs, and the first difference between two runs."""

from __future__ import annotations

import json
import os
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.testing.adapters import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.testing.adapters import Adapter, Knobs, Loader

__all__ = ("Lab", "NotApplicableError", "Run", "difference", "raised", "saved", "taken")

NUM_ROWS = 24


class NotApplicableError(Exception):
    """The loader cannot do what the check needs; the message says why."""


class Run(NamedTuple):
    """The rows that a run delivered, and its states.

    :ivar rows: the numbers of all rows, in order.
    :ivar epoch_ends: how many rows were delivered at the end of each epoch.
    :ivar states: rows delivered -> the state then, as JSON.
    :ivar end_states: epoch -> the state after its end was seen.
    """

    rows: list[int]
    epoch_ends: list[int]
    states: dict[int, str]
    end_states: dict[int, str]

    def epoch(self, number: int) -> list[int]:
        """The rows of an epoch."""
        ends = [0, *self.epoch_ends]
        return self.rows[ends[number] : ends[number + 1]]


class Lab:
    """Writes data to a folder, and runs loaders over it.

    :param folder: an empty folder for this check alone.
    """

    def __init__(self, adapter: Adapter, folder: str) -> None:
        self.adapter = adapter
        self.folder = folder

    def data(self, num_rows: int = NUM_ROWS, *, bad: Sequence[int] = ()) -> Rows:
        """Rows in one file; those whose numbers are in ``bad`` are bad."""
        path = os.path.join(self.folder, "rows.jsonl")
        rows = ({"row": row, "text": "word " * (row % 7), "bad": row in bad} for row in range(num_rows))
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return Rows([path], num_rows)

    def parts(self, num_parts: int, num_rows: int) -> Rows:
        """Files of ``num_rows`` rows each, numbered from 0 across all of them."""
        paths = [os.path.join(self.folder, f"part-{part}.jsonl") for part in range(num_parts)]
        for part, path in enumerate(paths):
            with open(path, "w", encoding="utf-8") as file:
                for row in range(part * num_rows, (part + 1) * num_rows):
                    file.write(json.dumps({"row": row, "text": "word", "bad": False}) + "\n")
        return Rows(paths, num_parts * num_rows)

    def require(self, *features: str) -> None:
        """Refuse a loader without these features.

        :raises NotApplicableError: if it lacks one of them.
        """
        for feature in features:
            if feature in self.adapter.lacks:
                raise NotApplicableError(self.adapter.lacks[feature])

    @contextmanager
    def open(self, rows: Rows, knobs: Knobs, state: str | None = None) -> Iterator[Loader]:
        """A loader, which resumes from ``state`` if it is given, and is closed at the end.

        :raises NotApplicableError: if it lacks a feature that these settings need.
        """
        self.require(*sorted(knobs.needs()))
        loader = self.adapter.open(rows, knobs)
        try:
            if state is not None:
                loader.load_state_dict(json.loads(state))
            yield loader
        finally:
            loader.close()

    def run(self, rows: Rows, knobs: Knobs, num_epochs: int = 2, *, with_states: bool = False) -> Run:
        """Run some epochs without interruption; optionally with the state after each batch and each end of an epoch."""
        run = Run([], [], {}, {})
        with self.open(rows, knobs) as loader:
            if with_states:
                run.states[0] = saved(loader)
            while len(run.epoch_ends) < num_epochs:
                try:
                    run.rows.extend(seen.row for seen in loader.next_batch())
                except StopIteration:
                    run.epoch_ends.append(len(run.rows))
                    if with_states:
                        run.end_states[len(run.epoch_ends) - 1] = saved(loader)
                    continue

                if with_states:
                    run.states[len(run.rows)] = saved(loader)
        return run

    def goes_on(self, rows: Rows, knobs: Knobs, state: str, whole: Run, stop: int) -> str | None:
        """The difference between a run that continues from ``state`` and the rows of ``whole`` after ``stop`` rows."""
        left, num_epochs = whole.rows[stop:], sum(end > stop for end in whole.epoch_ends)
        with self.open(rows, knobs, state) as loader:
            return difference(left, taken(loader, len(left), num_epochs))

    def resumes_everywhere(
        self, rows: Rows, knobs: Knobs, num_epochs: int = 1, *, stops: slice = slice(None)
    ) -> str | None:
        """None if a run that is resumed at any of its batches continues exactly; otherwise the difference.

        One epoch by default: another check has later ones.
        """
        whole = self.run(rows, knobs, num_epochs)
        run = self.run(rows, knobs, num_epochs, with_states=True)
        if found := difference(whole.rows, run.rows):
            return f"taking the state changes the run: {found}"

        for stop in sorted(run.states)[stops]:
            if found := self.goes_on(rows, knobs, run.states[stop], whole, stop):
                return f"resumed after {stop} rows: {found}"
        return None


def saved(loader: Loader) -> str:
    """The loader's state, as the text of a file."""
    return json.dumps(loader.state_dict())


def taken(loader: Loader, num_rows: int, num_epochs: int = 1) -> list[int]:
    """The next rows: at least ``num_rows``, unless ``num_epochs`` epochs end first, or one has no row."""
    found: list[int] = []
    ends = empty_ends = 0
    while len(found) < num_rows and ends < num_epochs and empty_ends < 2:
        before = len(found)
        try:
            while len(found) < num_rows:
                found.extend(seen.row for seen in loader.next_batch())
        except StopIteration:
            # The first end may be that of the interrupted epoch; a second one is that of an epoch without a row.
            is_empty = len(found) == before
            ends, empty_ends = ends + (not is_empty), empty_ends + is_empty
    return found


def difference(expected: Sequence[int], found: Sequence[int]) -> str | None:
    """The first difference between ``found`` and ``expected``, in words. ``found`` may be longer."""
    for number, wanted in enumerate(expected):
        got: Any = found[number] if number < len(found) else "nothing"
        if got != wanted:
            return f"row {wanted} should come {_ordinal(number)}, and {_row(got)} came{_losses(expected, found)}"

    return None


def raised(error: Exception) -> str:
    """The error of the loader, in one line; if it has no message, the line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    words = next(iter(str(error).splitlines()), "") or (frames[-1].line if frames else "")
    return f"it raised {type(error).__name__}: {words}"


def _ordinal(number: int) -> str:
    return "first" if number == 0 else f"after {number} others"


def _row(got: Any) -> str:
    return got if isinstance(got, str) else f"row {got}"


def _losses(expected: Sequence[int], found: Sequence[int]) -> str:
    found = found[: len(expected)]
    lost = sum(max(0, expected.count(row) - found.count(row)) for row in set(expected))
    repeated = sum(max(0, found.count(row) - expected.count(row)) for row in set(found))
    return f" ({lost} lost, {repeated} too many)" if lost or repeated else " (the same rows in another order)"
