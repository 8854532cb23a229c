"""StatefulDataLoader: what a trainer in PyTorch gets on its device, and what a state taken beside it holds."""

import asyncio
import contextlib
import json
import threading
from collections import namedtuple
from itertools import count, islice
from types import SimpleNamespace

import numpy as np
import pytest

from asyncdata import AsyncDataLoader, DataLoader, RowFn
from asyncdata.errors import BadRowError, ConfigError, LoaderClosedError, SnapshotError, WorkerError
from tests.support.examples import each_value
from tests.support.ranks import settled

pytest.importorskip("torch", reason="torch is not installed")

import torch

from asyncdata.integrations.torch import OrderView, StatefulDataLoader
from asyncdata.integrations.transfer_queue import QueueFeeder
from tests.support.adapters import KINDS, MAX_LENGTH, SAMPLES, chat, knobs, of_torch_load, plain, run, take
from tests.support.parts import change

pytestmark = [
    # Torch says so where a checkpoint is saved by a process alone.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
]

WAYS = {
    "epoch after epoch": ["all", "loop", "all", "loop", 3],
    "loops that are left": [3, "loop", 1, "loop", "all", "loop", 2],
    "a loop that is left at its last batch": ["all but the end", "loop", "all"],
    "restarts": [2, "restart", "all", "loop", 1, "restart", 3, "restart", "all", "restart", 2],
    "the same epoch and another one": [3, "epoch 0", "all", "loop", 2, "epoch 2", "loop", "all"],
    "another epoch behind the last batch": ["all but the end", "epoch 1", "loop", "all"],
}
"""How a trainer takes batches: a number of them, by a new loop, after a restart, or from another epoch."""

MORE_KINDS = [pytest.param(KINDS[name], marks=pytest.mark.thorough, id=name) for name in KINDS if name != "samples"]


@pytest.mark.parametrize("changes", [pytest.param(SAMPLES, id="samples"), *MORE_KINDS])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_however_batches_are_taken_they_are_those_of_the_loader_itself(chats, open_loader, opened, changes, way):
    both = [open_loader(**changes), opened(DataLoader(chats, **knobs(**changes)))]
    num_batches = len(run(open_loader(**changes), 1))
    loops = [iter(each) for each in both]
    for action in way:
        if action == "restart":
            state, both[0] = both[0].state_dict(), open_loader(**changes)
            both[0].load_state_dict(of_torch_load(state))
        elif str(action).startswith("epoch"):
            for each in both:
                each.set_epoch(int(action.removeprefix("epoch ")))
        elif action != "loop":
            size = {"all": num_batches + 1, "all but the end": num_batches}.get(action, action)
            found, expected = (take(loop, size) for loop in loops)
            assert found == expected
            if way in (WAYS["epoch after epoch"], WAYS["loops that are left"]):  # nothing makes them count anew
                assert settled(json.loads(both[0].state_dict()["asyncdata"])) == settled(both[1].state_dict())
        if action in ("loop", "restart"):
            loops = [iter(each) for each in both]


def test_arrays_are_tensors_of_their_dtype_and_all_else_stays(open_loader):
    batch = next(iter(open_loader()))
    kinds = {name: getattr(value, "dtype", type(value)) for name, value in batch.items()}
    assert kinds == {
        **dict.fromkeys(("input_ids", "labels", "position_ids"), torch.int64),
        **dict.fromkeys(("seq_idx", "cu_seqlens"), torch.int32),
        **dict.fromkeys(("max_seqlen", "num_padding"), int),
    }


def test_tensors_are_found_in_tuples_and_made_of_arrays_that_are_read_only_or_backwards(open_loader):
    pair = namedtuple("pair", ["left", "right"])
    fixed = np.arange(3)
    fixed.flags.writeable = False
    batch = {"a": pair(fixed, np.arange(3)[::-1]), "b": (np.ones(1), "x"), "c": torch.zeros(2)}
    found = next(iter(open_loader(**SAMPLES | {"collate_fn": lambda samples: batch})))
    assert type(found["a"]) is pair
    assert plain(found) == {"a": [[0, 1, 2], [2, 1, 0]], "b": [[1.0], "x"], "c": [0.0, 0.0]}
    found["a"].left[0] = 5
    assert fixed.tolist() == [0, 1, 2]


