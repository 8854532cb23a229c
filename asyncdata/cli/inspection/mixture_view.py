"""The samples of a mixture, to inspect them: which part each comes from, and its row there.

Which sample comes when is found by delivering the mixture, with the loader's own code. The row is then read in the
order of its part, which is that of a single source.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.cli.inspection.find_rows import has_file, row_at, row_in_file
from asyncdata.cli.inspection.window_view import InspectedRow, OpenedOrder
from asyncdata.core.errors import ConfigError, SourceChangedError
from asyncdata.core.types import Position
from asyncdata.loader.config import BadRows, LoaderConfig
from asyncdata.loader.loader import DataLoader
from asyncdata.loader.mix_file import mix_of_file
from asyncdata.tokenization.functions.untokenized import RowFn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import Self

    from asyncdata.core.types import Sample, SourceLocation

__all__ = ("MixtureView", "PlacedRow")

_BATCH = 256


class PlacedRow(NamedTuple):
    """A row, its part, and its place in the mixture.

    :ivar source_name: the part; empty if there is no mixture.
    :ivar position: None for a row of a mixture that was looked up by its place in the data.
    :ivar function: how it is tokenized; None if it is not.
    """

    source_name: str
    position: Position | None
    row: InspectedRow
    function: Any


def _inspected_mix(path: str) -> Any:
    """The mixture of a file, whose bad rows are passed over: it is looked at, and nothing is to be written."""
    mix = mix_of_file(path)
    for leaf in mix.leaves():
        leaf.part.bad_rows = BadRows(policy="skip", max=None)
    return mix


class MixtureView:
    """A mixture, opened to inspect single rows. Close it, or use ``with``.

    :param path: of the file that describes it.
    :param tokenize_fn: for parts without one; None: their rows are not tokenized, and each counts as a sample.
    :param knobs: of the loader on which the order depends.
    """

    def __init__(self, path: str, tokenize_fn: Any, knobs: dict[str, Any]) -> None:
        self._mix = _inspected_mix(path)
        self._knobs = knobs
        self._parts = {leaf.name: leaf.part for leaf in self._mix.leaves()}
        self._given = tokenize_fn
        needs_one = any(part.tokenize_fn is None for part in self._parts.values())
        self._default = RowFn() if tokenize_fn is None and needs_one else tokenize_fn
        self._opened: dict[str, OpenedOrder] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def function_of(self, name: str) -> Any:
        """How the rows of a part are tokenized; None if they are not."""
        own = self._parts[name].tokenize_fn
        return self._given if own is None else own

    def loader(self, num_workers: int | None = 0) -> DataLoader:
        """A loader that delivers the mixture; bad rows are passed over."""
        knobs = {**self._knobs, "num_workers": num_workers, "bad_rows": "skip"}
        return DataLoader(self._mix, tokenize_fn=self._default, **knobs)

    def first(self, num_samples: int) -> Iterator[PlacedRow]:
        """The rows of the first samples of the mixture, each after the rows of its part that yield no sample."""
        rows: dict[str, Iterator[InspectedRow]] = {}
        with self.loader() as loader:
            for sample in _delivered(loader, num_samples):
                name = _part_of(sample)
                if name not in rows:
                    rows[name] = self._rows_of(name)
                yield from self._until(sample, rows[name])

    def _until(self, sample: Sample, rows: Iterator[InspectedRow]) -> Iterator[PlacedRow]:
        """The rows of a part up to that of ``sample``."""
        assert sample.position is not None and sample.source is not None
        name, place, passed = _part_of(sample), sample.position, []
        for row in rows:
            passed.append(row)
            if _place(row.location) == _place(sample.source):
                break
        else:
            raise SourceChangedError(f"AD303 the files of part {name!r} changed while they were read")

        for number, row in enumerate(passed, place.row + 1 - len(passed)):
            yield PlacedRow(name, Position(place.epoch, place.window, number), row, self.function_of(name))

    def at(self, position: Position, num_workers: int | None = 0) -> PlacedRow:
        """The row of the sample at a position of the mixture; all samples before it are delivered.

        :raises ConfigError: if no sample is there.
        """
        with self.loader(num_workers) as loader:
            sample = next(sample for sample in _delivered(loader) if _has_reached(sample, position))
        if sample.position != position:
            raise ConfigError(
                f"there is no sample at {position}: the next one is at {sample.position}; rows between yield none"
            )

        return self.row_of(sample)

    def row_of(self, sample: Sample) -> PlacedRow:
        """The row of a sample."""
        name = _part_of(sample)
        assert sample.source is not None
        row = row_at(self._order_of(name), sample.source)
        return PlacedRow(name, sample.position, row, self.function_of(name))

    def row_in_file(self, place: str) -> PlacedRow:
        """The row at ``FILE:LINE`` of one of the parts; see :func:`~asyncdata.cli.inspection.find_rows.row_in_file`."""
        for name in self._parts:
            if has_file(self._order_of(name), place):
                return PlacedRow(name, None, row_in_file(self._order_of(name), place), self.function_of(name))

        raise ConfigError(f"{place!r} is not in a file of a part; a row of a mixture is written FILE:LINE")

    def _rows_of(self, name: str) -> Iterator[InspectedRow]:
        """All rows of a part, epoch after epoch."""
        for epoch in count():
            for view in self._order_of(name).windows(epoch):
                yield from map(view.inspect, range(view.num_rows))

    def _order_of(self, name: str) -> OpenedOrder:
        if name not in self._opened:
            part = self._parts[name]
            own = part.config(LoaderConfig.of(self._knobs), name)
            opened = OpenedOrder(part.source, self.function_of(name), seed=own.seed, shuffle=own.shuffle)
            self._opened[name] = self._stack.enter_context(opened)
        return self._opened[name]


def _delivered(loader: DataLoader, num_samples: int | None = None) -> Iterator[Sample]:
    """The next samples, in order; without a number, endless."""
    left = num_samples
    while left is None or left > 0:
        found = loader.get_next_batch(_BATCH if left is None else min(left, _BATCH))
        yield from found
        left = None if left is None else left - len(found)


def _has_reached(sample: Sample, position: Position) -> bool:
    assert sample.position is not None
    return sample.position >= position


def _part_of(sample: Sample) -> str:
    assert sample.source_name is not None
    return sample.source_name


def _place(location: SourceLocation) -> tuple[str, int, int | None]:
    return location.path, location.byte_offset, location.row_number
