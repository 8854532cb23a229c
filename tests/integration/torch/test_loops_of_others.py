"""asyncdata in the loops of Lightning, accelerate, torchdata and transformers: no row is read twice or left out."""

import json
from contextlib import closing
from itertools import islice
from types import SimpleNamespace

import pytest

from asyncdata import DataLoader, LengthGrouping, PackedCollator, Ranks, SoftPacking
from asyncdata.errors import ConfigError

pytest.importorskip("torch", reason="torch is not installed")

import torch

from asyncdata.integrations.torch import AsyncDataset, OrderView, StatefulDataLoader
from tests.support.adapters import chain_epochs, of_torch_load

# The frameworks warn of each other's old names, and of settings that a test has.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 64
NUM_ROWS = 64


def tokenize(row):
    return {"tokens": [row["number"]] * row["length"]}


@pytest.fixture
def rows(jsonl_file):
    return jsonl_file([{"number": number, "length": 5 + number * 7 % 40} for number in range(NUM_ROWS)])


def packed():
    return {
        "tokenize_fn": tokenize,
        "packing": SoftPacking(max_length=LENGTH, window_samples=16, window_tokens=2 * LENGTH),
        "length_grouping": LengthGrouping(window=4),
        "collate_fn": PackedCollator(max_length=LENGTH),
        "batch_size": 2,
        "num_workers": 0,
    }


def collate(samples):
    return {"input_ids": torch.tensor([int(sample.tokens[0]) for sample in samples])}


def single(**changes):
    """Batches of 8 rows."""
    return {"tokenize_fn": tokenize, "num_workers": 0, "batch_size": 8, "collate_fn": collate} | changes


