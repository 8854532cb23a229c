"""Makes padded rows of documents, for attention over whole rows; of preference pairs, two rows each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from asyncdata.batching.collators.base import (
    IGNORE,
    Document,
    Keys,
    Positive,
    add_columns,
    columns_in,
    filled_items,
    joined_labels,
    joined_tokens,
    needed_dummy,
    source_ids,
)
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.batching.collators.base import Batch, Integers


class PaddedCollator(Description, frozen=True, kw_only=True):
    """Makes rows that are as long as the longest document.

    Calling it with documents gives, each int64 of shape (num_documents, width): ``input_ids``; ``labels``, -100 in the
    padding, and at a document's first token after padding, which no token predicts; ``attention_mask``, 1 for tokens
    and 0 for padding; ``position_ids``, from 0 in each document, and 0 in the padding. What ``extra["num_padding"]`` of
    a sample says is padding, at the end of those of :class:`~asyncdata.FixedLengthTokenizeFn`, keeps its tokens, and is
    padding in all else. With the column ``mrope`` of Qwen's models ``position_ids`` are its own, of shape
    (3, num_documents, width).

    :ivar pad_id: the token of the padding.
    :ivar side: where the padding is.
    :ivar pad_to_multiple_of: rows are that long, or a multiple of it.
    :ivar max_length: no document may be longer; None: no limit.
    :ivar shift_labels: give ``shifted_labels`` in place of ``labels``: ``shifted_labels[i]`` is what ``input_ids[i]``
        is to predict. Models of transformers shift ``labels`` by themselves.
    :ivar keys: ``all``: every array. ``transformers``: what a model and TRL take: items of columns only if there are
        any, and no counts of them. ``verl``: ``loss_mask``, 0 or 1 at each token, in place of ``labels``; items in
        ``multi_modal_inputs``, a list with a dict of each document's own; and with ``mrope`` ``position_ids`` of shape
        (num_documents, 4, width), first those that count tokens.
    :ivar dummy: a sample with items, such as a small picture. It is one row more, the last, without a token that is
        trained, if the documents of a batch have no item of a column of its items: ranks that shard a model's vision
        tower must all run it, or they wait for each other for ever.
    :ivar source_names: the parts of the mixture: ``source_ids``, int32 of shape (num_documents, width), are then their
        numbers here, from 0, and -1 in the padding. A model does not take them: take them out before the call.
    :raises ConfigError: for a setting that cannot work; when called, AD450 for a document that is too long, AD451 and
        AD452 for something that is not a document.
    """

    takes_packs: ClassVar[bool] = False

    pad_id: int = 0
    side: Literal["right", "left"] = "right"
    pad_to_multiple_of: Positive = 1
    max_length: Positive | None = None
    shift_labels: bool = False
    keys: Keys = "all"
    dummy: Any = None
    source_names: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that the longest document still fits after its row is rounded up, and that labels are shifted once."""
        _check_keys(self)
        if self.dummy is not None and not filled_items([self.dummy]):
            raise ConfigError(
                "PaddedCollator: dummy is a Sample with items, as a loader delivers it for a row with a small picture"
            )

        if self.max_length is not None and self.max_length % self.pad_to_multiple_of:
            raise ConfigError(
                f"PaddedCollator: max_length={self.max_length} is no multiple of "
                f"pad_to_multiple_of={self.pad_to_multiple_of}"
            )

    def __call__(self, documents: Sequence[Document]) -> Batch:
        """The batch of these documents, one a row."""
        documents = [*documents, *needed_dummy(self.dummy, documents)]
        width = _width(documents, self.pad_to_multiple_of, self.max_length)
        ids = source_ids(documents, self.source_names, self.dummy) if self.source_names else None
        is_left, is_shifted = self.side == "left", self.shift_labels
        return _padded(documents, width, self.pad_id, self.keys, left=is_left, shifted=is_shifted, ids=ids)


