"""Datasets of Hugging Face: a reader gives the very rows that the dataset gives, however it was made and changed."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from asyncdata import (
    ConfigError,
    DataLoader,
    HuggingFaceSource,
    SnapshotMismatchError,
    SourceChangedError,
    SourceError,
    SourceLocation,
)
from asyncdata.cli.inspection.window_view import OpenedOrder
from asyncdata.core.import_path import resolve_path
from asyncdata.core.messages import Block, Job, Overflow
from asyncdata.sources.base import Source
from asyncdata.sources.reader import FileChangedError
from asyncdata.sources.row_json import encode_row
from tests.support.loading import ids
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncdata.sources.arrow.huggingface import DatasetBlocks

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")

BLOCK_BYTES = 1024
NUM_ROWS = 120


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch) -> Iterator[None]:
    """No progress bars, and a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def in_memory(num_rows: int = NUM_ROWS) -> Any:
    numbers = range(num_rows)
    return datasets.Dataset.from_dict(
        {
            "id": list(numbers),
            "pad": ["x" * (i * 37 % 90) for i in numbers],
            "chat": [[{"role": "user", "content": f"é{i}"}] for i in numbers],
        }
    )


def saved(folder: Path, dataset: Any = None) -> Any:
    """The dataset in several Arrow files."""
    (in_memory() if dataset is None else dataset).save_to_disk(folder, num_shards=3)
    return datasets.load_from_disk(folder)


def opened(dataset: Any, block_bytes: int = BLOCK_BYTES, **knobs: Any) -> DatasetBlocks:
    return HuggingFaceSource(dataset, **knobs).open(block_bytes)


def reader_of(blocks: DatasetBlocks) -> Any:
    """As a worker opens it: what crosses to it is JSON."""
    job = Job(files=blocks.files, tokenize=None, max_row_bytes=1 << 20, block_bytes=1, slack_bytes=0)
    return resolve_path(blocks.reader.path)(job, **json.loads(json.dumps(blocks.reader.settings)))


def rows_of(blocks: DatasetBlocks) -> list[Any]:
    reader, rows = reader_of(blocks), []
    for block in blocks.blocks(range(blocks.num_blocks)):
        found = reader.read_block(block, 1 << 30)
        rows += [json.loads(found.data[s : s + n]) for s, n in zip(found.starts, found.lengths, strict=True)]
    reader.close()
    return rows


def is_copied(blocks: DatasetBlocks) -> bool:
    return [os.path.basename(part["path"]) for part in blocks.reader.settings["data"]] == ["rows.arrow"]


def without_ids(dataset: Any) -> Any:
    return dataset.remove_columns("id")


# What a dataset may have become, and whether its rows must be copied then.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda ds: ds, False),
    "select, contiguous": (lambda ds: ds.select(range(30, 70)), False),
    "select, twice": (lambda ds: ds.select(range(30, 110)).select(range(5, 20)), False),
    "select, anywhere": (lambda ds: ds.select([5, 3, 3, 119, 0]), False),
    "shuffle": (lambda ds: ds.shuffle(seed=3), False),
    "shuffle of a selection": (lambda ds: ds.select(range(10, 90)).shuffle(seed=3), False),
    "selection of a shuffle": (lambda ds: ds.shuffle(seed=3).select(range(7, 50)), False),
    "one row of a shuffle": (lambda ds: ds.shuffle(seed=3).select([5]).select(range(1)), False),
    "one row, and its slice": (lambda ds: ds.select([5]).shuffle(seed=1).select(range(1)), False),
    "filter": (lambda ds: ds.filter(lambda row: row["id"] % 3 == 0), False),
    "sort": (lambda ds: ds.sort("pad"), False),
    "shard": (lambda ds: ds.shard(3, 1, contiguous=False), False),
    "train_test_split": (lambda ds: ds.train_test_split(0.3, seed=1)["test"], False),
    "rename": (lambda ds: ds.rename_column("id", "number"), False),
    "names exchanged": (lambda ds: ds.rename_columns({"id": "pad", "pad": "id"}), False),
    "remove": (without_ids, False),
    "columns chosen": (lambda ds: ds.select_columns(["chat", "id"]), False),
    "renamed, removed, sliced": (
        lambda ds: ds.rename_column("id", "n").remove_columns("chat").select(range(50, 100)),
        False,
    ),
    "concatenated": (lambda ds: datasets.concatenate_datasets([ds, ds.select(range(10)), ds.shuffle(seed=1)]), False),
    "map": (lambda ds: ds.map(lambda row: {"twice": row["id"] * 2}), False),
    "add_column": (lambda ds: ds.add_column("new", list(range(len(ds)))), True),
    "concatenated beside": (
        lambda ds: datasets.concatenate_datasets([ds, ds.select_columns("id").rename_column("id", "k")], axis=1),
        True,
    ),
    "concatenated with one in memory": (lambda ds: datasets.concatenate_datasets([ds, in_memory(5)]), True),
    "flattened": (lambda ds: ds.map(lambda row: {"s": {"a": row["id"]}}).flatten(), True),
    "a format": (lambda ds: ds.with_format("numpy"), False),
}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # datasets' own, when it sorts
@pytest.mark.parametrize("change", CHANGES)
def test_the_rows_are_those_that_the_dataset_gives(tmp_path, change):
    make, must_copy = CHANGES[change]
    dataset = make(saved(tmp_path / "ds"))

    blocks = opened(dataset)

    assert rows_of(blocks) == list(dataset.with_format(None))
    assert is_copied(blocks) is must_copy


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["nothing", "shuffle", "select, anywhere", "rename", "add_column", "concatenated"])
def test_the_rows_of_a_dataset_in_memory_are_those_that_it_gives(change):
    dataset = CHANGES[change][0](in_memory())
    blocks = opened(dataset)

    assert rows_of(blocks) == list(dataset)
    assert is_copied(blocks)


