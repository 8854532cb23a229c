"""Trainers that count epochs of their own, and that share out data of their own: nothing is read twice or left out."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyncdata import ConfigError, DataLoader, Ranks

torch = pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations.torch import AsyncDataset, StatefulDataLoader  # noqa: E402

NUM_ROWS = 64


def tokenize(row):
    return {"tokens": [row["number"]]}


def first_tokens(samples):
    return {"input_ids": np.array([sample.tokens[0] for sample in samples])}


@pytest.fixture
def rows(jsonl_file):
    return jsonl_file([{"number": number} for number in range(NUM_ROWS)])


def settings(**changes):
    return {"tokenize_fn": tokenize, "num_workers": 0, "batch_size": 8, "collate_fn": first_tokens} | changes


def numbers(batches):
    return [number for batch in batches for number in batch["input_ids"].tolist()]


# A trainer that counts epochs of its own.


@pytest.fixture
def saved(rows):
    """Three epochs as they come, and a state in the middle of the second one, after eleven batches."""
    with StatefulDataLoader(DataLoader(rows, **settings())) as loader:
        found = [*loader, *islice(loader, 3)]
        state = loader.state_dict()
        found += [*loader, *loader]
    return SimpleNamespace(all=numbers(found), state=state, num_seen=11 * 8)


@pytest.mark.parametrize("wrap", [StatefulDataLoader, lambda loader: loader], ids=["torch", "plain"])
def test_an_epoch_that_was_over_is_not_read_again_directly_after_a_restore(rows, saved, wrap):
    with wrap(DataLoader(rows, **settings())) as loader:
        loader.load_state_dict(saved.state if wrap is StatefulDataLoader else plain_state(saved.state))
        with pytest.raises(ConfigError, match=r"AD441 set_epoch\(0\) directly after a restore into epoch 1 .*follows"):
            loader.set_epoch(0)

        loader.set_epoch(1)
        assert numbers(islice(loader, 1)) == saved.all[saved.num_seen :][:8]
        loader.set_epoch(0)  # a trainer that has gone on may want it
        assert numbers(loader) == saved.all[:NUM_ROWS]


def plain_state(state):
    from asyncdata.integrations.torch.state import from_torch_state

    return from_torch_state(state)


def test_a_trainers_own_count_of_epochs_can_be_left_unheard(rows, saved):
    with StatefulDataLoader(DataLoader(rows, **settings()), follows_set_epoch=False) as loader:
        loader.load_state_dict(saved.state)
        found = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            found += numbers(loader)

    assert found == saved.all[saved.num_seen :]


def test_a_trainer_that_wants_to_skip_batches_is_told_what_to_set(rows):
    with StatefulDataLoader(DataLoader(rows, **settings())) as loader:
        assert not hasattr(loader, "dataset")
        with pytest.raises(AttributeError, match="ignore_data_skip=True"):
            _ = loader.dataset


@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer_with_max_steps_resumes_in_a_later_epoch(rows, tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.trained = []

        def forward(self, input_ids):
            self.trained += input_ids.tolist()
            return {"loss": (self.weight * input_ids.float()).mean()}

    class Keep(transformers.TrainerCallback):
        def __init__(self, loader):
            self.loader = loader

        def on_save(self, args, state, control, **_):
            self.loader.save(Path(args.output_dir, f"checkpoint-{state.global_step}", "asyncdata"))

    def train(max_steps, checkpoint=None):
        model = Model()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=max_steps,
            save_steps=11,
            ignore_data_skip=True,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        with StatefulDataLoader(DataLoader(rows, **settings()), follows_set_epoch=False) as loader:
            trainer = transformers.Trainer(model, arguments, callbacks=[Keep(loader)])
            trainer.get_train_dataloader = lambda: loader
            if checkpoint is not None:
                loader.restore(checkpoint / "asyncdata")
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return model.trained

    whole = train(24)
    assert sorted(whole[:NUM_ROWS]) == list(range(NUM_ROWS))
    resumed = train(24, tmp_path / "out" / "checkpoint-11")
    assert resumed == whole[11 * 8 :]


# A trainer that shares out data of its own.


class Shard:
    """What accelerate puts around an iterable dataset: it takes its rank's slices of every batch of all ranks."""

    def __init__(self, dataset, rank, num_processes):
        self.dataset = dataset
        self.process_index = rank
        self.num_processes = num_processes

    def __iter__(self):
        for number, element in enumerate(self.dataset):
            if number % self.num_processes == self.process_index:
                yield element


def by_hand(dataset, rank):
    return Shard(dataset, rank, 2)


def by_accelerate(dataset, rank):
    data_loader = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed")
    loader = torch.utils.data.DataLoader(dataset, batch_size=1, collate_fn=lambda batches: batches[0])
    return data_loader.prepare_data_loader(
        loader, num_processes=2, process_index=rank, dispatch_batches=False, put_on_device=False
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shared_out", [by_hand, by_accelerate])
def test_rows_that_would_be_shared_out_twice_are_refused_and_once_is_enough(rows, shared_out):
    trained = []
    for rank in range(2):
        twice = AsyncDataset(rows, **settings(ranks=Ranks(rank=rank, world_size=2)))
        with pytest.raises(ConfigError, match=r"AD442 .*Pass ranks=Ranks\(\) to AsyncDataset"):
            list(shared_out(twice, rank))
        twice.close()

        once = AsyncDataset(rows, **settings(ranks=Ranks(rank=0, world_size=1)))
        trained += numbers(shared_out(once, rank))
        once.close()

    assert sorted(trained) == list(range(NUM_ROWS))


def test_a_rank_that_reads_its_own_share_is_not_refused(rows):
    trained = []
    for rank in range(2):
        dataset = AsyncDataset(rows, **settings(ranks=Ranks(rank=rank, world_size=2)))
        trained += numbers(torch.utils.data.DataLoader(dataset, batch_size=None))
        dataset.close()

    assert sorted(trained) == list(range(NUM_ROWS))
