"""Plain prompts in batches: reads rows and writes samples without a Python object for each part."""

from __future__ import annotations

from array import array
from operator import sub
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from asyncdata.tokenization.rows import RowDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncdata.tokenization.column_writer import ColumnWriter
    from asyncdata.tokenization.encoders.fast_backends import FlatIds

__all__ = ("EMPTY_PROMPT", "PlainPrompts", "PlainReader", "write_prompts")

Buffer = bytes | memoryview

EMPTY_PROMPT = "empty_prompt"
"""The reason to drop a prompt without text or tokens."""

_NULL = b"null"
_NOTHING = msgspec.Raw(b"")


class PlainPrompts(NamedTuple):
    """The texts of rows, and the values of their columns."""

    texts: list[str]
    columns: dict[str, list[bytes] | list[str]]


class PlainReader:
    """Reads rows whose prompt is a string, and whose other fields need no conversion.

    :param keys: the row's keys of ``prompt``, ``label``, ``metadata`` and ``tools``; None: rows have no such field.
    """

    def __init__(self, keys: Mapping[str, str | None]) -> None:
        self._keys = {name: key for name, key in keys.items() if key is not None}
        self._is_plain = len(set(self._keys.values())) == len(self._keys)  # no key is used twice
        self._decode = RowDecoder(tuple(self._keys.values()), text=self._keys["prompt"], refuses_media=True).all

    def __call__(self, rows: Sequence[Buffer]) -> PlainPrompts | None:
        """The prompts; None if a row is bad or needs a conversion: then the caller reads the rows one by one."""
        found = self._decode(rows) if self._is_plain else None
        if found is None:
            return None

        fields = dict(zip(self._keys, found, strict=True))
        texts: list[str] = fields.pop("prompt")
        columns = {name: _texts(column) for name, column in fields.items()}
        if None in texts or not _is_ordinary(columns):
            return None

        columns.pop("tools", None)
        return PlainPrompts(texts, {**columns, "prompt_text": texts})


def _texts(column: list[msgspec.Raw | None]) -> list[bytes]:
    """The JSON texts of the values; an empty list if no row has one."""
    missing = column.count(None)
    if missing == len(column):
        return []

    return list(
        map(
            bytes,
            (_NOTHING if raw is None else raw for raw in column) if missing else cast("list[msgspec.Raw]", column),
        )
    )


def _is_ordinary(columns: dict[str, list[bytes]]) -> bool:
    """Whether every row has its label, all metadata are objects or null, and all tools are null."""
    tools = columns.get("tools", ())
    if any(text and text != _NULL for text in tools):
        return False

    if "label" in columns and not (columns["label"] and all(columns["label"])):
        return False

    metadata = columns.get("metadata", [])
    for number, text in enumerate(metadata):
        if text and text[0] != _OBJECT:
            if text != _NULL:
                return False

            metadata[number] = b""
    return True


_OBJECT = ord("{")


def write_prompts(prompts: PlainPrompts, flat: FlatIds, max_length: int | None, out: ColumnWriter) -> None:
    """Keep the prompts. Prompts without tokens, or with more than ``max_length`` tokens, are dropped."""
    ends, limit = flat.ends, len(flat.ids) if max_length is None else max_length
    starts = [0, *ends[:-1]]
    lengths = list(map(sub, ends, starts))
    if 0 < min(lengths) and max(lengths) <= limit and all(prompts.texts):
        out.keep_all(range(len(ends)), flat.ids, ends, prompts.columns)
        return

    for row, length in enumerate(lengths):
        if not length or not prompts.texts[row]:
            out.drop(row, EMPTY_PROMPT)
        elif length > limit:
            out.drop(row, "max_length")
        else:
            tokens = array("i", bytes(flat.ids[4 * starts[row] : 4 * ends[row]]))
            out.keep(row, tokens, **_columns_of(prompts, row))


def _columns_of(prompts: PlainPrompts, row: int) -> dict[str, bytes]:
    found = {name: values[row] for name, values in prompts.columns.items() if values and values[row]}
    return {name: value.encode() if isinstance(value, str) else value for name, value in found.items()}