@pytest.fixture(scope="module")
def forty(tmp_path_factory) -> Any:
    return saved(tmp_path_factory.mktemp("forty") / "ds", in_memory(40))


@pytest.mark.thorough
@settings(max_examples=50)
@given(data=st.data())
def test_any_chain_of_changes_gives_the_datasets_rows(forty, data):
    dataset = forty
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["slice", "pick", "rename", "shuffle", "remove", "concatenate"]))
        size = len(dataset)
        if kind == "slice":
            start = data.draw(st.integers(0, size - 1))
            dataset = dataset.select(range(start, data.draw(st.integers(start + 1, size))))
        elif kind == "pick":
            dataset = dataset.select(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
        elif kind == "rename":
            name = data.draw(st.sampled_from(dataset.column_names))
            dataset = dataset.rename_column(name, f"{name}'")
        elif kind == "shuffle":
            dataset = dataset.shuffle(seed=data.draw(st.integers(0, 99)))
        elif kind == "remove" and len(dataset.column_names) > 1:
            dataset = dataset.remove_columns(data.draw(st.sampled_from(dataset.column_names)))
        elif size < 200:
            dataset = datasets.concatenate_datasets([dataset, dataset])

    blocks = opened(dataset, data.draw(st.integers(50, 5000)))
    assert rows_of(blocks) == list(dataset)
    reader, expected = reader_of(blocks), [encode_row(row) for row in dataset]
    picked = data.draw(st.lists(st.integers(0, len(dataset) - 1), max_size=20))
    places = [Overflow(number, 0, row) for number, row in enumerate(picked)]
    assert reader.read_rows(places, [len(expected[row]) for row in picked]) == [expected[row] for row in picked]
    reader.close()


def test_columns_may_be_chosen(tmp_path):
    for dataset in (saved(tmp_path / "ds"), in_memory()):
        assert rows_of(opened(dataset, columns=["pad", "id"]))[7] == {"pad": dataset[7]["pad"], "id": 7}
    with pytest.raises(ConfigError, match="columns must name some of id, pad, chat, each once; got"):
        opened(in_memory(), columns=["nope"])


def test_features_are_left_as_they_are_stored(tmp_path):
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "when": datasets.Value("timestamp[s]"),
            "many": datasets.List(datasets.Value("float32")),
        }
    )
    row = {"picture": {"bytes": b"\x89PNG", "path": "a.png"}, "label": 1, "when": 0, "many": [0.5]}
    table = pa.Table.from_pylist([row], features.arrow_schema)
    dataset = datasets.Dataset(table, datasets.DatasetInfo(features=features))  # no encoder: that would need Pillow

    for found in (dataset, saved(tmp_path / "ds", datasets.concatenate_datasets([dataset] * 3))):
        assert rows_of(opened(found))[0] == {
            "picture": {"bytes": "iVBORw==", "path": "a.png"},
            "label": 1,
            "when": "1970-01-01T00:00:00",
            "many": [0.5],
        }


def test_a_transform_is_refused_because_workers_would_not_apply_it():
    dataset = in_memory().with_transform(lambda batch: batch)

    with pytest.raises(ConfigError, match="the dataset has a transform"):
        opened(dataset)


# Where it comes from


def test_it_is_a_source():
    assert isinstance(HuggingFaceSource("name"), Source)


def test_a_dataset_and_a_saved_folder_are_sources_by_themselves(tmp_path):
    dataset = saved(tmp_path / "ds")

    for source in (dataset, in_memory(), str(tmp_path / "ds"), tmp_path / "ds", HuggingFaceSource(tmp_path / "ds")):
        with DataLoader(source, tokenize_fn=row_id, num_workers=0, shuffle=False, timeout_s=240) as loader:
            assert ids(loader.get_next_batch(20)) == list(range(20))


