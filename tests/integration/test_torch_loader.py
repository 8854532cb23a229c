"""asyncdata.integrations.torch: what a trainer in PyTorch gets, and what a state taken beside it holds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import namedtuple
from itertools import islice

import numpy as np
import pytest

from asyncdata import (
    BadRowError,
    ConfigError,
    DataLoader,
    LengthGrouping,
    LoaderClosedError,
    PackedCollator,
    SnapshotError,
    SoftPacking,
)
from asyncdata.batching.collators.torch_tensors import to_torch
from tests.support.ranks import settled

torch = pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations import torch as integration  # noqa: E402
from asyncdata.integrations.torch import AsyncDataset, StatefulDataLoader, ranks  # noqa: E402
from asyncdata.integrations.torch import lookahead as torch_lookahead  # noqa: E402

pytestmark = [
    # Torch says so where a checkpoint is saved by a process alone.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

MAX_LENGTH = 96


@pytest.fixture
def chats(jsonl_file):
    """Rows of many lengths; every seventh is too long, and is dropped."""
    return jsonl_file(
        [{"number": number, "messages": chat(number, 1 + number % 7 * 4 ** (number % 7 // 6))} for number in range(150)]
    )


def chat(number, length):
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{number} " * length}]


def tokenize(row):
    """As a chat, and many times as fast."""
    length = 5 + len(row["messages"][1]["content"].split())
    return {"tokens": [row["number"]] * length, "labels": [-100] * 5 + [row["number"]] * (length - 5)}


def short(row):
    length = len(row["messages"][1]["content"].split())
    return tokenize(row) if length < 20 else None


def settings(**changes):
    return {
        "tokenize_fn": short,
        "packing": SoftPacking(max_length=MAX_LENGTH, window_samples=16, window_tokens=2 * MAX_LENGTH),
        "length_grouping": LengthGrouping(window=4),
        "collate_fn": PackedCollator(max_length=MAX_LENGTH),
        "batch_size": 1,
        "num_workers": 0,
        **changes,
    }


SAMPLES = {
    "packing": None,
    "length_grouping": None,
    "collate_fn": lambda samples: [sample.tokens for sample in samples],
    "batch_size": 7,
}
KINDS = {"packed": {}, "samples": SAMPLES, "rank 1 of 2": {"rank": 1, "world_size": 2}}


@pytest.fixture
def opened():
    """Loaders that are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda loader: stack.enter_context(contextlib.closing(loader))


@pytest.fixture
def open_loader(chats, opened):
    def opens(trainer_lookahead=0, **changes):
        inner = DataLoader(chats, **settings(**changes))
        return opened(StatefulDataLoader(inner, trainer_lookahead=trainer_lookahead))

    return opens


