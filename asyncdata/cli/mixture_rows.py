"""The samples of a mixture, to look at them: which part each comes from, and its row there.

Which sample comes when is found by delivering the mixture, with the loader's own code. The row is then found in the
order of its part, as that of a single source.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from asyncdata.cli.rows import OrderView
from asyncdata.core.errors import ConfigError, SourceChangedError
from asyncdata.core.types import Position
from asyncdata.loader.config import BadRows, LoaderConfig
from asyncdata.loader.loader import DataLoader
from asyncdata.loader.mix_file import mix_of_file
from asyncdata.tokenization.functions.untokenized import RowFn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdata.cli.rows import InspectedRow
    from asyncdata.core.types import Sample

_BATCH = 256


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

    def loader(self, num_workers: int | None = 0) -> DataLoader:
        """A loader that delivers the mixture."""
        knobs = {**self._knobs, "num_workers": num_workers, "bad_rows": "skip"}
        return DataLoader(self._mix, tokenize_fn=self._default, **knobs)

    def first(self, num_samples: int) -> Iterator[InspectedRow]:
        """The rows of the first samples of the mixture, each after the rows of its part that yield no sample."""
        rows: dict[str, Iterator[InspectedRow]] = {}
        with self.loader() as loader:
            for sample in delivered(loader, num_samples):
                name, order = self._part_of(sample)
                rows.setdefault(name, _all_rows(order))
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
        return replace(order.of(sample.source), source_name=name, position=sample.position)

    def in_file(self, place: str) -> InspectedRow:
        """The row at ``FILE:LINE`` of one of the parts; see :meth:`~asyncdata.cli.rows.OrderView.in_file`."""
        for name, order in self._orders.items():
            if order.has_file(place):
                return replace(order.in_file(place), source_name=name, position=None)

        raise ConfigError(f"{place!r} is not in a file of a part; a row of a mixture is written FILE:LINE")

    def _part_of(self, sample: Sample) -> tuple[str, OrderView]:
        assert sample.source_name is not None
        return sample.source_name, self._orders[sample.source_name]


def _all_rows(order: OrderView) -> Iterator[InspectedRow]:
    """The rows of a part, epoch after epoch."""
    for epoch in count():
        yield from order.rows(Position(epoch))


def delivered(loader: DataLoader, num_samples: int | None = None) -> Iterator[Sample]:
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
            yield replace(row, source_name=name, position=sample.position)
            return

        yield replace(row, source_name=name, position=None)

    raise SourceChangedError(f"AD303 the files of part {name!r} changed while they were read")
