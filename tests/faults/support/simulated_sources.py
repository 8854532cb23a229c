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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import anyio

from asyncdata import (
    DataLoader,
    EndOfData,
    IterableSource,
    PrefetchTimeoutError,
    RowShuffle,
    Shuffle,
    SoftPacking,
    XTunerPacking,
)
from tests.faults.support.simulated_trainers import STALLED_S, Outcome
from tests.faults.support.simulation import POISON, REQUEST_S, World, run_seeded
from tests.support.loading import NEVER_S
from tests.support.still_loader import WorkerKilled

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("WAYS", "Way", "simulate_way")

NUM_ROWS = 200
ROWS_PER_WINDOW = 32
INDEX_BLOCK_BYTES = 64
BLOCKS = Shuffle(block_bytes=256, window_blocks=4)
IN_ORDER = Shuffle(enabled=False, block_bytes=256, window_blocks=4)
ACROSS_EPOCHS = SoftPacking(max_length=16, window_samples=8, across_epochs=True)
EPOCHS = 3

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
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="asyncdata-simulation-")
    _kept.append(folder)
    return Path(folder.name)


_kept: list[Any] = []


@cache
def _lines() -> str:
    path = _folder() / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows()))
    return str(path)


@cache
def _parquet() -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = _folder() / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(_rows()), path, row_group_size=20)
    return str(path)


def _iterable() -> Any:
    return IterableSource(lambda epoch: _rows(), version="1")


class Way(NamedTuple):
    """One way for rows to become windows.

    :ivar source: makes what a loader is given.
    :ivar knobs: of the loader.
    :ivar needs: packages without which it cannot be tried.
    :ivar keeps_tokens: whether the loader has a token cache.
    """

    source: Callable[[], Any]
    knobs: dict[str, Any]
    needs: tuple[str, ...] = ()
    keeps_tokens: bool = False

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
    "blocks, kept as tokens": Way(_lines, {"shuffle": BLOCKS}, ("pyarrow", "xxhash"), keeps_tokens=True),
    "all rows permuted": Way(_lines, {"shuffle": "full"}),
    "all rows of Parquet permuted": Way(_parquet, {"shuffle": "full"}, ("pyarrow",)),
    "slime's order": Way(_lines, {"shuffle": RowShuffle(method="slime")}),
    "rows as they lie": Way(_lines, {"shuffle": RowShuffle(method="none")}),
    "rows of Parquet as they lie": Way(_parquet, {"shuffle": RowShuffle(method="none")}, ("pyarrow",)),
    "a slice as it lies": Way(_lines, {"shuffle": RowShuffle(method="none", first=5, stop=170)}),
    "a slice permuted": Way(_lines, {"shuffle": RowShuffle(method="slime", first=5, stop=-3)}),
    "kept rows as they lie": Way(_lines, {"shuffle": RowShuffle(method="none", only_kept=True)}),
    "a part of a split": Way(_lines, {"shuffle": RowShuffle(part="train")}),
    "planned packs": Way(_lines, {"packing": XTunerPacking(max_length=16, seed=3), **_PACKED}),
    "packs": Way(_lines, {"packing": SoftPacking(max_length=16, window_samples=8), "shuffle": BLOCKS, **_PACKED}),
    "packs across epochs": Way(_lines, {"packing": ACROSS_EPOCHS, "shuffle": BLOCKS, **_PACKED}),
    "a stream": Way(_iterable, {"shuffle": BLOCKS}),
}


@contextlib.contextmanager
def small_cuts() -> Any:
    """What is cut by thousands of rows and bytes is cut by dozens. D is the same."""
    modules = ("order.order", "prefetch.windows.indexed_windows", "order.rank_share", "checkpoint.restore")
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch(f"asyncdata.{module}.ROWS_PER_WINDOW", ROWS_PER_WINDOW))
        stack.enter_context(patch("asyncdata.loader.opening._INDEX_BLOCK_BYTES", INDEX_BLOCK_BYTES))
        yield


@cache
def expected_of(name: str, seed: int) -> list[Any]:
    """D, as a loader without workers has it that knows of no small cuts. Of packs the batches; None ends an epoch."""
    way = WAYS[name]
    knobs = {**way.knobs, "seed": seed, "num_workers": 0, "timeout_s": NEVER_S, "cache": {"folder": ""}}
    found: list[Any] = []
    with DataLoader(way.source(), tokenize_fn=without_the_killer, epochs=EPOCHS, **knobs) as loader:
        if way.is_packed:
            for _ in range(EPOCHS):
                found += [*loader, None]
            return found

        with contextlib.suppress(EndOfData):
            while True:
                found += [int(sample.tokens[0]) for sample in loader.get_next_batch(1)]
    return found


