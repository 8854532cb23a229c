"""asyncdata.integrations.torch: what a trainer in PyTorch gets, and what a state taken beside it holds."""

from __future__ import annotations

import json
import threading
from collections import namedtuple
from itertools import islice

import numpy as np
import pytest

from asyncdata import BadRowError, DataLoader, LoaderClosedError, Ranks, SnapshotError
from asyncdata.batching.collators.torch_tensors import to_torch
from tests.support.ranks import settled

torch = pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations.torch import StatefulDataLoader  # noqa: E402
from tests.support.torch_loading import (  # noqa: E402
    KINDS,
    SAMPLES,
    chain_epochs,
    chat,
    of_torch_load,
    plain,
    run,
    settings,
)

pytestmark = [
    # Torch says so where a checkpoint is saved by a process alone.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

# What is yielded


@pytest.mark.thorough
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_the_batches_are_those_of_the_loader_itself(chats, open_loader, opened, changes):
    alone = opened(DataLoader(chats, **settings(**changes)))

    assert run(open_loader(**changes), 3) == run(alone, 3)


def test_arrays_are_tensors_of_their_dtype_and_all_else_stays(open_loader):
    batch = next(iter(open_loader()))

    kinds = {name: getattr(value, "dtype", type(value)) for name, value in batch.items()}
    assert kinds == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "seq_idx": torch.int32,
        "cu_seqlens": torch.int32,
        "max_seqlen": int,
        "num_padding": int,
    }


def test_tensors_are_found_in_tuples_and_made_of_arrays_that_are_read_only_or_backwards():
    pair = namedtuple("pair", ["left", "right"])
    fixed = np.arange(3)
    fixed.flags.writeable = False

    found = to_torch({"a": pair(fixed, np.arange(3)[::-1]), "b": (np.ones(1), "x"), "c": torch.zeros(2)})

    assert type(found["a"]) is pair
    assert plain(found) == {"a": [[0, 1, 2], [2, 1, 0]], "b": [[1.0], "x"], "c": [0.0, 0.0]}
    found["a"].left[0] = 5
    assert fixed.tolist() == [0, 1, 2]


@pytest.mark.thorough
def test_one_for_is_one_epoch_and_one_that_was_left_goes_on(open_loader):
    whole, parts = open_loader(), open_loader()
    epochs = [[plain(batch) for batch in whole] for _ in range(2)]

    first = [plain(batch) for batch in islice(parts, 3)]
    second = [plain(batch) for batch in islice(parts, 1)]
    rest = [plain(batch) for batch in parts]
    assert first + second + rest == epochs[0]
    assert [plain(batch) for batch in parts] == epochs[1]


@pytest.mark.thorough
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_loop_that_was_left_at_its_last_batch_is_followed_by_the_next_epoch(chats, open_loader, opened, changes):
    found = []
    for loader in (open_loader(**changes), opened(DataLoader(chats, **settings(**changes)))):
        num_batches = len(run(loader, 1))
        loader.set_epoch(0)
        batches = iter(loader)
        for _ in range(num_batches):
            next(batches)
        found.append((loader.epoch, run(loader, 1)))

    assert found[0] == found[1]


def test_an_epoch_that_is_over_stays_over(open_loader):
    batches = iter(open_loader())
    for _ in batches:
        pass

    assert list(batches) == []


def test_it_is_closed_with_its_block(chats):
    with StatefulDataLoader(DataLoader(chats, **settings())) as loader:
        next(iter(loader))

    with pytest.raises(LoaderClosedError, match="AD502"):
        next(iter(loader))


def test_it_has_no_length_and_says_why(open_loader):
    loader = open_loader()

    with pytest.raises(TypeError, match="known at its end"):
        len(loader)
    assert len(list(loader)) > 5


# What a state holds


@pytest.mark.thorough
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_state_taken_at_any_batch_resumes_with_the_next_one(open_loader, changes):
    whole = open_loader(**changes)
    states, batches = [whole.state_dict()], []
    for _ in range(2):
        for batch in whole:
            batches.append(plain(batch))
            states.append(whole.state_dict())
    behind = whole.state_dict()
    following = [plain(batch) for batch in whole]

    for number, state in enumerate(states):
        resumed = open_loader(**changes)
        resumed.load_state_dict(of_torch_load(state))
        assert [plain(batch) for batch in islice(chain_epochs(resumed), len(batches) - number)] == batches[number:]
    resumed = open_loader(**changes)
    resumed.load_state_dict(behind)
    assert run(resumed, 1) == following


