"""The rows of the order D, one by one: where each lies, what it is, and the sample that it becomes.

They come from a loader with the same arguments, whose tokenize function keeps every row as it is. So they are shown as
a run delivers them, also those that it drops.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain, count, islice, takewhile
from typing import Any, Self
from uuid import uuid4

import msgspec
import numpy as np

from asyncdata.batching.planned import PLANNED_PACKINGS
from asyncdata.core.errors import BadRowError, ConfigError, NoSamplesError, SnapshotError, SourceChangedError
from asyncdata.core.messages import RowError
from asyncdata.core.types import Position, Sample, SampleRange, SourceLocation
from asyncdata.delivery.chunk import Chunk
from asyncdata.loader.config import BadRows, LoaderConfig
from asyncdata.loader.loader import DataLoader
from asyncdata.loader.mix import mix_of_file
from asyncdata.loader.recognised_dialects import with_dialects
from asyncdata.order.order import Order
from asyncdata.order.shuffle import RowShuffle, Shuffle
from asyncdata.sources.base import Blocks, Source
from asyncdata.sources.resolve import described
from asyncdata.tokenization.base import BatchTokenizer, fingerprints_of, has_fingerprint, open_tokenize_fn, resolved
from asyncdata.tokenization.column_writer import ColumnWriter
from asyncdata.tokenization.functions.untokenized import RowFn
from asyncdata.tokenization.rows import RowFault

_FIRST = Position()
_BATCH = 256
_BOM_BYTES = 3
_PIECE_BYTES = 1 << 20
_ALONE: dict[str, Any] = {
    **{"num_workers": 0, "epochs": None, "n_samples_per_prompt": 1, "ranks": {}, "executor": None, "outcomes": None},
    **{"telemetry": {}, "progress": "none"},
}
"""Knobs on which D does not depend."""


class InspectedRow(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A row, and what becomes of it, which is found when it is asked for.

    :ivar position: None for a row of a mixture that was looked up by its place in the data.
    :ivar raw: its bytes; empty for a row longer than ``max_row_bytes``.
    :ivar function: how it is tokenized; None if it is not.
    :ivar tokenize: the same, opened.
    :ivar refusal: why the source does not give its text; None if it does.
    :ivar source_name: the part of a mixture; empty if there is no mixture.
    """

    position: Position | None
    location: SourceLocation
    raw: bytes
    function: Any = None
    tokenize: Any = None
    refusal: RowError | None = None
    source_name: str = ""

    @cached_property
    def _chunk(self) -> Chunk | None:
        return None if self.tokenize is None or self.refusal is not None else _tokenized(self.tokenize, self.raw)

    @cached_property
    def sample(self) -> Sample | None:
        """None if the row yields none, or if there is no tokenize function."""
        chunk = self._chunk
        return SampleRange(chunk, 0, 1, 0, 0, 1).samples()[0] if chunk is not None and chunk.num_samples else None

    @property
    def thumbnails(self) -> list[tuple[str, str]]:
        """Captions of its pictures, and ``data:`` addresses of small copies."""
        made = getattr(self.tokenize, "thumbnails", None)
        return [] if made is None or self.sample is None else made(self.raw)

    @property
    def dropped(self) -> str:
        """Why it yields no sample, or an empty string."""
        return "" if self._chunk is None else next((drop.reason for drop in self._chunk.drops), "")

    @property
    def notes(self) -> list[str]:
        """What is noted of its sample."""
        return [] if self._chunk is None else [note.name for note in self._chunk.notes]

    @property
    def unread(self) -> dict[str, str]:
        """The keys that the tokenize function does not read, each with the beginning of its value."""
        return self.tokenize.rest(self.raw) if hasattr(self.tokenize, "rest") and self.refusal is None else {}

    @property
    def error(self) -> RowError | None:
        """What is wrong with the row; None for a good one."""
        return self.refusal if self._chunk is None else next(iter(self._chunk.errors), None)

    @property
    def fault(self) -> str | None:
        """The code and the reason of the error, in one text."""
        return None if self.error is None else f"{self.error.code} {self.error.reason}"


def _no_row(position: Position, why: str) -> ConfigError:
    return ConfigError(f"there is no row at {position}: {why}; windows and rows are counted from 0")


