"""What an epoch leaves out follows from what was delivered and reported before it begins: not from what is ready."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import pytest

from asyncdata import AsyncDataLoader, Limits, Mix, Outcomes, PassRate, Ranks, Shuffle
from asyncdata.errors import InvalidGroupError, PrefetchTimeoutError, WorkerError
from tests.support import planned_media
from tests.support.exchanges import Meeting
from tests.support.loaders import make
from tests.support.loading import NEVER_S, ids, write_rows
from tests.support.planned_media import NumberedMedia
from tests.support.tokenize_fns import row_id

SIZES = {"code": 31, "math": 20, "chat": 11}
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)
SOLVED = PassRate(drop_above=0.9, revisit_every=3)
GLOBAL_BATCH = 12


def slowly(row):
    """Some rows take longer than others, so that what is ready when differs."""
    time.sleep(row["id"] % 4 / 2000)
    return row_id(row)


@pytest.fixture
def mix(tmp_path):
    return Mix({name: write_rows(tmp_path / f"{name}.jsonl", size) for name, size in SIZES.items()}, quota=8)


def entry_of(sample):
    epoch = sample.position.epoch if sample.source_epoch is None else sample.source_epoch
    return sample.source_name, epoch, int(sample.tokens[0])


def score_of(sample):
    """Every second row is solved, and every fifth from its second epoch on."""
    _, epoch, row = entry_of(sample)
    return float(row % 2 or (row % 5 == 0 and epoch > 0))


def report(loader, batch):
    return loader.report(batch, list(map(score_of, batch)))


def train(loader, num_steps, before=lambda loader, batch: None):
    """The entries of each step's batch."""
    found = []
    with loader:
        while len(found) < num_steps:
            for batch in loader:
                before(loader, batch)
                report(loader, batch)
                found.append(list(map(entry_of, batch)))
                if len(found) == num_steps:
                    break
    return found


def alone(source, num_steps, before=lambda loader, batch: None, **settings):
    settings = {"shuffle": SHUFFLE, "batch_size": GLOBAL_BATCH, "outcomes": Outcomes(policy=SOLVED), **settings}
    return train(make(source, **settings), num_steps, before)


def on_ranks(world_size, source, num_steps, before=lambda rank, loader, batch: None, **settings):
    """The same of ranks that share their scores, and divide the scans."""
    scores, scans = Meeting(world_size), Meeting(world_size)

    def train_one(rank):
        loader = make(
            source,
            batch_size=GLOBAL_BATCH // world_size,
            ranks=Ranks(rank=rank, world_size=world_size, exchange=scans.of(rank)),
            outcomes=Outcomes(policy=SOLVED, exchange=scores.of(rank)),
            **{"shuffle": SHUFFLE, **settings},
        )
        try:
            return train(loader, num_steps, partial(before, rank))
        except BaseException:
            scores.end()
            raise
        finally:
            scans.end()

    with ThreadPoolExecutor(world_size) as threads:
        steps = zip(*threads.map(train_one, range(world_size)), strict=True)
        return [[entry for each in zip(*step, strict=True) for entry in each] for step in steps]


@pytest.mark.parametrize("buffer_size", [4, 1000])
@pytest.mark.parametrize("tokenize_fn", [row_id, slowly], ids=["fast", "slow"])
def test_a_mixture_leaves_out_the_same_on_one_rank_and_on_several_whatever_is_ready(mix, tokenize_fn, buffer_size):
    wanted = alone(mix, 40)

    settings = {"tokenize_fn": tokenize_fn, "buffer_size": buffer_size}
    assert alone(mix, 40, **settings) == wanted
    by_name = {"tokenize_fn": f"{__name__}:{tokenize_fn.__name__}", "num_workers": 2}
    assert alone(mix, 40, **settings | by_name) == wanted
    for world_size in (2, 3):
        assert on_ranks(world_size, mix, 40, **settings) == wanted


@pytest.mark.parametrize("workers", [0, 2])
def test_media_that_are_still_loaded_belong_to_the_epoch_before(tmp_path, workers):
    """With room for one sample, most of a batch is not loaded yet when it is asked for."""
    path = planned_media.write_rows(tmp_path / "rows.jsonl", dict.fromkeys(range(0, 60, 7), "slow"))
    settings = {"tokenize_fn": NumberedMedia(), "num_workers": workers, "batch_size": 4}
    found = alone(path, 26, limits=Limits(max_media_bytes=48), **settings)

    entries = [entry for step in found for entry in step]
    assert sorted(row for _, epoch, row in entries if epoch == 1) == list(range(0, 60, 2))
    assert {row for _, epoch, row in entries if epoch == 2} <= {row for row in range(60) if row % 2 == 0 and row % 5}


def test_media_of_a_mixture_on_ranks_change_nothing(tmp_path):
    slow = dict.fromkeys(range(0, 60, 7), "slow")
    sizes = {"few": 17, "many": 60}
    paths = {name: planned_media.write_rows(tmp_path / f"{name}.jsonl", slow, size) for name, size in sizes.items()}
    mix, settings = Mix(paths), {"tokenize_fn": NumberedMedia(), "limits": Limits(max_media_bytes=48)}

    wanted = alone(mix, 25, tokenize_fn=NumberedMedia())
    assert alone(mix, 25, **settings) == wanted
    assert on_ranks(2, mix, 25, **settings) == wanted
    assert on_ranks(3, mix, 25, **settings, num_workers=1) == wanted


# Calls that take nothing


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_look_at_what_comes_next_changes_nothing(mix, is_mixed, tmp_path):
    source = mix if is_mixed else tmp_path / "code.jsonl"

    assert alone(source, 30, lambda loader, _: loader.peek(20)) == alone(source, 30)


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


@pytest.mark.parametrize("num_steps", range(2, 8))
def test_what_was_decided_stays_if_groups_that_were_out_are_reported_after_a_restart(mix, num_steps):
    settings = {"shuffle": SHUFFLE, "outcomes": Outcomes(policy=SOLVED), "commit": "on_ack"}
    with make(mix, **settings) as loader:
        taken = []
        for step in range(num_steps):
            taken.append(loader.get_next_batch(8))
            if step % 2 == 0 and step < num_steps - 1:
                report(loader, taken[-1])
        state = loader.state_dict()
    with make(mix, **settings) as loader:
        loader.load_state_dict(state)
        for batch in taken:
            again = loader.get_next_batch(8)
            loader.report(again, [1.0] * 8)
            assert list(map(entry_of, again)) == list(map(entry_of, batch))


# Ranks that tell each other what they left out


def test_a_report_that_was_refused_is_made_again(mix):
    """One rank has a score that is no number, also in the first step of an epoch."""

    def broken(rank, loader, batch):
        with pytest.raises((InvalidGroupError, WorkerError), match="AD482"):
            loader.report(batch, [math.nan if rank else 0.0] * len(batch))

    assert on_ranks(2, mix, 20, broken) == alone(mix, 20)


def test_only_one_rank_takes_states_where_epochs_are_shorter_than_a_batch(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 7)
    mix = Mix({"few": path, "many": write_rows(tmp_path / "many.jsonl", 61)})

    assert on_ranks(2, mix, 20, lambda rank, loader, _: rank or loader.state_dict()) == alone(mix, 20)