def test_an_epoch_that_is_over_stays_over_and_its_length_is_not_known_before(open_loader):
    loader = open_loader()
    batches = iter(loader)
    with pytest.raises(TypeError, match="known at its end"):
        len(loader)
    assert len(list(batches)) > 5
    assert list(batches) == []


def test_it_is_closed_with_its_block(chats):
    with StatefulDataLoader(DataLoader(chats, **knobs())) as loader:
        next(iter(loader))
    with pytest.raises(LoaderClosedError, match="AD502"):
        next(iter(loader))


def test_states_go_to_a_file_and_from_a_loader_to_its_wrapper_and_back(chats, open_loader, opened, tmp_path):
    alone, ahead, resumed = opened(DataLoader(chats, **knobs())), open_loader(), open_loader()
    take(alone, 3)
    ahead.load_state_dict(alone.state_dict())
    ahead.save(tmp_path / "run.snapshot")
    resumed.restore(tmp_path / "run.snapshot")
    upcoming = take(resumed, 2)
    assert take(alone, 1) == take(ahead, 1) == upcoming[:1]
    alone.load_state_dict(json.loads(ahead.state_dict()["asyncdata"]))
    assert take(alone, 1) == upcoming[1:]


@pytest.mark.parametrize("state", [{"asyncdata": "{"}, {"asyncdata": 3}, {"other": 1}, {}])
def test_what_is_no_state_is_refused(open_loader, state):
    with pytest.raises(SnapshotError, match="AD602 this state_dict cannot be loaded"):
        open_loader().load_state_dict(state)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_a_distributed_checkpoint_keeps_all_of_a_state(open_loader, tmp_path, changes):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    loader, resumed = open_loader(**changes), open_loader(**changes)
    run(loader, 1)
    take(loader, 2)
    dcp.save({"loader": loader}, checkpoint_id=tmp_path / "checkpoint")
    dcp.load({"loader": resumed}, checkpoint_id=tmp_path / "checkpoint")
    found, expected = (settled(json.loads(one.state_dict()["asyncdata"])) for one in (resumed, loader))
    assert found == expected
    assert sum(resumed.statistics().dropped_total.values()) > 0
    assert run(resumed, 1) == run(loader, 1)


def test_a_state_taken_while_a_batch_is_fetched_by_another_thread_does_not_have_it(open_loader):
    began, may_go_on, asked = threading.Event(), threading.Event(), []

    def collate(samples):
        asked.append(len(samples))
        if len(asked) == 3:
            began.set()
            assert may_go_on.wait(240)
        return [sample.tokens for sample in samples]

    loader, resumed = open_loader(**{**SAMPLES, "collate_fn": collate}), open_loader(**SAMPLES)
    batches = iter(loader)
    yielded = take(batches, 1)
    before = loader.state_dict()
    trainer = threading.Thread(target=lambda: yielded.extend(take(batches, 1)))
    trainer.start()
    assert began.wait(240)  # batch 2 is fetched, and batch 3 is being
    seen = loader.state_dict()
    may_go_on.set()
    trainer.join()

    resumed.load_state_dict(seen)
    assert settled(json.loads(seen["asyncdata"])) == settled(json.loads(before["asyncdata"]))
    assert take(resumed, 1) == yielded[1:]