def _tokenized(tokenize: BatchTokenizer, raw: bytes) -> Chunk:
    """What a worker would make of a row."""
    out = ColumnWriter()
    try:
        tokenize([raw], out)
        if out.has_kept(0) and (whole := getattr(tokenize, "whole", None)):  # it was only counted
            out = ColumnWriter()
            whole([raw], out)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        out = ColumnWriter()
        out.fail(0, RowFault("AD421", f"the tokenizer raised {error!r}", raw))
    nowhere: Any = None  # nobody asks the chunk for the row's place
    return Chunk(out.finish(1, 0.0), Position(), 1, nowhere, ends_epoch=False)


class OrderView:
    """The order D of a loader with these arguments. Each iteration over rows opens a loader of its own.

    :param tokenize_fn: None to look at rows without tokenizing them.
    :param packing: changes D where packs are planned.
    :param knobs: of the loader, such as ``seed`` and ``shuffle``.
    :raises ConfigError: for a setting that cannot work.
    """

    def __init__(
        self,
        source: Source | str | list[str],
        tokenize_fn: Any = None,
        *,
        packing: Any = None,
        length_grouping: Any = None,
        **knobs: Any,
    ) -> None:
        self._source, self._config = described(source), LoaderConfig.of({**knobs, **_ALONE})
        self._function = None if tokenize_fn is None else resolved(with_dialects(self._source, tokenize_fn))
        self._tokenize = None if self._function is None else open_tokenize_fn(self._function)
        packs = {"packing": packing, "length_grouping": length_grouping}
        has_packs = packing is not None or length_grouping is not None
        self._is_planned = has_packs and (self._config.plan_packs or isinstance(packing, PLANNED_PACKINGS))
        order = self._config.order
        needs_samples = self._is_planned or (isinstance(order, RowShuffle) and order.only_kept)
        if needs_samples and self._function is None:
            raise ConfigError("this order leaves out rows that yield no sample: say how rows are tokenized")

        keeper = _Keeper(self._function, self._tokenize) if needs_samples else _Keeper()
        bad_rows = BadRows(policy="skip", max=None) if needs_samples else "raise"
        self._knobs = {**knobs, **_ALONE, "bad_rows": bad_rows, "tokenize_fn": keeper}
        if self._is_planned:
            self._knobs |= packs
        elif has_packs:
            DataLoader(self._source, **self._knobs, **packs).close()  # refused if they cannot work; D is without them

    def rows(self, start: Position = _FIRST) -> Iterator[InspectedRow]:
        """The rows of an epoch, from ``start`` on.

        :raises ConfigError: if there is no such position.
        :raises SourceError: for files that cannot be read; all of them are named.
        """
        for position, found in self._found(start):
            yield self._row(position, found)

    def _found(self, start: Position) -> Iterator[tuple[Position, Sample | BadRowError]]:
        """As :meth:`rows`: the samples in which the rows come, and errors of rows that the source refuses."""
        num_rows = 0
        with DataLoader(self._source, **self._knobs) as loader:
            try:
                if not self._is_planned and start != _FIRST:
                    _go_to(loader, start)
                for found in _in_packs(loader, start) if self._is_planned else _one_by_one(loader):
                    position = found.position if isinstance(found, Sample) else loader.position()
                    if position is None or position.epoch != start.epoch:
                        return
                    yield position, found
                    num_rows += 1
            except SnapshotError as error:
                why = re.search(r", and (.*?)\. It is damaged", str(error))
                raise _no_row(start, why[1] if why else str(error)) from error
            except NoSamplesError as error:
                if num_rows:  # the epoch ends with a bad row
                    return

                if start != _FIRST:
                    raise _no_row(start, "all rows of the epoch are before it") from error

                raise NoSamplesError("AD202 the files have no row: every line is blank") from error

    def _row(self, position: Position, found: Sample | BadRowError) -> InspectedRow:
        known: dict[str, Any] = {"position": position, "function": self._function}
        if isinstance(found, BadRowError):
            location = SourceLocation(found.path, found.byte_offset, -1, found.row_number, found.line)
            return InspectedRow(**known, location=location, raw=b"", refusal=RowError(0, found.code, found.reason))

        assert found.source is not None
        raw = found.prompt.encode("latin-1")
        return InspectedRow(**known, location=found.source, raw=raw, tokenize=self._tokenize)

    def window(self, start: Position) -> Iterator[InspectedRow]:
        """The rows of a window, from ``start`` on."""
        return takewhile(lambda row: row.position is not None and row.position.window == start.window, self.rows(start))

    def at(self, position: Position) -> InspectedRow:
        """The row at a position.

        :raises ConfigError: if there is none.
        """
        row = next(self.rows(position), None)
        if row is None or row.position != position:
            raise _no_row(position, f"the window has {position.row} rows")

        return row

    def numbered(self, number: int) -> InspectedRow:
        """Row ``number`` of the run, counted from 0 across epochs. Where no row is dropped, it is that sample's row.

        Costs a read of every window before it; of whole epochs before it, only the first is read.
        """
        num_rows = 0
        for num_rows, found in enumerate(self._found(_FIRST), 1):
            if num_rows > number:
                return self._row(*found)

        epoch, left = divmod(number, num_rows)
        for found in islice(self._found(Position(epoch)), left, None):
            return self._row(*found)

        raise SourceChangedError("AD303 the files changed while they were read; try again when nothing writes to them")

    # By the place in the data

    def in_file(self, place: str) -> InspectedRow:
        """The row at ``LINE``, or ``FILE:LINE``: in files of lines counted from 1, else the row's number from 0.

        :raises ConfigError: if there is none.
        """
        path, colon, number = place.rpartition(":")
        if not number.isdecimal():
            raise ConfigError(f"a row's location is written LINE or FILE:LINE, as in data.jsonl:12; got {place!r}")

        with closing(self._opened()) as files:
            paths = [file.path for file in files.files]
            file_id = _file_id(paths, path) if colon else _only_file(paths, place)
            found = self._find(files, file_id, _offsets_of(files, file_id, int(number)))
        if found is None:
            raise ConfigError(f"there is no row at {paths[file_id]}:{number}: it is blank, beyond the end, or left out")

        return found

    def of(self, location: SourceLocation) -> InspectedRow:
        """The row of a delivered sample.

        :raises SourceChangedError: if it is not there any more.
        """
        offset = location.byte_offset if location.row_number is None else location.row_number
        with closing(self._opened()) as files:
            found = self._find(files, _file_id([file.path for file in files.files], location.path), [offset])
        if found is None:
            raise SourceChangedError(f"AD303 {location.path} changed while it was read: its row at {offset} is gone")

        return found

    def has_file(self, place: str) -> bool:
        """Whether the file of ``FILE:LINE`` is one of the data."""
        path, colon, _ = place.rpartition(":")
        with closing(self._opened()) as files:
            return bool(colon) and bool(_named([file.path for file in files.files], path))

    def _opened(self) -> Blocks:
        order = self._config.order
        return self._source.open(Shuffle().block_bytes if isinstance(order, RowShuffle) else order.block_bytes)

    def _find(self, files: Blocks, file_id: int, offsets: list[int]) -> InspectedRow | None:
        """The row at one of these offsets of a file, or with one of these numbers, in epoch 0."""
        path, has_numbers = files.files[file_id].path, _has_numbers(files, file_id)
        window = self._window_of(files, file_id, offsets[0]) if offsets else None
        for row in () if not offsets else self.rows() if window is None else self.window(Position(0, window)):
            at = row.location.row_number if has_numbers else row.location.byte_offset
            if row.location.path == path and at in offsets:
                return row

        return None

    def _window_of(self, files: Blocks, file_id: int, offset: int) -> int | None:
        """The window with a row; None if it is not known before all are read. Blocks are in the order of the files."""
        shuffle = self._config.order
        if isinstance(shuffle, RowShuffle) or self._is_planned or not files.num_blocks or _is_array(files, file_id):
            return None

        def end(number: int) -> tuple[int, int]:
            (block,) = files.blocks([number])
            return block.file_id, block.stop

        wanted = bisect_right(range(files.num_blocks), (file_id, offset), key=end)
        order = Order(shuffle, self._config.seed, files.num_blocks, files.block_bytes)
        return next((window for window in range(order.num_windows) if wanted in order.blocks(0, window)), None)