@pytest.mark.thorough
def test_a_folder_of_files_is_loaded_as_load_dataset_does(tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"id": i}) + "\n" for i in range(10)))
    (folder / "test.jsonl").write_text('{"id": 99}\n')

    assert [row["id"] for row in rows_of(opened(str(folder), split="train"))] == list(range(10))
    assert [row["id"] for row in rows_of(opened(str(folder), split="train[2:4]"))] == [2, 3]
    with pytest.raises(ConfigError, match="a split is needed: there are 'train', 'test'"):
        opened(str(folder))
    found = opened("json", data_files=str(folder / "test.jsonl"))
    assert rows_of(found) == [{"id": 99}]
    assert found.location(0, 0, 5) == SourceLocation("json[train]", -1, 5, 0)


def test_a_dataset_that_cannot_be_loaded_is_named_with_the_reason(tmp_path):
    with pytest.raises(SourceError, match=r"^AD125 cannot load the dataset no/such-dataset: "):
        opened("no/such-dataset")
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(SourceError, match=r"^AD125 cannot load the dataset json: "):
        opened("json", data_files=str(tmp_path / "a.jsonl"))


def test_of_several_splits_one_must_be_named(tmp_path):
    both = datasets.DatasetDict({"train": in_memory(), "test": in_memory(3)})
    both.save_to_disk(tmp_path / "both")

    for source in (both, str(tmp_path / "both")):
        assert len(rows_of(opened(source, split="test"))) == 3
        with pytest.raises(ConfigError, match="no split 'dev': there are 'train', 'test'"):
            opened(source, split="dev")
        with pytest.raises(ConfigError, match="a split is needed: there are 'train', 'test'"):
            opened(source)
    assert len(rows_of(opened(datasets.DatasetDict({"only": in_memory(4)})))) == 4


def test_an_object_that_is_not_a_dataset_is_refused():
    with pytest.raises(ConfigError, match="a dataset is a Dataset, a DatasetDict, a folder or a name; got int"):
        opened(5)
    with pytest.raises(SourceError, match="^AD201 no rows in Dataset"):
        opened(in_memory().select([]))


def test_without_datasets_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(ConfigError, match=r"HuggingFaceSource needs datasets .*: pip install datasets"):
        opened("a")


# Blocks


@pytest.mark.thorough
@given(num_rows=st.integers(1, 50), block_bytes=st.integers(1, 3000))
@settings(max_examples=20)
def test_blocks_cover_every_index_once_and_come_as_they_lie(num_rows, block_bytes):
    blocks = opened(in_memory(num_rows), block_bytes)
    found = blocks.blocks(list(range(blocks.num_blocks))[::-1])

    assert [row for block in found for row in range(block.start, block.stop)] == list(range(num_rows))
    assert {block.file_id for block in found} == {0}


def test_a_block_is_known_by_its_first_index_and_by_no_other():
    blocks = opened(in_memory(50), 500)
    known = {block.start: number for number, block in enumerate(blocks.blocks(range(blocks.num_blocks)))}
    starts = np.arange(120)

    assert len(known) > 2
    assert blocks.numbers(np.zeros(120, np.int64), starts).tolist() == [known.get(start, -1) for start in range(120)]
    assert blocks.numbers(np.ones(120, np.int64), starts).tolist() == [-1] * 120


def test_a_block_is_about_as_large_as_asked_for(tmp_path):
    dataset = saved(tmp_path / "ds", in_memory(5000))
    blocks = opened(dataset, 16_000)
    reader = reader_of(blocks)

    sizes = [len(reader.read_block(block, 1 << 20).data) for block in blocks.blocks(range(blocks.num_blocks - 1))]
    reader.close()

    assert sum(sizes) / len(sizes) == pytest.approx(16_000, rel=0.4)
    assert max(sizes) < blocks.room_bytes


def test_rows_larger_than_a_block_are_blocks_of_their_own():
    dataset = datasets.Dataset.from_dict({"id": [0, 1, 2], "pad": ["x" * 5000] * 3})
    blocks = opened(dataset, 1000)

    assert blocks.blocks(range(3)) == [Block(0, 0, 1), Block(0, 1, 2), Block(0, 2, 3)]
    with OpenedOrder(HuggingFaceSource(dataset)) as one:
        assert one.order.num_windows == 1


# Temporary files


