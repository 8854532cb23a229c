"""Datasets of Hugging Face, in files, in memory or streamed: their very rows, however they were made and changed."""

import contextlib
import datetime
import errno
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from asyncdata import DataLoader, HuggingFaceSource, Shuffle
from asyncdata.errors import ConfigError, SourceChangedError
from tests.support.loaders import AS_IT_LIES, read_until_fault, refusal_of, rows_of, samples_of
from tests.support.parts import FileChangedError, Job, Overflow, StreamOrder, change, resolve_path
from tests.support.sources import jsonl, texts_of, write

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch) -> Iterator[None]:
    """No progress bars, a cache of its own, and no other test's temporary files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def in_memory(num_rows: int = 120) -> Any:
    columns = {"id": list(range(num_rows)), "pad": ["x" * (i * 37 % 90) for i in range(num_rows)]}
    chat = [[{"role": "user", "content": f"é{i}"}] for i in range(num_rows)]
    return datasets.Dataset.from_dict({**columns, "chat": chat})


def saved(folder: Path, dataset: Any = None) -> Any:
    (in_memory() if dataset is None else dataset).save_to_disk(folder, num_shards=3)
    return datasets.load_from_disk(folder)


def read(dataset: Any, **settings: Any) -> list[Any]:
    return rows_of(HuggingFaceSource(dataset, **settings))


def refused(source: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataLoader(source, **AS_IT_LIES)


def copies() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("asyncdata-*/rows.arrow"))


# What a dataset may have become, and whether its rows must be copied then.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda ds: ds, False),
    "selection of a shuffle": (lambda ds: ds.shuffle(seed=3).select(range(7, 50)), False),
    "sorted": (lambda ds: ds.sort("pad").shard(3, 1, contiguous=False), False),
    "names exchanged": (lambda ds: ds.rename_columns({"id": "pad", "pad": "id"}).remove_columns("chat"), False),
    "renamed, sliced": (lambda ds: ds.rename_column("id", "n").select(range(50, 100)), False),
    "concatenated": (lambda ds: datasets.concatenate_datasets([ds, ds.select(range(10)), ds.shuffle(seed=1)]), False),
    "mapped": (lambda ds: ds.map(lambda row: {"twice": row["id"] * 2}).filter(lambda row: row["id"] % 3), False),
    "with a column": (lambda ds: ds.add_column("new", list(range(len(ds)))), True),
    "beside another": (lambda ds: datasets.concatenate_datasets([ds, ds.rename_columns(OTHER_NAMES)], axis=1), True),
    "with one in memory": (lambda ds: datasets.concatenate_datasets([ds, in_memory(5)]), True),
    "flattened": (lambda ds: ds.map(lambda row: {"s": {"a": row["id"]}}).flatten(), True),
    "formatted": (lambda ds: ds.with_format("numpy"), False),
}
OTHER_NAMES = {"id": "k", "pad": "p", "chat": "c"}
QUICK = ("nothing", "selection of a shuffle", "names exchanged", "renamed, sliced", "with one in memory")


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # datasets' own, when it sorts
@pytest.mark.parametrize("where", ["in files", "in memory"])
@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in CHANGES]
)
def test_the_rows_are_those_that_the_dataset_gives(tmp_path, change, where):
    make, must_copy = CHANGES[change]
    dataset = make(saved(tmp_path / "ds") if where == "in files" else in_memory())
    with DataLoader(dataset, **AS_IT_LIES) as loader:
        found = [sample.extra for batch in loader for sample in batch]
        num_copies = len(copies())

    assert (found, num_copies) == (list(dataset.with_format(None)), must_copy or where == "in memory")
    assert copies() == []


def test_features_are_left_as_they_are_stored_and_columns_may_be_chosen(tmp_path):
    values = {"when": datasets.Value("timestamp[s]"), "many": datasets.List(datasets.Value("float32"))}
    label = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"picture": datasets.Image(), "label": label, **values})
    row = {"picture": {"bytes": b"\x89PNG", "path": "a.png"}, "label": 1, "when": 0, "many": [0.5]}
    table = pa.Table.from_pylist([row], features.arrow_schema)
    dataset = datasets.Dataset(table, datasets.DatasetInfo(features=features))  # no encoder: that would need Pillow

    for found in (dataset, saved(tmp_path / "ds", datasets.concatenate_datasets([dataset] * 3))):
        given = {"picture": {"bytes": "iVBORw==", "path": "a.png"}, "when": "1970-01-01T00:00:00"}
        assert read(found)[0] == {**row, **given}
        assert list(read(found, columns=["many", "label"])[0].items()) == [("many", [0.5]), ("label", 1)]
    refused(HuggingFaceSource(in_memory(), columns=["nope"]), "columns must name some of id, pad, chat, each once; got")


def test_a_dataset_and_a_saved_folder_are_sources_by_themselves_and_rows_are_known_by_their_index(tmp_path):
    dataset = saved(tmp_path / "ds")

    for source in (dataset, in_memory(), str(tmp_path / "ds"), tmp_path / "ds", HuggingFaceSource(tmp_path / "ds")):
        found = [(sample.extra["id"], sample.source.row_number) for sample in samples_of(source)]
        assert found == [(number, number) for number in range(120)]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_files_is_loaded_as_load_dataset_does(tmp_path, streaming):
    (tmp_path / "repo").mkdir()
    write(tmp_path / "repo" / "train.jsonl", jsonl({"id": i} for i in range(10)))
    test = write(tmp_path / "repo" / "test.jsonl", b'{"id": 99}\n')
    repo, knobs = str(tmp_path / "repo"), {"streaming": streaming}

    found = samples_of(HuggingFaceSource(repo, split="train", **knobs))
    assert [sample.extra["id"] for sample in found] == list(range(10))
    assert {sample.source.path for sample in found} == {f"{repo}[train]"}
    refused(HuggingFaceSource(repo, **knobs), "a split is needed: there are 'train', 'test'")
    assert read("json", data_files=str(test), split="train", **knobs) == [{"id": 99}]
    if not streaming:
        assert [row["id"] for row in read(repo, split="train[2:4]")] == [2, 3]


def test_of_several_splits_one_must_be_named(tmp_path):
    both = datasets.DatasetDict({"train": in_memory(), "test": in_memory(3)})
    both.save_to_disk(tmp_path / "both")
    streamed = datasets.IterableDatasetDict({name: one.to_iterable_dataset() for name, one in both.items()})

    for source in (both, str(tmp_path / "both"), streamed):
        assert len(read(source, split="test")) == 3
        refused(HuggingFaceSource(source, split="dev"), "no split 'dev': there are 'train', 'test'")
        refused(HuggingFaceSource(source), "a split is needed: there are 'train', 'test'")
    assert len(read(datasets.DatasetDict({"only": in_memory(4)}))) == 4


def test_what_is_no_dataset_or_cannot_be_loaded_is_named_with_the_reason(tmp_path, monkeypatch):
    for name, files in (("no/such", None), ("json", str(write(tmp_path / "a.jsonl", b"{")))):
        refusal = refusal_of(HuggingFaceSource(name, data_files=files))
        assert refusal.startswith(f"AD125 cannot load the dataset {name}: ")
    assert refusal_of(in_memory().select([])).startswith("AD201 no rows in Dataset")
    refused(HuggingFaceSource(5), "a dataset is a Dataset, a DatasetDict, a folder or a name; got int")
    refused(in_memory().with_transform(lambda batch: batch), "the dataset has a transform")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(HuggingFaceSource("a"), r"HuggingFaceSource needs datasets .*: pip install datasets")


def test_a_temporary_copy_is_private_and_deleted_with_its_loader():
    loaders = [DataLoader(in_memory(), **AS_IT_LIES) for _ in range(2)]
    folders = {path.parent for path in copies()}

    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    loaders.pop().close()
    assert len(copies()) == 1
    loaders.pop().close()
    del loaders
    gc.collect()
    assert not any(folder.exists() for folder in folders)


def test_where_no_copy_can_be_written_it_says_so(tmp_path, monkeypatch):
    change(monkeypatch, arrow_writer=Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert "no copy of the dataset can be written to " in (text := refusal_of(in_memory()))
    assert text.startswith("AD126 ")
    assert text.endswith("No space left on device; set TMPDIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert refusal_of(in_memory()).startswith("AD126 no folder can be made for a copy of the dataset: ")


def digest_of(dataset: Any) -> str:
    with contextlib.closing(HuggingFaceSource(dataset).open(1024)) as blocks:
        return str(blocks.fingerprint()["digest"])


def test_whatever_changes_the_rows_changes_the_fingerprint(tmp_path):
    dataset = saved(tmp_path / "ds", in_memory(3000))
    picked = [*range(1500), 1501, 1500, *range(1502, 3000)]
    found = [
        dataset, dataset.shuffle(seed=1), dataset.shuffle(seed=2), dataset.select(range(2999)),
        dataset.select(range(1, 3000)), dataset.select(picked), dataset.rename_column("pad", "text"),
        dataset.remove_columns("pad"), dataset.map(lambda row: {"pad": row["pad"] + "!" * (row["id"] == 1501)}),
        dataset.to_iterable_dataset(), dataset.to_iterable_dataset().map(lambda row: row),
        dataset.to_iterable_dataset().rename_column("pad", "text"),
    ]  # fmt: skip

    assert len({digest_of(one) for one in found}) == len(found)


def reader_of(dataset: Any) -> tuple[Any, Any]:
    """A reader as a worker opens it, which gets JSON, and the blocks."""
    blocks = HuggingFaceSource(dataset).open(1024)
    job = Job(files=blocks.files, tokenize=None, max_row_bytes=1 << 20, block_bytes=1, slack_bytes=0)
    return resolve_path(blocks.reader.path)(job, **json.loads(json.dumps(blocks.reader.settings))), blocks


def test_a_file_that_was_cut_is_named_before_it_is_read(tmp_path):
    reader, blocks = reader_of(saved(tmp_path / "ds"))
    first, *_, last = blocks.blocks(range(blocks.num_blocks))
    reader.read_block(first, 1 << 20)
    for path in sorted((tmp_path / "ds").glob("*.arrow")):
        os.truncate(path, path.stat().st_size - 8)

    for block in (first, last):
        with pytest.raises(FileChangedError, match=r"^AD30[23] .*\.arrow"):
            reader.read_block(block, 1 << 20)
    with pytest.raises(SourceChangedError, match=r"^AD302 .*\.arrow shrank"):
        blocks.check_unchanged()
    with pytest.raises(SourceChangedError, match=r"^AD30[23] .*\.arrow"):
        blocks.fingerprint()
    reader.close()


def test_a_row_that_is_another_one_when_it_is_read_by_itself_is_named():
    reader, _blocks = reader_of(in_memory())

    with pytest.raises(FileChangedError, match=r"^AD303 Dataset: row 5 was another one before"):
        reader.read_rows([Overflow(0, 0, 5)], [3])
    reader.close()


NUM_SHARDS = 4


def rows_of_shards(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for number in range(shard * 250, shard * 250 + 250):
            yield {"id": number, "pad": "x" * (number * 37 % 90)}


def from_generator(folder: Path) -> Any:
    return datasets.IterableDataset.from_generator(rows_of_shards, gen_kwargs={"shards": list(range(NUM_SHARDS))})


def from_files(folder: Path) -> Any:
    paths = [str(write(folder / f"{shard}.jsonl", jsonl(rows_of_shards([shard])))) for shard in range(NUM_SHARDS)]
    cache = str(folder / "cache")
    return datasets.load_dataset("json", data_files=paths, split="train", streaming=True, cache_dir=cache)


def from_a_dataset(folder: Path) -> Any:
    return datasets.Dataset.from_list(list(rows_of_shards(list(range(NUM_SHARDS))))).to_iterable_dataset(NUM_SHARDS)


STREAMS: dict[str, Callable[[Path], Any]] = {
    "a generator": from_generator,
    "files, mapped": lambda folder: from_files(folder).map(lambda rows: rows, batched=True, batch_size=37),
    "a dataset, filtered": lambda folder: from_a_dataset(folder).filter(lambda row: row["id"] % 3 > 0),
    "taken": lambda folder: from_generator(folder).skip(100).take(700),
    "put together": lambda folder: datasets.concatenate_datasets([from_generator(folder), from_a_dataset(folder)]),
    "interleaved": lambda folder: datasets.interleave_datasets([from_generator(folder), from_a_dataset(folder)]),
    "formatted": lambda folder: from_a_dataset(folder).with_format("numpy"),
}
streams = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "a generator" else pytest.mark.thorough) for name in STREAMS]
)


def passed(dataset: Any, state: Any = None, epoch: int = 0, *, shuffle: bool = False) -> list[tuple[Any, list[Any]]]:
    order = StreamOrder(Shuffle(enabled=shuffle), 7, 1)
    found = HuggingFaceSource(dataset).open(1024).read(order, epoch, state, bool)
    return [(rows.state, [json.loads(text or b"") for text in texts_of(rows)]) for rows in found]


def examples_of(parts: list[tuple[Any, list[Any]]]) -> list[Any]:
    return [row for _, rows in parts for row in rows]


@streams
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_example_of_a_stream_is_a_row_and_reading_resumes_from_every_state(name, shuffle, tmp_path):
    found = passed(STREAMS[name](tmp_path), epoch=1, shuffle=shuffle)
    expected = examples_of(found)

    if not shuffle:
        assert expected == list(STREAMS[name](tmp_path).with_format(None))
    assert len(found) > 2
    again, count = STREAMS[name](tmp_path), 0
    for state, rows in json.loads(json.dumps(found)):
        assert examples_of(passed(again, state, 1, shuffle=shuffle)) == expected[count:]
        count += len(rows)


def test_the_users_own_stream_is_left_as_it_is(tmp_path):
    dataset = from_generator(tmp_path)
    before = dataset.state_dict(), dataset.epoch

    passed(dataset, epoch=3, shuffle=True)

    assert (dataset.state_dict(), dataset.epoch) == before


def test_a_shuffle_buffer_is_refused_wherever_it_is(tmp_path):
    """Its rows are not in the dataset's state: they would be lost at a restart."""
    shuffled = from_generator(tmp_path).shuffle(seed=1, buffer_size=10)
    both = datasets.concatenate_datasets([from_generator(tmp_path), shuffled])

    for dataset in (shuffled, shuffled.map(lambda row: row), both):
        refused(dataset, r"was shuffled with a buffer, .* Take .shuffle\(\) away; shuffle=True")