class _Keeper:
    """A tokenize function that keeps the text of every row, as the prompt of a sample.

    :param tokenize: of an order that depends on samples: leaves out the rows that yield none here, and each sample has
        as many tokens as here.
    """

    def __init__(self, function: Any = None, tokenize: BatchTokenizer | None = None) -> None:
        self._function, self._tokenize = function, tokenize

    def resolve(self) -> Self:
        return self

    def fingerprints(self) -> dict[str, str]:
        """The function's, on which the row index depends, too."""
        is_known = self._function is not None and has_fingerprint(self._function)
        return fingerprints_of(self._function) if is_known else {"tokenize_fn": uuid4().hex}

    def settings(self) -> dict[str, Any]:
        return {}

    def open(self) -> Self:
        return self

    def __call__(self, rows: Sequence[bytes | memoryview], out: ColumnWriter) -> None:
        for number, row in enumerate(rows):
            raw, num_tokens = bytes(row), 0
            if self._tokenize is not None:
                chunk = _tokenized(self._tokenize, raw)
                if not chunk.num_samples:
                    out.drop(number, "no sample")
                    continue

                num_tokens = chunk.num_tokens(0, 1)
            out.keep(number, array("i", bytes(4 * num_tokens)), prompt_text=raw.decode("latin-1").encode())


