"""A loader as a dataset of torch: AsyncDataset, OrderView and RowView; and which rank a process is."""

import os
import pickle
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from asyncdata import DataLoader, Mix, Ranks, RowFn, RowShuffle
from asyncdata.errors import ConfigError, SnapshotError

pytest.importorskip("torch", reason="torch is not installed")

import torch

from asyncdata.integrations import torch as integration
from asyncdata.integrations.torch import AsyncDataset, OrderView, RowView, ranks
from tests.support.adapters import knobs, of_torch_load, run, take

pytestmark = [
    # Torch says so where a checkpoint is saved by a process alone.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
]
NUM_ROWS = 100


@pytest.fixture
def place(monkeypatch):
    """Puts this process in a place, which is where it is said to be: in the environment, by Ray Train or by torch."""

    def put(environment=(None, None), ray=None, torch_distributed=(None, None)):
        for name, value in zip(("RANK", "WORLD_SIZE"), environment, strict=True):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        rank, world_size = torch_distributed
        distributed = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: rank is not None,
            get_rank=lambda group: -1 if group == "of others" else rank,
            get_world_size=lambda group: world_size,
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
        monkeypatch.delitem(sys.modules, "ray.train", raising=False)

        def get_context():
            if ray[0] is None:
                raise RuntimeError("outside of a training function")
            return SimpleNamespace(get_world_rank=lambda: ray[0], get_world_size=lambda: ray[1])

        if ray is not None:
            monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=get_context))

    return put


@pytest.mark.parametrize(
    ("settings", "rank", "world_size"),
    [
        pytest.param({}, 0, 1, id="alone"),
        pytest.param({"environment": ("3", "8")}, 3, 8, id="environment"),
        pytest.param({"environment": ("3", "8"), "ray": (2, 4)}, 2, 4, id="Ray Train"),
        pytest.param({"environment": ("3", "8"), "ray": (None, None)}, 3, 8, id="no worker of Ray Train"),
        pytest.param({"environment": ("3", "8"), "ray": (0, None)}, 3, 8, id="Ray Train outside of a worker"),
        pytest.param({"environment": ("3", "8"), "ray": (2, 4), "torch_distributed": (1, 3)}, 1, 3, id="torch"),
    ],
)
def test_a_process_has_the_rank_that_those_who_started_it_say(place, settings, rank, world_size):
    place(**settings)
    assert ranks() == Ranks(rank=rank, world_size=world_size)
    given = {"gradient_accumulation": 4, "round_up": False}
    assert ranks(**given) == Ranks(rank=rank, world_size=world_size, **given)


@pytest.mark.parametrize(
    ("settings", "group", "message"),
    [
        ({"environment": ("1", None)}, None, "RANK='1' and WORLD_SIZE=None: set both to whole numbers, or neither"),
        ({"environment": (None, "2")}, None, "set both to whole numbers, or neither"),
        ({"environment": ("one", "2")}, None, "set both to whole numbers, or neither"),
        ({}, "a group", "torch.distributed is not initialised"),
        ({"torch_distributed": (1, 3)}, "of others", "not in the process group"),
    ],
)
def test_a_rank_that_is_half_known_is_refused(place, settings, group, message):
    place(**settings)
    with pytest.raises(ConfigError, match=message):
        ranks(group)


@pytest.fixture
def open_dataset(chats, opened):
    return lambda **changes: opened(AsyncDataset(chats, **knobs(**changes)))


def test_a_dataset_is_an_iterable_dataset_of_the_loaders_batches_and_the_module_has_no_other(open_loader, open_dataset):
    dataset = open_dataset()
    assert isinstance(dataset, torch.utils.data.IterableDataset)
    assert dataset.__class__ is integration.AsyncDataset
    assert run(torch.utils.data.DataLoader(dataset, batch_size=None), 2) == run(open_loader(), 2)
    with pytest.raises(AttributeError, match="has no attribute 'Dataset'"):
        integration.Dataset  # noqa: B018


def test_a_dataset_is_pickled_as_its_settings_and_its_place(open_loader, open_dataset, opened):
    def pickled(dataset):
        return opened(pickle.loads(pickle.dumps(dataset)))  # noqa: S301 - ours

    copy = pickled(open_dataset())
    found = take(copy, 3)
    assert found + run(pickled(pickled(copy)), 1) == run(open_loader(), 1)


def test_a_dataset_resumes_and_goes_to_epochs(open_loader, open_dataset):
    whole, dataset, resumed = run(open_loader(), 2), open_dataset(), open_dataset()
    num_batches = len(run(open_loader(), 1))
    take(dataset, 3)
    resumed.load_state_dict(of_torch_load(dataset.state_dict()))
    resumed.set_epoch(0)
    assert run(resumed, 1) == whole[3:num_batches]
    resumed.set_epoch(1)
    assert run(resumed, 1) == whole[num_batches:]


