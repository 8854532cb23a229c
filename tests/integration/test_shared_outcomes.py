"""Ranks that report scores together leave out the same rows, by what was reported before an epoch begins."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import anyio
import numpy as np
import pytest
from structlog.testing import capture_logs

from asyncdata import AsyncDataLoader, DataLoader, Mix, Outcomes, PassRate, Ranks, RowShuffle, Shuffle
from asyncdata.errors import ConfigError, InvalidGroupError, PrefetchTimeoutError, WorkerError
from tests.support import column_fns
from tests.support.column_fns import NumberedMedia
from tests.support.faults import until
from tests.support.loaders import gated, make
from tests.support.loading import NEVER_S, ids, row_id, waits_for_a_file, write_rows
from tests.support.ranks import Meeting, stream

NUM_ROWS = 53
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)
SOLVED = PassRate(drop_above=0.9, revisit_every=3)


def entry_of(sample):
    epoch = sample.position.epoch if sample.source_epoch is None else sample.source_epoch
    return sample.source_name, epoch, int(sample.tokens[0])


def score_of(sample):
    """Every second row is solved, and every fifth from its second epoch on."""
    _, epoch, row = entry_of(sample)
    return float(row % 2 or (row % 5 == 0 and epoch > 0))


def report(loader, batch):
    return loader.report(batch, list(map(score_of, batch)))


def ranks_of(world_size, source, policies=(), kind=DataLoader, **settings):
    """The loaders of all ranks."""
    meeting = Meeting(world_size)
    fixed = {"tokenize_fn": row_id, "shuffle": SHUFFLE, "buffer_size": 16, "num_workers": 0, "timeout_s": 240}
    settings = fixed | {"batch_size": 12 // world_size} | settings
    for rank in range(world_size):
        policy = policies[rank] if policies else SOLVED
        outcomes = Outcomes(policy=policy, exchange=meeting.of(rank))
        yield kind(source, outcomes=outcomes, ranks=Ranks(rank=rank, world_size=world_size), **settings)


def train(loader, num_steps, state=None):
    """The samples and the state of each step."""
    found = []
    with loader:
        if state is not None:
            loader.load_state_dict(state)
        for batch in islice(stream(loader), num_steps):
            report(loader, batch)
            found.append((batch, json.loads(json.dumps(loader.state_dict()))))
    return found


def run(world_size, source, num_steps, state=None, **settings):
    """What :func:`train` returns for each rank."""
    with ThreadPoolExecutor(world_size) as threads:
        loaders = ranks_of(world_size, source, **settings)
        return list(threads.map(lambda loader: train(loader, num_steps, state), loaders))


def in_order(runs):
    """Each step of all ranks: its rows in the order of D, those that fill up the last batch among them."""
    steps = [[batch for batch, _ in step] for step in zip(*runs, strict=True)]
    return [[entry_of(sample)[1:] for each in zip(*step, strict=True) for sample in each] for step in steps]


@pytest.mark.parametrize(("world_size", "shuffle"), [(2, SHUFFLE), (3, "full"), (4, RowShuffle(only_kept=True))])
def test_any_number_of_ranks_leaves_out_the_same_rows(rows, world_size, shuffle):
    found = run(world_size, rows, 18, shuffle=shuffle)
    taken = in_order(found)
    odd, fives = set(range(1, NUM_ROWS, 2)), set(range(0, NUM_ROWS, 5))
    left_out = [set(), odd, odd | fives, fives - odd]
    for epoch, solved in enumerate(left_out):
        assert {row for step in taken for of, row in step if of == epoch} == set(range(NUM_ROWS)) - solved
    assert taken == in_order(run(6, rows, 18, shuffle=shuffle))
    memories = [[state["outcomes"] for _, state in each] for each in found]
    for memory in memories[1:]:
        for mine, first in zip(memory, memories[0], strict=True):
            assert {**mine, "decided": None, "memory": None} == {**first, "decided": None, "memory": None}


class Score:
    def __float__(self):
        raise RuntimeError("the model is gone")


@pytest.mark.parametrize(("score", "why"), [(float("nan"), "AD482"), (Score(), "the model is gone")])
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
                    await report(loader, batch)
                found.append((batch, None))
                if len(found) == num_steps:
                    break
        await loader.report([], [])
    return found


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_report_that_is_cancelled_counts_on_all_ranks_before_samples_are_taken(rows, backend):
    loaders = list(ranks_of(2, rows, kind=AsyncDataLoader))
    with ThreadPoolExecutor(2) as threads:
        start = partial(threads.submit, anyio.run, train_async, backend=backend)
        runs = [start(loader, 18, loader is loaders[0]) for loader in loaders]
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


SIZES = {"code": 31, "math": 20, "chat": 11}
GLOBAL_BATCH = 12


@pytest.fixture
def mix(tmp_path):
    return Mix({name: write_rows(tmp_path / f"{name}.jsonl", size) for name, size in SIZES.items()}, quota=8)


def entries_of(loader, num_steps, before=lambda loader, batch: None):
    """The entries of each step's batch."""
    found = []
    with loader:
        for batch in islice(stream(loader), num_steps):
            before(loader, batch)
            report(loader, batch)
            found.append(list(map(entry_of, batch)))
    return found


