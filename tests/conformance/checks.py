"""The checks: sixteen ways in which loaders have lost, repeated or reordered rows, each with the reports of it.

A check is called with a :class:`~tests.conformance.lab.Lab` and returns what is wrong, or None.
"""

import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.conformance.lab import Knobs, Lab, NotApplicableError, difference, raised, resumes_after_a_kill, saved, taken

Body = Callable[[Lab], str | None]

_SHUFFLED = Knobs(shuffle=True)
_MAX_LINKS = 6
_PART_ROWS = 60
_WEIGHTS, _OTHER_WEIGHTS = (0.7, 0.2, 0.1), (0.1, 0.2, 0.7)
_PATIENCE_S = 20.0  # only a loader that fails takes so long


CHECKS: dict[str, Body] = {}
"""All checks, by name. The docstring of each describes the bug."""


def _check(body: Body) -> Body:
    CHECKS[body.__name__] = body
    return body


@_check  # seen in datasets #8308
def second_resume(lab: Lab) -> str | None:
    """The state froze at the first resume, so the second began at the start. Here a new loader takes each batch."""
    rows, knobs = lab.data(), Knobs()
    whole = lab.run(rows, knobs).rows
    found, state = [], None
    for _ in range(_MAX_LINKS):
        with lab.open(rows, knobs, state) as loader:
            found += taken(loader, 1)
            state = saved(loader)
        if problem := difference(whole[: len(found)], found):
            return f"resumed at every batch: {problem}"

    return None


@_check  # seen in torchtitan #3008, datasets
def later_epoch(lab: Lab) -> str | None:
    """A state was applied only if its epoch was that of the new loader, which is 0, and ignored silently otherwise."""
    rows, knobs = lab.data(), Knobs()
    run = lab.run(rows, knobs, 3, with_states=True)
    for epoch, stop in enumerate((run.epoch_ends[0] + 4, run.epoch_ends[1] + 8), 1):
        if found := lab.goes_on(rows, knobs, run.states[stop], run, stop):
            return f"resumed in epoch {epoch}: {found}"

    return None


@_check  # seen in torchtitan #3008
def between_items(lab: Lab) -> str | None:
    """A row that a suspended generator holds is lost or repeated: it is one row ahead of its consumer, or one row late.

    Here the state is taken after every single row.
    """
    return lab.resumes_everywhere(lab.data(10), Knobs(batch_size=1))


@_check  # seen in datasets #8145
def inside_a_transform(lab: Lab) -> str | None:
    """Rows that a batched function has processed, and that are not delivered yet, are lost: up to 1000 of them."""
    return lab.resumes_everywhere(lab.data(), Knobs(batch_size=2, transform_rows=5))


@_check  # seen in datasets #8360
def behind_a_filter(lab: Lab) -> str | None:
    """With a filter, the number of delivered rows is taken for the number of rows read."""
    return lab.resumes_everywhere(lab.data(30), Knobs(batch_size=2, keep_every=3))


@_check  # seen in datasets #7901, #8408
def shuffled(lab: Lab) -> str | None:
    """The shuffle buffer is refilled with rows after those that were read, not after those that were delivered."""
    return lab.resumes_everywhere(lab.data(), _SHUFFLED)


@_check  # seen in OpenRLHF #1322, verl #7401
def epoch_boundary(lab: Lab) -> str | None:
    """A state at the end of an epoch skips the next epoch, or repeats the one that is over.

    The end was stored in addition to the position, and one of the two was out of date. The state is taken after the
    last batch, before and after the end is seen. Epochs differ by their orders, if the loader can shuffle.
    """
    rows, knobs = lab.data(), Knobs(batch_size=6, shuffle="shuffle" not in lab.adapter.lacks)
    run = lab.run(rows, knobs, 3, with_states=True)
    for epoch in range(2):
        stop = run.epoch_ends[epoch]
        for state, when in ((run.states[stop], "before"), (run.end_states[epoch], "after")):
            if found := lab.goes_on(rows, knobs, state, run, stop):
                return f"resumed at the end of epoch {epoch}, its state taken {when} the end was seen: {found}"

    return None


@_check  # seen in NeMo-RL #3599, verl, slime
def read_ahead(lab: Lab) -> str | None:
    """The state counts what was read ahead as delivered, and the rows between reader and trainer are lost."""
    lab.require("read_ahead")
    workers = 0 if "workers" in lab.adapter.lacks else 2
    knobs = Knobs(batch_size=2, num_workers=workers, read_ahead=20)
    return lab.resumes_everywhere(lab.data(), knobs, stops=slice(0, None, 3))


