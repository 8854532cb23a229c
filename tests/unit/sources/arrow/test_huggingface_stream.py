"""Streaming datasets of Hugging Face: all examples, in a form that JSON has, from any state that is given."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import ConfigError, HuggingFaceSource, Shuffle, SourceError
from asyncdata.sources.stream import StreamOrder
from tests.support.streams import jsonl, texts_of, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

datasets = pytest.importorskip("datasets")

NUM_ROWS = 1000
NUM_SHARDS = 4


def rows_of(shards: list[int]) -> Iterator[dict[str, Any]]:
    size = NUM_ROWS // NUM_SHARDS
    for shard in shards:
        for number in range(shard * size, shard * size + size):
            yield {"id": number, "pad": "x" * (number * 37 % 90)}


def from_generator(folder: Path) -> Any:
    return datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"shards": list(range(NUM_SHARDS))})


def from_files(folder: Path) -> Any:
    paths = [str(write(folder / f"{shard}.jsonl", jsonl(rows_of([shard])))) for shard in range(NUM_SHARDS)]
    cache = str(folder / "cache")
    return datasets.load_dataset("json", data_files=paths, split="train", streaming=True, cache_dir=cache)


def from_a_dataset(folder: Path) -> Any:
    return datasets.Dataset.from_list(list(rows_of(list(range(NUM_SHARDS))))).to_iterable_dataset(NUM_SHARDS)


MAKES: dict[str, Callable[[Path], Any]] = {
    "a generator": from_generator,
    "files": from_files,
    "a dataset": from_a_dataset,
    "mapped": lambda folder: from_files(folder).map(lambda row: {"more": row["id"] + 1}),
    "mapped in batches": lambda folder: from_files(folder).map(lambda rows: rows, batched=True, batch_size=37),
    "filtered": lambda folder: from_a_dataset(folder).filter(lambda row: row["id"] % 3 > 0),
    "taken": lambda folder: from_generator(folder).skip(100).take(700),
    "put together": lambda folder: datasets.concatenate_datasets([from_generator(folder), from_a_dataset(folder)]),
    "interleaved": lambda folder: datasets.interleave_datasets([from_generator(folder), from_a_dataset(folder)]),
    "formatted": lambda folder: from_a_dataset(folder).with_format("numpy"),
}


def opened(dataset: Any, **settings: Any) -> Any:
    return HuggingFaceSource(dataset, **settings).open(1024)


def order(*, shuffle: bool = False) -> StreamOrder:
    return StreamOrder(Shuffle(enabled=shuffle), 7, 1)


def read(stream: Any, state: Any = None, epoch: int = 0, *, shuffle: bool = False) -> list[dict[str, Any]]:
    found = stream.read(order(shuffle=shuffle), epoch, state, bool)
    return [json.loads(text or b"") for rows in found for text in texts_of(rows)]


def examples(dataset: Any) -> list[dict[str, Any]]:
    """What the dataset itself gives."""
    return list(dataset.with_format(None))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MAKES)
def test_every_example_is_a_row_in_the_datasets_order(name, tmp_path):
    stream = opened(MAKES[name](tmp_path))

    for epoch in range(2):
        assert read(stream, epoch=epoch) == examples(MAKES[name](tmp_path))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_reading_resumes_from_every_state_with_the_next_example(name, shuffle, tmp_path):
    stream = opened(MAKES[name](tmp_path))
    found = list(stream.read(order(shuffle=shuffle), 1, None, bool))
    assert len(found) > 2
    expected = [json.loads(text or b"") for rows in found for text in texts_of(rows)]
    again = opened(MAKES[name](tmp_path))
    count = 0
    for rows in found:
        state = json.loads(json.dumps(rows.state))
        assert read(again, state, 1, shuffle=shuffle) == expected[count:]
        count += len(rows.lengths)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a generator", "files", "a dataset"])
def test_shuffled_the_shards_come_in_another_order_in_each_epoch(name, tmp_path):
    stream = opened(MAKES[name](tmp_path))

    epochs = [[row["id"] for row in read(stream, epoch=epoch, shuffle=True)] for epoch in range(6)]

    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 2
    assert epochs == [[row["id"] for row in read(stream, epoch=epoch, shuffle=True)] for epoch in range(6)]


def test_the_users_own_dataset_is_left_as_it_is(tmp_path):
    dataset = from_generator(tmp_path)
    before = dataset.state_dict(), dataset.epoch

    read(opened(dataset), epoch=3, shuffle=True)

    assert (dataset.state_dict(), dataset.epoch) == before


def test_a_shuffle_buffer_is_refused_wherever_it_is(tmp_path):
    """Its rows are not in the dataset's state: they would be lost at a restart."""
    shuffled = from_generator(tmp_path).shuffle(seed=1, buffer_size=10)
    for dataset in (
        shuffled,
        shuffled.map(lambda row: row),
        datasets.concatenate_datasets([from_generator(tmp_path), shuffled]),
    ):
        with pytest.raises(ConfigError, match=r"was shuffled with a buffer, .* Take .shuffle\(\) away; shuffle=True"):
            opened(dataset)


