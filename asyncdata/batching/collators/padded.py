"""Makes a padded row of each document, for attention over whole rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
import numpy as np

from asyncdata.batching.collators.base import IGNORE, padded
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.batching.collators.base import Batch, Document

__all__ = ("FixedCollator", "PaddedCollator")

Positive = Annotated[int, msgspec.Meta(ge=1)]


class PaddedCollator(Description, frozen=True, kw_only=True):
    """Makes rows that are as long as the longest document.

    Calling it with documents gives, each int64 of shape (num_documents, width): ``input_ids``; ``labels``, -100 in the
    padding, and at a document's first token after padding, which no token predicts; ``attention_mask``, 1 for tokens
    and 0 for padding; ``position_ids``, from 0 in each document, and 0 in the padding. What ``extra["num_padding"]`` of
    a sample says is padding, at the end of those of :class:`~asyncdata.FixedLengthTokenizeFn`, keeps its tokens, and is
    padding in all else.

    :ivar pad_id: the token of the padding.
    :ivar side: where the padding is.
    :ivar pad_to_multiple_of: rows are that long, or a multiple of it.
    :ivar max_length: no document may be longer; None: no limit.
    :ivar shift_labels: give ``shifted_labels`` in place of ``labels``: ``shifted_labels[i]`` is what ``input_ids[i]``
        is to predict. Models of transformers shift ``labels`` by themselves.
    :raises ConfigError: for a setting that cannot work; when called, AD450 for a document that is too long, AD451 and
        AD452 for something that is not a document.
    """

    takes_packs: ClassVar[bool] = False

    pad_id: int = 0
    side: Literal["right", "left"] = "right"
    pad_to_multiple_of: Positive = 1
    max_length: Positive | None = None
    shift_labels: bool = False

    def check(self) -> None:
        """Check that the longest document still fits after its row is rounded up."""
        if self.max_length is not None and self.max_length % self.pad_to_multiple_of:
            raise ConfigError(
                f"PaddedCollator: max_length={self.max_length} is no multiple of "
                f"pad_to_multiple_of={self.pad_to_multiple_of}"
            )

    def __call__(self, documents: Sequence[Document]) -> Batch:
        """The batch of these documents, one a row."""
        longest = max((len(document.tokens) for document in documents), default=0)
        if self.max_length is not None and longest > self.max_length:
            raise _too_long(longest, self.max_length)

        width = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = padded(documents, width, self.pad_id, left=self.side == "left")
        return _shifted(batch) if self.shift_labels else batch


class FixedCollator(Description, frozen=True, kw_only=True):
    """Rows of exactly ``length``, padded on the right: every batch has the same shape.

    The arrays are those of :class:`PaddedCollator`.

    :ivar length: tokens of every row.
    :ivar pad_id: the token of the padding.
    :ivar shift_labels: as in :class:`PaddedCollator`.
    :raises ConfigError: for a setting that cannot work; when called, AD450 for a document that is too long.
    """

    takes_packs: ClassVar[bool] = False

    length: Positive
    pad_id: int = 0
    shift_labels: bool = False

    def __call__(self, documents: Sequence[Document]) -> Batch:
        """The batch of these documents, one a row."""
        longest = max((len(document.tokens) for document in documents), default=0)
        if longest > self.length:
            raise _too_long(longest, self.length)

        batch = padded(documents, self.length, self.pad_id, left=False)
        return _shifted(batch) if self.shift_labels else batch


def _too_long(length: int, limit: int) -> ConfigError:
    return ConfigError(
        f"AD450 a document of {length} tokens does not fit a row of {limit}; limit it where it is tokenized"
    )


def _shifted(batch: Batch) -> Batch:
    """``shifted_labels`` in place of ``labels``: each at the token before, within its row."""
    labels = batch.pop("labels")
    # No token predicts the first token of a row: before it is padding, or nothing.
    shifted = np.full_like(labels, IGNORE)
    shifted[:, :-1] = np.where(batch["attention_mask"][:, :-1] == 1, labels[:, 1:], IGNORE)
    return {**batch, "shifted_labels": shifted}
