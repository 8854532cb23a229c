"""Converts Arrow rows of Parquet files and Hugging Face datasets to JSON texts, in a worker. Runs without numpy."""

from __future__ import annotations

import base64
import json
import math
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.sources.arrow.column_types import (
    binary_type,
    is_bytes,
    is_list,
    is_text,
    plain_type,
    shown_type,
    stored_type,
)
from asyncdata.sources.reader import BlockRows
from asyncdata.sources.row_json import BYTES, PAIRS, encode_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    Fix = Callable[[Any], Any] | None

__all__ = ("RowWriter", "block_rows")

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_encode = msgspec.json.Encoder().encode
_encode_raw = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


class RowWriter:
    """Converts rows to JSON texts. The text of a row depends only on the row, not on its batch.

    ====================================  ==========================================================================
    Arrow                                 JSON
    ====================================  ==========================================================================
    null, boolean, string, struct, list   themselves; a null stays a key of its row
    integer                               all its digits
    float                                 shortest text that reads back the same; ``NaN``, ``Infinity``, ``-Infinity``
    decimal, UUID                         text
    date, time, timestamp                 ISO 8601 text, with the offset of a zone; nanoseconds where there are any
    duration                              seconds, a number
    binary                                base64 text
    map                                   an object where its keys are text, else a list of ``[key, value]``
    dictionary, extension                 what it stands for, what it is stored as
    ====================================  ==========================================================================

    Text that is not UTF-8 is copied unchanged; decoding the row reports it as a bad row.

    :param schema: the schema of the batches.
    :param columns: the indices of the columns to use, in the order of a row's keys.
    :param python_values: binary and maps are written so that ``row_json.python_value`` makes Python's values of them.
    :raises TypeError: for a type that cannot be written as JSON; the message names its column.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str], *, python_values: bool = False) -> None:
        self._names = tuple(columns)
        self._columns = [_Column(name, schema.field(name).type, python_values) for name in columns]

    def __call__(self, batch: pa.RecordBatch) -> list[bytes]:
        """The text of each row."""
        try:
            return self._texts(batch)
        except UnicodeDecodeError:
            return [self._text(batch.slice(row, 1)) for row in range(batch.num_rows)]

    def _texts(self, batch: pa.RecordBatch) -> list[bytes]:
        arrays = [column.plain(batch.column(column.name)) for column in self._columns]
        values = [column.values(found) for column, found in zip(self._columns, arrays, strict=True)]
        rows = [dict(zip(self._names, row, strict=True)) for row in zip(*values, strict=True)]
        if all(map(_is_all_finite, arrays)):
            return [_encode(row) for row in rows]

        return [_encode(row) if _is_finite(row) else encode_row(row) for row in rows]

    def _text(self, row: pa.RecordBatch) -> bytes:
        try:
            return self._texts(row)[0]
        except UnicodeDecodeError:
            found = {column.name: column.raw_value(row.column(column.name)) for column in self._columns}
            return _encode_raw(found).encode("utf-8", "surrogateescape")


class _Column:
    """Converts the values of one column to JSON values."""

    def __init__(self, name: str, kind: pa.DataType, python_values: bool) -> None:
        import pyarrow as pa

        self.name = name
        self._stored = stored_type(kind)
        try:
            self._plain = plain_type(self._stored)
            self._fix = _fixer(self._stored, python_values)
            self.plain(pa.nulls(1, kind))
        except (TypeError, pa.ArrowException) as error:
            raise TypeError(f"column {name!r} is {shown_type(kind)}, which has no form in JSON: {error}") from error

    def plain(self, values: pa.Array) -> pa.Array:
        """``values`` as a type that Python has."""
        for kind in (self._stored, self._plain):
            if values.type != kind:
                values = values.cast(kind)
        return values

    def values(self, plain: pa.Array) -> list[Any]:
        """The values; raises UnicodeDecodeError for text that is none."""
        found: list[Any] = plain.to_pylist()
        fix = self._fix
        return found if fix is None else [value if value is None else fix(value) for value in found]

    def raw_value(self, values: pa.Array) -> Any:
        """The only value; bytes of text that are not UTF-8 are lone surrogates, as ``surrogateescape`` makes them."""
        plain = self.plain(values)
        (found,) = plain.cast(binary_type(self._plain)).to_pylist()
        value = _unescaped(found, self._plain)
        return value if value is None or self._fix is None else self._fix(value)


def block_rows(rows: Sequence[bytes], num_bytes: int, max_row_bytes: int) -> BlockRows:
    """The reply of a reader for a block with ``rows``: as many of them as fit into ``num_bytes``."""
    starts, lengths, kept, size = array("i"), array("i"), [], 0
    for row in rows:
        length = len(row)
        if length > max_row_bytes:
            starts.append(-1)
            lengths.append(-1)
            continue

        lengths.append(length)
        if size + length > num_bytes:
            starts.append(-1)
            continue

        starts.append(size)
        kept.append(row)
        size += length
    return BlockRows(b"".join(kept), starts, lengths, array("i", range(len(rows))), 0)


def _unescaped(value: Any, kind: pa.DataType) -> Any:
    """A value of :func:`binary_type`, as one of ``kind``."""
    import pyarrow as pa

    if value is None:
        return None

    if is_text(kind):
        return value.decode("utf-8", "surrogateescape")

    if is_bytes(kind):
        return base64.b64encode(value).decode("ascii")

    if pa.types.is_struct(kind):
        return {field.name: _unescaped(value[field.name], field.type) for field in kind}

    if is_list(kind):
        return [_unescaped(item, kind.value_type) for item in value]

    if pa.types.is_map(kind):
        return [(_unescaped(key, kind.key_type), _unescaped(item, kind.item_type)) for key, item in value]

    return value


def _fixer(kind: pa.DataType, python_values: bool) -> Fix:
    """The conversion that a value that is not null still needs; None for none."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return _iso

    if pa.types.is_time(kind):
        return _short_fraction

    if pa.types.is_duration(kind):
        per_second = _PER_SECOND[kind.unit]
        return lambda value: value / per_second

    if pa.types.is_struct(kind):
        return _struct_fixer({field.name: _fixer(field.type, python_values) for field in kind})

    if pa.types.is_map(kind):
        fixers = _fixer(kind.key_type, python_values), _fixer(kind.item_type, python_values)
        return _map_fixer(*fixers, _as_pairs if python_values else _object_of(kind.key_type))

    if python_values and is_bytes(plain_type(kind)):
        return lambda value: {BYTES: value}

    return _list_fixer(_fixer(kind.value_type, python_values)) if is_list(kind) else None