def plain(batch):
    """A batch as lists, to be compared."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}

    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]

    return batch.tolist() if isinstance(batch, torch.Tensor | np.ndarray) else batch


def run(loader, num_epochs):
    return [plain(batch) for _ in range(num_epochs) for batch in loader]


def of_torch_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# What is yielded


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


def test_one_for_is_one_epoch_and_one_that_was_left_goes_on(open_loader):
    whole, parts = open_loader(), open_loader()
    epochs = [[plain(batch) for batch in whole] for _ in range(2)]

    first = [plain(batch) for batch in islice(parts, 3)]
    second = [plain(batch) for batch in islice(parts, 1)]
    rest = [plain(batch) for batch in parts]
    assert first + second + rest == epochs[0]
    assert [plain(batch) for batch in parts] == epochs[1]


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

    with pytest.raises(TypeError, match="known when it is over"):
        len(loader)
    assert len(list(loader)) > 5


# What a state holds


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


def chain_epochs(loader):
    while True:
        yield from loader


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


def test_ranks_have_disjoint_batches_and_one_state(open_loader):
    loaders = [open_loader(rank=rank, world_size=2) for rank in range(2)]
    iterators = [chain_epochs(loader) for loader in loaders]
    for _ in range(3):
        left, right = (plain(next(iterator)) for iterator in iterators)
        assert left != right
    assert loaders[0].state_dict() == loaders[1].state_dict()

    resumed = open_loader(rank=1, world_size=2)
    resumed.load_state_dict(loaders[0].state_dict())
    assert plain(next(chain_epochs(resumed))) == plain(next(iterators[1]))


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
            assert may_go_on.wait(60)
        return [sample.tokens for sample in samples]

    loader = open_loader(**{**SAMPLES, "collate_fn": collate})
    batches = iter(loader)
    yielded = [plain(next(batches))]
    before = loader.state_dict()
    trainer = threading.Thread(target=lambda: yielded.append(plain(next(batches))))
    trainer.start()
    assert began.wait(60)  # batch 2 is fetched, and batch 3 is being
    seen = loader.state_dict()
    may_go_on.set()
    trainer.join()

    resumed = open_loader(**SAMPLES)
    resumed.load_state_dict(seen)
    assert seen == before
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


# Trainers that look ahead


class LooksAhead:
    """A loop as Lightning has it: it fetches one batch more, to know whether it is at the last one."""

    def __init__(self, loader):
        self.batches = iter(loader)
        self.held = list(islice(self.batches, 1))

    def __iter__(self):
        while self.held:
            batch = self.held.pop()
            self.held += islice(self.batches, 1)
            yield plain(batch)


def test_a_trainer_that_looks_ahead_resumes_with_the_batch_it_held(open_loader):
    whole = run(open_loader(), 3)
    for number in range(1, len(whole)):
        loader = open_loader(trainer_lookahead=1)
        trained = list(islice(epochs_of(loader), number))
        state = loader.state_dict()

        resumed = open_loader(trainer_lookahead=1)
        resumed.load_state_dict(state)
        rest = list(islice(epochs_of(resumed), len(whole) - number))
        assert trained == whole[:number]
        assert rest == whole[number:]


def epochs_of(loader):
    while True:
        yield from LooksAhead(loader)


def test_a_loop_that_was_left_gives_back_what_the_trainer_held(open_loader):
    whole = run(open_loader(), 2)
    loader = open_loader(trainer_lookahead=1)

    found = [batch for _ in range(3) for batch in islice(LooksAhead(loader), 3)]
    assert found == whole[:9]


def test_a_lookahead_below_zero_is_refused(chats, opened):
    inner = opened(DataLoader(chats, **settings()))

    with pytest.raises(ConfigError, match="trainer_lookahead must be 0 or more, got -1"):
        StatefulDataLoader(inner, trainer_lookahead=-1)


def test_only_one_batch_is_fetched_ahead(open_loader, monkeypatch):
    made = []
    fetch = torch_lookahead._Fetch  # noqa: SLF001
    monkeypatch.setattr(torch_lookahead, "_Fetch", lambda loader: made.append(1) or fetch(loader))
    loader = open_loader(trainer_lookahead=1)

    counts = []
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        counts.append(len(made))
    batches = iter(loader)  # the third comes again
    for _ in range(3):
        next(batches)
        counts.append(len(made))
    assert counts == [1, 3, 4, 4, 5, 6]


# Distributed checkpoints


def test_it_is_stateful_for_distributed_checkpoints(open_loader, opened, chats):
    stateful = pytest.importorskip("torch.distributed.checkpoint.stateful")

    assert isinstance(open_loader(), stateful.Stateful)
    assert isinstance(opened(AsyncDataset(chats, **settings())), stateful.Stateful)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_distributed_checkpoint_keeps_all_of_a_state(open_loader, tmp_path, changes):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    whole = run(open_loader(**changes), 2)
    loader = open_loader(**changes)
    for _ in range(len(run(loader, 1)), len(whole) - 1):
        next(iter(loader))
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "checkpoint")

    resumed = open_loader(**changes)
    dcp.load({"loader": resumed}, checkpoint_id=tmp_path / "checkpoint")
    assert resumed.state_dict() == loader.state_dict()
    assert sum(resumed.statistics().dropped_total.values()) > 0
    assert run(resumed, 1) == whole[-1:]


# Devices


def test_a_device_that_is_not_there_is_refused(chats, opened):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    inner = opened(DataLoader(chats, **settings()))

    with pytest.raises(ConfigError, match="device='cuda' needs a CUDA device"):
        StatefulDataLoader(inner, device="cuda")
    with pytest.raises(ConfigError, match="pin_memory=True needs a CUDA device"):
        next(iter(StatefulDataLoader(inner, pin_memory=True)))


def test_a_device_that_copies_at_once_gets_tensors_and_nothing_else(chats, opened):
    loader = opened(StatefulDataLoader(DataLoader(chats, **settings()), device="meta"))

    batch = next(iter(loader))
    assert batch["input_ids"].device.type == "meta"
    assert batch["input_ids"].shape == (1, MAX_LENGTH)
    assert type(batch["max_seqlen"]) is int


class FakeStream:
    """Stands for a CUDA stream; says what was asked of it, and in which order."""

    def __init__(self, name, said):
        self.name, self.said = name, said

    def __enter__(self):
        self.said.append(f"{self.name} is current")

    def __exit__(self, *exception):
        self.said.append(f"{self.name} is no longer")

    def record_event(self):
        self.said.append(f"{self.name} marks the end of a copy")
        return "mark"

    def wait_event(self, event):
        self.said.append(f"{self.name} waits for the {event}")


@pytest.fixture
def fake_cuda(monkeypatch):
    """What is said to a CUDA device that is the CPU."""
    said = []
    side, compute = FakeStream("side", said), FakeStream("compute", said)
    patches = {
        "is_available": lambda: True,
        "current_device": lambda: 3,
        "Stream": lambda device: side if device == torch.device("cuda", 3) else None,
        "stream": lambda stream: stream,
        "current_stream": lambda device: compute if device == torch.device("cuda", 3) else None,
    }
    for name, patch in patches.items():
        monkeypatch.setattr(torch.cuda, name, patch)

    def record_stream(_, stream):
        said.append(f"kept for {stream.name}")

    def moved(tensor, device, *, non_blocking=False):
        said.append(f"copied to {device}, waiting: {not non_blocking}")
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: said.append("pinned") or tensor.clone())
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return said


BEGINS = ["pinned", "side is current", "copied to cuda:3, waiting: False", "side marks the end of a copy"]
BEGINS += ["side is no longer"]
ENDS = ["compute waits for the mark", "kept for compute"]


def test_the_next_batch_is_copied_on_a_stream_of_its_own_before_the_trainer_has_this_one(chats, opened, fake_cuda):
    one = {**SAMPLES, "collate_fn": lambda samples: {"tokens": samples[0].tokens, "n": 1}}
    loader = opened(StatefulDataLoader(DataLoader(chats, **settings(**one)), device="cuda"))
    batches = iter(loader)

    next(batches)
    assert fake_cuda == BEGINS + ENDS  # the first one is not kept waiting
    fake_cuda.clear()
    next(batches)
    assert fake_cuda == BEGINS + BEGINS + ENDS
    fake_cuda.clear()
    next(batches)
    assert fake_cuda == BEGINS + ENDS


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_streams_change_nothing_of_what_is_delivered(chats, open_loader, opened, fake_cuda, changes):
    whole = run(open_loader(**changes), 2)
    loader = opened(StatefulDataLoader(DataLoader(chats, **settings(**changes)), device="cuda"))
    found = [plain(batch) for batch in islice(chain_epochs(loader), 5)]
    state = loader.state_dict()

    resumed = opened(StatefulDataLoader(DataLoader(chats, **settings(**changes)), device="cuda", pin_memory=False))
    resumed.load_state_dict(state)
    assert found + [plain(batch) for batch in islice(chain_epochs(resumed), len(whole) - 5)] == whole


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_on_a_cuda_device_are_those_of_the_cpu(chats, open_loader, opened):
    whole = run(open_loader(), 1)
    loader = opened(StatefulDataLoader(DataLoader(chats, **settings()), device="cuda"))

    found = []
    for batch in loader:
        assert batch["input_ids"].is_cuda
        torch.cuda._sleep(10_000_000)  # noqa: SLF001 - computes meanwhile
        found.append({name: plain(value) for name, value in batch.items()})
    assert found == whole


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_batches_stay_on_the_cpu(chats, opened):
    loader = opened(StatefulDataLoader(DataLoader(chats, **settings()), pin_memory=True))

    assert next(iter(loader))["input_ids"].is_pinned()


# Ranks


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_alone_is_rank_0_of_1(environment):
    assert ranks() == {"rank": 0, "world_size": 1}


def test_ranks_are_those_of_the_environment(environment):
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "8")

    assert ranks() == {"rank": 3, "world_size": 8}


@pytest.mark.parametrize(("rank", "world_size"), [("1", None), (None, "2"), ("one", "2")])
def test_half_an_environment_is_refused(environment, rank, world_size):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value is not None:
            environment.setenv(name, value)

    with pytest.raises(ConfigError, match="set both to whole numbers, or neither"):
        ranks()


def test_ranks_are_those_of_torch_distributed_before_all(environment, tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "8")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert ranks() == ranks(distributed.group.WORLD) == {"rank": 0, "world_size": 1}
        with pytest.raises(ConfigError, match="not in the process group"):
            ranks(distributed.GroupMember.NON_GROUP_MEMBER)
    finally:
        distributed.destroy_process_group()


def test_a_group_needs_torch_distributed(environment):
    with pytest.raises(ConfigError, match="is not initialised"):
        ranks(object())


# As a dataset


@pytest.fixture
def open_dataset(chats, opened):
    return lambda **changes: opened(AsyncDataset(chats, **settings(**changes)))


def test_a_dataset_is_an_iterable_dataset_of_the_loaders_batches(open_loader, open_dataset):
    dataset = open_dataset()

    assert isinstance(dataset, torch.utils.data.IterableDataset)
    batches = torch.utils.data.DataLoader(dataset, batch_size=None)
    assert run(batches, 2) == run(open_loader(), 2)


def test_a_module_has_no_other_name(open_dataset):
    assert open_dataset().__class__ is integration.AsyncDataset
    with pytest.raises(AttributeError, match="has no attribute 'Dataset'"):
        integration.Dataset  # noqa: B018


IN_WORKERS = """
import sys, torch
from asyncdata import ConfigError, TextTokenizeFn
from asyncdata.demo import tokenizer_folder
from asyncdata.integrations.torch import AsyncDataset