def alone(source, num_steps, before=lambda loader, batch: None, **settings):
    settings = {"shuffle": SHUFFLE, "batch_size": GLOBAL_BATCH, "outcomes": Outcomes(policy=SOLVED), **settings}
    return entries_of(make(source, **settings), num_steps, before)


def on_ranks(world_size, source, num_steps, before=lambda rank, loader, batch: None, **settings):
    """The same of ranks that share their scores, and divide the scans."""
    scores, scans = Meeting(world_size), Meeting(world_size)

    def train_one(rank):
        ranks = Ranks(rank=rank, world_size=world_size, exchange=scans.of(rank))
        outcomes, own = Outcomes(policy=SOLVED, exchange=scores.of(rank)), {"shuffle": SHUFFLE, **settings}
        loader = make(source, batch_size=GLOBAL_BATCH // world_size, ranks=ranks, outcomes=outcomes, **own)
        try:
            return entries_of(loader, num_steps, partial(before, rank))
        except BaseException:
            scores.end()
            raise
        finally:
            scans.end()

    with ThreadPoolExecutor(world_size) as threads:
        steps = zip(*threads.map(train_one, range(world_size)), strict=True)
        return [[entry for each in zip(*step, strict=True) for entry in each] for step in steps]


@pytest.mark.parametrize("workers", [0, 2])
def test_media_that_are_still_loaded_belong_to_the_epoch_before(tmp_path, workers):
    """With room for one sample, most of a batch is not loaded yet when it is asked for."""
    path = column_fns.write_rows(tmp_path / "rows.jsonl", dict.fromkeys(range(0, 60, 7), "slow"))
    settings = {"tokenize_fn": NumberedMedia(), "num_workers": workers, "batch_size": 4}
    found = alone(path, 26, limits={"max_media_bytes": 48}, **settings)
    entries = [entry for step in found for entry in step]
    assert sorted(row for _, epoch, row in entries if epoch == 1) == list(range(0, 60, 2))
    assert {row for _, epoch, row in entries if epoch == 2} <= {row for row in range(60) if row % 2 == 0 and row % 5}


def test_media_of_a_mixture_on_ranks_change_nothing(tmp_path):
    slow = dict.fromkeys(range(0, 60, 7), "slow")
    sizes = {"few": 17, "many": 60}
    paths = {name: column_fns.write_rows(tmp_path / f"{name}.jsonl", slow, size) for name, size in sizes.items()}
    mix, settings = Mix(paths), {"tokenize_fn": NumberedMedia(), "limits": {"max_media_bytes": 48}}
    wanted = alone(mix, 25, tokenize_fn=NumberedMedia())
    assert alone(mix, 25, **settings) == wanted
    assert on_ranks(2, mix, 25, **settings) == wanted
    assert on_ranks(3, mix, 25, **settings, num_workers=1) == wanted


def test_a_rank_may_look_ahead_alone(mix):
    assert on_ranks(2, mix, 30, lambda rank, loader, _: loader.peek(30 * rank)) == alone(mix, 30)


def test_a_look_ends_where_the_next_epoch_is_not_decided(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 10)
    with make(path, outcomes=Outcomes(policy=SOLVED)) as loader:
        batch = loader.get_next_batch(8)
        coming = ids(loader.peek(5))
        assert len(coming) == 2
        report(loader, batch)
        assert ids(loader.get_next_batch(2)) == coming
        assert loader.peek(5) == []
        assert len(loader.get_next_batch(3)) == 3
        assert len(loader.peek(2)) == 2
    with make(path) as loader:
        assert len(loader.peek(25)) == 25, "without a policy, each epoch has all rows"


class Gate:
    """Rows go through; once it is closed, they wait."""

    def __init__(self):
        self.is_open, self.is_reached = threading.Event(), threading.Event()
        self.is_open.set()

    def __call__(self, row):
        if not self.is_open.is_set():
            self.is_reached.set()
            self.is_open.wait(NEVER_S)
        return [row["id"]]


async def timed_out(loader, gate):
    while not gate.is_reached.is_set():
        with pytest.raises(PrefetchTimeoutError):
            await loader.get_next_batch(4, timeout_s=0.01)


async def cancelled(loader, gate):
    async with anyio.create_task_group() as group:
        group.start_soon(loader.get_next_batch, 4)
        await anyio.to_thread.run_sync(gate.is_reached.wait, NEVER_S)
        group.cancel_scope.cancel()


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("call", [timed_out, cancelled])
def test_a_call_whose_time_is_over_has_decided_nothing(tmp_path, call, is_resumed):
    path, gate = write_rows(tmp_path / "rows.jsonl", 8), Gate()
    settings = {"shuffle": SHUFFLE, "num_workers": 0, "outcomes": Outcomes(policy=SOLVED), "timeout_s": NEVER_S}

    async def run():
        async with AsyncDataLoader(path, tokenize_fn=gate, buffer_size=4, **settings) as loader:
            await report(loader, await loader.get_next_batch(4))
            last = await loader.get_next_batch(4)
            gate.is_open.clear()
            await call(loader, gate)
            state = loader.state_dict()
            gate.is_open.set()
            await report(loader, last)
            if not is_resumed:
                return ids(await loader.get_next_batch(4))
        async with AsyncDataLoader(path, tokenize_fn=gate, buffer_size=4, **settings) as loader:
            loader.load_state_dict(state)
            await report(loader, last)
            return ids(await loader.get_next_batch(4))

    assert sorted(anyio.run(run)) == [0, 2, 4, 6]


def test_a_report_counts_while_a_call_waits_for_the_first_row_of_the_epoch(tmp_path):
    path, gate = write_rows(tmp_path / "rows.jsonl", 8), Gate()
    with make(path, gate, outcomes=Outcomes(policy=SOLVED), buffer_size=4) as loader, ThreadPoolExecutor(1) as thread:
        report(loader, loader.get_next_batch(4))
        last = loader.get_next_batch(4)
        gate.is_open.clear()
        waiting = thread.submit(loader.get_next_batch, 4)
        assert gate.is_reached.wait(NEVER_S)
        report(loader, last)
        gate.is_open.set()
        assert sorted(ids(waiting.result(NEVER_S))) == [0, 2, 4, 6]


@pytest.mark.parametrize("seed", [2, 8])
def test_a_part_whose_turn_comes_while_a_call_waits_begins_its_next_epoch(tmp_path, seed):
    """With room for no more than one sample, nothing else happens after the sample before it is merged."""
    mix = Mix({name: write_rows(tmp_path / f"{name}.jsonl", 3) for name in ("few", "many")}, quota=4)
    settings = {"seed": seed, "buffer_size": 1, "limits": {"max_ready_bytes": 40}}
    assert on_ranks(2, mix, 30, **settings) == alone(mix, 30, **settings)


def test_only_one_rank_takes_states_where_epochs_are_shorter_than_a_batch(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 7)
    mix = Mix({"few": path, "many": write_rows(tmp_path / "many.jsonl", 61)})
    assert on_ranks(2, mix, 20, lambda rank, loader, _: rank or loader.state_dict()) == alone(mix, 20)