class FixedCollator(Description, frozen=True, kw_only=True):
    """Rows of exactly ``length``, padded on the right: every batch has the same shape.

    The arrays are as :class:`PaddedCollator` makes them.

    :ivar length: tokens of every row.
    :ivar pad_id: the token of the padding.
    :ivar shift_labels: as in :class:`PaddedCollator`.
    :ivar keys: as in :class:`PaddedCollator`.
    :ivar source_names: as in :class:`PaddedCollator`.
    :raises ConfigError: for a setting that cannot work; when called, AD450 for a document that is too long.
    """

    takes_packs: ClassVar[bool] = False

    length: Positive
    pad_id: int = 0
    shift_labels: bool = False
    keys: Keys = "all"
    source_names: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that labels are shifted once."""
        _check_keys(self)

    def __call__(self, documents: Sequence[Document]) -> Batch:
        """The batch of these documents, one a row."""
        _width(documents, self.length, self.length)
        ids = source_ids(documents, self.source_names) if self.source_names else None
        return _padded(documents, self.length, self.pad_id, self.keys, shifted=self.shift_labels, ids=ids)


class PreferenceCollator(Description, frozen=True, kw_only=True):
    """Makes the batches that DPOTrainer and RewardTrainer of TRL take, of the samples of ``PreferenceTokenizeFn``.

    Calling it with n samples gives, each int64 of shape (2 * n, width), first the chosen answers of all, then the
    rejected ones, each after its prompt: ``input_ids``; ``attention_mask``, 1 for tokens and 0 for padding, which is on
    the right; and ``completion_mask``, 1 for tokens that are trained.

    :ivar pad_id: the token of the padding.
    :ivar pad_to_multiple_of: rows are that long, or a multiple of it.
    :ivar completion_mask: whether there is a ``completion_mask``, as for DPO. The model of a RewardTrainer takes none.
    :raises ConfigError: for a setting that cannot work; when called, AD452 for a sample without a rejected answer.
    """

    takes_packs: ClassVar[bool] = False

    pad_id: int = 0
    pad_to_multiple_of: Positive = 1
    completion_mask: bool = True

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """The batch of these pairs."""
        if columns := columns_in(samples):
            raise ConfigError(
                f"AD452 a PreferenceCollator got samples with the column {columns[0].name!r}; rejected answers have "
                "none, so it takes no columns"
            )

        documents = [*samples, *map(_rejected, samples)]
        rows = _padded(documents, _width(documents, self.pad_to_multiple_of), self.pad_id)
        batch = {name: rows[name] for name in ("input_ids", "attention_mask")}
        if self.completion_mask:
            batch["completion_mask"] = (rows["labels"] != IGNORE).astype(np.int64)
        return batch


def _rejected(sample: Any) -> Document:
    """The prompt with the rejected answer."""
    extra = getattr(sample, "extra", None) or {}
    if "rejected_input_ids" not in extra:
        raise ConfigError(
            "AD452 a PreferenceCollator got a sample without a rejected answer; it takes samples of "
            "PreferenceTokenizeFn, not packed"
        )

    tokens = np.array(extra["rejected_input_ids"], np.int64)
    labels = np.full_like(tokens, IGNORE)
    for start, end in extra["rejected_spans"]:
        labels[start:end] = tokens[start:end]
    return Document(tokens, labels)


def _check_keys(collator: PaddedCollator | FixedCollator) -> None:
    if collator.shift_labels and collator.keys != "all":
        raise ConfigError(
            f"{type(collator).__name__}: with keys={collator.keys!r} the trainer shifts labels; leave out shift_labels"
        )


def _width(documents: Sequence[Any], multiple: int, limit: int | None = None) -> int:
    """The tokens of the longest document, rounded up.

    :raises ConfigError: AD450, if a document is longer than ``limit``.
    """
    longest = max((len(document.tokens) for document in documents), default=0)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"AD450 a document of {longest} tokens does not fit a row of {limit}; limit it where it is tokenized"
        )

    return -(-longest // multiple) * multiple


def _padded(
    documents: Sequence[Any],
    width: int,
    pad_id: int,
    keys: Keys = "all",
    *,
    left: bool = False,
    shifted: bool = False,
    ids: Integers | None = None,
) -> Batch:
    """One document a row, each filled up to ``width``: arrays of shape (num_documents, width).

    Padding that documents bring along keeps its tokens, and is padding in all else.

    :param ids: what :func:`source_ids` gives, if the batch shall have them.
    :raises ConfigError: AD451 and AD452, for something that is not a document.
    """
    lengths = np.array([len(document.tokens) for document in documents])
    columns = np.arange(width)
    is_token = columns >= (width - lengths)[:, None] if left else columns < lengths[:, None]
    input_ids = np.full(is_token.shape, pad_id, np.int64)
    labels = np.full(is_token.shape, IGNORE, np.int64)
    input_ids[is_token], labels[is_token] = joined_tokens(documents), joined_labels(documents)
    starts = (width - lengths if left else np.zeros_like(lengths))[:, None]
    ends = starts + (lengths - np.array(list(map(_num_padding, documents)), np.int64))[:, None]
    is_attended = is_token & (columns < ends)
    labels[~is_attended] = IGNORE
    if left:  # else the padding before a document would be trained to predict its first token
        labels[(columns == starts) & (starts > 0)] = IGNORE
    batch: Batch = {
        "input_ids": input_ids,
        "labels": labels,
        "attention_mask": is_attended.astype(np.int64),
        "position_ids": (columns - starts) * is_attended,
    }
    batch = _shifted(batch) if shifted else batch
    if keys == "verl":
        batch["loss_mask"] = (batch.pop("labels") != IGNORE).astype(np.int64)
    if ids is not None:
        batch["source_ids"] = np.where(is_attended, ids[:-1, None], np.int32(-1))
    rows = [[document] for document in documents]
    add_columns(batch, rows, is_token, "document" if shifted else "none", keys=keys)
    return batch


def _num_padding(document: Any) -> int:
    """How many tokens at a document's end are padding already: ``extra["num_padding"]`` of a whole sample, or 0.

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


def _shifted(batch: Batch) -> Batch:
    """``shifted_labels`` in place of ``labels``: each at the token before, within its row."""
    labels = batch.pop("labels")
    # No token predicts the first token of a row: before it is padding, or nothing.
    shifted = np.full_like(labels, IGNORE)
    shifted[:, :-1] = np.where(batch["attention_mask"][:, :-1] == 1, labels[:, 1:], IGNORE)
    return {**batch, "shifted_labels": shifted}
