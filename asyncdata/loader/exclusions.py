"""Rows that a run continues without: from what names a row to its key in the state."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.types import Group, Sample, SourceLocation
from asyncdata.delivery.ledger import GroupFile, RowKey, journal_key

if TYPE_CHECKING:
    from asyncdata.batching.packs import Pack
    from asyncdata.core.identity import FileRefs
    from asyncdata.loader.opened_source import OpenedPart
    from asyncdata.sources.base import Blocks


_BOM = b"\xef\xbb\xbf"


class RowPlaces:
    """The places of a source's rows. A source may have a file several times, and one that grows gets new files.

    :param files: that the source is going to have; None: those that it has.
    """

    def __init__(self, source: Blocks, files: FileRefs | None = None) -> None:
        self._source, self._files = source, files
        self._counts_rows = source.location(0, 5, 1).byte_offset != 5  # rows are located by their numbers
        self._refs: FileRefs | None = None
        self._numbers: dict[str, list[int]] = {}
        self._repeats: list[list[int]] = []

    def files(self, path: Any) -> Sequence[int]:
        """The numbers of the file with this path, ascending; none, if the source has no such file."""
        refs = self._source.files if self._files is None else self._files
        if self._refs is not refs:
            numbers: dict[str, list[int]] = {}
            for number, file in enumerate(refs):
                numbers.setdefault(file.path, []).append(number)
            self._repeats = [found for found in numbers.values() if len(found) > 1]
            self._numbers, self._refs = numbers, refs  # in this order, as another thread may read them
        return self._numbers.get(path, ())

    def repeats(self) -> list[list[int]]:
        """The numbers of each file that the source has several times."""
        self.files("")
        return self._repeats

    def offset(self, byte_offset: Any, row_number: Any) -> Any:
        """The one by which the source locates its rows."""
        return row_number if self._counts_rows else byte_offset

    def has_row(self, file: int, place: int) -> bool:
        """Whether a row begins there; True where a store, or all of the file, would have to be read to know it."""
        source, ref = self._source, self._source.files[file]
        if self._counts_rows:
            numbers = range(getattr(source, "num_blocks", 0))
            last = bisect_right(numbers, file, key=lambda number: source.blocks([number])[0].file_id)
            return last == 0 or place < source.blocks([last - 1])[0].stop

        is_array = any(source.are_arrays[file : file + 1])
        if ref.pin is not None or is_array or source.reader.tag == "python-lines":  # these may follow white space
            return place < ref.num_bytes

        with suppress(OSError), open(ref.path, "rb") as opened:
            opened.seek(max(0, place - len(_BOM)))
            before, first = opened.read(min(place, len(_BOM))), opened.read(1)
            return first not in b"\n" and (before == _BOM or before[-1:] in b"\n")
        return True


_GAP, _NOT_TRAINED = 2, -100


class RowKeys:
    """The keys of a loader's rows: the number of the file, and the row's byte offset there, or its number.

    :param parts: of a mixture, or the only source.
    :param files: of parts, if it is not those that they have now.
    """

    def __init__(self, parts: Sequence[OpenedPart], files: Mapping[str, FileRefs] | None = None) -> None:
        self._places = {part.name: RowPlaces(part.files, (files or {}).get(part.name)) for part in parts}

    def __call__(self, rows: Iterable[Any]) -> dict[RowKey, str]:
        """The keys of samples, groups of samples, locations, or rows as ``asyncdata sample --json`` prints them.

        A file that a source has twice is left out in both places.

        :return: the part of each.
        :raises ConfigError: AD485, naming the first that is no row of this loader.
        """
        return {key: name for row in rows for name, key in self._of(row)}

    def _of(self, row: Any) -> Iterator[tuple[str, RowKey]]:
        if isinstance(row, list | tuple) and row:
            for sample in row:
                yield from self._of(sample)
            return

        found = self._found(row)
        if not found or not (isinstance(row, Sample) or self._begins(*found[0])):
            raise ConfigError(
                f"AD485 exclude() was given {row!r}, and no row of this loader's files begins there: give samples that "
                "it delivered, their `source`, or the objects that `asyncdata sample --json` prints"
            )

        yield from ((name, journal_key(name, key)) for name, key in found)

    def _begins(self, name: str, key: tuple[int, int]) -> bool:
        """Whether a row begins at a place that no loader has delivered."""
        return self._places[name].has_row(*key)

    def _found(self, row: Any) -> list[tuple[str, tuple[int, int]]]:
        """The part, the file and the place in it of one row; none, if it is not of this loader.

        A location does not tell its part: it is of each part that has the file.
        """
        name, path, byte_offset, row_number = _place_of(row)
        found = []
        for part in [name] if name else self._places:
            places = self._places.get(part)
            place = None if places is None else places.offset(byte_offset, row_number)
            if places is not None and isinstance(path, str) and type(place) is int and 0 <= place < 1 << 63:
                found += [(part, (file, place)) for file in places.files(path)]
        return found

    def is_of(self, group: Group, rows: Container[RowKey]) -> bool:
        """Whether a sample of a group is of one of these rows."""
        return any(journal_key(name, key) in rows for sample in group for name, key in self._found(sample))

    def files_of(self, groups: Iterable[Group]) -> Iterator[GroupFile]:
        """The files that groups are of."""
        known = {
            (sample.source_name or "", sample.source.path) for group in groups for sample in group if sample.source
        }
        for name, path in known:
            for number in self._places[name].files(path)[:1] if name in self._places else ():
                yield name, number, path

    def without(self, packs: Iterable[Pack], excluded: Container[RowKey]) -> list[Pack]:
        """The packs without the pieces of these rows; the references of the packs are samples.

        A pack of which nothing is left keeps two tokens that are not trained, so that no rank misses a batch.
        """
        left = [(pack, [piece for piece in pack if not self.is_of([piece[0]], excluded)]) for pack in packs]
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