@_check  # seen in NeMo-RL #3599 (review)
def bad_rows(lab: Lab) -> str | None:
    """If bad rows are skipped, the number of delivered rows is taken for a position, and each moves it by one."""
    lab.require("bad_rows")
    rows = lab.data(20, bad=(0, 3, 4, 11, 19))
    return lab.resumes_everywhere(rows, Knobs(batch_size=2, passes_bad_rows=True))


@_check  # seen in OpenRLHF #1320
def short_tail(lab: Lab) -> str | None:
    """If fewer rows are left than requested, they are dropped; also if a batch is larger than the whole data."""
    rows = lab.data()
    for batch_size in (7, rows.num_rows + 16):
        knobs = Knobs(batch_size=batch_size)
        run = lab.run(rows, knobs)
        for epoch in range(2):
            if found := difference(list(range(rows.num_rows)), sorted(run.epoch(epoch))):
                return f"in batches of {batch_size}, epoch {epoch}: {found}"

        if found := lab.resumes_everywhere(rows, knobs):
            return f"in batches of {batch_size}: {found}"

    return None


@_check  # seen in torchdata's StatefulDataLoader (an assertion), datasets
def other_workers(lab: Lab) -> str | None:
    """A state consists of one for each worker, and cannot be resumed, or not there, by another number of workers."""
    rows = lab.data()
    knobs = Knobs(num_workers=2)
    run = lab.run(rows, knobs, 1, with_states=True)
    for num_workers in (2, 1, 3):
        try:
            found = lab.goes_on(rows, knobs._replace(num_workers=num_workers), run.states[8], run, 8)
        except Exception as error:  # whatever it is, the number of workers matters
            found = raised(error)
        if found:
            return f"begun with 2 workers, resumed with {num_workers}: {found}"

    return None


@_check  # seen in datasets #8669
def idle_workers(lab: Lab) -> str | None:
    """With shuffled rows, all workers but one are idle, without a message: the file was one shard."""
    rows = lab.data(400)
    found: set[int] = set()  # of an epoch: the next one may have other processes
    began = time.monotonic()
    with lab.open(rows, Knobs(batch_size=16, num_workers=2, shuffle=True, read_ahead=64)) as loader:
        while len(found) < 2 and time.monotonic() - began < _PATIENCE_S:
            try:
                found |= {seen.worker for seen in loader.next_batch()}
            except StopIteration:
                found.clear()
    return None if len(found) >= 2 else "of 2 workers over one file, 1 did all the work, epoch after epoch"


@_check  # seen in ms-swift #9902
def every_epoch_alike(lab: Lab) -> str | None:
    """Every epoch has the same order, or after a resume the next epoch has another order than without one."""
    rows = lab.data()
    run = lab.run(rows, _SHUFFLED, 3)
    orders = [run.epoch(number) for number in range(3)]
    if orders[0] == orders[1] or orders[1] == orders[2]:
        return "two epochs after one another have the same order"

    states = lab.run(rows, _SHUFFLED, 1, with_states=True).end_states
    found = lab.goes_on(rows, _SHUFFLED, states[0], run, run.epoch_ends[0])
    return f"resumed after epoch 0: {found}" if found else None


@_check  # seen in streaming #781, #573
def after_sigkill(lab: Lab) -> str | None:
    """Something that a killed run has left, such as shared memory, stops the next run in the same folder."""
    workers = 0 if "workers" in lab.adapter.lacks else 2
    return resumes_after_a_kill(lab, lab.data(), Knobs(num_workers=workers))


@_check  # seen in open-instruct
def exclusions(lab: Lab) -> str | None:
    """Rows that are excluded while an epoch runs shift the others at a resume in its middle.

    The rows that are solved are taken out of the permutation, and the saved number of batches is skipped in what is
    left. So rows that are reported after the epoch's start move the others: some come twice, and some never. Here an
    epoch leaves out what was solved in the one before it, and every batch of it is reported too.
    """
    rows = lab.data()
    knobs = Knobs(skips_solved=True)
    states: dict[int, str] = {}
    with lab.open(rows, knobs) as loader:
        first, second = _reported(loader), _reported(loader, states)
    if found := difference(list(range(rows.num_rows)), sorted(first)):
        return f"epoch 0: {found}"

    if found := difference([row for row in range(rows.num_rows) if row % 3], sorted(second)):
        return f"epoch 1, of which every third row is excluded: {found}"

    for stop in sorted(states)[:-1]:
        with lab.open(rows, knobs, states[stop]) as loader:
            if found := difference(second[stop:], _reported(loader, {})):
                return f"resumed after {stop} rows of epoch 1: {found}"

    return None


