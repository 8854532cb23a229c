"""asyncdata in the loops of Lightning, accelerate and torchdata: what was not trained on comes next."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from asyncdata import DataLoader, LengthGrouping, PackedCollator, SoftPacking

torch = pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations.torch import AsyncDataset, StatefulDataLoader  # noqa: E402

# The frameworks warn of each other's old names, and of settings that a test has.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 64


def tokenize(row):
    return {"tokens": [row["number"]] * row["length"]}


@pytest.fixture
def rows(jsonl_file):
    return jsonl_file([{"number": number, "length": 5 + number * 7 % 40} for number in range(120)])


def settings():
    return {
        "tokenize_fn": tokenize,
        "packing": SoftPacking(max_length=LENGTH, window_samples=16, window_tokens=2 * LENGTH),
        "length_grouping": LengthGrouping(window=4),
        "collate_fn": PackedCollator(max_length=LENGTH),
        "batch_size": 2,
        "num_workers": 0,
    }


def epochs_of(loader, num_epochs):
    return [batch["input_ids"].tolist() for _ in range(num_epochs) for batch in loader]


@pytest.fixture
def whole(rows):
    """Two epochs."""
    with DataLoader(rows, **settings()) as loader:
        return epochs_of(loader, 2)


# Lightning


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


def fit(lightning, rows, folder, **options):
    """What a Trainer trains on, until it stops."""
    resume, lookahead = options.pop("ckpt_path", None), options.pop("trainer_lookahead", 1)

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.trained = []

        def training_step(self, batch):
            self.trained.append(batch["input_ids"].tolist())
            return self.weight.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    keep = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(callbacks=[keep], default_root_dir=folder, **quiet, **options)
    with StatefulDataLoader(DataLoader(rows, **settings()), trainer_lookahead=lookahead) as loader:
        model = Model()
        trainer.fit(model, loader, ckpt_path=resume)
    return model.trained


def test_a_run_under_lightning_resumes_with_the_batch_that_its_trainer_held(lightning, rows, whole, tmp_path):
    trained = fit(lightning, rows, tmp_path / "first", max_epochs=2)
    assert trained == whole

    for number in range(1, len(whole)):
        checkpoint = tmp_path / "first" / f"step={number}.ckpt"
        rest = fit(lightning, rows, tmp_path / f"from {number}", max_epochs=2, ckpt_path=checkpoint)
        assert (number, rest) == (number, whole[number:])


def test_with_a_limit_of_batches_the_trainer_of_lightning_holds_none(lightning, rows, whole, tmp_path):
    limits = {"max_epochs": 3, "limit_train_batches": 2, "trainer_lookahead": 0}
    assert fit(lightning, rows, tmp_path / "first", **limits) == whole[:6]

    checkpoint = tmp_path / "first" / "step=3.ckpt"
    assert fit(lightning, rows, tmp_path / "second", ckpt_path=checkpoint, **limits) == whole[3:6]


# accelerate


def test_a_run_under_accelerate_resumes(rows, whole, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    for number in (0, 3, len(whole) - 2):
        loader = StatefulDataLoader(DataLoader(rows, **settings()), device=accelerator.device)
        accelerator.register_for_checkpointing(loader)
        with loader:
            before = list(islice(endless(loader), number))
            accelerator.save_state(str(tmp_path / "checkpoint"))
            list(islice(endless(loader), 2))
            accelerator.load_state(str(tmp_path / "checkpoint"))
            rest = list(islice(endless(loader), len(whole) - number))
        accelerator._custom_objects.clear()  # noqa: SLF001 - there is no other way to take one back

        assert [batch["input_ids"].tolist() for batch in before + rest] == whole


def endless(loader):
    while True:
        yield from loader


def test_accelerate_leaves_a_loader_as_it_is(rows):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    with StatefulDataLoader(DataLoader(rows, **settings())) as loader:
        assert accelerate.Accelerator(cpu=True).prepare(loader) is loader


# torchdata


def test_a_dataset_in_torchdatas_loader_resumes(rows, whole):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    dataset = AsyncDataset(rows, **settings())
    loader = stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=0)
    states, found = [], []
    for _ in range(2):
        for batch in loader:
            found.append(batch["input_ids"].tolist())
            states.append(json.loads(json.dumps(loader.state_dict())))
    dataset.close()
    assert found == whole

    for number, state in enumerate(states[:-1], 1):
        other = AsyncDataset(rows, **settings())
        resumed = stateful.StatefulDataLoader(other, batch_size=None, num_workers=0)
        resumed.load_state_dict(state)
        rest = [batch["input_ids"].tolist() for batch in islice(endless(resumed), len(whole) - number)]
        other.close()
        assert rest == whole[number:]
