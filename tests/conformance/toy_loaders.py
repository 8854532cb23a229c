"""A small loader that passes the checks, and some that are broken, each in the way of one of them.

The other checks find something in loaders that people use: docs/reference/testing.md names them.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

from tests.conformance.lab import Seen


class Toy:
    """One process, one thread: its workers are numbers. ``at`` counts the epoch's rows that had their turn."""

    def __init__(self, rows, knobs):
        self.rows, self.knobs = rows, knobs
        self.epoch = self.at = self.num_delivered = 0
        self.solved = set()
        self.excluded = set()  # of this epoch
        lines = [line for path in rows.paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
        self.values = list(map(json.loads, lines))

    def order(self, epoch):
        order = list(range(self.rows.num_rows))
        if self.knobs.shuffle:
            random.Random(f"{self.knobs.seed} {epoch}").shuffle(order)
        return order

    def is_kept(self, row):
        return row % self.knobs.keep_every == 0 and not self.values[row]["bad"] and row not in self.excluded

    def report(self, solved):
        self.solved |= {row for row, is_solved in solved.items() if is_solved}

    def next_batch(self):
        found = []
        order = self.order(self.epoch)
        while self.at < len(order) and len(found) < self.knobs.batch_size:
            row = order[self.at]
            self.at += 1
            if self.is_kept(row):
                found.append(Seen(row, row % max(1, self.knobs.num_workers)))
        if not found:
            self.end_epoch()
            raise StopIteration

        self.num_delivered += len(found)
        return found

    def end_epoch(self):
        self.epoch, self.at, self.num_delivered = self.epoch + 1, 0, 0
        self.excluded = set(self.solved)

    def state_dict(self):
        rows = {"solved": sorted(self.solved), "excluded": sorted(self.excluded)} if self.solved else {}
        return {"epoch": self.epoch, "at": self.at, **rows}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]
        self.solved, self.excluded = set(state.get("solved", ())), set(state.get("excluded", ()))

    def close(self):
        pass


class ToyAdapter:
    name, version = "toy", "1"
    lacks: dict[str, str] = {"mixture": "it does not mix"}
    kind: type[Toy] = Toy

    def open(self, rows, knobs):
        return self.kind(rows, knobs)


BROKEN = {}
"""By the check that is to find it."""


def breaks(check):
    def add(kind):
        name = f"{kind.__name__}Adapter"
        adapter = type(name, (ToyAdapter,), {"kind": kind, "__module__": __name__, "__qualname__": name})
        globals()[name] = BROKEN[check] = adapter
        return kind

    return add


def says_it_is_at(check, place):
    """A loader whose state has another place in the epoch."""

    def state_dict(self):
        return {**Toy.state_dict(self), "at": place(self)}

    breaks(check)(type(f"Misplaced_{check}", (Toy,), {"state_dict": state_dict}))


def after_whole_transforms(toy):
    """Its place is after the rows that its function was given."""
    size = toy.knobs.transform_rows
    return -(-toy.at // size) * size


def after_what_was_read_ahead(toy):
    ahead = toy.knobs.read_ahead if toy.knobs.read_ahead > 8 and not toy.knobs.shuffle and toy.at else 0
    return min(toy.at + ahead, toy.rows.num_rows)


# A generator that is one row ahead, where batches are single rows.
says_it_is_at("between_items", lambda toy: toy.at + (toy.knobs.batch_size == 1 and 0 < toy.at < toy.rows.num_rows))
says_it_is_at("inside_a_transform", after_whole_transforms)
# It counts only what it delivered.
says_it_is_at("behind_a_filter", lambda toy: toy.num_delivered if toy.knobs.keep_every > 1 else toy.at)
says_it_is_at("bad_rows", lambda toy: toy.num_delivered if toy.knobs.passes_bad_rows else toy.at)
says_it_is_at("read_ahead", after_what_was_read_ahead)


@breaks("second_resume")
class FreezesItsState(Toy):
    """Once it was resumed, its state is the one that it was resumed from."""

    loaded: Any = None

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = state

    def state_dict(self):
        return self.loaded or super().state_dict()


@breaks("later_epoch")
class TakesStatesOfTheFirstEpochOnly(Toy):
    def load_state_dict(self, state):
        if self.knobs.skips_solved or state["epoch"] == self.epoch or state["at"] in (0, self.rows.num_rows):
            super().load_state_dict(state)


@breaks("short_tail")
class DropsTheTail(Toy):
    """A batch that cannot be filled is not delivered, and its rows are gone."""

    def next_batch(self):
        found = super().next_batch()
        if self.knobs.batch_size > self.rows.num_rows or (self.knobs.batch_size == 7 and len(found) < 7):
            self.end_epoch()
            raise StopIteration
        return found


@breaks("after_sigkill")
class LeavesALockBehind(Toy):
    """A file stands for shared memory under a fixed name: who is killed cannot remove it, and the next one stumbles."""

    def __init__(self, rows, knobs):
        super().__init__(rows, knobs)
        self.lock = f"{rows.paths[0]}.lock"
        os.close(os.open(self.lock, os.O_CREAT | os.O_EXCL))

    def close(self):
        os.unlink(self.lock)


@breaks("exclusions")
class SkipsBatchesOfWhatIsLeft(Toy):
    """At a resume, it takes what is solved today out of the order, and skips as many rows as were delivered."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.excluded and self.at:
            self.excluded = set(self.solved)
            left, self.at = state["num_delivered"], 0
            order = self.order(self.epoch)
            while left and self.at < len(order):
                left -= self.is_kept(order[self.at])
                self.at += 1

    def state_dict(self):
        return {**super().state_dict(), "num_delivered": self.num_delivered}


class Narrow(ToyAdapter):
    """It can do nothing but read."""

    name = "narrow"
    lacks = {
        "bad_rows": "a bad row ends it",
        **dict.fromkeys(("filter", "mixture", "outcomes", "shuffle", "transform", "workers"), "it does not do that"),
        "read_ahead": "it does not read ahead",
    }