def _reported(loader, states=None):
    """The rows to the end of the epoch, each batch reported: every third is solved; with states, all are."""
    rows, num_ends = [], 0
    while num_ends < 2:  # the first end may be that of the interrupted epoch
        try:
            batch = [seen.row for seen in loader.next_batch()]
        except StopIteration:
            num_ends += 1
            if rows:
                break

            continue

        rows += batch
        loader.report({row: row % 3 == 0 or states is not None for row in batch})
        if states is not None:
            states[len(rows)] = saved(loader)
    return rows


@_check  # seen in LitData #436, torchtitan
def other_weights(lab: Lab) -> str | None:
    """A mixture cannot be resumed with other weights, or this loses or repeats rows of its parts.

    The state is a position in the mixture as a whole, and the place in each part is computed from it with today's
    weights. Each part must continue where it was, in its own order, and the new weights must be followed.
    """
    lab.require("mixture")
    rows = lab.parts(len(_WEIGHTS), _PART_ROWS)
    knobs = Knobs(weights=_WEIGHTS)
    before, states = [], {}
    with lab.open(rows, knobs) as loader:
        while len(states) < 4:
            before += taken(loader, 2 * knobs.batch_size)
            states[len(before)] = saved(loader)
    for stop, state in states.items():
        with lab.open(rows, knobs._replace(weights=_OTHER_WEIGHTS), state) as loader:
            after = taken(loader, _PART_ROWS // 2)
        if found := _parts_disturbed(before[:stop], after):
            return f"resumed after {stop} rows with other weights: {found}"

    return None


def _parts_disturbed(before: list[int], after: list[int]) -> str | None:
    for part in range(len(_WEIGHTS)):
        first = part * _PART_ROWS
        found = [row for row in [*before, *after] if first <= row < first + _PART_ROWS]
        if problem := difference(list(range(first, first + len(found))), found):
            return f"part {part}: {problem}"

    last = len(_WEIGHTS) - 1
    num_last = len([row for row in after if row >= last * _PART_ROWS])
    if num_last < len(after) // 2:
        return f"of {len(after)} rows, {num_last} are of part {last}, whose weight was {_WEIGHTS[-1]} and is 0.7 now"

    return None


# The report

PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"


class Outcome(NamedTuple):
    """The result of a check, by its name."""

    check: str
    result: str  # ``passed``, ``failed`` or ``not applicable``
    detail: str = ""  # the first difference, or why it is not applicable


class Report(NamedTuple):
    """The results of all checks of a loader."""

    name: str
    version: str
    outcomes: list[Outcome]

    @property
    def failures(self) -> list[Outcome]:
        """The checks that failed."""
        return [outcome for outcome in self.outcomes if outcome.result == FAILED]

    def count(self, result: str) -> int:
        """The number of checks with this result."""
        return sum(outcome.result == result for outcome in self.outcomes)

    def table(self) -> str:
        """For a terminal: a line for each check."""
        width = max((len(outcome.check) for outcome in self.outcomes), default=0)
        lines = [f"{one.check:<{width}}  {one.result:<14}  {one.detail}".rstrip() for one in self.outcomes]
        counts = ", ".join(f"{self.count(result)} {result}" for result in (PASSED, FAILED, NOT_APPLICABLE))
        return "\n".join([f"{self.name} {self.version}: {counts}", *lines])


def run_checks(adapter, checks=None) -> Report:
    """Run the checks on a loader: all, or those of these names, in their order."""
    names = CHECKS if checks is None else checks
    return Report(adapter.name, adapter.version, [_outcome(name, adapter) for name in names])


def _outcome(name, adapter) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="asyncdata-testing-") as folder:
        try:
            problem = CHECKS[name](Lab(adapter, folder))
        except NotApplicableError as reason:
            return Outcome(name, NOT_APPLICABLE, str(reason))
        except Exception as error:  # an error of the loader is a failure of the check
            problem = raised(error)
    return Outcome(name, FAILED, problem) if problem else Outcome(name, PASSED)
