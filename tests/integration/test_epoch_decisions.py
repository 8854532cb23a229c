"""What an epoch leaves out follows from what was delivered and reported before it begins: not from what is ready."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import pytest

from asyncdata import AsyncDataLoader, Limits, Mix, Outcomes, PassRate, Ranks, Shuffle
from asyncdata.errors import PrefetchTimeoutError
from tests.support import planned_media
from tests.support.exchanges import Meeting
from tests.support.loaders import make
from tests.support.loading import NEVER_S, ids, write_rows
from tests.support.planned_media import NumberedMedia

SIZES = {"code": 31, "math": 20, "chat": 11}
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)
SOLVED = PassRate(drop_above=0.9, revisit_every=3)
GLOBAL_BATCH = 12


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
    settings = {"seed": seed, "buffer_size": 1, "limits": Limits(max_ready_bytes=40)}
    assert on_ranks(2, mix, 30, **settings) == alone(mix, 30, **settings)


# Ranks that tell each other what they left out


def test_only_one_rank_takes_states_where_epochs_are_shorter_than_a_batch(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 7)
    mix = Mix({"few": path, "many": write_rows(tmp_path / "many.jsonl", 61)})

    assert on_ranks(2, mix, 20, lambda rank, loader, _: rank or loader.state_dict()) == alone(mix, 20)
