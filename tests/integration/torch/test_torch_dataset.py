"""asyncdata.integrations.torch: which rank a process is, and a loader as a dataset of torch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from itertools import islice

import pytest

from asyncdata import ConfigError, Ranks

torch = pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations import torch as integration  # noqa: E402
from asyncdata.integrations.torch import AsyncDataset, ranks  # noqa: E402
from tests.support.torch_loading import of_torch_load, plain, run, settings  # noqa: E402

pytestmark = [
    # Torch says so where a checkpoint is saved by a process alone.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

# Ranks


@pytest.fixture
def environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_alone_is_rank_0_of_1(environment):
    assert ranks() == Ranks(rank=0, world_size=1)


def test_ranks_are_those_of_the_environment(environment):
    environment.setenv("RANK", "3")
    environment.setenv("WORLD_SIZE", "8")

    assert ranks() == Ranks(rank=3, world_size=8)


def test_ranks_may_be_given_the_other_settings_of_ranks(environment):
    environment.setenv("RANK", "1")
    environment.setenv("WORLD_SIZE", "2")

    assert ranks(gradient_accumulation=4, round_up=False) == Ranks(
        rank=1, world_size=2, gradient_accumulation=4, round_up=False
    )


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
        assert ranks() == ranks(distributed.group.WORLD) == Ranks(rank=0, world_size=1)
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_dataset_is_of_this_process_rank_unless_it_is_told(environment, open_loader, open_dataset):
    environment.setenv("RANK", "1")
    environment.setenv("WORLD_SIZE", "2")

    assert run(open_dataset(), 1) == run(open_loader(ranks=Ranks(rank=1, world_size=2)), 1)
    assert run(open_dataset(ranks={"gradient_accumulation": 2}), 1) == run(
        open_loader(ranks=Ranks(rank=1, world_size=2, gradient_accumulation=2)), 1
    )
    assert run(open_dataset(ranks=Ranks(world_size=1)), 1) == run(open_loader(), 1)


def test_a_dataset_that_is_not_closed_is_closed_when_it_is_garbage(chats):
    dataset = AsyncDataset(chats, **settings())
    next(iter(dataset))
    del dataset  # a thread that is left would fail the test
