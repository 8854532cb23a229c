"""A loader of two pages that passes every check, and sixteen that are broken, each in the way of one of them."""

from __future__ import annotations

import json
import os
import random
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdata.testing import Seen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncdata.testing import Knobs, Rows


class Toy:
    """One process, one thread: its workers are numbers. ``at`` counts the epoch's rows that had their turn."""

    def __init__(self, rows: Rows, knobs: Knobs) -> None:
        self.rows, self.knobs = rows, knobs
        self.epoch = self.at = 0
        self.num_delivered = 0
        self.solved: set[int] = set()
        self.excluded: set[int] = set()  # of this epoch
        self.cursors = [0] * len(rows.paths)
        self.taken = [0] * len(rows.paths)  # since it was opened, as a resume may have other weights
        lines = [line for path in rows.paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
        self.values = list(map(json.loads, lines))

    def order(self, epoch: int) -> list[int]:
        order = list(range(self.rows.num_rows))
        if self.knobs.shuffle:
            random.Random(f"{self.knobs.seed} {epoch}").shuffle(order)
        return order

    def is_kept(self, row: int) -> bool:
        return row % self.knobs.keep_every == 0 and not self.values[row]["bad"] and row not in self.excluded

    def worker_of(self, row: int) -> int:
        return row % max(1, self.knobs.num_workers)

    def report(self, solved: Mapping[int, bool]) -> None:
        self.solved |= {row for row, is_solved in solved.items() if is_solved}

    def mixed(self) -> list[Seen]:
        """A batch of a mixture: each row is of the part that lags most behind its weight."""
        found = []
        size = self.rows.num_rows // len(self.cursors)
        for _ in range(self.knobs.batch_size):
            total = sum(self.taken) + 1
            lags = [weight * total - taken for weight, taken in zip(self.knobs.weights, self.taken, strict=True)]
            part = lags.index(max(lags))
            rows = [row for row in self.order(0) if row // size == part]
            found.append(Seen(rows[self.cursors[part]]))
            self.cursors[part] += 1
            self.taken[part] += 1
        return found

    def next_batch(self) -> list[Seen]:
        if self.knobs.weights:
            return self.mixed()

        found: list[Seen] = []
        order = self.order(self.epoch)
        while self.at < len(order) and len(found) < self.knobs.batch_size:
            row = order[self.at]
            self.at += 1
            if self.is_kept(row):
                found.append(Seen(row, self.worker_of(row)))
        if not found:
            self.end_epoch()
            raise StopIteration

        self.num_delivered += len(found)
        return found

    def end_epoch(self) -> None:
        self.epoch, self.at, self.num_delivered = self.epoch + 1, 0, 0
        self.excluded = set(self.solved)

    def state_dict(self) -> Any:
        rows = {"solved": sorted(self.solved), "excluded": sorted(self.excluded)} if self.solved else {}
        return {"epoch": self.epoch, "at": self.at, "cursors": list(self.cursors), **rows}

    def load_state_dict(self, state: Any) -> None:
        self.epoch, self.at = state["epoch"], state["at"]
        self.solved, self.excluded = set(state.get("solved", ())), set(state.get("excluded", ()))
        self.cursors = list(state.get("cursors", self.cursors))

    def close(self) -> None:
        pass


class ToyAdapter:
    name = "toy"
    version = "1"
    lacks: Mapping[str, str] = {}
    kind: type[Toy] = Toy

    def open(self, rows: Rows, knobs: Knobs) -> Toy:
        return self.kind(rows, knobs)


BROKEN: dict[str, type[ToyAdapter]] = {}
"""By the check that is to find it."""


def breaks(check: str) -> Any:
    def add(kind: type[Toy]) -> type[Toy]:
        name = f"{kind.__name__}Adapter"
        adapter = type(name, (ToyAdapter,), {"kind": kind, "__module__": __name__, "__qualname__": name})
        globals()[name] = BROKEN[check] = adapter
        return kind

    return add


@breaks("second_resume")
class FreezesItsState(Toy):
    """Once it was resumed, its state is the one that it was resumed from."""

    loaded: Any = None

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.loaded = state

    def state_dict(self) -> Any:
        return self.loaded or super().state_dict()


@breaks("later_epoch")
class TakesStatesOfTheFirstEpochOnly(Toy):
    def load_state_dict(self, state: Any) -> None:
        is_known = self.knobs.skips_solved or self.knobs.weights  # what other checks ask for
        if is_known or state["epoch"] == self.epoch or state["at"] in (0, self.rows.num_rows):
            super().load_state_dict(state)


@breaks("between_items")
class HoldsARow(Toy):
    """A generator that is one row ahead, where batches are single rows."""

    def state_dict(self) -> Any:
        is_ahead = self.knobs.batch_size == 1 and 0 < self.at < self.rows.num_rows
        return {**super().state_dict(), "at": self.at + is_ahead}


@breaks("inside_a_transform")
class CountsWholeTransforms(Toy):
    """Its place is after the rows that its function was given."""

    def state_dict(self) -> Any:
        size = self.knobs.transform_rows
        return {**super().state_dict(), "at": -(-self.at // size) * size}


@breaks("behind_a_filter")
class CountsWhatPassedTheFilter(Toy):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "at": self.num_delivered if self.knobs.keep_every > 1 else self.at}


@breaks("shuffled")
class LosesItsShuffleBuffer(Toy):
    """A buffer is filled before the first row; the state counts what was read into it, and not what is left in it."""

    def order(self, epoch: int, start: int = 0) -> list[int]:
        if not self.knobs.shuffle:
            return super().order(epoch)

        draw, rows = random.Random(f"{self.knobs.seed} {epoch}"), iter(range(start, self.rows.num_rows))
        buffer = list(islice(rows, self.knobs.read_ahead))
        found = []
        for row in rows:
            number = draw.randrange(len(buffer))
            found.append(buffer[number])
            buffer[number] = row
        draw.shuffle(buffer)
        return found + buffer

    def state_dict(self) -> Any:
        is_inside = self.knobs.shuffle and 0 < self.at < self.rows.num_rows
        return {**super().state_dict(), "at": self.at, "read": self.at + self.knobs.read_ahead if is_inside else 0}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        if state["read"]:
            left = self.order(self.epoch, min(state["read"], self.rows.num_rows))
            first, normal = self.epoch, self.order
            self.at = 0
            self.order = lambda epoch: left if epoch == first else normal(epoch)  # type: ignore[method-assign]


@breaks("epoch_boundary")
class KeepsThatItIsExhausted(Toy):
    """Of a state of an epoch's end it remembers the end, and takes the next epoch for the one that has ended."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        if self.at == self.rows.num_rows and self.knobs.batch_size == 6:
            self.epoch += 1


@breaks("read_ahead")
class CountsWhatItReadAhead(Toy):
    def state_dict(self) -> Any:
        ahead = self.knobs.read_ahead if self.knobs.read_ahead > 8 and not self.knobs.shuffle and self.at else 0
        return {**super().state_dict(), "at": min(self.at + ahead, self.rows.num_rows)}


@breaks("bad_rows")
class CountsDeliveriesPastBadRows(Toy):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "at": self.num_delivered if self.knobs.passes_bad_rows else self.at}


@breaks("short_tail")
class DropsTheTail(Toy):
    """A batch that cannot be filled is not delivered, and its rows are gone."""

    def next_batch(self) -> list[Seen]:
        found = super().next_batch()
        if self.knobs.batch_size > self.rows.num_rows or (self.knobs.batch_size == 7 and len(found) < 7):
            self.end_epoch()
            raise StopIteration

        return found


@breaks("other_workers")
class InsistsOnItsWorkers(Toy):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "num_workers": self.knobs.num_workers}

    def load_state_dict(self, state: Any) -> None:
        assert state["num_workers"] == self.knobs.num_workers, "another number of workers"
        super().load_state_dict(state)


@breaks("idle_workers")
class LeavesWorkersIdle(Toy):
    def worker_of(self, row: int) -> int:
        return 0 if self.knobs.shuffle else super().worker_of(row)


@breaks("every_epoch_alike")
class ForgetsTheEpoch(Toy):
    def order(self, epoch: int) -> list[int]:
        return super().order(0)


@breaks("after_sigkill")
class LeavesALockBehind(Toy):
    """A file stands for shared memory under a fixed name: who is killed cannot remove it, and the next one stumbles."""

    def __init__(self, rows: Rows, knobs: Knobs) -> None:
        super().__init__(rows, knobs)
        self.lock = f"{rows.paths[0]}.lock"
        os.close(os.open(self.lock, os.O_CREAT | os.O_EXCL))

    def close(self) -> None:
        os.unlink(self.lock)


@breaks("exclusions")
class SkipsBatchesOfWhatIsLeft(Toy):
    """At a resume, it takes what is solved today out of the order, and skips as many rows as were delivered."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        if self.excluded and self.at:
            self.excluded = set(self.solved)
            left, self.at = state["num_delivered"], 0
            order = self.order(self.epoch)
            while left and self.at < len(order):
                left -= self.is_kept(order[self.at])
                self.at += 1

    def state_dict(self) -> Any:
        return {**super().state_dict(), "num_delivered": self.num_delivered}


@breaks("other_weights")
class PlacesPartsByTheirWeights(Toy):
    """At a resume, it computes the place in each part from the place in the mixture."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        if self.knobs.weights:
            self.cursors = [round(weight * sum(self.cursors)) for weight in self.knobs.weights]


class Narrow(ToyAdapter):
    """It can do nothing but read."""

    name = "narrow"
    lacks: Mapping[str, str] = {
        "bad_rows": "a bad row ends it",
        "filter": "it has no filter",
        "mixture": "it has no mixtures",
        "outcomes": "it remembers nothing",
        "read_ahead": "it does not read ahead",
        "shuffle": "it does not shuffle",
        "transform": "it has no functions",
        "workers": "it has no workers",
    }


def epochs_of(loader: Any, number: int) -> Iterator[list[int]]:
    """So many epochs' rows."""
    for _ in range(number):
        found: list[int] = []
        try:
            while True:
                found += [seen.row for seen in loader.next_batch()]
        except StopIteration:
            yield found
