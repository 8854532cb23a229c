"""OrderView and RowView: a loader as a map-style dataset of torch, in the loops of torch and torchdata."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import subprocess
import sys

import pytest

from asyncdata import ConfigError, DataLoader, RowFn, RowShuffle, SnapshotError

torch = pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations.torch import OrderView, RowView  # noqa: E402
from tests.support.torch_loading import of_torch_load  # noqa: E402

NUM_ROWS = 100


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"id": number, "text": "x" * (number % 7)}) + "\n" for number in range(NUM_ROWS))
    )
    return path


@pytest.fixture
def opened():
    """Views of loaders, closed after the test."""
    with contextlib.ExitStack() as stack:

        def opens(kind, path, *arguments, **knobs):
            loader = DataLoader(path, tokenize_fn=RowFn(), **{"num_workers": 0, "timeout_s": 240, **knobs})
            return kind(stack.enter_context(contextlib.closing(loader)), *arguments)

        yield opens


def ids(items):
    return [item["id"] for item in items]


def in_order(path, number, **knobs):
    """The first rows of D."""
    with DataLoader(path, tokenize_fn=RowFn(), num_workers=0, timeout_s=240, **knobs) as loader:
        return [sample.extra["id"] for sample in loader.get_next_batch(number)]


def test_item_i_is_row_i_of_the_order(rows, opened):
    view = opened(OrderView, rows, shuffle="full")
    whole = in_order(rows, 2 * NUM_ROWS, shuffle="full")

    assert isinstance(view, torch.utils.data.Dataset)
    assert len(view) == NUM_ROWS
    assert ids(view[number] for number in range(3)) == whole[:3]
    assert ids(view.__getitems__(range(3, NUM_ROWS))) == whole[3:NUM_ROWS]
    assert ids(view.__getitems__([0, 1])) == whole[NUM_ROWS : NUM_ROWS + 2], "the next epoch"
    assert not view.__getitems__([])


def test_an_epoch_may_have_any_number_of_rows_and_none_is_lost_between_two(rows, opened):
    view = opened(OrderView, rows, 30)
    batches = torch.utils.data.DataLoader(view, batch_size=4, drop_last=True, collate_fn=ids)

    delivered = [row for _ in range(4) for batch in batches for row in batch]

    assert len(view) == 30
    assert delivered == in_order(rows, 4 * 28)


@pytest.mark.filterwarnings("ignore")  # torchdata calls what torch has deprecated
@pytest.mark.parametrize("num_batches", [1, 7, 8, 9, 20])
def test_it_resumes_in_the_loader_of_torchdata(rows, opened, num_batches):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def batches_of(view, state=None):
        loader = stateful.StatefulDataLoader(view, batch_size=4, num_workers=0, collate_fn=ids)
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(4):
            yield from ((loader, batch) for batch in loader)

    whole = [batch for _, batch in batches_of(opened(OrderView, rows, 30))]
    before = []
    for loader, batch in batches_of(opened(OrderView, rows, 30)):
        before.append(batch)
        if len(before) == num_batches:
            state = of_torch_load(loader.state_dict())
            break
    after = [batch for _, batch in batches_of(opened(OrderView, rows, 30), state)]

    assert (before + after)[: len(whole)] == whole


def test_its_state_is_what_torch_load_takes_and_knows_the_next_index(rows, opened):
    view = opened(OrderView, rows, 30)
    view.__getitems__(range(7))
    state = of_torch_load(view.state_dict())
    expected = ids(view.__getitems__([7, 8]))
    other = opened(OrderView, rows, 30)

    other.load_state_dict(state)

    assert ids(other.__getitems__([7, 8])) == expected
    with pytest.raises(SnapshotError, match="AD602 this is not the state of a view"):
        other.load_state_dict({"asyncdata": state["asyncdata"]})


@pytest.mark.parametrize("indices", [[1], [0, 2], [3, 2, 1], [0, 0]])
def test_a_sampler_that_shuffles_or_skips_is_refused_and_nothing_is_consumed(rows, opened, indices):
    view = opened(OrderView, rows, 30)

    with pytest.raises(ConfigError, match="AD445 .* Turn its shuffle off"):
        view.__getitems__(indices)

    assert ids([view[0]]) == in_order(rows, 1)


def test_a_shuffling_loader_of_torch_is_refused(rows, opened):
    batches = torch.utils.data.DataLoader(opened(OrderView, rows, 30), batch_size=4, shuffle=True, collate_fn=ids)

    with pytest.raises(ConfigError, match="AD445"):
        list(batches)


def test_an_index_outside_is_an_index_error(rows, opened):
    with pytest.raises(IndexError, match=r"index 30 is not in 0\.\.29"):
        opened(OrderView, rows, 30)[30]


def test_a_length_that_is_not_known_says_both_ways_out(rows, opened):
    with pytest.raises(TypeError, match=r'pass rows_per_epoch=, or shuffle="full"'):
        len(opened(OrderView, rows))


def test_set_epoch_goes_to_an_epoch_of_the_data(rows, opened):
    view = opened(OrderView, rows, shuffle="full")
    whole = in_order(rows, 2 * NUM_ROWS, shuffle="full")
    view.__getitems__(range(5))

    view.set_epoch(0)
    assert view[5]["id"] == whole[5]

    view.set_epoch(1)
    assert view[0]["id"] == whole[NUM_ROWS]


def test_a_loader_of_groups_is_refused(rows, opened):
    with pytest.raises(ConfigError, match="one item for each index"):
        opened(OrderView, rows, 30, n_samples_per_prompt=4)

    with pytest.raises(ConfigError, match="rows_per_epoch must be 1 or more"):
        opened(OrderView, rows, 0)


IN_WORKERS = """
import sys, torch
from asyncdata import ConfigError, DataLoader, RowFn
from asyncdata.integrations.torch import OrderView

