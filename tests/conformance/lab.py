"""The interface between the kit and a loader, and the parts of a check: data, runs, resumed runs, and differences.

Needs only Python, as the whole kit does, so that it runs in the environment of any loader.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

NUM_ROWS = 24
_LIMIT_S = 120.0
_NUM_BATCHES = 3

FEATURES = {
    "bad_rows": "it can skip rows that cannot be read",
    "filter": "it can leave rows out",
    "mixture": "it can mix several files by weights, which may change at a resume",
    "outcomes": "it can leave rows out of later epochs, by what is reported of them",
    "read_ahead": "it reads ahead of its consumer",
    "shuffle": "it can shuffle rows",
    "transform": "it can call a function with many rows at once",
    "workers": "it has worker processes",
}
"""What some loaders cannot do, and some checks need."""


class Rows(NamedTuple):
    """The data: JSONL files of rows ``{"row": n, "text": "..."}``, numbered from 0 across all files.

    A bad row has ``"bad": true``: the loader's function of rows must raise for it.
    """

    paths: list[str]  # in their order; in a mixture each is a part
    num_rows: int  # in all of them


class Knobs(NamedTuple):
    """The settings of a loader."""

    batch_size: int = 4  # rows of a batch; the last one of an epoch may have fewer, and is delivered
    num_workers: int = 0  # worker processes; 0: none
    shuffle: bool = False  # in another order in each epoch
    seed: int = 7  # of the order
    read_ahead: int = 8  # rows that may be read ahead, or held in a shuffle buffer
    keep_every: int = 1  # a filter keeps only rows whose number is a multiple of it
    transform_rows: int = 1  # rows with which a function of rows is called at once
    passes_bad_rows: bool = False  # rows for which the function raises are skipped
    skips_solved: bool = False  # rows that were reported as solved are left out from the next epoch on
    weights: tuple[float, ...] = ()  # mix the files, with these shares of the rows; no file is read to its end then

    def needs(self) -> set[str]:
        """The features out of :data:`FEATURES` that the loader needs for these settings."""
        wanted = {
            "bad_rows": self.passes_bad_rows, "filter": self.keep_every > 1, "mixture": bool(self.weights),
            "outcomes": self.skips_solved, "shuffle": self.shuffle, "transform": self.transform_rows > 1,
            "workers": self.num_workers > 0,
        }  # fmt: skip
        return {name for name, is_wanted in wanted.items() if is_wanted}


class Seen(NamedTuple):
    """A row that was delivered, by its number, and the id of the process that made it; 0 if that is not known."""

    row: int
    worker: int = 0


class Loader(Protocol):
    """An open loader. One with the feature ``outcomes`` has ``report(solved)``: which rows of the last batch are."""

    def next_batch(self) -> list[Seen]:
        """The next batch. It raises StopIteration at an epoch's end, and the next call begins the next epoch."""

    def state_dict(self) -> Any:
        """Its current state, as values that JSON has."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from this state; called before the first batch."""

    def close(self) -> None:
        """Stop its processes."""


class EpochByEpoch:
    """A loader that iterates over one epoch after another, whose number is kept beside the state, as trainers do."""

    epoch = 0
    _batches: Any = None

    def begin(self) -> Iterator[Any]:
        """The batches of the epoch."""
        raise NotImplementedError

    @property
    def batches(self) -> Iterator[Any]:
        """Those that the epoch has left."""
        if self._batches is None:
            self._batches = self.begin()
        return self._batches

    def next_batch(self) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            self.epoch, self._batches = self.epoch + 1, None
            raise

    def close(self) -> None:
        self._batches = None


class Adapter(Protocol):
    """A kind of loader. Its class takes no arguments and can be imported, as a check runs it in new processes."""

    name: str
    version: str
    lacks: Mapping[str, str]  # the :data:`FEATURES` it does not have, with the reason; checks that need them are left

    def open(self, rows: Rows, knobs: Knobs) -> Loader:
        """A loader over ``rows``, made as its own documentation says."""


