"""The Arrow types that can be written as JSON, and the types that columns are cast to for that. Runs without numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

__all__ = ("binary_type", "is_bytes", "is_list", "is_same_form", "is_text", "plain_type", "shown_type", "stored_type")


def shown_type(kind: pa.DataType) -> str:
    """The type for a message, no longer than a line."""
    text = str(kind)
    return text if len(text) <= 200 else f"{text[:200]}..."


def is_same_form(a: pa.DataType, b: pa.DataType) -> bool:
    """Whether values of both types have the same form in JSON. A column of nulls only matches any type."""
    import pyarrow as pa

    a, b = plain_type(stored_type(a)), plain_type(stored_type(b))
    if pa.types.is_null(a) or pa.types.is_null(b) or a == b:
        return True

    if is_list(a) and is_list(b):
        return is_same_form(a.value_type, b.value_type)

    if pa.types.is_struct(a) and pa.types.is_struct(b):
        fields = {field.name: field.type for field in b}
        return {field.name for field in a} == set(fields) and all(is_same_form(f.type, fields[f.name]) for f in a)

    if pa.types.is_map(a) and pa.types.is_map(b):
        return is_same_form(a.key_type, b.key_type) and is_same_form(a.item_type, b.item_type)

    kinds = (pa.types.is_integer, pa.types.is_floating, is_text, is_bytes)
    return any(is_kind(a) and is_kind(b) for is_kind in kinds)


def is_list(kind: pa.DataType) -> bool:
    """Whether ``to_pylist`` gives lists, and Arrow can cast them."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether it is a string."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_bytes(kind: pa.DataType) -> bool:
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


def stored_type(kind: pa.DataType) -> pa.DataType:
    """The value type of a dictionary, or the storage type of an extension."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return kind if kind.extension_name == "arrow.uuid" else stored_type(kind.storage_type)

    if pa.types.is_dictionary(kind):
        return stored_type(kind.value_type)

    return _nested(kind, stored_type) or kind


def plain_type(kind: pa.DataType) -> pa.DataType:
    """A type for which ``to_pylist`` gives JSON values, or values that need only a small conversion.

    Arrow converts dates and times to text: Python's types are limited to the year 9999 and to microseconds.
    """
    import pyarrow as pa

    types = pa.types
    if types.is_temporal(kind):
        if types.is_interval(kind):
            raise TypeError("an interval of months is not a number of seconds")

        return pa.int64() if types.is_duration(kind) else pa.string()

    if types.is_decimal(kind) or types.is_string_view(kind):
        return pa.string()

    if types.is_binary_view(kind):
        return pa.binary()

    formless = (types.is_list_view, types.is_large_list_view, types.is_union, types.is_run_end_encoded)
    if any(is_formless(kind) for is_formless in formless):
        raise TypeError("cast it to another type")

    return _nested(kind, plain_type) or kind


def binary_type(kind: pa.DataType) -> pa.DataType:
    """The type with binary instead of string."""
    import pyarrow as pa

    if pa.types.is_string(kind):
        return pa.binary()

    return pa.large_binary() if pa.types.is_large_string(kind) else _nested(kind, binary_type) or kind