view = OrderView(DataLoader(sys.argv[1], tokenize_fn=RowFn(), num_workers=0), 30)
try:
    next(iter(torch.utils.data.DataLoader(view, num_workers=2, multiprocessing_context="fork")))
except ConfigError as error:
    print(error)
"""


@pytest.mark.thorough
def test_workers_of_torch_are_refused(rows, tmp_path):
    script = tmp_path / "in_workers.py"
    script.write_text(IN_WORKERS)

    path = os.pathsep.join(name for name in sys.path if name)
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, script, rows], capture_output=True, text=True, env=environment, check=True)

    assert "one of torch's 2 workers, and each would deliver the same batches: pass num_workers=0" in done.stdout


def test_a_view_is_not_pickled(rows, opened):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        pickle.dumps(opened(OrderView, rows, 30))


# RowView


def test_item_i_of_a_row_view_is_row_i_whatever_was_asked_before(rows, opened):
    view = opened(RowView, rows, shuffle="full")
    whole = in_order(rows, NUM_ROWS, shuffle="full")

    assert len(view) == NUM_ROWS
    assert ids(view.__getitems__([50, 3, 99, 3])) == [whole[50], whole[3], whole[99], whole[3]]
    assert ids(view[number] for number in (10, 11, 40, 12)) == [whole[10], whole[11], whole[40], whole[12]]


def test_a_row_view_is_shuffled_by_torch(rows, opened):
    batches = torch.utils.data.DataLoader(
        opened(RowView, rows, shuffle="full"), batch_size=8, shuffle=True, collate_fn=ids
    )

    delivered = [row for batch in batches for row in batch]

    assert sorted(delivered) == list(range(NUM_ROWS))
    assert delivered != in_order(rows, NUM_ROWS, shuffle="full")


def test_gaps_within_the_read_ahead_restart_nothing(rows, opened, monkeypatch):
    view = opened(RowView, rows, shuffle="full")
    sought = []
    seek = view.loader.seek
    monkeypatch.setattr(view.loader, "seek", lambda *place: sought.append(place) or seek(*place))

    for first in range(0, NUM_ROWS, 20):
        view.__getitems__(range(first, first + 10))

    assert sought == [(0, 0)]


def test_a_row_view_finds_its_rows_also_after_a_restore(rows, opened):
    view = opened(RowView, rows, shuffle="full")
    whole = in_order(rows, NUM_ROWS, shuffle="full")
    state = view.state_dict()
    assert ids(view.__getitems__([0, 1, 2])) == whole[:3]

    view.load_state_dict(state)  # the loader is at the first row again

    assert ids(view.__getitems__([3, 4])) == whole[3:5]


def test_a_row_that_gives_no_sample_is_named(rows, opened):
    with rows.open("a") as file:
        file.write("[1]\n")
    view = opened(RowView, rows, shuffle="full", bad_rows="skip", seed=3)

    with pytest.raises(ConfigError, match="AD446 row \\d+ of epoch 0 gave no sample"):
        view.__getitems__(range(NUM_ROWS + 1))


def test_a_row_view_needs_a_row_index(rows, opened):
    with pytest.raises(TypeError, match=r'RowView is not known: pass shuffle="full"'):
        opened(RowView, rows)[0]


@pytest.mark.parametrize("shuffle", ["full", RowShuffle(method="none")])
@pytest.mark.parametrize("length", [30, 2 * NUM_ROWS + 30])
def test_the_epochs_of_a_row_view_may_be_shorter_or_longer_than_the_data(rows, opened, length, shuffle):
    view = opened(RowView, rows, length, shuffle=shuffle)
    whole = in_order(rows, length, shuffle=shuffle)
    indices = list(range(length))
    shuffled = random.Random(3).sample(indices, length)

    assert len(view) == length
    assert ids(view.__getitems__(indices)) == whole
    assert ids(view.__getitems__(shuffled)) == [whole[index] for index in shuffled]
    with pytest.raises(IndexError, match=rf"index {length} is not in 0\.\.{length - 1}"):
        view[length]


def test_a_row_view_may_begin_with_a_later_epoch(rows, opened):
    with contextlib.closing(DataLoader(rows, tokenize_fn=RowFn(), num_workers=0, timeout_s=240, shuffle="full")) as of:
        view = RowView(of, 2 * NUM_ROWS, epoch=1)
        whole = in_order(rows, 3 * NUM_ROWS, shuffle="full")

        assert ids(view.__getitems__([0, NUM_ROWS - 1, NUM_ROWS, 2 * NUM_ROWS - 1])) == [
            whole[index] for index in (NUM_ROWS, 2 * NUM_ROWS - 1, 2 * NUM_ROWS, 3 * NUM_ROWS - 1)
        ]


def test_a_row_view_with_a_length_needs_a_row_index_too(rows, opened):
    with pytest.raises(TypeError, match=r'RowView is not known: pass shuffle="full"'):
        opened(RowView, rows, 30)[0]
