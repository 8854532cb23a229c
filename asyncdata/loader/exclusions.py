"""Rows that a run continues without: from what names a row to its key in the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from asyncdata.core.errors import ConfigError
from asyncdata.core.types import Sample, SourceLocation
from asyncdata.delivery.ledger import journal_key
from asyncdata.loader.row_places import RowPlaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

    from asyncdata.batching.packs import Pack
    from asyncdata.delivery.ledger import Ledger, Returned
    from asyncdata.loader.opened_source import OpenedPart

    Key = tuple[int, int]

__all__ = ("RowKeys",)

_GAP, _NOT_TRAINED = 2, -100


class RowKeys:
    """The keys of a loader's rows: the number of the file, and the row's byte offset there, or its number.

    :param parts: of a mixture, or the only source.
    """

    def __init__(self, parts: list[OpenedPart]) -> None:
        self._places = {part.name: RowPlaces(part.source.files) for part in parts}

    def __call__(self, rows: Iterable[Any]) -> set[Key]:
        """The keys of samples, groups of samples, locations, or rows as ``asyncdata sample --json`` prints them.

        A file that a source has twice is left out in both places.

        :raises ConfigError: AD485, naming the first that is no row of this loader.
        """
        return {key for row in rows for key in self._of(row)}

    def _of(self, row: Any) -> Iterator[Key]:
        if isinstance(row, list | tuple) and row:
            for sample in row:
                yield from self._of(sample)
            return

        name, path, byte_offset, row_number = _place_of(row)
        places = self._places.get(name)
        files = () if places is None else places.files(path)
        place = None if places is None else places.offset(byte_offset, row_number)
        if not files or not isinstance(place, int) or place < 0:
            of = f" of part {name!r}" if name else ""
            raise ConfigError(
                f"AD485 exclude() was given {row!r}, which is no row{of} of this loader's files: give samples that it "
                "delivered, their `source`, or the objects that `asyncdata sample --json` prints"
            )

        for file in files:
            yield journal_key(name, (file, place))

    def excluding(self, rows: Iterable[Any]) -> Callable[[Ledger], Ledger]:
        """The change of a ledger to one without these rows, also without the groups of them that were given back."""
        keys = self(rows)

        def is_out(item: Returned) -> bool:
            return item.group[0].source is not None and not keys.isdisjoint(self._of(item.group[0]))

        return lambda ledger: replace(
            ledger,
            excluded=ledger.excluded | keys,
            buffer=tuple(item for item in ledger.buffer if not is_out(item)),
        )

    def without(self, packs: Iterable[Pack], excluded: AbstractSet[Key]) -> list[Pack]:
        """The packs without the pieces of these rows; the references of the packs are samples.

        A pack of which nothing is left keeps two tokens that are not trained, so that no rank misses a batch.
        """
        left = [(pack, [piece for piece in pack if excluded.isdisjoint(self._of(piece[0]))]) for pack in packs]
        return [kept or [(_gap(piece[0]), 0, _GAP) for piece in pack[:1]] for pack, kept in left]


def _gap(sample: Sample) -> Sample:
    nothing = np.zeros(_GAP, np.int32)
    return Sample(tokens=nothing, labels=nothing + _NOT_TRAINED, position=sample.position, source=sample.source)


def _place_of(row: Any) -> tuple[str, Any, Any, Any]:
    """The part, the path, the byte offset, and the row number."""
    if isinstance(row, Mapping):
        return row.get("source") or "", row.get("path"), row.get("byte_offset"), row.get("row_number")

    source = row.source if isinstance(row, Sample) else row
    name = row.source_name if isinstance(row, Sample) else None
    if not isinstance(source, SourceLocation):
        return "", None, None, None

    return name or "", source.path, source.byte_offset, source.row_number