def test_a_state_taken_as_another_thread_begins_to_fetch_does_not_have_that(chats, opened, open_loader, monkeypatch):
    inner = DataLoader(chats, **knobs(**SAMPLES))
    loader, resumed, found = opened(StatefulDataLoader(inner)), open_loader(**SAMPLES), []
    batches, state_dict = iter(loader), inner.state_dict

    def taken_late():
        monkeypatch.setattr(inner, "state_dict", state_dict)
        found.extend(take(batches, 2))  # and a third is fetched
        return state_dict()

    monkeypatch.setattr(inner, "state_dict", taken_late)
    resumed.load_state_dict(loader.state_dict())
    assert len(found) == 2
    assert take(resumed, 1) == take(batches, 1)


def test_an_error_comes_at_its_place(jsonl_file, opened):
    row = {"number": 1, "messages": chat(1, 1)}
    path = jsonl_file([row] * 9 + [b"{"] + [row] * 5)
    inner = DataLoader(path, **knobs(**{**SAMPLES, "batch_size": 3}, shuffle=False))
    batches = iter(opened(StatefulDataLoader(inner)))
    assert [len(next(batches)) for _ in range(3)] == [3, 3, 3]
    with pytest.raises(BadRowError, match="AD101"):
        next(batches)


@pytest.mark.parametrize(
    ("place", "number", "error"),
    each_value(["making", "copying"], [1, 2, 4], [KeyboardInterrupt(), RuntimeError("out of memory")]),
)
def test_a_batch_that_failed_comes_when_it_is_asked_for_again(open_loader, monkeypatch, place, number, error):
    calls = []

    def fail_once(value):
        calls.append(value)
        if len(calls) == number:
            raise error
        return value

    changes = dict(SAMPLES)
    if place == "making":
        changes["collate_fn"] = lambda samples: fail_once([sample.tokens for sample in samples])
    whole = run(open_loader(**SAMPLES), 1)
    loader, resumed = open_loader(**changes), open_loader(**SAMPLES)
    if place == "copying":
        from_numpy = torch.from_numpy
        monkeypatch.setattr(torch, "from_numpy", lambda array: from_numpy(fail_once(array)))

    found = []
    with pytest.raises(type(error)):
        found.extend(map(plain, loader))  # what came before stays
    state = loader.state_dict()
    assert found + [plain(batch) for batch in loader] == whole
    resumed.load_state_dict(state)
    assert found + run(resumed, 1) == whole


def looks_ahead(loader):
    """A loop as Lightning has it: it fetches one batch more, to know whether it is at the last one."""
    batches = iter(loader)
    held = take(batches, 1)
    while held:
        batch = held.pop()
        held += take(batches, 1)
        yield batch


def test_a_trainer_that_looks_ahead_resumes_with_the_batch_it_held(open_loader):
    whole = run(open_loader(), 2)
    num_batches = len(run(open_loader(), 1))

    def loops_over(loader):
        while True:
            yield from looks_ahead(loader)

    for number in (1, 2, num_batches - 1, num_batches, num_batches + 1):
        loader, resumed = open_loader(trainer_lookahead=1), open_loader(trainer_lookahead=1)
        loop = loops_over(loader)
        trained = list(islice(loop, number))
        resumed.load_state_dict(loader.state_dict())
        assert trained + list(islice(loops_over(resumed), len(whole) - number)) == whole


def test_a_loop_that_was_left_gives_back_what_the_trainer_held(open_loader):
    whole, loader = run(open_loader(), 2), open_loader(trainer_lookahead=1)
    assert [batch for _ in range(3) for batch in islice(looks_ahead(loader), 3)] == whole[:9]


def test_only_one_batch_is_fetched_ahead(open_loader):
    loader = open_loader(trainer_lookahead=1, **SAMPLES)
    counts = []
    for _ in range(2):
        batches = iter(loader)  # the second time the third batch comes again
        for _ in range(3):
            next(batches)
            counts.append(loader.statistics().samples_total // 7)
    assert counts == [1, 3, 4, 4, 5, 6]


NEEDS_NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainer_lookahead": -1}, "trainer_lookahead must be 0 or more, got -1"),
        pytest.param({"device": "cuda"}, "device='cuda' needs a CUDA device", marks=NEEDS_NO_CUDA),
        pytest.param({"pin_memory": True}, "pin_memory=True needs a CUDA device", marks=NEEDS_NO_CUDA),
    ],
)
def test_what_cannot_be_had_is_refused(open_loader, given, message):
    with pytest.raises(ConfigError, match=message):
        next(iter(open_loader(**given)))


