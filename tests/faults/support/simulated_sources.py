"""All kinds of windows in a simulated world: cold starts, restarts in the middle, and a watcher that finds every state
with work to do in which nothing is pending.

Blocks are small, and so is everything that is cut by a number of rows or bytes: a few hundred rows are many windows,
and the row index takes dozens of requests. ``python -m tests.faults.support.simulated_sources WAY SEED`` runs a
schedule again, and prints what happened.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import anyio

import asyncdata as ad
from tests.faults.support.simulation import (
    POISON,
    REQUEST_S,
    STALLED_S,
    Outcome,
    WorkerKilled,
    World,
    run_and_tell,
    run_seeded,
)
from tests.support.loading import NEVER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata import Sample

__all__ = ("WAYS", "Outcome", "simulate_way")

NUM_ROWS = 200
ROWS_PER_WINDOW = 32
INDEX_BLOCK_BYTES = 64
BLOCKS = ad.Shuffle(block_bytes=256, window_blocks=4)
IN_ORDER = ad.Shuffle(enabled=False, block_bytes=256, window_blocks=4)
ACROSS_EPOCHS = ad.SoftPacking(max_length=16, window_samples=8, across_epochs=True)
EPOCHS = 2

Row = dict[str, Any]


def with_a_killer(row: Row) -> list[int] | None:
    """The row's id, one to five times; one row brings down its worker, and every seventh one yields no sample."""
    if row["id"] == POISON:
        raise WorkerKilled

    return None if row["id"] % 7 == 5 else [row["id"]] * (1 + row["id"] % 5)


def without_the_killer(row: Row) -> list[int] | None:
    """The same, with nothing that harms; of another row the same is dropped."""
    return None if row["id"] == POISON else with_a_killer(row)


with_a_killer.version = without_the_killer.version = 1  # type: ignore[attr-defined]


