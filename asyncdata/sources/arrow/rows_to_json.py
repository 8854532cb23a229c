"""Converts Arrow rows of Parquet files and Hugging Face datasets to JSON texts, in a worker, and says which types can
be written so. Runs without numpy.
"""

from __future__ import annotations

import base64
import json
import math
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.sources.files import BlockRows
from asyncdata.sources.row_json import BYTES, PAIRS, encode_row, json_value, without_padding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pyarrow as pa

    Fix = Callable[[Any], Any] | None

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_encode = msgspec.json.Encoder().encode
_encode_bad = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), default=lambda each: type(each).__name__
).encode


class RowWriter:
    """Converts rows to JSON texts. The text of a row depends only on the row, not on its batch.

    ====================================  ==========================================================================
    Arrow                                 JSON
    ====================================  ==========================================================================
    null, boolean, string, struct, list   themselves; a null stays a key of its row, and an item of its list
    struct in a list, or in a map         an object without its fields that are null: they are fields of other rows
    integer                               all its digits
    float                                 shortest text that reads back the same; ``NaN``, ``Infinity``, ``-Infinity``
    decimal, UUID                         text
    date, time, timestamp                 ISO 8601 text, with the offset of a zone; nanoseconds where there are any
    duration                              seconds, a number
    binary                                base64 text
    map                                   an object where its keys are text, else a list of ``[key, value]``
    JSON                                  the value that its text stands for; text that is no JSON stays text
    dictionary, extension                 what it stands for, what it is stored as
    ====================================  ==========================================================================

    Text that is not UTF-8 is copied unchanged; decoding the row reports it as a bad row.

    :param schema: the schema of the batches.
    :param columns: the indices of the columns to use, in the order of a row's keys.
    :param python_values: binary and maps are written so that ``row_json.python_value`` makes Python's values of them;
        nulls and JSON are left as they are.
    :ivar is_padded: whether fields were left out.
    :raises TypeError: for a type that cannot be written as JSON; the message names its column.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str], *, python_values: bool = False) -> None:
        self._names = tuple(columns)
        self._columns = [_Column(name, schema.field(name).type, python_values) for name in columns]

    @property
    def is_padded(self) -> bool:
        return any(column.is_padded for column in self._columns)

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
            return _encode_bad(found).encode("utf-8", "surrogateescape")


class _Column:
    """Converts the values of one column to JSON values."""

    def __init__(self, name: str, kind: pa.DataType, python_values: bool) -> None:
        import pyarrow as pa

        self.name = name
        self.is_padded = False
        self._stored = _stored_type(kind)
        try:
            self._plain = _plain_type(self._stored)
            self._may_pad = not python_values and self._plain.num_fields > 0
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
        if self._may_pad and _has_padding(plain):
            found, given = list(map(without_padding, found)), found
            self.is_padded = self.is_padded or found != given
        fix = self._fix
        return found if fix is None else [value if value is None else fix(value) for value in found]

    def raw_value(self, values: pa.Array) -> Any:
        """The only value; bytes of text that are not UTF-8 are lone surrogates, as ``surrogateescape`` makes them."""
        plain = self.plain(values)
        (found,) = plain.cast(_binary_type(self._plain)).to_pylist()
        value = _unescaped(found, self._plain)
        return value if value is None or self._fix is None else self._fix(value)


def block_rows(rows: Iterable[bytes], num_bytes: int, max_row_bytes: int) -> BlockRows:
    """The reply of a reader for a block with ``rows``: as many as fit into ``num_bytes``; no others are held."""
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
    return BlockRows(b"".join(kept), starts, lengths, array("i", range(len(lengths))), 0)


def _unescaped(value: Any, kind: pa.DataType) -> Any:
    """A value of :func:`_binary_type`, as one of ``kind``."""
    import pyarrow as pa

    if value is None:
        return None

    if _is_text(kind):
        return value.decode("utf-8", "surrogateescape")

    if _is_bytes(kind):
        return base64.b64encode(value).decode("ascii")

    if pa.types.is_struct(kind):
        return {field.name: _unescaped(value[field.name], field.type) for field in kind}

    if _is_list(kind):
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

    if _is_json(kind):
        return None if python_values else json_value

    if pa.types.is_struct(kind):
        return _struct_fixer({field.name: _fixer(field.type, python_values) for field in kind})

    if pa.types.is_map(kind):
        fixers = _fixer(kind.key_type, python_values), _fixer(kind.item_type, python_values)
        if python_values:
            return _map_fixer(*fixers, lambda pairs: {PAIRS: pairs})

        return _map_fixer(*fixers, dict if _is_text(_plain_type(kind.key_type)) else list)

    if python_values and _is_bytes(_plain_type(kind)):
        return lambda value: {BYTES: value}

    return _list_fixer(_fixer(kind.value_type, python_values)) if _is_list(kind) else None


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

    return lambda value: {**value, **{name: fix(value[name]) for name, fix in wanted if value.get(name) is not None}}


def _list_fixer(fix: Fix) -> Fix:
    if fix is None:
        return None

    return lambda value: [item if item is None else fix(item) for item in value]


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

    return _is_all_finite(values.flatten()) if _is_list(kind) else True


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)

    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))

    return all(map(_is_finite, value)) if isinstance(value, list | tuple) else True


def _has_padding(values: pa.Array, *, is_inner: bool = False) -> bool:
    """Whether a struct in a list or a map has a field that is null. May be True if only another row has one."""
    kind = values.type
    if not kind.num_fields:
        return False

    import pyarrow as pa

    if pa.types.is_struct(kind):
        fields = (values.field(number) for number in range(kind.num_fields))
        return any((is_inner and field.null_count) or _has_padding(field, is_inner=is_inner) for field in fields)

    return _has_padding(values.items if pa.types.is_map(kind) else values.values, is_inner=True)


# Types


def shown_type(kind: pa.DataType) -> str:
    """The type for a message, no longer than a line."""
    text = str(kind)
    return text if len(text) <= 200 else f"{text[:200]}..."


def is_same_form(a: pa.DataType, b: pa.DataType) -> bool:
    """Whether values of both types have the same form in JSON. A column of nulls only matches any type."""
    import pyarrow as pa

    a, b = _stored_type(a), _stored_type(b)
    if pa.types.is_null(a) or pa.types.is_null(b) or a == b:
        return True

    if _is_json(a) or _is_json(b):
        return _is_json(a) and _is_json(b)

    if _is_list(a) and _is_list(b):
        return is_same_form(a.value_type, b.value_type)

    if pa.types.is_struct(a) and pa.types.is_struct(b):
        fields = {field.name: field.type for field in b}
        return {field.name for field in a} == set(fields) and all(is_same_form(f.type, fields[f.name]) for f in a)

    if pa.types.is_map(a) and pa.types.is_map(b):
        return is_same_form(a.key_type, b.key_type) and is_same_form(a.item_type, b.item_type)

    a, b = _plain_type(a), _plain_type(b)
    kinds = (pa.types.is_integer, pa.types.is_floating, _is_text, _is_bytes)
    return a == b or any(is_kind(a) and is_kind(b) for is_kind in kinds)


def _is_list(kind: pa.DataType) -> bool:
    """Whether ``to_pylist`` gives lists, and Arrow can cast them."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    """Whether it is a string."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_json(kind: pa.DataType) -> bool:
    """Whether it is text that stands for a JSON value, as of ``Json()`` of datasets."""
    return getattr(kind, "extension_name", "") == "arrow.json"


