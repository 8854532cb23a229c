"""PyTorch's loaders over a mixture."""

from __future__ import annotations

import json

import pytest

from asyncdata import ConfigError, DataLoader, Mix, Part, Shuffle
from tests.support.tokenize_fns import row_id

pytest.importorskip("torch")

from asyncdata.integrations.torch import AsyncDataset, OrderView, RowView, StatefulDataLoader

KNOBS = {"tokenize_fn": row_id, "num_workers": 0, "shuffle": Shuffle(block_bytes=256, window_blocks=4)}


@pytest.fixture
def mix(tmp_path):
    parts = {}
    for name, number in (("a", 60), ("b", 40)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"id": n}) + "\n" for n in range(number)))
        parts[name] = Part(path, weight=number)
    return Mix(parts, quota=5)


def entries(samples):
    return [(sample.source_name, int(sample.tokens[0])) for sample in samples]


@pytest.fixture
def expected(mix):
    with DataLoader(mix, **KNOBS) as loader:
        return entries(loader.get_next_batch(64))


def test_an_order_view_has_the_samples_of_the_mixture(mix, expected):
    with DataLoader(mix, **KNOBS) as loader:
        view = OrderView(loader, rows_per_epoch=50)
        first = [view[number] for number in range(20)]
        state = view.state_dict()
    with DataLoader(mix, **KNOBS) as loader:
        view = OrderView(loader, rows_per_epoch=50)
        view.load_state_dict(state)

        assert entries(first + [view[number] for number in range(20, 50)]) == expected[:50]


def test_a_row_view_is_refused_as_a_mixture_has_no_row_index(mix):
    with DataLoader(mix, **KNOBS) as loader:
        with pytest.raises(ConfigError, match="AD471 a mixture has no row index"):
            len(RowView(loader))
        with pytest.raises(ConfigError, match="AD471 a mixture has no row index"):
            RowView(loader, rows_per_epoch=10)[7]


def test_a_dataset_is_resumed_by_its_own_state(mix, expected):
    dataset = AsyncDataset(mix, batch_size=8, collate_fn=entries, **KNOBS)
    try:
        batches = iter(dataset)
        found = [next(batches) for _ in range(3)]
        state = dataset.state_dict()
    finally:
        dataset.close()
    dataset = AsyncDataset(mix, batch_size=8, collate_fn=entries, **KNOBS)
    try:
        dataset.load_state_dict(state)
        batches = iter(dataset)
        found += [next(batches) for _ in range(5)]
    finally:
        dataset.close()

    assert [entry for batch in found for entry in batch] == expected


def test_a_stateful_loader_is_resumed(mix, expected):
    with DataLoader(mix, batch_size=8, collate_fn=entries, **KNOBS) as inner:
        loader = StatefulDataLoader(inner)
        batches = iter(loader)
        found = [next(batches) for _ in range(4)]
        state = json.loads(json.dumps(loader.state_dict()))
    with DataLoader(mix, batch_size=8, collate_fn=entries, **KNOBS) as inner:
        loader = StatefulDataLoader(inner)
        loader.load_state_dict(state)
        batches = iter(loader)
        found += [next(batches) for _ in range(4)]

    assert [entry for batch in found for entry in batch] == expected