def _rows() -> list[Row]:
    return [{"id": number, "pad": "x" * (number * 37 % 60)} for number in range(NUM_ROWS)]


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Of what all schedules of this process read."""
    return tempfile.TemporaryDirectory(prefix="asyncdata-simulation-")


@cache
def _lines() -> str:
    path = Path(folder().name) / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows()))
    return str(path)


@cache
def _parquet() -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(folder().name) / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(_rows()), path, row_group_size=20)
    return str(path)


def _iterable() -> Any:
    return ad.IterableSource(lambda epoch: _rows(), version="1")


class Way(NamedTuple):
    """One way for rows to become windows. Without the packages that it needs it cannot be tried."""

    source: Callable[[], Any]
    knobs: dict[str, Any]
    needs: tuple[str, ...] = ()

    @property
    def is_packed(self) -> bool:
        return "packing" in self.knobs


def ids_of_packs(packs: list[Any]) -> list[list[tuple[int, ...]]]:
    """A collate function: the tokens of each document."""
    return [[tuple(document.tokens.tolist()) for document in pack] for pack in packs]


_PACKED: dict[str, Any] = {"batch_size": 2, "collate_fn": ids_of_packs}
WAYS: dict[str, Way] = {
    "blocks": Way(_lines, {"shuffle": BLOCKS}),
    "blocks in their order": Way(_lines, {"shuffle": IN_ORDER}),
    "blocks of Parquet": Way(_parquet, {"shuffle": BLOCKS}, ("pyarrow",)),
    "all rows permuted": Way(_lines, {"shuffle": "full"}),
    "all rows of Parquet permuted": Way(_parquet, {"shuffle": "full"}, ("pyarrow",)),
    "slime's order": Way(_lines, {"shuffle": ad.RowShuffle(method="slime")}),
    "rows as they lie": Way(_lines, {"shuffle": ad.RowShuffle(method="none")}),
    "rows of Parquet as they lie": Way(_parquet, {"shuffle": ad.RowShuffle(method="none")}, ("pyarrow",)),
    "a slice as it lies": Way(_lines, {"shuffle": ad.RowShuffle(method="none", first=5, stop=170)}),
    "a slice permuted": Way(_lines, {"shuffle": ad.RowShuffle(method="slime", first=5, stop=-3)}),
    "kept rows as they lie": Way(_lines, {"shuffle": ad.RowShuffle(method="none", only_kept=True)}),
    "a part of a split": Way(_lines, {"shuffle": ad.RowShuffle(part="train")}),
    "planned packs": Way(_lines, {"packing": ad.xtuner.XTunerPacking(max_length=16, seed=3), **_PACKED}),
    "packs": Way(_lines, {"packing": ad.SoftPacking(max_length=16, window_samples=8), "shuffle": BLOCKS, **_PACKED}),
    "packs across epochs": Way(_lines, {"packing": ACROSS_EPOCHS, "shuffle": BLOCKS, **_PACKED}),
    "a stream": Way(_iterable, {"shuffle": BLOCKS}),
}


@contextlib.contextmanager
def small_cuts() -> Any:
    """What is cut by thousands of rows and bytes is cut by dozens. D is the same."""
    modules = ("order.order", "read_ahead.indexed_windows", "checkpoint.restore")
    with contextlib.ExitStack() as stack:
        for module in modules:
            import_module(f"asyncdata.{module}")  # first, as one that is imported later would keep the small number
        for module in modules:
            stack.enter_context(patch(f"asyncdata.{module}.ROWS_PER_WINDOW", ROWS_PER_WINDOW))
        stack.enter_context(patch("asyncdata.loader.opened_rows._INDEX_BLOCK_BYTES", INDEX_BLOCK_BYTES))
        yield


@cache
def expected_of(name: str, seed: int) -> list[Any]:
    """D, as a loader without workers has it that knows of no small cuts. Of packs the batches; None ends an epoch."""
    way = WAYS[name]
    knobs = {**way.knobs, "seed": seed, "num_workers": 0, "timeout_s": NEVER_S, "cache": {"folder": ""}}
    found: list[Any] = []
    with ad.DataLoader(way.source(), tokenize_fn=without_the_killer, epochs=EPOCHS, **knobs) as loader:
        if way.is_packed:
            for _ in range(EPOCHS):
                found += [*loader, None]
            return found

        with contextlib.suppress(ad.errors.EndOfData):
            while True:
                found += [int(sample.tokens[0]) for sample in loader.get_next_batch(1)]
    return found


class Trainer:
    """Asks, gives up, gives back, saves and restores, in one task or several; and knows what it must be given.

    :param stream: D.
    :param size: samples of a group.
    """

    def __init__(self, world: World, loader: Any, stream: list[Any], size: int = 1) -> None:
        self._world, self._chance, self._loader = world, world.chance, loader
        self._stream, self._size, self._next = stream, size, 0
        self._num_waiting = 0
        self._is_closed = False
        self._buffer: list[int] = []
        self._held: dict[int, list[Sample]] = {}
        self._saved: list[tuple[str, int, list[int]]] = []

    async def run(self, num_steps: int) -> None:
        """Do so many random things; or fewer, if somebody closes the loader."""
        acts = [self.take, self.give_back, self.save, self.restore, self.resize]
        with contextlib.suppress(ad.errors.LoaderClosedError):
            for _ in range(num_steps):
                if (waiting := self._chance.choices(acts, [10, 3, 2, 1, 1])[0]()) is not None:
                    await waiting
                if self._chance.random() < 0.5:
                    await anyio.sleep(self._chance.expovariate(1 / (4 * REQUEST_S)))
            return

        assert self._is_closed

    def _patience_s(self) -> float:
        return self._chance.choice([STALLED_S, STALLED_S, 0.0, REQUEST_S * self._chance.random() * 4])

    def _gave_up(self, patience_s: float) -> None:
        assert patience_s < STALLED_S, "nothing came, ever"
        self._world.trace.num_given_up += 1

    async def take(self) -> None:
        """A call, given up by its scope or by its own timeout now and then."""
        number, patience_s = self._chance.choice([1, 2, 7, 40]), self._patience_s()
        is_scope = self._chance.random() < 0.5
        groups = None
        self._num_waiting += 1
        try:
            with anyio.move_on_after(patience_s if is_scope else None):
                groups = await self._loader.get_samples(number, timeout_s=STALLED_S if is_scope else patience_s)
        except ad.errors.PrefetchTimeoutError:
            assert not is_scope
        except ad.errors.EndOfData as end:
            assert self._next + number - len(self._buffer) > len(self._stream), "there is more"
            groups = end.groups
        finally:
            self._num_waiting -= 1
        self._world.trace.append(f"wanted {number} in {patience_s:g} s: {'-' if groups is None else len(groups)} given")
        if groups is None:
            self._gave_up(patience_s)
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
        self._world.trace.num_samples += len(wanted) * size

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
        number = self._chance.choice([1, 2, 3]) * bool(self._saved)
        for state, place, buffer in self._chance.choices(self._saved, k=number):
            self._next, self._buffer, self._held = place, list(buffer), {}
            self._loader.load_state_dict(json.loads(state))
            self._world.trace.num_restores += 1
            self._world.trace.append(f"restored to {place}, with {buffer} given back")

    def resize(self) -> None:
        """Another number of workers, as the tuner does it."""
        service = self._loader._engine.service  # noqa: SLF001
        self._world.executor.set_num_workers(self._chance.choice([1, 2, 5]))
        if service._call_soon is not None:  # noqa: SLF001
            service._read_ahead.resize()  # noqa: SLF001

    def close(self) -> None:
        """Close the loader; what waits ends."""
        self._is_closed = True
        self._loader.close()


class PackTrainer(Trainer):
    """The same with loops over batches; a batch that was given up comes again."""

    loop: Any = None

    async def take(self) -> None:
        if self._next == len(self._stream):
            return

        if self.loop is None:
            self.loop = aiter(self._loader)
        patience_s, batch = self._patience_s(), ()
        with anyio.move_on_after(patience_s):
            batch = await anext(self.loop, None)
        if batch == ():
            self._gave_up(patience_s)
            return

        assert batch == self._stream[self._next], self._next
        self._next += 1
        self._world.trace.num_samples += 1
        self._world.trace.append(f"one more, {self._next} in all")
        if batch is None:
            self.loop = None

    def give_back(self) -> None:
        """Packs are not given back."""

    def restore(self) -> None:
        super().restore()
        self.loop = None
        # Nothing is left of the epoch where a loop begins: it is the next one's.
        if self._stream[self._next : self._next + 1] == [None]:
            self._next += 1


async def _read(world: World, name: str, kept: str) -> None:
    """A trainer has up to four tasks, of which the first one to end may close the loader."""
    chance, way = world.chance, WAYS[name]
    seed, capacity = chance.randrange(2), chance.choice([1, 10, 64, 1000])
    size, num_tasks = (1, 1) if way.is_packed else (chance.choice([1, 2]), chance.choice([1, 1, 2, 4]))
    knobs = {**way.knobs, "seed": seed, "epochs": EPOCHS, "buffer_size": capacity, "n_samples_per_prompt": size}
    world.trace.append(f"{name}, {knobs}, {num_tasks} tasks, {world.executor.num_workers} workers")
    knobs["cache"] = {"folder": kept}
    # A pass that counts the tokens of rows runs the function itself, and there a killer is no special case.
    function = without_the_killer if way.is_packed else with_a_killer
    async with world.loader(way.source(), function, **knobs) as loader:
        trainer = (PackTrainer if way.is_packed else Trainer)(world, loader, expected_of(name, seed), size)
        async with anyio.create_task_group() as group:
            for _ in range(num_tasks - 1):
                group.start_soon(trainer.run, chance.choice([5, 30]))
            await trainer.run(chance.choice([3, 20, 60]))
            if chance.random() < 0.3:
                trainer.close()


def simulate_way(name: str, seed: int, outcome: Outcome) -> None:
    """Run the schedule of ``seed`` over a way; it starts cold, with nothing on the disk.

    :param outcome: what has happened is kept there.
    :raises AssertionError: if something is not as it must be, or would not have come to be.
    """
    kept = tempfile.mkdtemp(dir=folder().name)
    try:
        for value in range(2):
            expected_of(name, value)  # in a time that is real
        with small_cuts():
            run_seeded(lambda world: _read(world, name, kept), seed, outcome)
    finally:
        shutil.rmtree(kept)


if __name__ == "__main__":
    run_and_tell(lambda outcome: simulate_way(sys.argv[1], int(sys.argv[2]), outcome))