def tokens_of(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def numbers(batches):
    return sum(tokens_of(batches), [])


@pytest.fixture
def whole(rows):
    """Two epochs."""
    with DataLoader(rows, **packed()) as loader:
        return tokens_of([*loader, *loader])


class Model(torch.nn.Module):
    """It writes down what it is trained on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained = []

    def forward(self, input_ids):
        self.trained.append(input_ids.tolist())
        return {"loss": (self.weight * input_ids.float()).mean()}


def fit(rows, folder, *, resume=None, lookahead=1, **options):
    """What a Trainer of Lightning trains on, until it stops."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Lightning(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch):
            self.log_dict(self.trainer.train_dataloader.metrics())
            return self.model(batch["input_ids"])["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    keep = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer, made = lightning.Trainer(callbacks=[keep], default_root_dir=folder, **quiet, **options), Lightning()
    with StatefulDataLoader(DataLoader(rows, **packed()), trainer_lookahead=lookahead) as loader:
        trainer.fit(made, loader, ckpt_path=resume)
    assert trainer.logged_metrics.keys() >= {"data/wait_share", "data/dropped", "data/pack_fill"}
    return made.model.trained


def test_a_run_under_lightning_resumes_with_the_batch_that_its_trainer_held(rows, whole, tmp_path):
    assert fit(rows, tmp_path / "first", max_epochs=2) == whole
    for number in range(1, len(whole)):
        checkpoint = tmp_path / "first" / f"step={number}.ckpt"
        rest = fit(rows, tmp_path / f"from {number}", max_epochs=2, resume=checkpoint)
        assert (number, rest) == (number, whole[number:])


def test_with_a_limit_of_batches_the_trainer_of_lightning_holds_none(rows, whole, tmp_path):
    limits = {"max_epochs": 3, "limit_train_batches": 2, "lookahead": 0}
    assert fit(rows, tmp_path / "first", **limits) == whole[:6]
    checkpoint = tmp_path / "first" / "step=3.ckpt"
    assert fit(rows, tmp_path / "second", resume=checkpoint, **limits) == whole[3:6]


def test_a_run_under_accelerate_resumes(rows, whole, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    for number in (0, 3, len(whole) - 2):
        loader = StatefulDataLoader(DataLoader(rows, **packed()), device=accelerator.device)
        assert accelerator.prepare(loader) is loader, "it is left as it is"
        accelerator.register_for_checkpointing(loader)
        with loader:
            before = list(islice(chain_epochs(loader), number))
            accelerator.save_state(str(tmp_path / "checkpoint"))
            list(islice(chain_epochs(loader), 2))
            accelerator.load_state(str(tmp_path / "checkpoint"))
            rest = list(islice(chain_epochs(loader), len(whole) - number))
        accelerator._custom_objects.clear()  # noqa: SLF001 - there is no other way to take one back

        assert tokens_of(before + rest) == whole


def view_of(rows):
    return OrderView(DataLoader(rows, **single(batch_size=None, collate_fn=None)), 30)


@pytest.mark.parametrize(
    ("opens", "given"),
    [
        (lambda rows: AsyncDataset(rows, **packed()), {"batch_size": None}),
        (view_of, {"batch_size": 4, "collate_fn": collate}),
    ],
    ids=["AsyncDataset", "OrderView"],
)
def test_a_dataset_in_torchdatas_loader_resumes(rows, opens, given):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    with closing(opens(rows)) as dataset:
        loader = stateful.StatefulDataLoader(dataset, num_workers=0, **given)
        batches = islice(chain_epochs(loader), 20)
        found = [(batch["input_ids"].tolist(), of_torch_load(loader.state_dict())) for batch in batches]
    whole = [batch for batch, _ in found]
    for number, (_, state) in enumerate(found[:-1], 1):
        with closing(opens(rows)) as dataset:
            resumed = stateful.StatefulDataLoader(dataset, num_workers=0, **given)
            resumed.load_state_dict(state)
            assert tokens_of(islice(chain_epochs(resumed), len(whole) - number)) == whole[number:]


@pytest.mark.thorough
def test_transformers_trainer_with_max_steps_resumes_in_a_later_epoch(rows, tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Keep(transformers.TrainerCallback):
        def __init__(self, loader):
            self.loader = loader

        def on_save(self, args, state, control, **_):
            self.loader.save(tmp_path / f"asyncdata-{state.global_step}")

    def train(checkpoint=None):
        model, quiet = Model(), {"report_to": [], "use_cpu": True, "disable_tqdm": True}
        steps = {"max_steps": 24, "save_steps": 11, "ignore_data_skip": True}
        arguments = transformers.TrainingArguments(str(tmp_path / "out"), **steps, **quiet)
        with StatefulDataLoader(DataLoader(rows, **single()), follows_set_epoch=False) as loader:
            trainer = transformers.Trainer(model, arguments, callbacks=[Keep(loader)])
            trainer.get_train_dataloader = lambda: loader
            if checkpoint is not None:
                loader.restore(tmp_path / "asyncdata-11")
            trainer.train(resume_from_checkpoint=checkpoint)
        return sum(model.trained, [])

    whole = train()
    assert sorted(whole[:NUM_ROWS]) == list(range(NUM_ROWS))
    assert train(str(tmp_path / "out" / "checkpoint-11")) == whole[11 * 8 :]


@pytest.fixture
def saved(rows):
    """Three epochs as they come, and a state in the middle of the second one, after eleven batches."""
    with StatefulDataLoader(DataLoader(rows, **single())) as loader:
        found = [*loader, *islice(loader, 3)]
        state = loader.state_dict()
        found += [*loader, *loader]
    return SimpleNamespace(all=numbers(found), state=state, num_seen=11 * 8)


@pytest.mark.parametrize("is_of_torch", [True, False], ids=["torch", "plain"])
def test_an_epoch_that_was_over_is_not_read_again_directly_after_a_restore(rows, saved, is_of_torch):
    loader = DataLoader(rows, **single())
    with StatefulDataLoader(loader) if is_of_torch else loader as loader:
        loader.load_state_dict(saved.state if is_of_torch else json.loads(saved.state["asyncdata"]))
        with pytest.raises(ConfigError, match=r"AD441 set_epoch\(0\) directly after a restore into epoch 1 .*follows"):
            loader.set_epoch(0)
        loader.set_epoch(1)
        assert numbers(islice(loader, 1)) == saved.all[saved.num_seen :][:8]
        loader.set_epoch(0)  # a trainer that has gone on may want it
        assert numbers(loader) == saved.all[:NUM_ROWS]


def test_a_trainers_own_count_of_epochs_can_be_left_unheard(rows, saved):
    found = []
    with StatefulDataLoader(DataLoader(rows, **single()), follows_set_epoch=False) as loader:
        loader.load_state_dict(saved.state)
        for epoch in range(2):
            loader.set_epoch(epoch)
            found += numbers(loader)
    assert found == saved.all[saved.num_seen :]


def test_a_trainer_that_wants_to_skip_batches_is_told_what_to_set(rows):
    with StatefulDataLoader(DataLoader(rows, **single())) as loader:
        assert not hasattr(loader, "dataset")
        with pytest.raises(AttributeError, match="ignore_data_skip=True"):
            _ = loader.dataset


class Shard:
    """What accelerate puts around an iterable dataset: it takes its rank's slices of every batch of all ranks."""

    def __init__(self, dataset, rank):
        self.dataset, self.process_index, self.num_processes = dataset, rank, 2

    def __iter__(self):
        return islice(self.dataset, self.process_index, None, self.num_processes)


def by_accelerate(dataset, rank):
    data_loader = pytest.importorskip("accelerate.data_loader", reason="accelerate is not installed")
    loader = torch.utils.data.DataLoader(dataset, batch_size=1, collate_fn=lambda batches: batches[0])
    given = {"dispatch_batches": False, "put_on_device": False}
    return data_loader.prepare_data_loader(loader, num_processes=2, process_index=rank, **given)


def by_itself(dataset, rank):
    return torch.utils.data.DataLoader(dataset, batch_size=None)


@pytest.mark.parametrize(("shared_out", "world_size"), [(Shard, 1), (by_accelerate, 1), (by_itself, 2)])
def test_rows_are_shared_out_once(rows, shared_out, world_size):
    trained = []
    for rank in range(2):
        ranks = Ranks(rank=rank % world_size, world_size=world_size)
        with closing(AsyncDataset(rows, **single(ranks=ranks))) as dataset:
            trained += numbers(shared_out(dataset, rank))
    assert sorted(trained) == list(range(NUM_ROWS))


@pytest.mark.parametrize("shared_out", [Shard, by_accelerate])
def test_rows_that_would_be_shared_out_twice_are_refused(rows, shared_out):
    with closing(AsyncDataset(rows, **single(ranks=Ranks(rank=1, world_size=2)))) as dataset:
        with pytest.raises(ConfigError, match=r"AD442 .*Pass ranks=Ranks\(\) to AsyncDataset"):
            list(shared_out(dataset, 1))


def test_a_state_is_refused_where_accelerate_holds_a_batch_that_is_not_trained_on(rows):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    with closing(AsyncDataset(rows, **single())) as dataset:
        before = dataset.state_dict()
        loader = accelerate.Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(dataset, batch_size=None))
        assert loader.dataset is dataset
        next(iter(loader))
        with pytest.raises(ConfigError, match="AD442 accelerate fetches a batch before .* StatefulDataLoader"):
            dataset.state_dict()
        next(iter(torch.utils.data.DataLoader(dataset, batch_size=None)))
        assert dataset.state_dict() != before