def _go_to(loader: DataLoader[Any, Any], position: Position) -> None:
    state = loader.state_dict()
    loader.load_state_dict({**state, "position": list(msgspec.structs.astuple(position)), "canaries": []})


def _one_by_one(loader: DataLoader[Any, Any]) -> Iterator[Sample | BadRowError]:
    """The samples from where the loader is, without an end, and the rows that the source refuses."""
    size = _BATCH
    while True:
        try:
            yield from loader.get_next_batch(size)
        except BadRowError as error:
            if size == 1:
                place = loader.position()
                yield error
                _go_to(loader, msgspec.structs.replace(place, row=place.row + 1))
            size = 1  # so that the samples before it are delivered


def _in_packs(loader: DataLoader[Any, Any], start: Position) -> Iterator[Sample]:
    """The samples of planned packs, or of groups of like length, in an epoch, from ``start`` on."""
    loader.set_epoch(start.epoch)
    for batch in loader:
        for item in batch:
            samples = [item] if isinstance(item, Sample) else [document.sample for document in item]
            yield from (sample for sample in samples if sample.position is not None and sample.position >= start)


def _file_id(paths: list[str], path: str) -> int:
    named = _named(paths, path)
    if len(named) != 1:
        why = "several files of the data have that name" if named else "it is not a file of the data"
        raise ConfigError(f"{path}: {why}; give its path as the data has it, such as {paths[0]}")

    return named[0]


def _named(paths: list[str], path: str) -> list[int]:
    """The files of this path, or else of this name."""
    wanted = os.path.abspath(path)
    named = [number for number, each in enumerate(paths) if os.path.abspath(each) == wanted]
    return named or [number for number, each in enumerate(paths) if os.path.basename(each) == path]


def _only_file(paths: list[str], place: str) -> int:
    if len(paths) > 1:
        raise ConfigError(f"the data has {len(paths)} files; say which: {paths[0]}:{place}")

    return 0


def _has_numbers(files: Blocks, file_id: int) -> bool:
    """Whether a file's rows are identified by their numbers, as in Parquet, arrays and streams, and not by lines."""
    return files.num_blocks == 0 or _is_array(files, file_id) or files.location(file_id, 0, 0).row_number is not None


def _is_array(files: Blocks, file_id: int) -> bool:
    """Whether a file is a JSON array whose elements are read by their bytes, but have numbers too."""
    return files.num_blocks > 0 and bool(files.are_arrays) and files.are_arrays[file_id]


def _offsets_of(files: Blocks, file_id: int, number: int) -> list[int]:
    """Where row ``number`` of a file may begin: its line, or, where rows have numbers, the number itself."""
    if _has_numbers(files, file_id):
        return [number]

    start = _line_start(files.files[file_id].path, number)
    return [] if start is None else [start] if start else [0, _BOM_BYTES]


def _line_start(path: str, line: int) -> int | None:
    """The offset of a line, counted from 1; None beyond the end. Reads the file up to there."""
    left, offset = line - 1, 0
    if left < 0:
        return None

    with open(path, "rb", buffering=0) as file:
        while left and (piece := file.read(_PIECE_BYTES)):
            ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n"))
            if len(ends) >= left:
                return offset + int(ends[left - 1]) + 1

            left -= len(ends)
            offset += len(piece)
    return None if left else offset