def test_a_loader_to_await_is_refused_by_what_awaits_nothing(chats):
    loader = AsyncDataLoader(chats, tokenize_fn=RowFn(), num_workers=0, commit="on_ack")
    for kind in (StatefulDataLoader, lambda one: OrderView(one, 10), lambda one: QueueFeeder(one, 4)):
        with pytest.raises(ConfigError, match=r"takes a DataLoader, not an AsyncDataLoader"):
            kind(loader)
    asyncio.run(loader.aclose())


def test_a_device_that_copies_at_once_gets_tensors_and_nothing_else(open_loader):
    batch = next(iter(open_loader(device="meta")))
    assert batch["input_ids"].device.type == "meta"
    assert batch["input_ids"].shape == (1, MAX_LENGTH)
    assert type(batch["max_seqlen"]) is int


@pytest.fixture
def fake_cuda(monkeypatch):
    """What is said to a CUDA device that is the CPU, and in which order."""
    said = []

    def stream_of(name):
        return SimpleNamespace(
            name=name,
            record_event=lambda: said.append(f"{name} marks the end of a copy") or "mark",
            wait_event=lambda event: said.append(f"{name} waits for the {event}"),
        )

    @contextlib.contextmanager
    def current(stream):
        said.append(f"{stream.name} is current")
        yield
        said.append(f"{stream.name} is no longer")

    def moved(tensor, device, *, non_blocking=False):
        said.append(f"copied to {device}, waiting: {not non_blocking}")
        return tensor.clone()

    side, compute = stream_of("side"), stream_of("compute")
    third = torch.device("cuda", 3)
    for name, patch in {
        "is_available": lambda: True,
        "current_device": lambda: 3,
        "Stream": lambda device: side if device == third else None,
        "stream": current,
        "current_stream": lambda device: compute if device == third else None,
        "set_device": lambda index: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, patch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: said.append("pinned") or tensor.clone())
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: said.append(f"kept for {stream.name}"))
    return said


BEGINS = ["pinned", "side is current", "copied to cuda:3, waiting: False", "side marks the end of a copy"]
BEGINS += ["side is no longer"]
ENDS = ["compute waits for the mark", "kept for compute"]


@pytest.mark.parametrize(
    ("settings", "begins"),
    [({"device": "cuda"}, BEGINS), ({"device": "cuda:3", "pin_memory": False}, BEGINS[1:])],
    ids=["pinned", "not pinned"],
)
def test_the_next_batch_is_copied_on_its_own_stream_before_it_is_due(open_loader, fake_cuda, settings, begins):
    one = {**SAMPLES, "collate_fn": lambda samples: {"tokens": samples[0].tokens, "n": 1}}
    batches, said = iter(open_loader(**one, **settings)), []
    for _ in range(3):
        next(batches)
        wait_for_the_thread()
        said.append(list(fake_cuda))
        fake_cuda.clear()
    assert said == [begins + ENDS, begins + ENDS + begins, ENDS + begins], "the first one is not kept waiting"


def wait_for_the_thread():
    for thread in threading.enumerate():
        if thread.name == "asyncdata-fetch":
            thread.join()


@pytest.fixture
def held_back(chats, fake_cuda):
    """A loader for a device, whose third batch is not made before ``goes_on`` is set; and when it is about to be."""
    begun, goes_on, numbers = threading.Event(), threading.Event(), count(1)

    def made(samples):
        if next(numbers) == 3:
            begun.set()
            goes_on.wait()
        return [sample.tokens for sample in samples]

    with StatefulDataLoader(DataLoader(chats, **knobs(**SAMPLES | {"collate_fn": made})), device="cuda") as loader:
        yield loader, begun, goes_on
        goes_on.set()