def test_a_dataset_is_of_this_process_rank_unless_it_is_told(place, open_loader, open_dataset):
    place(environment=("1", "2"))
    accumulated = Ranks(rank=1, world_size=2, gradient_accumulation=2)
    assert run(open_dataset(), 1) == run(open_loader(ranks=Ranks(rank=1, world_size=2)), 1)
    assert run(open_dataset(ranks={"gradient_accumulation": 2}), 1) == run(open_loader(ranks=accumulated), 1)
    assert run(open_dataset(ranks=Ranks(world_size=1)), 1) == run(open_loader(), 1)


def test_a_dataset_that_is_not_closed_is_closed_when_it_is_garbage(chats):
    dataset = AsyncDataset(chats, **knobs())
    next(iter(dataset))
    del dataset  # a thread that is left would fail the test


@pytest.fixture
def rows(jsonl_file):
    return jsonl_file([{"id": number, "text": "x" * (number % 7)} for number in range(NUM_ROWS)])


@pytest.fixture
def view_of(rows, opened):
    """Views of loaders of the rows, closed after the test."""

    def opens(kind, *arguments, path=rows, **changes):
        more = {name: changes.pop(name) for name in ("epoch", "max_gap") if name in changes}
        loader = DataLoader(path, tokenize_fn=RowFn(), **{"num_workers": 0, "timeout_s": 240, **changes})
        return kind(opened(loader), *arguments, **more)

    return opens


@pytest.fixture
def in_order(rows):
    """The first rows of D, in the order that is asked for."""

    def found(number, **changes):
        with DataLoader(rows, tokenize_fn=RowFn(), num_workers=0, timeout_s=240, **changes) as loader:
            return [sample.extra["id"] for sample in loader.get_next_batch(number)]

    return found


def ids(items):
    return [item["id"] for item in items]


def test_item_i_is_row_i_of_the_order(view_of, in_order):
    view = view_of(OrderView, shuffle="full")
    whole = in_order(2 * NUM_ROWS, shuffle="full")
    assert isinstance(view, torch.utils.data.Dataset)
    assert len(view) == NUM_ROWS
    assert ids(view[number] for number in range(3)) == whole[:3]
    assert ids(view.__getitems__(range(3, NUM_ROWS))) == whole[3:NUM_ROWS]
    assert ids(view.__getitems__([0, 1])) == whole[NUM_ROWS : NUM_ROWS + 2], "the next epoch"
    assert not view.__getitems__([])


def test_an_epoch_may_have_any_number_of_rows_and_none_is_lost_between_two(view_of, in_order):
    view = view_of(OrderView, 30)
    batches = torch.utils.data.DataLoader(view, batch_size=4, drop_last=True, collate_fn=ids)
    delivered = [row for _ in range(4) for batch in batches for row in batch]
    assert len(view) == 30
    assert delivered == in_order(4 * 28)


def test_its_state_knows_the_next_index(view_of):
    view, other = view_of(OrderView, 30), view_of(OrderView, 30)
    view.__getitems__(range(7))
    state = of_torch_load(view.state_dict())
    other.load_state_dict(state)
    assert ids(other.__getitems__([7, 8])) == ids(view.__getitems__([7, 8]))
    with pytest.raises(SnapshotError, match="AD602 this is not the state of a view"):
        other.load_state_dict({"asyncdata": state["asyncdata"]})


@pytest.mark.parametrize("indices", [[1], [0, 2], [3, 2, 1], [0, 0]])
def test_a_sampler_that_shuffles_or_skips_is_refused_and_nothing_is_consumed(view_of, in_order, indices):
    view = view_of(OrderView, 30)
    with pytest.raises(ConfigError, match="AD445 .* Turn its shuffle off"):
        view.__getitems__(indices)
    assert ids([view[0]]) == in_order(1)


@pytest.mark.parametrize("length", [30, None])
def test_set_epoch_goes_to_an_epoch_of_the_data_unless_the_view_has_its_own(view_of, in_order, length):
    view = view_of(OrderView, length, shuffle="full")
    whole = in_order(2 * NUM_ROWS, shuffle="full")
    view.__getitems__(range(5))
    view.set_epoch(0)
    assert view[5]["id"] == whole[5]
    view.set_epoch(1)
    assert view[6 if length else 0]["id"] == whole[6 if length else NUM_ROWS]


IN_WORKERS = """
import sys, torch
from asyncdata import DataLoader, RowFn
from asyncdata.errors import ConfigError
from asyncdata.integrations.torch import AsyncDataset, OrderView

if __name__ == "__main__":
    dataset = AsyncDataset(sys.argv[1], tokenize_fn=RowFn(), batch_size=2)
    view = OrderView(DataLoader(sys.argv[1], tokenize_fn=RowFn(), num_workers=0), 30)
    for data, context in ((dataset, "spawn"), (view, "fork")):
        options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": context}
        try:
            next(iter(torch.utils.data.DataLoader(data, **options)))
        except ConfigError as error:
            print(error)
"""