def test_examples_of_a_stream_have_the_form_of_every_source_and_one_without_is_named():
    def make() -> Iterator[dict[str, Any]]:
        yield {"when": datetime.datetime(2024, 2, 29, 1, 2, 3), "raw": b"\x00\xff", "none": None}
        yield {"when": {1, 2}}

    found, error = read_until_fault(datasets.IterableDataset.from_generator(make))

    assert found == [{"when": "2024-02-29T01:02:03", "raw": "AP8=", "none": None}]
    assert "example 1 cannot be written as JSON: a builtins.set has no form" in str(error)
    assert str(error).startswith("AD128 ")


def test_only_the_columns_of_a_stream_that_are_asked_for_are_there_and_images_stay_undecoded(tmp_path):
    assert read(from_a_dataset(tmp_path), columns=["id"]) == [{"id": number} for number in range(1000)]
    pytest.importorskip("PIL", reason="datasets makes no column of images without Pillow")
    rows = [{"image": {"bytes": b"no picture", "path": None}}]
    dataset = datasets.Dataset.from_list(rows, features=datasets.Features({"image": datasets.Image()}))
    assert read(dataset.to_iterable_dataset()) == [{"image": {"bytes": "bm8gcGljdHVyZQ==", "path": None}}]


def test_a_stream_without_states_says_so(tmp_path, monkeypatch):
    """Of older releases: its rows before are read again then."""
    dataset = from_generator(tmp_path)
    monkeypatch.delattr(datasets.IterableDataset, "state_dict")

    states = [state for state, _ in passed(dataset)]

    assert states[1:] == [None] * (len(states) - 1)
