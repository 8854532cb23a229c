"""Ranks that report scores together remember the same, and leave out the same rows."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio
import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata import AsyncDataLoader, DataLoader, HardPacking, Outcomes, PassRate, Ranks, RowShuffle, Shuffle
from asyncdata.errors import ConfigError, InvalidGroupError, PrefetchTimeoutError, WorkerError
from tests.support.exchanges import Meeting
from tests.support.faults import until
from tests.support.loaders import gated, make
from tests.support.tokenize_fns import row_id, waits_for_a_file

NUM_ROWS = 53
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)
SOLVED = PassRate(drop_above=0.9, revisit_every=3)


def row_of(sample):
    return int(sample.tokens[0])


def score_of(sample):
    """Every second row is solved, and every fifth from the second epoch on."""
    return float(row_of(sample) % 2 or (row_of(sample) % 5 == 0 and sample.position.epoch > 0))


def ranks_of(world_size, source, policies=(), kind=DataLoader, **settings):
    """The loaders of all ranks."""
    meeting = Meeting(world_size)
    settings = {
        "tokenize_fn": row_id,
        "shuffle": SHUFFLE,
        "buffer_size": 16,
        "num_workers": 0,
        "timeout_s": 240,
        **settings,
    }
    for rank in range(world_size):
        policy = policies[rank] if policies else SOLVED
        yield kind(
            source,
            batch_size=12 // world_size,
            outcomes=Outcomes(policy=policy, exchange=meeting.of(rank)),
            ranks=Ranks(rank=rank, world_size=world_size),
            **settings,
        )


def train(loader, num_steps, state=None):
    """The samples and the state of each step."""
    found = []
    with loader:
        if state is not None:
            loader.load_state_dict(state)
        while len(found) < num_steps:
            for batch in loader:
                loader.report(batch, list(map(score_of, batch)))
                found.append((batch, json.loads(json.dumps(loader.state_dict()))))
                if len(found) == num_steps:
                    break
    return found


def run(world_size, source, num_steps, state=None, **settings):
    """What :func:`train` returns for each rank."""
    with ThreadPoolExecutor(world_size) as threads:
        loaders = ranks_of(world_size, source, **settings)
        return list(threads.map(lambda loader: train(loader, num_steps, state), loaders))


def in_order(runs):
    """Each step of all ranks: its rows in the order of D, those that fill up the last batch among them."""
    steps = [[batch for batch, _ in step] for step in zip(*runs, strict=True)]
    return [[(row_of(s), s.position.epoch) for each in zip(*step, strict=True) for s in each] for step in steps]


@pytest.mark.parametrize(("world_size", "shuffle"), [(2, SHUFFLE), (3, "full"), (4, RowShuffle(only_kept=True))])
def test_any_number_of_ranks_leaves_out_the_same_rows(rows, world_size, shuffle):
    found = run(world_size, rows, 18, shuffle=shuffle)

    taken = in_order(found)
    odd, fives = set(range(1, NUM_ROWS, 2)), set(range(0, NUM_ROWS, 5))
    left_out = [set(), odd, odd | fives, fives - odd]
    for epoch, solved in enumerate(left_out):
        assert {row for step in taken for row, of in step if of == epoch} == set(range(NUM_ROWS)) - solved
    assert taken == in_order(run(6, rows, 18, shuffle=shuffle))
    memories = [[state["outcomes"] for _, state in each] for each in found]
    for memory in memories[1:]:
        for mine, first in zip(memory, memories[0], strict=True):
            assert {**mine, "decided": None, "memory": None} == {**first, "decided": None, "memory": None}


class Score:
    def __float__(self):
        raise RuntimeError("the model is gone")


@pytest.mark.parametrize(
    ("score", "why"), [(float("nan"), "AD482"), (Score(), "the model is gone")], ids=["no number", "raises"]
)
def test_what_a_rank_cannot_report_is_an_error_of_all_and_nothing_is_counted(rows, score, why):
    first, second = ranks_of(2, rows)

    def broken(loader, score):
        with loader:
            batch = next(iter(loader))
            with pytest.raises((InvalidGroupError, RuntimeError, WorkerError)) as error:
                loader.report(batch, [score] * len(batch))
            return str(error.value), loader.statistics().outcome_rows

    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(broken, [first, second], [1.0, score]))

    assert "AD486 rank 1 cannot report its scores" in told[0][0]
    assert why in told[0][0]
    assert told[1][0].startswith(why)
    assert [number for _, number in told] == [0, 0]


def test_ranks_with_other_policies_are_told(rows):
    loaders = ranks_of(2, rows, policies=[SOLVED, PassRate(drop_below=0.1)])

    def until_told(loader):
        with pytest.raises(ConfigError, match=r"AD487 since the last report, rank \d has left out other"):
            train(loader, 20)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(until_told, loaders))


def test_an_exchange_that_fails_or_answers_something_else_is_an_error(rows):
    def of(exchange):
        outcomes = Outcomes(policy=SOLVED, exchange=exchange)
        with make(rows, row_id, outcomes=outcomes, batch_size=2, ranks=Ranks(world_size=2)) as loader:
            loader.report(next(iter(loader)), [1.0, 1.0])

    def broken(data):
        raise OSError("no route")

    with pytest.raises(WorkerError, match=r"AD486 the other ranks cannot be reached .*no route.* equally often"):
        of(broken)
    with pytest.raises(ConfigError, match=r"AD487 Outcomes\(exchange=...\) returned the bytes of 1 ranks"):
        of(lambda data: [data])
    with pytest.raises(ConfigError, match=r"AD487 Outcomes\(exchange=...\) did not return the bytes"):
        of(lambda data: [data, b"?"])
    with pytest.raises(ConfigError, match="AD487 .* they are of the type ndarray"):
        of(lambda data: [np.frombuffer(data, np.uint8)] * 2)


async def train_async(loader, num_steps, cancels):
    """The batches of each step; every third report is cancelled at once, if ``cancels``."""
    found = []
    async with loader:
        while len(found) < num_steps:
            async for batch in loader:
                with anyio.move_on_after(0 if cancels and len(found) % 3 == 1 else None):
                    await loader.report(batch, list(map(score_of, batch)))
                found.append((batch, None))
                if len(found) == num_steps:
                    break
        await loader.report([], [])
    return found


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_report_that_is_cancelled_counts_on_all_ranks_before_samples_are_taken(rows, backend):
    loaders = list(ranks_of(2, rows, kind=AsyncDataLoader))
    with ThreadPoolExecutor(2) as threads:
        runs = [
            threads.submit(anyio.run, train_async, loader, 18, rank == 0, backend=backend)
            for rank, loader in enumerate(loaders)
        ]
        found = [one.result() for one in runs]

    assert in_order(found) == in_order(run(2, rows, 18))


def test_an_event_loop_runs_while_a_report_waits_for_another_rank(rows):
    first, second = ranks_of(2, rows, kind=AsyncDataLoader, timeout_s=0.5)
    may_report = threading.Event()

    async def waits():
        async with first, anyio.create_task_group() as group:
            group.start_soon(first.report, [], [])
            while not may_report.is_set():
                try:
                    await anext(aiter(first))
                except PrefetchTimeoutError as error:
                    if "a report waits for other ranks" in str(error):
                        may_report.set()

    async def comes():
        async with second:
            may_report.wait()
            await second.report([], [])

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(anyio.run, waits), threads.submit(anyio.run, comes)]:
            one.result()


def test_what_one_rank_has_decided_early_is_not_compared_before_it_takes_a_sample(tmp_path):
    path, gate = gated(tmp_path, 0, NUM_ROWS)
    gate.touch()

    async def main():
        first, second = ranks_of(2, path, kind=AsyncDataLoader, tokenize_fn=waits_for_a_file, shuffle=False)
        async with first, second:
            for loader in (first, second):
                assert [batch async for batch in loader]
            gate.unlink()
            with capture_logs() as logs:
                async with anyio.create_task_group() as waits:
                    waits.start_soon(anext, aiter(first))
                    await anyio.to_thread.run_sync(until, lambda: "outcomes.decided" in [log["event"] for log in logs])
                    waits.cancel_scope.cancel()
            async with anyio.create_task_group() as reports:
                for loader in (first, second):
                    reports.start_soon(loader.report, [], [])
            gate.touch()

    anyio.run(main)


@pytest.mark.parametrize("is_reported", [False, True], ids=["samples", "report"])
def test_the_error_of_a_cancelled_report_is_that_of_the_next_call(rows, is_reported):
    loaders = list(ranks_of(2, rows, kind=AsyncDataLoader))

    async def cancelled(loader):
        async with loader:
            batch = await anext(aiter(loader))
            await loader.report([], [])
            with anyio.move_on_after(0):
                await loader.report(batch, [1.0] * len(batch))
            with pytest.raises(WorkerError, match="AD486 rank 1 cannot report its scores"):
                await (loader.report([], []) if is_reported else anext(aiter(loader)))
            assert await anext(aiter(loader))

    async def broken(loader):
        async with loader:
            batch = await anext(aiter(loader))
            await loader.report([], [])
            with pytest.raises(InvalidGroupError, match="AD482"):
                await loader.report(batch, [float("nan")] * len(batch))
            if is_reported:
                await loader.report([], [])

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(anyio.run, *each) for each in zip((cancelled, broken), loaders, strict=True)]:
            one.result()


def test_what_does_not_go_together_is_refused(rows):
    exchange = Meeting(2).of(0)
    with pytest.raises(ConfigError, match="AD480 .*packs"):
        packing = HardPacking(max_length=8)
        make(rows, outcomes=Outcomes(exchange=exchange), ranks=Ranks(world_size=2), batch_size=1, packing=packing)
    with pytest.raises(ConfigError, match="exchange is a function of bytes"):
        Outcomes(exchange=5)
