"""Puts the columns that samples have beside their tokens into a batch."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.batching.collators.base import Document
from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.batching.collators.base import Batch, Integers
    from asyncdata.core.columns import Column

__all__ = ("add_columns", "columns_in")

_MROPE = "mrope"


def columns_in(documents: Sequence[Any]) -> list[Column]:
    """The columns that the samples of these documents declare, by name.

    :raises ConfigError: AD452, if two samples declare one name differently, or one has arrays that none declares.
    """
    found: dict[str, Column] = {}
    for columns in map(_columns_of, documents):
        declared = getattr(columns, "declared", {})
        if columns and not declared:
            raise ConfigError("AD452 sample.columns is what a tokenize function declares; put other values into extra")

        for name, column in declared.items():
            if found.setdefault(name, column) != column:
                raise ConfigError(f"AD452 a batch has two kinds of the column {name!r}: {found[name]} and {column}")
    return [found[name] for name in sorted(found)]


def add_columns(batch: Batch, rows: Sequence[Sequence[Any]], is_token: Integers, shift: str = "none") -> None:
    """Add the columns of the documents to the batch; nothing if they have none.

    A column ``mrope`` of three numbers a token joins ``position_ids``, which are of shape (4, num_rows, width) then.

    :param rows: the documents of each row.
    :param is_token: bool of shape (num_rows, width): where the rows' tokens are.
    :param shift: how the batch's labels are shifted; see :class:`~asyncdata.PackedCollator`.
    :raises ConfigError: AD452, for a name that the batch has already, and for a document that is a piece of a sample
        which has items.
    """
    documents = list(chain.from_iterable(rows))
    columns = columns_in(documents)
    for column in columns:
        if column.name in batch:
            raise ConfigError(f"AD452 the batch has {column.name!r} already; give the column another name")

        if column.per == "token":
            values = [np.concatenate([_of_tokens(document, column, shift) for document in row]) for row in rows]
            if shift == "pack":
                values = [value[1:] if column.follows == "labels" else value[:-1] for value in values]
            array = column.padding(is_token.size).reshape(*is_token.shape, *column.shape)
            array[is_token] = np.concatenate(values)
            batch[column.name] = array
        elif column.per == "sample":
            values = [_value(document, column) for document in documents]
            batch[column.name] = np.stack([column.padding(1)[0] if each is None else each for each in values])
        else:
            items = [_items(document, column) for document in documents]
            batch[column.name] = np.concatenate(items)
            batch[f"{column.name}_counts"] = np.array(list(map(len, items)), np.int64)
        batch[column.name] = batch[column.name].view(column.numpy)
    if any(column.name == _MROPE and column.shape == (3,) for column in columns):
        # Models of Qwen take four positions: the first tells them where a document begins, the others are M-RoPE's.
        positions = np.moveaxis(batch.pop(_MROPE), 2, 0)
        batch["position_ids"] = np.concatenate([batch["position_ids"][None], positions])


def _columns_of(document: Any) -> Any:
    sample = document.sample if isinstance(document, Document) else document
    return getattr(sample, "columns", None)


def _value(document: Any, column: Column) -> Any:
    return (_columns_of(document) or {}).get(column.name)


def _of_tokens(document: Any, column: Column, shift: str) -> Integers:
    """The values of a document's tokens; padding, if it lacks the column."""
    value: Integers | None = _value(document, column)
    num_tokens = len(document.tokens)
    if value is None and column.name == _MROPE:  # of a text, which has its places in all three
        return np.repeat(np.arange(num_tokens)[:, None], 3, axis=1)

    if value is None:
        return column.padding(num_tokens)

    start = document.start if isinstance(document, Document) else 0
    if len(value) < start + num_tokens:
        raise ConfigError(
            f"AD452 a document has {num_tokens} tokens, and {column.name} only {max(0, len(value) - start)} values for "
            "them; a column has one for each token of its sample"
        )

    value = value[start : start + num_tokens]
    if shift == "document" and column.follows == "labels":
        return np.concatenate([value[1:], column.padding(1)])

    return value


def _items(document: Any, column: Column) -> Integers:
    value: Integers | None = _value(document, column)
    if value is None:
        return column.padding(0)

    if len(value) and isinstance(document, Document) and len(document.tokens) < len(document.sample.tokens):
        raise ConfigError(
            f"AD452 a document is a piece of a sample with {len(value)} items of {column.name}, which belong to the "
            "whole sample; use a packing that cuts no samples, such as SoftPacking, or drop longer ones (max_length)"
        )

    return value
