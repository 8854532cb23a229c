"""Hugging Face datasets. In Arrow files or in memory: locates their rows, and splits their indices into blocks. In
streaming: their examples, and the state from which they resume.
"""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError, SourceChangedError, SourceError, redacted, safe_cause
from asyncdata.core.files import TemporaryFolder
from asyncdata.core.identity import FileRef, FileRefs, canonical, digest, digest_each
from asyncdata.core.messages import Block, Job, ReaderSpec
from asyncdata.core.settings import Settings, needing
from asyncdata.sources.arrow.dataset_reader import ArrowFile, ArrowReader, Part, write_arrow
from asyncdata.sources.arrow.rows_to_json import RowWriter
from asyncdata.sources.base import Files
from asyncdata.sources.files import FileChangedError, stamp
from asyncdata.sources.paths import is_saved_dataset
from asyncdata.sources.row_json import json_value, without_padding
from asyncdata.sources.stream import ExampleStream, Rows, StreamOrder, plain_state

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    import datasets


_ROOM = 4
_ROWS_PER_BATCH = 1000
_NUM_PLACES, _ROWS_PER_PLACE = 64, 16
_INDICES_PER_BATCH = 1 << 16
_KNOWN_REPLAYS = frozenset({"slice", "rename_columns", "select", "drop", "replace_schema_metadata", "combine_chunks"})


class HuggingFaceSource(Settings, frozen=True, forbid_unknown_fields=True):
    """Rows of a dataset as they are stored: no feature is decoded, and no format is applied.

    Workers read the Arrow files of the dataset directly. A dataset in memory, or one that is not stored in Arrow files
    completely (for example after ``add_column`` or ``cast``), is written once to a temporary Arrow file. The loader
    deletes it at its end; the file of a killed process is deleted when the next one is written. ``select``,
    ``shuffle``, ``filter``, ``sort``, and renamed or removed columns need no copy.

    :param dataset: a ``datasets.Dataset`` or ``DatasetDict``, a folder that ``save_to_disk`` wrote, or an argument
        of ``load_dataset``: a name on the hub, a local folder, or a format such as ``"parquet"`` with
        ``data_files``.
    :param split: the split to read; required if there are several. ``load_dataset`` also accepts ``"train[:10%]"``.
    :param revision: a branch, tag or commit on the hub.
    :param name: the dataset's configuration.
    :param data_files: the files, as for ``load_dataset``.
    :param columns: the columns of a row, in order; None: all.
    :param max_row_bytes: a row whose JSON is longer is a bad row.
    """

    dataset: Any
    split: str | None = None
    revision: str | None = None
    name: str | None = None
    data_files: Any = None
    columns: list[str] | None = None
    streaming: bool = False
    max_row_bytes: int = 64 * 1024 * 1024

    def __repr__(self) -> str:
        return redacted(super().__repr__())

    def open(self, block_bytes: int) -> DatasetBlocks | DatasetStream:
        """Load the dataset if necessary, and find its Arrow files.

        :raises SourceError: if it cannot be loaded, has no rows, or has a type that cannot be written as JSON.
        :raises ConfigError: for a split or column that does not exist, or if ``datasets`` is not installed.
        """
        with needing("HuggingFaceSource", "datasets"):
            import datasets

        found = self._load(datasets) if isinstance(self.dataset, str | os.PathLike) else self.dataset
        if isinstance(found, datasets.IterableDataset | datasets.IterableDatasetDict):
            return self._open_stream(found)

        if isinstance(found, datasets.DatasetDict):
            found = _only_split(found, self.split)
        if not isinstance(found, datasets.Dataset):
            raise ConfigError(f"a dataset is a Dataset, a DatasetDict, a folder or a name; got {type(found).__name__}")

        columns = _checked(found, self.columns)
        if not len(found):
            raise SourceError(f"AD201 no rows in {self._title(found)}")

        return DatasetBlocks(found, self._title(found), columns, block_bytes, self.max_row_bytes)

    def _load(self, datasets: Any) -> Any:
        path = os.path.expanduser(os.fspath(self.dataset))
        try:
            if is_saved_dataset(path):
                return datasets.load_from_disk(path)

            return datasets.load_dataset(
                path if os.path.exists(path) else os.fspath(self.dataset),
                self.name,
                split=self.split,
                revision=self.revision,
                data_files=self.data_files,
                streaming=self.streaming,
            )
        except Exception as error:  # datasets may raise any error for a bad file
            raise SourceError(f"AD125 cannot load the dataset {self.dataset}: {error}") from safe_cause(error)

    def _open_stream(self, dataset: Any) -> DatasetStream:
        found = _only_split(dataset, self.split) if isinstance(dataset, dict) else dataset
        return DatasetStream(found, self._title(found), self.columns, self.max_row_bytes)

    def _title(self, dataset: datasets.Dataset) -> str:
        """The name of the dataset in errors."""
        if isinstance(self.dataset, str | os.PathLike):
            name = os.fspath(self.dataset)
        else:
            name = dataset.info.dataset_name or type(dataset).__name__
        return f"{name}[{dataset.split}]" if dataset.split is not None else name


