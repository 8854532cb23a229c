"""Packed batches under hostile use: interrupts, timeouts, collate functions that fail, states taken by anyone."""

from __future__ import annotations

import contextlib
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
    from pathlib import Path

pytestmark = pytest.mark.thorough

Knobs = dict[str, Any]

NUM_TOKENS = 2000
RANK: Knobs = {"ranks": {"rank": 1, "world_size": 2, "gradient_accumulation": 2}, "epochs": 2}

ways = pytest.mark.parametrize("knobs", WAYS.values(), ids=WAYS)
packed_ways = pytest.mark.parametrize("knobs", PACKED.values(), ids=PACKED)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", lengths(NUM_TOKENS, MAX_LENGTH - 4))


def whole_run(path: Path, **knobs: Any) -> list[Batch]:
    with make(path, **knobs) as loader:
        return list(stream(loader))


def next_of(path: Path, state: dict[str, Any], **knobs: Any) -> Batch | None:
    """What comes next in a run that resumes from ``state``."""
    with make(path, **knobs) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        return next(stream(loader), None)


# Interrupts

STRIDE = 13


@ways
def test_after_an_interrupt_at_any_instant_the_batch_comes_again_and_once(path, knobs):
    """Interrupted at some instant, then at a later one, until it is through; other instants for each batch."""
    run = whole_run(path, **RANK, **knobs)
    chance, states, found = random.Random(0), [], []
    with make(path, **RANK, **knobs) as loader:
        loop = iter(loader)
        while len(found) < 15:
            point = chance.randrange(STRIDE)
            while (batch := interrupted(point, loop)) is None:
                states.append((len(found), loader.state_dict()))
                point += STRIDE + point // 10
                loop = chance.choice([loop, iter(loader)])
            if batch is OVER:
                loop = iter(loader)
                continue

            found.append(batch)
            assert batch == run[len(found) - 1], f"batch {len(found) - 1}, after {len(states)} interrupts"

    assert len(states) > 50
    for number, state in states[::7]:
        assert next_of(path, state, **RANK, **knobs) == run[number]


OVER = object()


def interrupted(point: int, loop: Any) -> Any:
    """The loop's next batch, or OVER; None if the interrupt came first."""
    try:
        return interrupted_at(point, loop.__next__)
    except KeyboardInterrupt:
        return None
    except StopIteration:
        return OVER


# Timeouts

GATE = threading.Event()


def gated(row: dict[str, Any]) -> list[int]:
    """Waits, at the 40th row, until a test lets it go on."""
    if row["id"] == 40:
        GATE.wait()
    return numbered(row)


@ways
def test_a_timeout_takes_nothing(path, knobs):
    knobs = {**RANK, **knobs, "tokenize_fn": gated}
    GATE.set()
    run = whole_run(path, **knobs)
    GATE.clear()
    found, states = list[Batch](), []
    try:
        with make(path, timeout_s=0.01, **knobs) as loader:
            loop = iter(loader)
            while len(found) < len(run):
                try:
                    found.append(next(loop))
                except PrefetchTimeoutError:
                    states.append((len(found), loader.state_dict()))
                    if len(states) == 5:
                        GATE.set()
                except StopIteration:
                    loop = iter(loader)
    finally:
        GATE.set()

    assert len(states) >= 5
    assert found == run
    number, state = states[-1]
    assert next_of(path, state, **knobs) == run[number]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@packed_ways
def test_an_async_loop_gives_the_same_batches_and_a_cancelled_call_takes_nothing(path, knobs, backend):
    run = whole_run(path, **RANK, **knobs)

    async def main() -> list[Batch]:
        found: list[Batch] = []
        settings = {"shuffle": SHUFFLE, "num_workers": 0, "batch_size": 1, "collate_fn": batch_of, **RANK, **knobs}
        async with AsyncDataLoader(path, tokenize_fn=numbered, **settings) as loader:
            is_over = False
            while not is_over:
                is_over, loop = True, aiter(loader)
                while True:
                    with anyio.CancelScope() as scope, contextlib.suppress(StopAsyncIteration):
                        scope.cancel()
                        found.append(await anext(loop))  # a call that need not wait comes through
                        is_over = False
                    try:
                        found.append(await anext(loop))
                    except StopAsyncIteration:
                        break
                    is_over = False
        return found

    assert anyio.run(main, backend=backend) == run


# Collate functions


@ways
def test_a_batch_whose_collate_function_failed_comes_again(path, knobs):
    """And a state that it asks for is of the batch before, where batches are made of packs."""
    run = whole_run(path, **RANK, **knobs)
    fails = itertools.cycle([True, False, True, True, False])
    states: list[tuple[int, dict[str, Any]]] = []

    def collate(items: list[Any]) -> Batch:
        if knobs:
            states.append((len(found), loader.state_dict()))
        if next(fails):
            raise ValueError("not today")

        return batch_of(items)

    found: list[Batch] = []
    with make(path, **RANK, **knobs, collate_fn=collate) as loader:
        loop = iter(loader)
        while len(found) < len(run):
            try:
                found.append(next(loop))
            except ValueError:
                states.append((len(found), loader.state_dict()))
            except StopIteration:
                loop = iter(loader)

    assert found == run
    for number, state in states[::9]:
        assert next_of(path, state, **RANK, **knobs) == run[number]


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
def test_states_before_the_first_batch_twice_in_a_row_and_behind_the_end(path, knobs):
    run = whole_run(path, **RANK, **knobs)
    with make(path, **RANK, **knobs) as loader:
        first, second = loader.state_dict(), loader.state_dict()
        batches = stream(loader)
        next(batches)
        third, fourth = loader.state_dict(), loader.state_dict()
        rest = list(batches)
        end, again = loader.state_dict(), loader.state_dict()
        assert list(loader) == []
        later = loader.state_dict()

    assert settled(first) == settled(second)
    assert settled(third) == settled(fourth)
    assert settled(end) == settled(again)
    assert rest == run[1:]
    assert next_of(path, first, **RANK, **knobs) == run[0]
    assert next_of(path, third, **RANK, **knobs) == run[1]
    assert next_of(path, end, **RANK, **knobs) is None
    assert next_of(path, later, **RANK, **knobs) is None


@ways
def test_a_loader_in_use_can_be_set_back_and_forth(path, knobs):
    run = whole_run(path, **RANK, **knobs)
    chance, states = random.Random(3), []
    with make(path, **RANK, **knobs) as loader:
        states.append(loader.state_dict())
        states += (loader.state_dict() for _ in stream(loader))
        for _ in range(20):
            place = chance.randrange(len(run))
            loader.load_state_dict(states[place])
            assert list(itertools.islice(stream(loader), 4)) == run[place : place + 4]


@packed_ways
def test_an_abandoned_loop_and_a_new_one_go_on_where_the_loader_is_until_it_is_closed(path, knobs):
    run = whole_run(path, **RANK, **knobs)
    found: list[Batch] = []
    with make(path, **RANK, **knobs) as loader:
        while len(found) < len(run):
            found += itertools.islice(loader, 3)
        loop = iter(loader)

    assert found == run
    with pytest.raises(LoaderClosedError):
        next(loop)