def test_the_next_batch_is_made_while_the_trainer_computes_and_is_in_no_state_yet(open_loader, held_back):
    loader, begun, goes_on = held_back
    whole = run(open_loader(**SAMPLES), 1)
    batches = iter(loader)
    found = take(batches, 2)  # returns, though the third batch cannot be made
    begun.wait()
    resumed = open_loader(**SAMPLES)
    resumed.load_state_dict(loader.state_dict())
    assert take(resumed, 1) == whole[2:3]
    goes_on.set()
    assert found + take(batches, len(whole)) == whole


BESIDE = {
    "another loop": lambda loader, state: None,
    "a restart": lambda loader, state: loader.load_state_dict(state),
    "a file": lambda loader, state: loader.restore(state),
    "an epoch": lambda loader, state: loader.set_epoch(1),
}


@pytest.mark.parametrize("change", BESIDE.values(), ids=BESIDE)
def test_what_changes_the_place_waits_for_the_batch_that_is_being_made(open_loader, held_back, tmp_path, change):
    loader, begun, goes_on = held_back
    plain_one = open_loader(**SAMPLES)
    state = loader.state_dict()
    if change is BESIDE["a file"]:
        loader.save(state := tmp_path / "run.snapshot")
    for each in (loader, plain_one):
        take(each, 2)
    begun.wait()
    threading.Timer(0.05, goes_on.set).start()
    for each in (loader, plain_one):
        change(each, state)
    assert run(loader, 2) == run(plain_one, 2)


def test_closing_ends_the_thread_that_waits_for_rows(tmp_path, jsonl_file, fake_cuda):
    rows = [{"id": number} for number in range(25)] + [{"id": 25, "gate": str(tmp_path / "never")}]
    settings = {"tokenize_fn": "tests.support.worker_fns:waits", "collate_fn": lambda samples: samples[0].tokens}
    inner = DataLoader(jsonl_file(rows), num_workers=1, batch_size=10, buffer_size=10, shuffle=False, **settings)
    with StatefulDataLoader(inner, device="cuda") as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0], [10]]
        assert any(thread.name == "asyncdata-fetch" for thread in threading.enumerate())
    assert not any(thread.name == "asyncdata-fetch" for thread in threading.enumerate())
    with pytest.raises(LoaderClosedError):
        next(batches)


def test_what_fails_in_the_thread_is_raised_in_its_turn_and_comes_again(open_loader, fake_cuda):
    whole, fails, numbers = run(open_loader(**SAMPLES), 1), [3, 5], count(1)

    def made(samples):
        if next(numbers) in fails:
            raise RuntimeError("no memory")
        return [sample.tokens for sample in samples]

    loader, found = open_loader(**SAMPLES | {"collate_fn": made}, device="cuda"), []
    for _ in fails:
        with pytest.raises(RuntimeError, match="no memory"):
            found.extend(map(plain, loader))
    assert found + run(loader, 1) == whole


def test_without_room_for_a_thread_the_batch_is_made_when_it_is_needed(open_loader, fake_cuda, monkeypatch):
    def no_room(target, name, **_):
        raise WorkerError("AD426")

    whole = run(open_loader(**SAMPLES), 1)
    change(monkeypatch, starts_of_a_copier=no_room)
    assert run(open_loader(**SAMPLES, device="cuda"), 1) == whole


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_on_a_cuda_device_are_those_of_the_cpu_and_pinned_ones_stay_there(open_loader):
    whole, found = run(open_loader(), 1), []
    for batch in open_loader(device="cuda"):
        assert batch["input_ids"].is_cuda
        torch.cuda._sleep(10_000_000)  # noqa: SLF001 - computes meanwhile
        found.append(plain(batch))
    assert found == whole
    assert next(iter(open_loader(pin_memory=True)))["input_ids"].is_pinned()