class DatasetBlocks(Files):
    """Ranges of a dataset's indices, of about equal size in bytes.

    :ivar files: the dataset itself, as it is called: a row's offset is its index.
    :ivar block_bytes: average bytes of a block's rows, estimated from the size of the Arrow files.
    :ivar room_bytes: of a slot, for a block.
    """

    def __init__(
        self, dataset: datasets.Dataset, title: str, columns: list[str], block_bytes: int, max_row_bytes: int
    ) -> None:
        self._folder = _temporary_folder()
        data = _data_parts(dataset, columns)
        indices = _index_parts(dataset, self._folder.path) if data else []
        data = data or [_copied(dataset, columns, self._folder.path)]
        paths = dict.fromkeys(part.path for part in (*data, *indices))
        stamps = {path: stamp(path) for path in paths}
        super().__init__(list(stamps.values()), max_row_bytes)
        self.extent = len(dataset)
        sizes = {path: found.num_bytes for path, found in stamps.items()}
        self.files: FileRefs = [FileRef(title, sum(sizes.values()))]
        settings = {"columns": columns, "data": data, "indices": indices, "sizes": sizes, "stamps": self.refs}
        self.reader = ReaderSpec(
            "asyncdata.sources.arrow.dataset_reader:ArrowReader", msgspec.to_builtins(settings), "huggingface-2"
        )
        stored = {part.path: part.num_stored for part in data}
        num_bytes = sum(sizes[path] for path in stored) // max(1, sum(stored.values()))
        row_bytes = max(1, num_bytes) + sum(len(name) + 4 for name in columns)
        self._block_rows = max(1, block_bytes // row_bytes)
        self.block_bytes = self._block_rows * row_bytes
        self.room_bytes = _ROOM * self.block_bytes
        self._digests: dict[str, Any] | None = None

    def close(self) -> None:
        """Remove the temporary files: a copy of what was in memory, and indices."""
        self._folder.close()

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return -(-self.extent // self._block_rows)

    def blocks(self, ids: Iterable[int]) -> list[Block]:
        """The index ranges of the blocks numbered ``ids``, sorted."""
        starts = np.sort(np.asarray(ids, dtype=np.int64)) * self._block_rows
        return [Block(0, start, min(start + self._block_rows, self.extent)) for start in starts.tolist()]

    def fingerprint(self) -> dict[str, Any]:
        """Digest of the rows, sampled, the size of their files, and all of the indices.

        The library's own fingerprint is not used, because it may differ in every session.
        """
        if self._digests is None:
            super().fingerprint()  # the files themselves, to be compared while they are read
            found = self._digest()
            try:
                self.check_unchanged()
            except SourceChangedError:
                return found  # of what the files are now: nothing to hold them against later

            self._digests = found
        return self._digests

    def _digest(self) -> dict[str, Any]:
        settings = self.reader.settings
        job = Job(
            files=self.files,
            tokenize=None,
            max_row_bytes=self.max_row_bytes,
            block_bytes=self.block_bytes,
            slack_bytes=0,
        )
        reader = ArrowReader(job, **settings | {"stamps": []})  # of whatever they are now
        num_bytes = sum(settings["sizes"].values())
        try:
            texts = reader.each(_sampled(self.extent))
            rows = digest_each(chain((str(self.extent), str(num_bytes)), texts))
            indices = blake2b(digest_size=16)
            for piece in reader.index_pieces():
                indices.update(piece)
        except FileChangedError as error:
            raise SourceChangedError(str(error)) from error
        finally:
            reader.close()
        listed = [
            ["rows", num_bytes, rows],
            ["indices", 8 * self.extent if settings["indices"] else 0, indices.hexdigest()],
        ]
        whole = digest(canonical(listed), canonical(settings["columns"]))
        return {"num_files": len(listed), "num_bytes": num_bytes, "digest": whole, "files": listed}


def _only_split(found: datasets.DatasetDict, split: str | None) -> Any:
    if split is None and len(found) == 1:
        return next(iter(found.values()))

    if split not in found:
        has = ", ".join(map(repr, found))
        raise ConfigError(f"{'a split is needed' if split is None else f'no split {split!r}'}: there are {has}")

    return found[split]


def _checked(dataset: datasets.Dataset, columns: list[str] | None) -> list[str]:
    """The columns to read."""
    if dataset.format["type"] == "custom":
        raise ConfigError(
            "the dataset has a transform, which is applied when Python looks at it, and never to stored rows; do its "
            "work in the tokenize function, or in map()"
        )

    names = dataset.column_names
    wanted = names if columns is None else columns
    missing = [name for name in wanted if name not in names]
    if missing or not wanted or len(set(wanted)) < len(wanted):
        raise ConfigError(f"columns must name some of {', '.join(names)}, each once; got {wanted}")

    try:
        RowWriter(dataset.data.schema, wanted)
    except TypeError as error:
        raise SourceError(f"AD124 {error}; leave it out with columns=[...]") from error

    return list(wanted)


def _data_parts(dataset: datasets.Dataset, columns: Sequence[str]) -> list[Part]:
    """The parts of files with the rows, without the index mapping; empty if the rows are not only in files."""
    parts = _mapped_parts(dataset.data, columns)
    return parts if sum(part.stop - part.start for part in parts) == len(dataset.data) else []


def _index_parts(dataset: datasets.Dataset, folder: str) -> list[Part]:
    """The parts of files with the index mapping; empty without one."""
    indices = dataset._indices  # noqa: SLF001 - nothing public tells it
    if indices is None:
        return []

    parts = _mapped_parts(indices, ["indices"])
    if sum(part.stop - part.start for part in parts) == len(dataset):
        return parts

    return [_written(os.path.join(folder, "indices.arrow"), indices.table.to_batches(max_chunksize=_INDICES_PER_BATCH))]


def _mapped_parts(table: Any, columns: Sequence[str]) -> list[Part]:
    """The parts of Arrow files that make up ``table``; empty if it has other parts, too."""
    from datasets.table import ConcatenationTable, MemoryMappedTable

    rows = table.blocks if isinstance(table, ConcatenationTable) else [[table]]
    if any(len(row) != 1 or not isinstance(row[0], MemoryMappedTable) for row in rows):
        return []

    parts = [_mapped_part(row[0], columns) for row in rows]
    return [] if None in parts else [part for part in parts if part is not None]


def _mapped_part(table: Any, columns: Sequence[str]) -> Part | None:
    """A file, and the rows that ``table`` uses; None if the rows are changed and not only selected."""
    with closing(ArrowFile(FileRef(table.path, 0))) as file:
        names = [(name, number) for number, name in enumerate(file.table.column_names)]
        num_stored = file.table.num_rows
    start, stop = 0, num_stored
    for action, args, kwargs in table.replays:
        if kwargs or action not in _KNOWN_REPLAYS:
            return None

        if action == "slice":
            start = min(stop, start + int(args[0]))  # a number of numpy's, sometimes
            stop = stop if args[1] is None else min(stop, start + int(args[1]))
        elif action == "rename_columns":
            names = [(name, number) for name, (_, number) in zip(args[0], names, strict=True)]
        elif action == "select":
            names = [entry for name in args[0] for entry in names if entry[0] == name]
        elif action == "drop":
            names = [entry for entry in names if entry[0] not in args[0]]
    numbers = dict(names)
    if not set(columns) <= set(numbers):
        return None

    return Part(os.path.abspath(table.path), start, stop, num_stored, [numbers[name] for name in columns])


def _temporary_folder() -> TemporaryFolder:
    try:
        return TemporaryFolder("copy")
    except OSError as error:
        raise SourceError(f"AD126 no folder can be made for a copy of the dataset: {error}; set TMPDIR") from error


def _copied(dataset: datasets.Dataset, columns: list[str], folder: str) -> Part:
    """Write the dataset's rows to a new file, in order."""
    tables: Any = dataset.select_columns(columns).with_format("arrow").iter(_ROWS_PER_BATCH)
    batches = (batch for table in tables for batch in table.combine_chunks().to_batches())
    return _written(os.path.join(folder, "rows.arrow"), batches)


def _written(path: str, batches: Iterable[Any]) -> Part:
    try:
        return write_arrow(path, batches)
    except OSError as error:
        raise SourceError(f"AD126 no copy of the dataset can be written to {path}: {error}; set TMPDIR") from error


def _sampled(num_rows: int) -> list[int]:
    """The rows to digest: all of a small dataset, otherwise both ends and some ranges between."""
    if num_rows <= (_NUM_PLACES + 2) * _ROWS_PER_PLACE:
        return list(range(num_rows))

    last = num_rows - _ROWS_PER_PLACE
    starts = [last * place // (_NUM_PLACES + 1) for place in range(_NUM_PLACES + 2)]
    return [row for start in starts for row in range(start, start + _ROWS_PER_PLACE)]


class DatasetStream(ExampleStream):
    """The examples of an ``IterableDataset``, as Python objects, with images and the like left undecoded.

    A state is ``{"number": index of the next example, "dataset": the dataset's state_dict()}``. If the dataset has no
    state, or JSON cannot store it, a restart skips the delivered examples from the start of the epoch.

    With shuffle, the dataset's shards have another order in each epoch: its ``set_epoch`` gets a number that depends
    on seed and epoch.

    :param columns: the columns of an example; None: all.
    :ivar is_padded: whether fields of structs were left out, as they are null.
    :raises ConfigError: for a dataset with a shuffle buffer: its ``state_dict()`` does not contain the rows in the
        buffer, so a restart would lose them.
    """

    def __init__(
        self, dataset: datasets.IterableDataset, title: str, columns: Sequence[str] | None, max_row_bytes: int
    ) -> None:
        super().__init__(title, max_row_bytes)
        self._pipeline = _pipeline(getattr(dataset, "_ex_iterable", None))
        if "BufferShuffledExamplesIterable" in str(self._pipeline):
            raise ConfigError(
                f"{title} was shuffled with a buffer, whose rows its state does not hold: they would be lost at a "
                "restart. Take .shuffle() away; shuffle=True mixes the rows of each window"
            )

        dataset = dataset if columns is None else dataset.select_columns(list(columns))
        self._dataset = _undecoded(dataset)
        self._jsons = {name: kind for name, kind in (self._dataset.features or {}).items() if "Json(" in repr(kind)}
        self._is_of_arrow = "ArrowExamplesIterable" in str(self._pipeline)
        self.is_padded = False

    def read(
        self, order: StreamOrder, epoch: int, state: dict[str, Any] | None, check: Callable[[], object]
    ) -> Generator[Rows]:
        dataset = self._dataset.with_format(None)  # a dataset object has one place and one epoch: this is ours
        dataset.set_epoch(order.key(epoch))
        state = {"number": 0, "dataset": None} if state is None else state
        if state["dataset"] is not None:
            dataset.load_state_dict(state["dataset"])
        yield from self.rows(iter(dataset), state["number"], state, partial(_state_now, dataset), check)

    def _text(self, example: Any, number: int) -> bytes:
        """The example as JSON, with the values of ``Json()``, and without the nulls that Arrow has added."""
        example = {name: _parsed(value, self._jsons.get(name)) for name, value in example.items()}
        text = super()._text(example, number)
        if not self._is_of_arrow or b":null" not in text:
            return text

        found = super()._text({name: without_padding(value) for name, value in example.items()}, number)
        self.is_padded |= found != text
        return found

    def fingerprint(self) -> dict[str, Any]:
        """The description of the dataset: its name, features, shards and transformations.

        The content is not read; when a run resumes, the first row is compared.
        """
        info, features = self._dataset.info, self._dataset.features
        what = {
            "name": [info.dataset_name, info.config_name, str(info.version), str(self._dataset.split)],
            "features": repr(sorted(features.items())) if features is not None else None,
            "num_shards": self._dataset.num_shards,
            "pipeline": self._pipeline,
        }
        return {"digest": digest(canonical(what)), **what}


def _state_now(dataset: datasets.IterableDataset, number: int) -> dict[str, Any] | None:
    state_dict = getattr(dataset, "state_dict", None)  # older releases have none
    state = plain_state(state_dict()) if state_dict is not None else None
    return None if state is None else {"number": number, "dataset": state}


def _pipeline(node: Any) -> list[Any]:
    """The class names of the transformations of an example, from the last to the first."""
    steps: list[Any] = []
    while node is not None:
        steps.append(type(node).__name__)
        several = getattr(node, "ex_iterables", None)
        if several is not None:
            steps.append([_pipeline(inner) for inner in several])
        node = getattr(node, "ex_iterable", None)
    return steps


def _undecoded(dataset: datasets.IterableDataset) -> datasets.IterableDataset:
    """The dataset with images, audio and the like as they are stored: path and bytes."""
    features = dataset.features
    decode = getattr(dataset, "decode", None)
    if features is None or decode is None:
        return dataset

    undecoded: datasets.IterableDataset = decode(False)
    return undecoded


def _parsed(value: Any, feature: Any) -> Any:
    """A value that is stored by ``feature``, with the values of JSON texts in it."""
    if type(feature).__name__ == "Json":  # older releases have none
        return json_value(value)

    if isinstance(value, dict) and isinstance(feature, dict):
        return {key: _parsed(item, feature.get(key)) for key, item in value.items()}

    inner = getattr(feature, "feature", None)
    return [_parsed(item, inner) for item in value] if inner is not None and isinstance(value, list) else value