def test_values_that_json_has_no_word_for_have_the_form_of_every_source(tmp_path):
    def make() -> Iterator[dict[str, Any]]:
        yield {"when": datetime.datetime(2024, 2, 29, 1, 2, 3), "raw": b"\x00\xff", "nan": float("nan"), "none": None}

    (row,) = read(opened(datasets.IterableDataset.from_generator(make)))

    assert row["when"] == "2024-02-29T01:02:03"
    assert row["raw"] == "AP8="
    assert row["nan"] != row["nan"]
    assert row["none"] is None


def test_only_the_columns_that_are_asked_for_are_there(tmp_path):
    assert read(opened(from_a_dataset(tmp_path), columns=["id"])) == [{"id": number} for number in range(NUM_ROWS)]


def test_images_are_left_undecoded(tmp_path):
    pytest.importorskip("PIL", reason="datasets makes no column of images without Pillow")
    features = datasets.Features({"image": datasets.Image(), "id": datasets.Value("int64")})
    dataset = datasets.Dataset.from_list(
        [{"image": {"bytes": b"no picture", "path": None}, "id": 1}], features=features
    )

    assert read(opened(dataset.to_iterable_dataset())) == [
        {"image": {"bytes": "bm8gcGljdHVyZQ==", "path": None}, "id": 1}
    ]


def test_an_example_that_has_no_form_in_json_is_named(tmp_path):
    def make() -> Iterator[dict[str, Any]]:
        yield {"a": 1}
        yield {"a": {1, 2}}

    with pytest.raises(
        SourceError, match=r"^AD128 .*: example 1 cannot be written as JSON: a builtins\.set has no form"
    ):
        read(opened(datasets.IterableDataset.from_generator(make)))


def test_a_dataset_without_states_says_so(tmp_path, monkeypatch):
    """Of older releases: its rows before are read again then."""
    dataset = from_generator(tmp_path)
    monkeypatch.delattr(datasets.IterableDataset, "state_dict")

    states = [rows.state for rows in opened(dataset).read(order(), 0, None, bool)]

    assert states[1:] == [None] * (len(states) - 1)


def test_of_several_splits_one_is_to_be_named(tmp_path):
    splits = datasets.IterableDatasetDict({"train": from_generator(tmp_path), "test": from_a_dataset(tmp_path).take(3)})

    assert len(read(opened(splits, split="test"))) == 3
    with pytest.raises(ConfigError, match="a split is needed: there are 'train', 'test'"):
        opened(splits)


def test_a_dataset_is_streamed_where_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", jsonl(rows_of([0])))

    stream = opened(str(tmp_path / "data"), split="train", streaming=True)

    assert read(stream) == list(rows_of([0]))
    assert stream.location(0, 3, 9).row_number == 3
    assert str(tmp_path / "data") in stream.location(0, 3, 9).path


def test_other_datasets_have_other_fingerprints(tmp_path):
    digests = [
        opened(dataset).fingerprint()["digest"]
        for dataset in (
            from_generator(tmp_path),
            from_generator(tmp_path),
            from_generator(tmp_path).map(lambda row: row),
            from_a_dataset(tmp_path),
            from_a_dataset(tmp_path).rename_column("pad", "other"),
        )
    ]

    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