@pytest.mark.thorough
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_state_is_that_of_a_loader_that_looks_nowhere_ahead(chats, open_loader, opened, changes):
    ahead, alone = open_loader(**changes), opened(DataLoader(chats, **settings(**changes)))
    for _ in range(2):
        for batch, expected in zip(ahead, alone, strict=True):
            assert plain(batch) == plain(expected)
            states = [json.loads(ahead.state_dict()["asyncdata"]), alone.state_dict()]
            assert settled(states[0]) == settled(states[1])


def test_a_batch_that_was_fetched_and_not_yielded_comes_after_a_restart(open_loader):
    loader = open_loader(**SAMPLES)
    batches = iter(loader)
    next(batches)
    next(batches)
    state, num_fetched = loader.state_dict(), loader.statistics().samples_total
    upcoming = plain(next(batches))

    resumed = open_loader(**SAMPLES)
    resumed.load_state_dict(state)
    assert num_fetched == 21
    assert resumed.statistics().samples_total == 14
    assert plain(next(iter(resumed))) == upcoming


def test_a_state_loaded_in_the_middle_of_an_epoch_forgets_what_was_fetched(open_loader):
    loader = open_loader()
    state = loader.state_dict()
    first = [plain(batch) for batch in islice(loader, 4)]

    loader.load_state_dict(state)
    assert [plain(batch) for batch in islice(loader, 4)] == first


def test_a_file_holds_what_was_yielded(open_loader, tmp_path):
    loader, resumed = open_loader(), open_loader()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    loader.save(tmp_path / "run.snapshot")

    resumed.restore(tmp_path / "run.snapshot")
    assert plain(next(iter(resumed))) == plain(next(batches))


def test_states_go_from_a_loader_to_its_wrapper_and_back(chats, open_loader, opened):
    alone, ahead = opened(DataLoader(chats, **settings())), open_loader()
    batches = iter(alone)
    for _ in range(3):
        next(batches)

    ahead.load_state_dict(alone.state_dict())
    others = iter(ahead)
    assert plain(next(others)) == plain(next(batches))
    alone.load_state_dict(json.loads(ahead.state_dict()["asyncdata"]))
    assert plain(next(iter(alone))) == plain(next(others))


@pytest.mark.parametrize("state", [{"asyncdata": "{"}, {"asyncdata": 3}, {"other": 1}, {}])
def test_what_is_no_state_is_refused(open_loader, state):
    with pytest.raises(SnapshotError, match="AD602 this state_dict cannot be loaded"):
        open_loader().load_state_dict(state)


def told(loader):
    """The state without what a loader's workers find out in their own time."""
    state = json.loads(loader.state_dict()["asyncdata"])
    return {name: value for name, value in state.items() if name not in ("rows_left", "canaries")}


def test_ranks_have_disjoint_batches_and_one_state(open_loader):
    loaders = [open_loader(ranks=Ranks(rank=rank, world_size=2)) for rank in range(2)]
    iterators = [chain_epochs(loader) for loader in loaders]
    for _ in range(3):
        left, right = (plain(next(iterator)) for iterator in iterators)
        assert left != right
    assert told(loaders[0]) == told(loaders[1])

    resumed = open_loader(ranks=Ranks(rank=1, world_size=2))
    resumed.load_state_dict(loaders[0].state_dict())
    assert plain(next(chain_epochs(resumed))) == plain(next(iterators[1]))