# Of a mixture: which sample comes when is found by delivering it, with the loader's own code. A row is then found in
# the order of its part, as in the order of a single source.


class MixtureView:
    """A mixture, to look at single rows. Its bad rows are passed over, and nothing is written.

    :param path: of the file that describes it.
    :param tokenize_fn: for parts without one; None: their rows are not tokenized, and each counts as a sample.
    :param knobs: of the loader on which the order depends.
    """

    def __init__(self, path: str, tokenize_fn: Any, knobs: dict[str, Any]) -> None:
        self._mix, self._knobs = mix_of_file(path), knobs
        parts: dict[str, Any] = {leaf.name: leaf.part for leaf in self._mix.leaves()}
        self._orders: dict[str, OrderView] = {}
        for name, part in parts.items():
            part.bad_rows = BadRows(policy="skip", max=None)
            own = part.config(LoaderConfig.of(knobs), name)
            function = tokenize_fn if part.tokenize_fn is None else part.tokenize_fn
            self._orders[name] = OrderView(part.source, function, seed=own.seed, shuffle=own.shuffle)
        needs_one = any(part.tokenize_fn is None for part in parts.values())
        self._default = RowFn() if tokenize_fn is None and needs_one else tokenize_fn

    def loader(self, num_workers: int | None = 0) -> DataLoader[Any, Any]:
        """A loader that delivers the mixture."""
        knobs = {**self._knobs, "num_workers": num_workers, "bad_rows": "skip"}
        return DataLoader(self._mix, tokenize_fn=self._default, **knobs)

    def first(self, num_samples: int) -> Iterator[InspectedRow]:
        """The rows of the first samples of the mixture, each after the rows of its part that yield no sample."""
        rows: dict[str, Iterator[InspectedRow]] = {}
        with self.loader() as loader:
            for sample in delivered(loader, num_samples):
                name, order = self._part_of(sample)
                rows.setdefault(name, chain.from_iterable(map(order.rows, map(Position, count()))))
                yield from _until(sample, name, rows[name])

    def at(self, position: Position, num_workers: int | None = 0) -> InspectedRow:
        """The row of the sample at a position of the mixture; all samples before it are delivered.

        :raises ConfigError: if no sample is there.
        """
        with self.loader(num_workers) as loader:
            found = delivered(loader)
            sample = next(each for each in found if each.position is not None and each.position >= position)
        if sample.position != position:
            raise ConfigError(f"there is no sample at {position}: the next one is at {sample.position}")

        return self.row_of(sample)

    def row_of(self, sample: Sample) -> InspectedRow:
        """The row of a sample."""
        name, order = self._part_of(sample)
        assert sample.source is not None
        return msgspec.structs.replace(order.of(sample.source), source_name=name, position=sample.position)

    def in_file(self, place: str) -> InspectedRow:
        """The row at ``FILE:LINE`` of one of the parts; see :meth:`~asyncdata.cli.rows.OrderView.in_file`."""
        for name, order in self._orders.items():
            if order.has_file(place):
                return msgspec.structs.replace(order.in_file(place), source_name=name, position=None)

        raise ConfigError(f"{place!r} is not in a file of a part; a row of a mixture is written FILE:LINE")

    def _part_of(self, sample: Sample) -> tuple[str, OrderView]:
        assert sample.source_name is not None
        return sample.source_name, self._orders[sample.source_name]


def delivered(loader: DataLoader[Any, Any], num_samples: int | None = None) -> Iterator[Sample]:
    """The next samples, in order; without a number, endless."""
    left = num_samples
    while left is None or left > 0:
        found = loader.get_next_batch(_BATCH if left is None else min(left, _BATCH))
        yield from found
        left = None if left is None else left - len(found)


def _until(sample: Sample, name: str, rows: Iterator[InspectedRow]) -> Iterator[InspectedRow]:
    """The rows of a part up to the row of ``sample``; rows before it yield no sample, so they have no position."""
    for row in rows:
        if row.location == sample.source:
            yield msgspec.structs.replace(row, source_name=name, position=sample.position)
            return

        yield msgspec.structs.replace(row, source_name=name, position=None)

    raise SourceChangedError(f"AD303 the files of part {name!r} changed while they were read")