if __name__ == "__main__":
    dataset = AsyncDataset(sys.argv[1], tokenize_fn=TextTokenizeFn(tokenizer_folder()), batch_size=2)
    options = {"batch_size": None, "num_workers": 2, "multiprocessing_context": "spawn"}
    try:
        next(iter(torch.utils.data.DataLoader(dataset, **options)))
    except ConfigError as error:
        print(error)
"""


def test_workers_of_torch_are_refused_with_the_reason(chats, tmp_path):
    script = tmp_path / "in_workers.py"
    script.write_text(IN_WORKERS)

    path = os.pathsep.join(name for name in sys.path if name)
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, script, chats], capture_output=True, text=True, env=environment, check=True)
    assert "one of torch's 2 workers, and each would deliver the same batches: pass num_workers=0" in done.stdout


def test_a_dataset_is_pickled_as_its_settings_and_its_place(open_loader, open_dataset, opened):
    whole = run(open_loader(), 1)
    fresh = open_dataset()
    copy = opened(pickle.loads(pickle.dumps(fresh)))  # noqa: S301 - ours
    batches = iter(copy)
    found = [plain(batch) for batch in islice(batches, 3)]

    other = opened(pickle.loads(pickle.dumps(copy)))  # noqa: S301
    third = opened(pickle.loads(pickle.dumps(other)))  # noqa: S301
    assert found + run(third, 1) == whole


def test_a_dataset_resumes_and_goes_to_epochs(open_loader, open_dataset):
    whole = run(open_loader(), 1)
    dataset, resumed = open_dataset(), open_dataset()
    batches = iter(dataset)
    for _ in range(3):
        next(batches)

    resumed.load_state_dict(of_torch_load(dataset.state_dict()))
    resumed.set_epoch(0)
    assert run(resumed, 1) == whole[3:]


def test_a_dataset_is_of_this_process_rank_unless_it_is_told(environment, open_loader, open_dataset):
    environment.setenv("RANK", "1")
    environment.setenv("WORLD_SIZE", "2")

    assert run(open_dataset(), 1) == run(open_loader(rank=1, world_size=2), 1)
    assert run(open_dataset(world_size=1), 1) == run(open_loader(), 1)


def test_a_dataset_that_nobody_closes_is_closed_when_it_is_garbage(chats):
    dataset = AsyncDataset(chats, **settings())
    next(iter(dataset))
    del dataset  # a thread that is left would fail the test
