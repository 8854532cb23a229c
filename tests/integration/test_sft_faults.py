"""Packed batches under hostile use: interrupts, timeouts, collate functions that fail, states taken by anyone."""

from __future__ import annotations

import itertools
import json
import random
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncdata import AsyncDataLoader, LoaderClosedError, PrefetchTimeoutError
from tests.support.check_points import interrupted_at
from tests.support.ranks import (
    MAX_LENGTH,
    PACKED,
    SHUFFLE,
    WAYS,
    Batch,
    batch_of,
    lengths,
    make,
    numbered,
    settled,
    stream,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.thorough

Knobs = dict[str, Any]

RANK: Knobs = {"ranks": {"rank": 1, "world_size": 2, "gradient_accumulation": 2}, "epochs": 2}

ways = pytest.mark.parametrize("knobs", WAYS.values(), ids=WAYS)
packed_ways = pytest.mark.parametrize("knobs", PACKED.values(), ids=PACKED)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", lengths(2000, MAX_LENGTH - 4))


def whole_run(path: Path, **knobs: Any) -> list[Batch]:
    with make(path, **knobs) as loader:
        return list(stream(loader))


def next_of(path: Path, state: dict[str, Any], **knobs: Any) -> Batch | None:
    """What comes next in a run that resumes from ``state``."""
    with make(path, **knobs) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        return next(stream(loader), None)


# Calls that fail


class Interrupts:
    """Each batch is interrupted at some instant, then at a later one, until it is through."""

    error: type[BaseException] = KeyboardInterrupt
    function: Knobs = {}
    settings: Knobs = {}

    def __init__(self) -> None:
        self.chance = random.Random(0)
        self.points = self.rising()

    def rising(self) -> Iterator[int]:
        point = self.chance.randrange(13)
        while True:
            yield point
            point += 13 + point // 10

    def step(self, loop: Any) -> Batch:
        batch: Batch = interrupted_at(next(self.points), loop.__next__)
        self.points = self.rising()
        return batch


class Timeouts:
    """The 40th row comes after some calls have timed out."""

    error: type[BaseException] = PrefetchTimeoutError

    def __init__(self) -> None:
        self.gate, self.num_failed = threading.Event(), 0
        self.function: Knobs = {"tokenize_fn": self.tokenize}
        self.settings: Knobs = {"timeout_s": 0.01, **self.function}

    def tokenize(self, row: dict[str, Any]) -> list[int]:
        if row["id"] == 40:
            self.gate.wait()
        return numbered(row)

    def step(self, loop: Any) -> Batch:
        self.num_failed += 1
        if self.num_failed > 60:
            self.gate.set()
        batch: Batch = next(loop)
        return batch


class Collating:
    """A collate function fails at times."""

    error: type[BaseException] = ValueError
    function: Knobs = {}

    def __init__(self) -> None:
        self.fails = itertools.cycle([True, False, True, True, False])
        self.settings: Knobs = {"collate_fn": self.collate}

    def collate(self, items: list[Any]) -> Batch:
        if next(self.fails):
            raise ValueError("not today")

        return batch_of(items)

    def step(self, loop: Any) -> Batch:
        batch: Batch = next(loop)
        return batch


@ways
@pytest.mark.parametrize("kind", [Interrupts, Timeouts, Collating])
def test_the_batch_of_a_call_that_failed_comes_again_and_once_also_after_a_resume(path, knobs, kind):
    fault, run = kind(), whole_run(path, **RANK, **knobs)
    found, states, chance = list[Batch](), [], random.Random(1)
    with make(path, **{**RANK, **knobs, **fault.settings}) as loader:
        loop = iter(loader)
        while len(found) < len(run):
            try:
                found.append(fault.step(loop))
                assert found[-1] == run[len(found) - 1], f"batch {len(found) - 1}, after {len(states)} failures"
            except fault.error:
                states.append((len(found), loader.state_dict()))
                loop = chance.choice([loop, iter(loader)])
            except StopIteration:
                loop = iter(loader)

    assert len(states) >= 5
    for number, state in states[:: max(1, len(states) // 12)]:
        assert next_of(path, state, **RANK, **knobs, **fault.function) == run[number]


@packed_ways
def test_a_collate_function_that_asks_for_the_state_is_told_of_the_batch_before(path, knobs):
    run, states = whole_run(path, **RANK, **knobs), []

    def collate(items: list[Any]) -> Batch:
        states.append(loader.state_dict())
        return batch_of(items)

    with make(path, **RANK, **knobs, collate_fn=collate) as loader:
        assert list(stream(loader)) == run
    for number in range(0, len(run), 6):
        assert next_of(path, states[number], **RANK, **knobs) == run[number]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@packed_ways
def test_an_async_loop_gives_the_same_batches_and_a_cancelled_call_takes_nothing(path, knobs, backend):
    run = whole_run(path, **RANK, **knobs)

    async def main() -> list[Batch]:
        found: list[Batch] = []
        settings = {"shuffle": SHUFFLE, "num_workers": 0, "batch_size": 1, "collate_fn": batch_of, **RANK, **knobs}
        async with AsyncDataLoader(path, tokenize_fn=numbered, **settings) as loader:
            loop = aiter(loader)
            for is_cancelled in itertools.cycle([True, False]):
                if len(found) == len(run):
                    return found
                try:
                    with anyio.CancelScope() as scope:
                        if is_cancelled:
                            scope.cancel()
                        found.append(await anext(loop))  # a cancelled call that need not wait comes through
                except StopAsyncIteration:
                    loop = aiter(loader)
        raise AssertionError("never")

    assert anyio.run(main, backend=backend) == run


# States


@ways
def test_states_taken_all_the_time_by_another_thread_each_go_on_with_a_batch_and_not_back(path, knobs):
    run = whole_run(path, **RANK, **knobs)
    states: list[tuple[int, dict[str, Any], int]] = []
    num_got, is_over = [0], threading.Event()

    with make(path, **RANK, **knobs) as loader:

        def take() -> None:
            while not is_over.is_set():
                before = num_got[0]
                state = loader.state_dict()
                states.append((before, state, num_got[0] + 1))

        thread = threading.Thread(target=take)
        thread.start()
        for _ in stream(loader):
            num_got[0] += 1
        is_over.set()
        thread.join()

    for first, state, last in states[:: max(1, len(states) // 25)]:
        assert next_of(path, state, **RANK, **knobs) in [*run, None][first : last + 1]


@ways
def test_a_loader_in_use_can_be_set_back_and_forth_from_the_first_batch_to_behind_the_end(path, knobs):
    run, chance = whole_run(path, **RANK, **knobs), random.Random(3)
    with make(path, **RANK, **knobs) as loader:
        states = [loader.state_dict(), *(loader.state_dict() for _ in stream(loader))]
        assert list(loader) == []
        assert settled(loader.state_dict()) == settled(loader.state_dict())
        for place in [len(run), 0, *(chance.randrange(len(run)) for _ in range(20)), len(run)]:
            loader.load_state_dict(states[place])
            assert settled(loader.state_dict()) == settled(states[place])
            assert list(itertools.islice(stream(loader), 4)) == run[place : place + 4]
        loop = iter(loader)
    with pytest.raises(LoaderClosedError):
        next(loop)