def _iso(text: str) -> str:
    """``2024-01-31 12:00:00.500000+0100`` as Python's ``isoformat`` has it."""
    day, _, rest = text.partition(" ")
    if rest.endswith("Z"):
        return f"{day}T{_short_fraction(rest[:-1])}+00:00"

    if rest[-5:-4] in {"+", "-"}:
        return f"{day}T{_short_fraction(rest[:-5])}{rest[-5:-2]}:{rest[-2:]}"

    return f"{day}T{_short_fraction(rest)}" if rest[2:3] == ":" else text


def _short_fraction(text: str) -> str:
    """No fraction of a second, six digits of it, or nine."""
    whole, point, fraction = text.partition(".")
    if not point or not fraction.strip("0"):
        return whole

    fraction = fraction.ljust(6, "0")
    return f"{whole}.{fraction if fraction[6:].strip('0') else fraction[:6]}"


def _struct_fixer(fixers: dict[str, Fix]) -> Fix:
    wanted = [(name, fix) for name, fix in fixers.items() if fix is not None]
    if not wanted:
        return None

    return lambda value: {**value, **{name: fix(value[name]) for name, fix in wanted if value[name] is not None}}


def _list_fixer(fix: Fix) -> Fix:
    if fix is None:
        return None

    return lambda value: [item if item is None else fix(item) for item in value]


def _as_pairs(pairs: list[tuple[Any, Any]]) -> Any:
    return {PAIRS: pairs}


def _object_of(key_type: pa.DataType) -> Callable[[list[tuple[Any, Any]]], Any]:
    """What makes a map of pairs: an object, if the keys are text."""
    return dict if is_text(plain_type(key_type)) else list


def _map_fixer(fix_key: Fix, fix_item: Fix, make: Callable[[list[tuple[Any, Any]]], Any]) -> Fix:
    def fixed(value: list[tuple[Any, Any]]) -> Any:
        pairs = [
            (fix_key(key) if fix_key else key, fix_item(item) if fix_item and item is not None else item)
            for key, item in value
        ]
        return make(pairs)

    return fixed


def _is_all_finite(values: pa.Array) -> bool:
    """Whether it has no NaN and no infinity. May be False if only a null slot has one."""
    import pyarrow as pa

    kind = values.type
    if pa.types.is_floating(kind):
        import pyarrow.compute as pc

        return pc.all(pc.is_finite(values)).as_py() is not False

    if pa.types.is_struct(kind):
        return all(map(_is_all_finite, values.flatten()))

    if pa.types.is_map(kind):
        return _is_all_finite(values.keys) and _is_all_finite(values.items)

    return _is_all_finite(values.flatten()) if is_list(kind) else True


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)

    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))

    return all(map(_is_finite, value)) if isinstance(value, list | tuple) else True
