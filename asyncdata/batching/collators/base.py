"""What collators take, and what they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("IGNORE", "Batch", "Document", "Integers", "joined_labels", "joined_tokens", "padded")

IGNORE = -100
"""The label of a token that is not trained on, which is torch's ``ignore_index``."""

Integers = np.ndarray[Any, np.dtype[Any]]

Batch = dict[str, Any]
"""Arrays and integers by name."""


class Document(NamedTuple):
    """A sample, or a piece of one, as a collator takes it.

    :ivar tokens: integers of shape (num_tokens,), at least one.
    :ivar labels: of the same shape: what is predicted *at* each token, not shifted; -100: not trained on. None: the
        tokens themselves.
    :ivar loss_mask: if there are no labels: 1 for tokens that are trained on, else 0, of shape (num_tokens,).
    :ivar sample: the :class:`~asyncdata.Sample` that it is a piece of, or all of. Of a whole one, row
        collators look up how much of it is padding: ``extra["num_padding"]``.
    """

    tokens: Integers
    labels: Integers | None = None
    loss_mask: Integers | None = None
    sample: Any = None


def joined_tokens(documents: Sequence[Document]) -> Integers:
    """The tokens of all documents, int64, end to end.

    :raises ConfigError: AD451, if there is no document, or an empty one.
    """
    if not documents or not all(len(document.tokens) for document in documents):
        raise ConfigError(
            "AD451 a pack needs a document, and a document a token; drop empty ones before they are packed"
        )

    return np.concatenate([document.tokens for document in documents], dtype=np.int64, casting="same_kind")


def joined_labels(documents: Sequence[Document]) -> Integers:
    """The labels of all documents, int64, end to end.

    :raises ConfigError: AD452, if a document does not have one for each token.
    """
    return np.concatenate([_labels(document) for document in documents], dtype=np.int64, casting="same_kind")


def _labels(document: Document) -> Integers:
    tokens, labels, loss_mask = document.tokens, document.labels, document.loss_mask
    given = labels if labels is not None else loss_mask
    if given is None:
        return tokens

    if len(given) != len(tokens):
        raise ConfigError(
            f"AD452 a document has {len(tokens)} tokens and {len(given)} labels or mask values; each token has one"
        )

    return given if labels is not None else np.where(np.asarray(loss_mask, bool), tokens, IGNORE)


def padded(documents: Sequence[Document], width: int, pad_id: int, *, left: bool) -> Batch:
    """One document a row, each filled up to ``width``: arrays of shape (num_documents, width).

    Padding that documents bring along keeps its tokens, and is padding in all else.

    :raises ConfigError: AD451 and AD452, for something that is not a document.
    """
    lengths = np.array([len(document.tokens) for document in documents])
    columns = np.arange(width)
    is_token = columns >= (width - lengths)[:, None] if left else columns < lengths[:, None]
    input_ids = np.full(is_token.shape, pad_id, np.int64)
    labels = np.full(is_token.shape, IGNORE, np.int64)
    input_ids[is_token], labels[is_token] = joined_tokens(documents), joined_labels(documents)
    starts = (width - lengths if left else np.zeros_like(lengths))[:, None]
    ends = starts + (lengths - _brought_along(documents))[:, None]
    is_attended = is_token & (columns < ends)
    labels[~is_attended] = IGNORE
    if left:  # else the padding before a document would be trained to predict its first token
        labels[(columns == starts) & (starts > 0)] = IGNORE
    return {
        "input_ids": input_ids,
        "labels": labels,
        "attention_mask": is_attended.astype(np.int64),
        "position_ids": (columns - starts) * is_attended,
    }


def _brought_along(documents: Sequence[Document]) -> Integers:
    """How many tokens at each document's end are padding already, according to its sample."""
    return np.array([_num_padding(document) for document in documents], np.int64)


def _num_padding(document: Any) -> int:
    """``extra["num_padding"]`` of a whole sample; 0 for a piece of one.

    :raises ConfigError: AD452, if the sample has fewer tokens.
    """
    sample = document.sample if isinstance(document, Document) else document
    extra = getattr(sample, "extra", None) or {}
    if "num_padding" not in extra or len(sample.tokens) != len(document.tokens):
        return 0

    number, num_tokens = extra["num_padding"], len(document.tokens)
    if not isinstance(number, int | np.integer) or not 0 <= number <= num_tokens:
        raise ConfigError(
            f"AD452 a document of {num_tokens} tokens has extra['num_padding']={number!r}; it counts those of its "
            "tokens, at their end, that are padding"
        )

    return int(number)
