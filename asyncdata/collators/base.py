"""What collators are given, and what they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("IGNORE", "Batch", "Document", "Integers", "joined_labels", "joined_tokens", "padded")

IGNORE = -100
"""The label of a token that is not trained on, which is torch's ``ignore_index``."""

Integers = np.ndarray[Any, np.dtype[Any]]

Batch = dict[str, Any]
"""Arrays and integers by name."""


class Document(NamedTuple):
    """A sample, or a piece of one, as collators take it.

    :ivar tokens: integers of shape (num_tokens,), at least one.
    :ivar labels: likewise: what is to be predicted *at* each token, not shifted; -100: not trained on. None: the tokens
        themselves.
    :ivar loss_mask: if there are no labels: 1 for tokens that are trained on, else 0, of shape (num_tokens,).
    """

    tokens: Integers
    labels: Integers | None = None
    loss_mask: Integers | None = None


def joined_tokens(documents: Sequence[Document]) -> Integers:
    """The tokens of all documents, int64, end to end.

    :raises ConfigError: AD451, if there is none, or one that is empty.
    """
    if not documents or not all(len(document.tokens) for document in documents):
        raise ConfigError(
            "AD451 a pack needs a document, and a document a token; drop empty ones before they are packed"
        )

    return np.concatenate([document.tokens for document in documents], dtype=np.int64, casting="same_kind")


def joined_labels(documents: Sequence[Document]) -> Integers:
    """Their labels, likewise.

    :raises ConfigError: AD452, if a document has not one for each token.
    """
    return np.concatenate([_labels(document) for document in documents], dtype=np.int64, casting="same_kind")


def _labels(document: Document) -> Integers:
    tokens, labels, loss_mask = document
    given = labels if labels is not None else loss_mask
    if given is None:
        return tokens

    if len(given) != len(tokens):
        raise ConfigError(
            f"AD452 a document has {len(tokens)} tokens and {len(given)} labels or mask values; each token has one"
        )

    return given if labels is not None else np.where(np.asarray(loss_mask, bool), tokens, IGNORE)


def padded(documents: Sequence[Document], width: int, pad_id: int, *, left: bool) -> Batch:
    """One document a row, each filled up to ``width``: arrays of shape (num_documents, width)."""
    lengths = np.array([len(document.tokens) for document in documents])
    columns = np.arange(width)
    is_token = columns >= (width - lengths)[:, None] if left else columns < lengths[:, None]
    input_ids = np.full(is_token.shape, pad_id, np.int64)
    labels = np.full(is_token.shape, IGNORE, np.int64)
    input_ids[is_token], labels[is_token] = joined_tokens(documents), joined_labels(documents)
    positions = np.maximum(columns - (width - lengths)[:, None], 0) if left else columns * is_token
    return {
        "input_ids": input_ids,
        "labels": labels,
        "attention_mask": is_token.astype(np.int64),
        "position_ids": positions,
    }