async def _read(world: World, outcome: Outcome, name: str, folder: str) -> None:
    chance, way = world.chance, WAYS[name]
    seed, capacity = chance.randrange(2), chance.choice([1, 10, 64, 1000])
    knobs = {**way.knobs, "seed": seed, "epochs": EPOCHS, "buffer_size": capacity}
    knobs["cache"] = {"folder": folder, "tokens": way.keeps_tokens}
    outcome.append(f"{name}, {seed=}, {capacity=}, {world.executor.num_workers} workers")
    expected = expected_of(name, seed)
    # A pass that counts the tokens of rows runs the function itself, and there a killer is no special case.
    function = without_the_killer if way.is_packed or "kept" in name else with_a_killer
    async with world.loader(way.source(), function, **knobs) as loader:
        reader = _Packs if way.is_packed else _Samples
        await reader(world, loader, expected, outcome).run(chance.choice([3, 20, 60]))


class _Samples:
    """Takes what comes next, gives up now and then, goes back to what it has saved; and has workers come and go."""

    def __init__(self, world: World, loader: Any, expected: list[Any], outcome: Outcome) -> None:
        self.world, self.chance, self.loader = world, world.chance, loader
        self.expected, self.outcome, self.place = expected, outcome, 0
        self.saved: list[tuple[str, int]] = []

    async def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.place == len(self.expected):
                return

            act = self.chance.choices([self.take, self.save, self.restore, self.resize], [12, 2, 1, 1])[0]
            await act()
            if self.chance.random() < 0.5:
                await anyio.sleep(self.chance.expovariate(1 / (4 * REQUEST_S)))

    @property
    def patience_s(self) -> float:
        return self.chance.choice([STALLED_S, STALLED_S, STALLED_S, REQUEST_S * self.chance.random() * 4])

    async def take(self) -> None:
        number, patience_s = self.chance.choice([1, 2, 7, 40]), self.patience_s
        number = min(number, len(self.expected) - self.place)
        try:
            samples = await self.loader.get_next_batch(number, timeout_s=patience_s)
        except PrefetchTimeoutError:
            assert patience_s < STALLED_S, "nothing came, ever"
            self.outcome.num_given_up += 1
            return

        self.check([int(sample.tokens[0]) for sample in samples])

    def check(self, found: list[Any]) -> None:
        wanted = self.expected[self.place : self.place + len(found)]
        assert found == wanted, (self.place, found, wanted)
        self.place += len(found)
        self.outcome.num_samples += len(found)
        self.outcome.append(f"{len(found)} more, {self.place} in all")

    async def save(self) -> None:
        self.saved.append((json.dumps(self.loader.state_dict()), self.place))

    async def restore(self) -> None:
        if self.saved:
            state, self.place = self.chance.choice(self.saved)
            self.loader.load_state_dict(json.loads(state))
            self.outcome.num_restores += 1
            self.outcome.append(f"restored to {self.place}")

    async def resize(self) -> None:
        """As the tuner does it."""
        service = self.loader._engine.service  # noqa: SLF001
        if service._call_soon is not None:  # noqa: SLF001
            self.world.executor.set_num_workers(self.chance.choice([1, 2, 5]))
            service._producer.resize()  # noqa: SLF001


class _Packs(_Samples):
    """The same with loops over batches; a batch that was given up comes again."""

    loop: Any = None

    async def take(self) -> None:
        if self.loop is None:
            self.loop = aiter(self.loader)
        patience_s = self.patience_s
        batch: Any = ()
        with anyio.move_on_after(patience_s):
            batch = await anext(self.loop, None)
        if batch == ():
            assert patience_s < STALLED_S, "nothing came, ever"
            self.outcome.num_given_up += 1
            return

        self.check([batch])
        if batch is None:
            self.loop = None

    async def restore(self) -> None:
        await super().restore()
        self.loop = None
        self._pass_end()

    def _pass_end(self) -> None:
        """Nothing is left of the epoch where a loop begins: it is the next one's."""
        if self.place < len(self.expected) and self.expected[self.place] is None:
            self.place += 1


def simulate_way(name: str, seed: int, outcome: Outcome) -> None:
    """Run the schedule of ``seed`` over a way; it starts cold, with nothing on the disk.

    :param outcome: what has happened is kept there.
    :raises AssertionError: if something is not as it must be, or would not have come to be.
    """
    folder = tempfile.mkdtemp(dir=_folder())
    try:
        for value in range(2):
            expected_of(name, value)  # in a time that is real
        with small_cuts():
            run_seeded(lambda world: _read(world, outcome, name, folder), seed, outcome)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    lines = Outcome()
    try:
        simulate_way(sys.argv[1], int(sys.argv[2]), lines)
    finally:
        sys.stdout.write("\n".join(lines) + "\n")
