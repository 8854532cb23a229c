"""asyncdata.integrations.torch: trainers that look ahead, distributed checkpoints, and copies to a device."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from asyncdata import ConfigError, DataLoader

torch = pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations.torch import AsyncDataset, StatefulDataLoader  # noqa: E402
from asyncdata.integrations.torch import lookahead as torch_lookahead  # noqa: E402
from tests.support.ranks import settled  # noqa: E402
from tests.support.torch_loading import KINDS, MAX_LENGTH, SAMPLES, chain_epochs, plain, run, settings  # noqa: E402

pytestmark = [
    # Torch says so where a checkpoint is saved by a process alone.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_it_is_stateful_for_distributed_checkpoints(open_loader, opened, chats):
    stateful = pytest.importorskip("torch.distributed.checkpoint.stateful")

    assert isinstance(open_loader(), stateful.Stateful)
    assert isinstance(opened(AsyncDataset(chats, **settings())), stateful.Stateful)


@pytest.mark.thorough
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
    states = [json.loads(one.state_dict()["asyncdata"]) for one in (resumed, loader)]
    assert settled(states[0]) == settled(states[1])
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


@pytest.mark.thorough
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