def named(path: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


# Runs


class NotApplicableError(Exception):
    """The loader cannot do what the check needs; the message says why."""


class Run(NamedTuple):
    """The rows that a run delivered, and its states."""

    rows: list[int]  # the numbers of all rows, in order
    epoch_ends: list[int]  # how many rows were delivered at the end of each epoch
    states: dict[int, str]  # rows delivered -> the state then, as JSON
    end_states: dict[int, str]  # epoch -> the state after its end was seen

    def epoch(self, number: int) -> list[int]:
        """The rows of an epoch."""
        ends = [0, *self.epoch_ends]
        return self.rows[ends[number] : ends[number + 1]]


class Lab:
    """Writes data to a folder, which is of one check alone, and runs loaders over it."""

    def __init__(self, adapter: Adapter, folder: str) -> None:
        self.adapter, self.folder = adapter, folder

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
        """Refuse a loader that lacks one of these features."""
        for feature in features:
            if feature in self.adapter.lacks:
                raise NotApplicableError(self.adapter.lacks[feature])

    @contextmanager
    def open(self, rows: Rows, knobs: Knobs, state: str | None = None) -> Iterator[Loader]:
        """A loader that resumes from ``state``, if it is given, and is closed; it is refused if it lacks a feature."""
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

    def resumes_everywhere(self, rows, knobs, num_epochs=1, stops=slice(None)):
        """None if a run that is resumed at any of its batches continues exactly; otherwise the difference."""
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
            place = "first" if number == 0 else f"after {number} others"
            seen = got if isinstance(got, str) else f"row {got}"
            return f"row {wanted} should come {place}, and {seen} came{_losses(expected, found)}"

    return None


def raised(error: Exception) -> str:
    """The error of the loader, in one line; if it has no message, the line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    words = next(iter(str(error).splitlines()), "") or (frames[-1].line if frames else "")
    return f"it raised {type(error).__name__}: {words}"


def _losses(expected: Sequence[int], found: Sequence[int]) -> str:
    found = found[: len(expected)]
    lost = sum(max(0, expected.count(row) - found.count(row)) for row in set(expected))
    repeated = sum(max(0, found.count(row) - expected.count(row)) for row in set(found))
    return f" ({lost} lost, {repeated} too many)" if lost or repeated else " (the same rows in another order)"


# A loader in a process of its own, which is killed


def resumes_after_a_kill(lab: Lab, rows: Rows, knobs: Knobs) -> str | None:
    """What is wrong with a run that is killed with SIGKILL after some batches and then resumed; None: nothing."""
    lab.require(*sorted(knobs.needs()))
    whole = lab.run(rows, knobs, 1).rows
    before, state = [], None
    with _child(lab, rows, knobs, None) as lines:
        for line in lines:
            batch = json.loads(line)
            before += batch["rows"]
            state = batch["state"]
            if len(before) >= _NUM_BATCHES * knobs.batch_size:
                break  # and is killed

    if state is None:
        return "the process that was to be killed delivered nothing"

    after: list[int] = []
    with _child(lab, rows, knobs, state) as lines:
        for line in lines:
            after += json.loads(line)["rows"]
            if len(before) + len(after) >= len(whole):
                break

    found = difference(whole, before + after)
    return f"killed after {len(before)} rows and resumed: {found}" if found else None


@contextmanager
def _child(lab: Lab, rows: Rows, knobs: Knobs, state: str | None) -> Iterator[Iterator[str]]:
    """The lines that a process prints, one per batch. It is killed at the end of the block."""
    kind = type(lab.adapter)
    if kind.__module__ == "__main__" or "<" in kind.__qualname__:
        raise NotApplicableError(f"{kind.__qualname__} cannot be imported by another process")

    path = [os.path.abspath(entry) for entry in sys.path]
    told = [f"{kind.__module__}:{kind.__qualname__}", rows._asdict(), knobs._asdict(), state, path]
    command = [sys.executable, "-c", _BOOT, json.dumps(told)]
    errors = os.path.join(lab.folder, "errors.txt")
    with open(errors, "ab") as file:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True)
    alarm = threading.Timer(_LIMIT_S, child.kill)
    alarm.start()
    try:
        yield iter(child.stdout or ())
    finally:
        alarm.cancel()
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
        with suppress(ProcessLookupError):  # workers that outlived it must not disturb the next check
            os.killpg(child.pid, signal.SIGTERM)


_BOOT = """\
import json, sys
told = json.loads(sys.argv[1])
sys.path[:] = told.pop()
from tests.conformance.lab import main
if __name__ == "__main__":
    main(*told)
"""


def main(path: str, rows: dict[str, Any], knobs: dict[str, Any], state: str | None) -> None:
    """In the new process: take all batches, and print each with the state after it."""
    told = os.dup(1)
    os.dup2(2, 1)  # what the loader prints goes to stderr
    loader = named(path)().open(Rows(**rows), Knobs(**knobs))
    if state is not None:
        loader.load_state_dict(json.loads(state))
    while True:
        try:
            found = [seen.row for seen in loader.next_batch()]
        except StopIteration:
            continue

        os.write(told, json.dumps({"rows": found, "state": saved(loader)}).encode() + b"\n")