def _is_bytes(kind: pa.DataType) -> bool:
    """Whether it is binary."""
    import pyarrow as pa

    is_sized = pa.types.is_fixed_size_binary(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or is_sized)


def _nested(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType | None:
    """``kind`` with its inner types changed; None if it has no inner types."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, change(field.type)) for field in kind])

    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(change(kind.value_type)))

    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(change(kind.value_type)))

    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(change(kind.value_type)), kind.list_size)

    return pa.map_(change(kind.key_type), change(kind.item_type)) if pa.types.is_map(kind) else None


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """The value type of a dictionary, or the storage type of an extension."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return kind if kind.extension_name in {"arrow.uuid", "arrow.json"} else _stored_type(kind.storage_type)

    if pa.types.is_dictionary(kind):
        return _stored_type(kind.value_type)

    return _nested(kind, _stored_type) or kind


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """A type for which ``to_pylist`` gives JSON values, or values that need only a small conversion.

    Arrow converts dates and times to text: Python's types are limited to the year 9999 and to microseconds.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_temporal(kind):
        if types.is_interval(kind):
            raise TypeError("an interval of months is not a number of seconds")

        return pa.int64() if types.is_duration(kind) else pa.string()

    if types.is_decimal(kind) or types.is_string_view(kind) or _is_json(kind):
        return pa.string()

    if types.is_binary_view(kind):
        return pa.binary()

    formless = (types.is_list_view, types.is_large_list_view, types.is_union, types.is_run_end_encoded)
    if any(is_formless(kind) for is_formless in formless):
        raise TypeError("cast it to another type")

    return _nested(kind, _plain_type) or kind


def _binary_type(kind: pa.DataType) -> pa.DataType:
    """The type with binary instead of string."""
    import pyarrow as pa

    if pa.types.is_string(kind):
        return pa.binary()

    return pa.large_binary() if pa.types.is_large_string(kind) else _nested(kind, _binary_type) or kind