@pytest.mark.thorough
def test_a_temporary_copy_is_private_and_deleted_with_its_loader(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    blocks, others = opened(in_memory()), opened(in_memory())
    folders = {Path(found.reader.settings["data"][0]["path"]).parent for found in (blocks, others)}

    assert set(tmp_path.glob("asyncdata-*")) == folders
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    blocks.close()
    del others
    gc.collect()
    assert list(tmp_path.glob("asyncdata-*")) == []


@pytest.mark.thorough
def test_a_temporary_copy_is_deleted_after_a_process_that_closed_nothing(tmp_path):
    code = """
import datasets
from asyncdata import DataLoader
loader = DataLoader(datasets.Dataset.from_dict({"id": [1, 2, 3]}), tokenize_fn=len, num_workers=0)
print(loader.get_next_batch)
"""
    root = Path(__file__).parents[4]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment, timeout=240)

    assert list(tmp_path.glob("asyncdata-*")) == []


@pytest.mark.thorough
def test_the_temporary_copy_of_a_killed_trainer_is_deleted_by_the_next_one(tmp_path, monkeypatch):
    code = """
import sys
import datasets
from asyncdata import DataLoader
loader = DataLoader(datasets.Dataset.from_dict({"id": [1, 2, 3]}), tokenize_fn=len, num_workers=0)
print("ready", flush=True)
sys.stdin.read()
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[4])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"ready\n"
        trainer.kill()
    (left,) = tmp_path.glob("asyncdata-*/rows.arrow")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    blocks = opened(in_memory())

    assert not left.exists()
    assert len(list(tmp_path.glob("asyncdata-*"))) == 1
    blocks.close()
    assert not list(tmp_path.glob("asyncdata-*"))


def test_where_no_copy_can_be_written_it_says_so(tmp_path, monkeypatch):
    def fails(path: str, batches: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("asyncdata.sources.arrow.huggingface.write_arrow", fails)
    with pytest.raises(SourceError, match="^AD126 no copy of the dataset can be written to .*No space left.*TMPDIR"):
        opened(in_memory())

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(SourceError, match="^AD126 no folder can be made for a copy of the dataset: .*; set TMPDIR"):
        opened(in_memory())


# Fingerprints and changes


@pytest.mark.thorough
def test_the_fingerprint_is_that_of_the_rows_and_not_the_librarys(tmp_path):
    """Which may be another one in every session, and lies in the Arrow files too."""
    found = []
    for name in ("a", "b"):
        dataset = saved(tmp_path / name)
        mapped = dataset.map(lambda row: {"twice": 2 * row["id"]}, new_fingerprint=name * 16)
        found.append((dataset, mapped))
    (a, mapped_a), (b, mapped_b) = found

    assert mapped_a._fingerprint != mapped_b._fingerprint  # noqa: SLF001 - what is compared
    assert opened(a).fingerprint() == opened(b).fingerprint()
    assert opened(mapped_a).fingerprint() == opened(mapped_b).fingerprint()
    assert opened(in_memory()).fingerprint() == opened(in_memory()).fingerprint()
    assert opened(a.shuffle(seed=1)).fingerprint() == opened(b.shuffle(seed=1)).fingerprint()


@pytest.mark.thorough
def test_whatever_changes_the_rows_changes_the_fingerprint(tmp_path):
    dataset = saved(tmp_path / "ds", in_memory(3000))
    picked = list(range(3000))
    picked[1500], picked[1501] = picked[1501], picked[1500]
    found = [
        dataset,
        dataset.shuffle(seed=1),
        dataset.shuffle(seed=2),
        dataset.select(range(2999)),
        dataset.select(range(1, 3000)),
        dataset.select(picked),
        dataset.rename_column("pad", "text"),
        dataset.remove_columns("pad"),
        dataset.map(lambda row: {"pad": row["pad"] + "!" * (row["id"] == 1501)}),
    ]

    digests = [opened(item).fingerprint()["digest"] for item in found]

    assert len(set(digests)) == len(found)


def test_a_state_of_other_indices_is_refused_with_the_difference(tmp_path):
    dataset = saved(tmp_path / "ds")
    knobs = {"tokenize_fn": row_id, "num_workers": 0, "timeout_s": 240}
    with DataLoader(dataset.shuffle(seed=1), **knobs) as loader:
        state = loader.state_dict()

    with DataLoader(dataset.shuffle(seed=2), **knobs) as loader:
        with pytest.raises(SnapshotMismatchError, match="indices has other content"):
            loader.load_state_dict(state)


def test_a_file_that_was_cut_is_named_before_it_is_read(tmp_path):
    blocks = opened(saved(tmp_path / "ds"))
    reader = reader_of(blocks)
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
    blocks = opened(in_memory())
    reader = reader_of(blocks)

    with pytest.raises(FileChangedError, match=r"^AD303 Dataset: row 5 was another one before"):
        reader.read_rows([Overflow(0, 0, 5)], [3])
    reader.close()
