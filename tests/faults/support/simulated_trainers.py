"""What trainers do in a simulated world, and what they must be given there; a seed says which of it.

``python -m tests.faults.support.simulated_trainers SEED`` runs the schedule of a seed again, and prints what happened.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from asyncdata import EndOfData, LoaderClosedError, PrefetchTimeoutError
from tests.faults.support.simulation import POISON, REQUEST_S, SimulatedLoader, Trace, World, run_seeded
from tests.support.loading import SHUFFLE, order_of, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata import Sample

__all__ = ("Trainer", "simulate")

NUM_ROWS = 150
STALLED_S = 1e6
"""Of the mock clock: who waits so long waits for ever."""
MANY = 8
"""Epochs: more than any trainer here comes to."""

_kept: list[Any] = []


@cache
def data_file() -> str:
    """A file of rows, the same in each schedule of this process."""
    folder = tempfile.TemporaryDirectory(prefix="asyncdata-simulation-")
    _kept.append(folder)
    return str(write_rows(Path(folder.name) / "rows.jsonl", NUM_ROWS))


@cache
def stream_of(seed: int, num_epochs: int) -> list[int]:
    """D: the ids of its rows, without the one that brings down workers."""
    return [row for row in order_of(Path(data_file()), num_epochs, seed=seed) if row != POISON]


class Trainer:
    """Asks, gives up, gives back, saves and restores, in one task or several; and knows what it must be given.

    :param size: samples of a group.
    :param epochs: as the loader has it.
    """

    def __init__(self, world: World, loader: SimulatedLoader, seed: int, size: int, epochs: int | None) -> None:
        self._world = world
        self._chance = world.chance
        self._loader = loader
        self._stream = stream_of(seed, epochs or MANY)
        self._size = size
        self._next = 0
        self._num_waiting = 0
        self._is_closed = False
        self._buffer: list[int] = []
        self._held: dict[int, list[Sample]] = {}
        self._saved: list[tuple[str, int, list[int]]] = []
        self.num_samples = self.num_given_up = self.num_restores = 0

    async def run(self, num_steps: int) -> None:
        """Do so many random things; or fewer, if somebody closes the loader."""
        weights: dict[Callable[[], Any], int] = {
            self.take: 10,
            self.give_back: 3,
            self.save: 2,
            self.restore: 1,
            self.resize: 1,
        }
        with contextlib.suppress(LoaderClosedError):
            for _ in range(num_steps):
                (act,) = self._chance.choices([*weights], [*weights.values()])
                if (waiting := act()) is not None:
                    await waiting
                if self._chance.random() < 0.5:
                    await anyio.sleep(self._chance.expovariate(1 / (4 * REQUEST_S)))
            return

        assert self._is_closed

    async def take(self) -> None:
        """A call, given up by its scope or by its own timeout now and then."""
        number = self._chance.choice([1, 2, 7, 40])
        patience_s = self._chance.choice([STALLED_S, STALLED_S, 0.0, REQUEST_S * self._chance.random() * 4])
        is_scope = self._chance.random() < 0.5
        groups = None
        self._num_waiting += 1
        try:
            with anyio.move_on_after(patience_s if is_scope else None):
                groups = await self._loader.get_samples(number, timeout_s=STALLED_S if is_scope else patience_s)
        except PrefetchTimeoutError:
            assert patience_s < STALLED_S, "nothing came, ever"
        except EndOfData as end:
            assert self._next + number - len(self._buffer) > len(self._stream), "there is more"
            groups = end.groups
        finally:
            self._num_waiting -= 1
        self._world.trace.append(f"wanted {number} in {patience_s:g} s: {'-' if groups is None else len(groups)} given")
        if groups is None:
            assert patience_s < STALLED_S, "nothing came, ever"
            self.num_given_up += 1
        else:
            self._check(number, groups)

    def _check(self, number: int, groups: list[list[Sample]]) -> None:
        chosen, self._buffer = self._buffer[:number], self._buffer[number:]
        fresh = range(self._next, min(self._next + number - len(chosen), len(self._stream)))
        self._next = fresh.stop
        wanted, size = [*chosen, *fresh], self._size
        found = [[(sample.index, int(sample.tokens[0])) for sample in group] for group in groups]
        assert found == [[(name * size + i, self._stream[name]) for i in range(size)] for name in wanted], wanted
        self._held |= dict(zip(wanted, groups, strict=True))
        self.num_samples += len(wanted) * size

    def give_back(self) -> None:
        """Some of what it holds, in any order; not while another task's request has chosen from the buffer."""
        if self._num_waiting:
            return

        names = self._chance.sample(sorted(self._held), min(len(self._held), self._chance.choice([0, 1, 3])))
        self._loader.add_samples([self._held.pop(name) for name in names])
        self._buffer += names
        self._world.trace.append(f"gave back {names}")

    def save(self) -> None:
        """Keep the state, as text."""
        self._saved.append((json.dumps(self._loader.state_dict()), self._next, list(self._buffer)))

    def restore(self) -> None:
        """Go on from states that were kept, one after another; what is held from later is forgotten with it."""
        for state, place, buffer in self._chance.choices(
            self._saved, k=self._chance.choice([1, 2, 3]) * bool(self._saved)
        ):
            self._next, self._buffer, self._held = place, list(buffer), {}
            self._loader.load_state_dict(json.loads(state))
            self.num_restores += 1
            self._world.trace.append(f"restored to {place}, with {buffer} given back")

    def resize(self) -> None:
        """Another number of workers."""
        self._world.executor.set_num_workers(self._chance.choice([1, 2, 5]))

    def close(self) -> None:
        """Close the loader; what waits ends."""
        self._is_closed = True
        self._loader.close()


class Outcome(Trace):
    """What happened in a schedule, and how much of it.

    :ivar num_samples: delivered.
    :ivar num_given_up: calls that were cancelled or timed out.
    """

    num_samples = num_given_up = num_restores = 0


async def _samples(world: World, outcome: Outcome) -> None:
    """Up to four tasks, of which the first one to end may close the loader."""
    chance = world.chance
    seed, size, epochs = chance.randrange(3), chance.choice([1, 2]), chance.choice([None, None, 1, 2])
    knobs = {"seed": seed, "n_samples_per_prompt": size, "epochs": epochs, "buffer_size": chance.choice([1, 10, 1000])}
    num_tasks, is_closed_early = chance.choice([1, 1, 2, 4]), chance.random() < 0.3
    outcome.append(f"{num_tasks} tasks, {knobs}")
    async with world.loader(data_file(), shuffle=SHUFFLE, **knobs) as loader:
        trainer = Trainer(world, loader, seed, size, epochs)
        async with anyio.create_task_group() as group:
            for _ in range(num_tasks - 1):
                group.start_soon(trainer.run, chance.choice([5, 30]))
            await trainer.run(chance.choice([5, 15, 30]))
            if is_closed_early:
                trainer.close()
    outcome.num_samples, outcome.num_given_up = trainer.num_samples, trainer.num_given_up
    outcome.num_restores = trainer.num_restores


def simulate(seed: int, outcome: Outcome | None = None) -> Outcome:
    """The outcome of the schedule of ``seed``.

    :param outcome: kept there also when something fails.
    :raises AssertionError: if something is not as it must be.
    """
    told = Outcome() if outcome is None else outcome
    run_seeded(lambda world: _samples(world, told), seed, told)
    return told


if __name__ == "__main__":
    lines = Outcome()
    try:
        simulate(int(sys.argv[1]), lines)
    finally:
        sys.stdout.write("\n".join(lines) + "\n")
