"""What collators take, and what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError

IGNORE = -100
"""The label of a token that is not trained on, which is torch's ``ignore_index``."""

Integers = np.ndarray[Any, np.dtype[Any]]

Batch = dict[str, Any]
"""Arrays and integers by name."""

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Document(NamedTuple):
    """A sample, or a piece of one, as a collator takes it.

    :ivar tokens: integers of shape (num_tokens,), at least one.
    :ivar labels: of the same shape: what is predicted *at* each token, not shifted; -100: not trained on. None: the
        tokens themselves.
    :ivar loss_mask: if there are no labels: 1 for tokens that are trained on, else 0, of shape (num_tokens,).
    :ivar sample: the :class:`~asyncdata.Sample` that it is a piece of, or all of. Of a whole one, row
        collators look up how much of it is padding: ``extra["num_padding"]``. Its ``columns`` go into the batch.
    :ivar start: the number in the sample of the first token.
    """

    tokens: Integers
    labels: Integers | None = None
    loss_mask: Integers | None = None
    sample: Any = None
    start: int = 0


def joined_tokens(documents: Sequence[Document]) -> Integers:
    """The tokens of all documents, int64, end to end.

    :raises ConfigError: AD451, if there is no document, or an empty one.
    """
    if not documents or not all(len(document.tokens) for document in documents):
        raise ConfigError(
            "AD451 a pack needs a document, and a document a token; drop empty ones before they are packed"
        )

    return np.concatenate([document.tokens for document in documents], dtype=np.int64, casting="same_kind")


def source_ids(documents: Sequence[Any], names: Sequence[str], dummy: Any = None) -> Integers:
    """The place in ``names`` of each document's part of a mixture, and -1 at last: int32 of shape (num_documents + 1,).

    :param dummy: a sample of no part: -1.
    :raises ConfigError: AD452, for a document of another part, or of none.
    """
    found = []
    for document in documents:
        sample = document.sample if isinstance(document, Document) else document
        name = getattr(sample, "source_name", None)
        if name not in names and sample is not dummy:
            raise ConfigError(
                f"AD452 a document is of the part {name!r} of a mixture, and source_names={tuple(names)} has no number "
                "for it; name all parts (of nested mixtures with dots), and leave source_names out without a mixture"
            )

        found.append(names.index(name) if name in names else -1)
    return np.array([*found, -1], np.int32)


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