@pytest.mark.thorough
def test_set_epoch_keeps_a_run_in_the_middle_of_that_epoch_and_goes_to_another(open_loader):
    whole = open_loader()
    epochs = [[plain(batch) for batch in whole] for _ in range(3)]

    loader = open_loader()
    head = [plain(batch) for batch in islice(loader, 3)]
    loader.set_epoch(0)
    assert head + [plain(batch) for batch in loader] == epochs[0]

    loader = open_loader(**SAMPLES)
    other = open_loader(**SAMPLES)
    list(islice(loader, 3))
    for each in (loader, other):
        each.set_epoch(2)
    assert (loader.epoch, run(loader, 1)) == (2, run(other, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_set_epoch_behind_the_last_batch_does_what_it_does_to_the_loader_itself(chats, open_loader, opened, changes):
    found = []
    for loader in (open_loader(**changes), opened(DataLoader(chats, **settings(**changes)))):
        start = loader.state_dict()
        num_batches = len(run(loader, 1))
        loader.load_state_dict(start)
        batches = iter(loader)
        for _ in range(num_batches):
            next(batches)
        loader.set_epoch(1)
        found.append(run(loader, 1))

    assert found[0] == found[1]


def test_a_state_taken_while_a_batch_is_fetched_does_not_have_it(open_loader):
    began, may_go_on = threading.Event(), threading.Event()
    asked = []

    def collate(samples):
        asked.append(len(samples))
        if len(asked) == 3:
            began.set()
            assert may_go_on.wait(240)
        return [sample.tokens for sample in samples]

    loader = open_loader(**{**SAMPLES, "collate_fn": collate})
    batches = iter(loader)
    yielded = [plain(next(batches))]
    before = loader.state_dict()
    trainer = threading.Thread(target=lambda: yielded.append(plain(next(batches))))
    trainer.start()
    assert began.wait(240)  # batch 2 is fetched, and batch 3 is being
    seen = loader.state_dict()
    may_go_on.set()
    trainer.join()

    resumed = open_loader(**SAMPLES)
    resumed.load_state_dict(seen)
    assert settled(json.loads(seen["asyncdata"])) == settled(json.loads(before["asyncdata"]))
    assert plain(next(iter(resumed))) == yielded[1]


def test_a_state_taken_as_another_thread_begins_to_fetch_does_not_have_that(chats, opened, open_loader, monkeypatch):
    inner = DataLoader(chats, **settings(**SAMPLES))
    loader, found = opened(StatefulDataLoader(inner)), []
    batches, take = iter(loader), inner.state_dict

    def taken_late():
        monkeypatch.setattr(inner, "state_dict", take)
        found.extend(plain(batch) for batch in islice(batches, 2))  # and a third is fetched
        return take()

    monkeypatch.setattr(inner, "state_dict", taken_late)
    state = loader.state_dict()
    resumed = open_loader(**SAMPLES)
    resumed.load_state_dict(state)
    assert len(found) == 2
    assert plain(next(iter(resumed))) == plain(next(batches))


# Errors and interrupts


def test_an_error_comes_at_its_place(jsonl_file, opened):
    row = {"number": 1, "messages": chat(1, 1)}
    path = jsonl_file([row] * 9 + [b"{"] + [row] * 5)
    inner = DataLoader(path, **settings(**{**SAMPLES, "batch_size": 3}, shuffle=False))
    batches = iter(opened(StatefulDataLoader(inner)))

    assert [len(next(batches)) for _ in range(3)] == [3, 3, 3]
    with pytest.raises(BadRowError, match="AD101"):
        next(batches)


def failing_once_at(number, error):
    calls = []

    def collate(samples):
        calls.append(samples)
        if len(calls) == number:
            raise error
        return [sample.tokens for sample in samples]

    return collate


@pytest.mark.thorough
def test_a_batch_whose_making_failed_comes_when_it_is_asked_for_again(open_loader):
    whole = run(open_loader(**SAMPLES), 1)
    loader = open_loader(**{**SAMPLES, "collate_fn": failing_once_at(4, ValueError("no"))})
    batches = iter(loader)

    found = [plain(next(batches)) for _ in range(3)]
    with pytest.raises(ValueError, match="no"):
        next(batches)
    resumed = open_loader(**SAMPLES)
    resumed.load_state_dict(loader.state_dict())
    assert found + [plain(batch) for batch in batches] == whole
    assert found + run(resumed, 1) == whole


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_interrupt_while_a_batch_is_made_loses_none(open_loader, number):
    whole = run(open_loader(**SAMPLES), 1)
    loader = open_loader(**{**SAMPLES, "collate_fn": failing_once_at(number, KeyboardInterrupt())})

    found = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(map(plain, loader))  # what came before stays
    resumed = open_loader(**SAMPLES)
    resumed.load_state_dict(loader.state_dict())
    assert found + [plain(batch) for batch in loader] == whole
    assert found + run(resumed, 1) == whole


@pytest.mark.thorough
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=["interrupt", "error"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_copy_that_fails_loses_no_batch(open_loader, monkeypatch, number, error):
    whole = run(open_loader(**SAMPLES), 1)
    loader = open_loader(**SAMPLES)
    copy = failing_once_at(number, error)
    monkeypatch.setattr("asyncdata.integrations.torch.transfer.to_torch", lambda batch, **_: tensors(copy, batch))

    found = []
    with pytest.raises(type(error)):
        found.extend(map(plain, loader))  # what came before stays
    resumed = open_loader(**SAMPLES)
    resumed.load_state_dict(loader.state_dict())
    assert found + [plain(batch) for batch in loader] == whole
    assert found + run(resumed, 1) == whole
    if isinstance(error, RuntimeError):
        assert len(found) == number - 1


def tensors(check, batch):
    check([])
    return to_torch(batch)