@pytest.mark.thorough
def test_workers_of_torch_are_refused_with_the_reason(rows, tmp_path):
    script = tmp_path / "in_workers.py"
    script.write_text(IN_WORKERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(name for name in sys.path if name)}
    done = subprocess.run([sys.executable, script, rows], capture_output=True, text=True, env=environment, check=True)
    reason = "one of torch's 2 workers, and each would deliver the same batches: pass num_workers=0"
    assert done.stdout.count(reason) == 2, done.stdout


def test_a_row_view_is_shuffled_by_torch(view_of, in_order):
    batches = torch.utils.data.DataLoader(view_of(RowView, shuffle="full"), batch_size=8, shuffle=True, collate_fn=ids)
    delivered = [row for batch in batches for row in batch]
    assert sorted(delivered) == list(range(NUM_ROWS))
    assert delivered != in_order(NUM_ROWS, shuffle="full")


@pytest.mark.parametrize(("gap", "num_seeks"), [(256, 1), (11, 1), (10, 5)])
def test_gaps_within_the_read_ahead_restart_nothing(view_of, monkeypatch, gap, num_seeks):
    view = view_of(RowView, shuffle="full", max_gap=gap)
    sought = []
    seek = view.loader.seek
    monkeypatch.setattr(view.loader, "seek", lambda *place: sought.append(place) or seek(*place))
    for first in range(0, NUM_ROWS, 20):
        view.__getitems__([*range(first, first + 9)])
    assert (sought[0], len(sought)) == ((0, 0), num_seeks)


def test_item_i_of_a_row_view_is_row_i_whatever_was_asked_before_also_after_a_restore(view_of, in_order):
    view = view_of(RowView, shuffle="full")
    whole = in_order(NUM_ROWS, shuffle="full")
    state = view.state_dict()
    assert len(view) == NUM_ROWS
    assert ids(view.__getitems__([0, 1, 2])) == whole[:3]
    view.load_state_dict(state)  # the loader is at the first row again
    assert ids(view.__getitems__([3, 4])) == whole[3:5]
    assert ids(view.__getitems__([50, 3, 99, 3])) == [whole[50], whole[3], whole[99], whole[3]]
    assert ids(view[number] for number in (10, 11, 40, 12)) == [whole[10], whole[11], whole[40], whole[12]]


@pytest.mark.parametrize(
    ("length", "epoch", "shuffle"),
    [(30, 0, "full"), (2 * NUM_ROWS + 30, 0, RowShuffle(method="none")), (2 * NUM_ROWS, 1, "full")],
)
def test_epochs_of_a_row_view_may_be_shorter_or_longer_than_data_or_later(view_of, in_order, length, epoch, shuffle):
    view = view_of(RowView, length, epoch=epoch, shuffle=shuffle)
    whole = in_order(epoch * NUM_ROWS + length, shuffle=shuffle)[epoch * NUM_ROWS :]
    shuffled = random.Random(3).sample(range(length), length)
    assert len(view) == length
    assert ids(view.__getitems__(range(length))) == whole
    assert ids(view.__getitems__(shuffled)) == [whole[index] for index in shuffled]


def test_a_row_that_gives_no_sample_is_named(rows, view_of):
    with rows.open("a") as file:
        file.write("[1]\n")
    with pytest.raises(ConfigError, match="AD446 row \\d+ of epoch 0 gave no sample"):
        view_of(RowView, shuffle="full", bad_rows="skip", seed=3).__getitems__(range(NUM_ROWS + 1))


@pytest.mark.parametrize(
    ("kind", "length", "changes", "error", "message"),
    [
        (OrderView, 30, {}, IndexError, r"index 30 is not in 0\.\.29"),
        (OrderView, 30, {"n_samples_per_prompt": 4}, ConfigError, "OrderView gives one item for each index"),
        (OrderView, 0, {}, ConfigError, "rows_per_epoch must be 1 or more, got 0"),
        (OrderView, None, {}, TypeError, r'OrderView is not known: pass rows_per_epoch=, or shuffle="full"'),
        (RowView, 30, {"shuffle": "full"}, IndexError, r"index 30 is not in 0\.\.29"),
        (RowView, None, {}, TypeError, r'RowView is not known: pass shuffle="full"'),
        (RowView, 31, {}, TypeError, r'RowView is not known: pass shuffle="full"'),
    ],
)
def test_a_view_that_cannot_answer_says_the_way_out(view_of, kind, length, changes, error, message):
    with pytest.raises(error, match=message):
        view_of(kind, length, **changes)[30]


def test_a_row_view_of_a_mixture_is_refused_as_that_has_no_row_index(rows, view_of):
    for length, call in ((None, len), (10, lambda view: view[7])):
        with pytest.raises(ConfigError, match="AD471 a mixture has no row index"):
            call(view_of(RowView, length, path=Mix({"a": rows})))


def test_a_view_is_not_pickled(view_of):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(view_of(OrderView, 30))
