"""What collators take, and what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from asyncdata.core.columns import Column


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


Keys = Literal["all", "transformers", "verl"]
"""How a batch has items: ``all``: with their counts. ``transformers``: without, and only if there are any, so that the
batch is a call of a model. ``verl``: as ``multi_modal_inputs``, a list with a dict of each row's items.
"""


_MROPE = "mrope"
"""The column of positions in time, height and width, as models of Qwen count them. It becomes a batch's positions."""

_VERL = "multi_modal_inputs"

_NUM_FRAMES = "num_audio_frames"
"""The column of how many frames each sound has, of features that lie end to end."""


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


def filled_items(documents: Sequence[Any]) -> set[str]:
    """The columns of which one of the documents has an item."""
    names = [column.name for column in columns_in(documents) if column.per == "item"]
    return {name for name in names for document in documents if len((_columns_of(document) or {}).get(name, ()))}


def needed_dummy(dummy: Any, documents: Sequence[Any]) -> list[Document]:
    """The dummy without a token that is trained, if there is one and the documents lack a kind of its items."""
    if dummy is None or filled_items([dummy]) <= filled_items(documents):
        return []

    return [Document(dummy.tokens, np.full(len(dummy.tokens), IGNORE), None, dummy)]


def add_columns(
    batch: Batch,
    rows: Sequence[Sequence[Any]],
    is_token: Integers,
    shift: str = "none",
    *,
    keys: Keys = "all",
    packed: bool = False,
) -> None:
    """Add the columns of the documents to the batch; nothing if they have none.

    :param rows: the documents of each row.
    :param is_token: bool of shape (num_rows, width): where the rows' tokens are.
    :param shift: how the batch's labels are shifted; see :class:`~asyncdata.PackedCollator`.
    :param packed: rows have several documents. With ``mrope``, positions then have the batch's own first, which tell
        documents apart.
    :raises ConfigError: AD452, for a name that the batch has already, and for a document that is a piece of a sample
        which has items.
    """
    documents = list(chain.from_iterable(rows))
    for column in columns_in(documents):
        if column.name in batch or (keys == "verl" and column.name == _VERL):
            raise ConfigError(f"AD452 the batch has {column.name!r} already; give the column another name")

        if column.name == _MROPE and (column.per, column.shape, column.numpy.kind) != ("token", (3,), "i"):
            raise ConfigError(
                f"AD452 mrope becomes position_ids: declare Column('mrope', 'int64', shape=(3,)), not {column}"
            )

        if column.per == "token":
            values = [np.concatenate([_of_tokens(document, column, shift) for document in row]) for row in rows]
            if shift == "pack":
                values = [value[1:] if column.follows == "labels" else value[:-1] for value in values]
            array = column.padding(is_token.size).reshape(*is_token.shape, *column.shape)
            array[is_token] = np.concatenate(values)
            batch[column.name] = array.view(column.numpy)
        elif column.per == "sample":
            values = [_value(document, column) for document in documents]
            array = np.stack([column.padding(1)[0] if each is None else each for each in values])
            batch[column.name] = array.view(column.numpy)
        else:
            _add_items(batch, column, [_items(document, column) for document in documents], keys)
    if keys == "verl":
        batch.setdefault(_VERL, [{} for _ in documents])
    for inputs in {"verl": batch.get(_VERL, []), "transformers": [batch], "all": []}[keys]:
        _pad_sounds(inputs)
    if _MROPE in batch:
        _add_mrope(batch, keys, packed=packed)


def _add_items(batch: Batch, column: Column, items: list[Integers], keys: Keys) -> None:
    if keys == "verl":
        inputs = batch.setdefault(_VERL, [{} for _ in items])
        for values, found in zip(items, inputs, strict=True):
            found.update({column.name: values.view(column.numpy)} if len(values) else {})
        return

    if keys == "all" or any(map(len, items)):
        batch[column.name] = np.concatenate(items).view(column.numpy)
    if keys == "all":
        batch[f"{column.name}_counts"] = np.array(list(map(len, items)), np.int64)


def _pad_sounds(inputs: Batch) -> None:
    """Give each sound as many frames as the longest of them has, as a model takes them."""
    lengths = inputs.pop(_NUM_FRAMES, None)
    for name in () if lengths is None else ("input_features", "input_features_mask"):
        frames = inputs[name]
        padded = np.zeros((len(lengths), lengths.max(), *frames.shape[1:]), frames.dtype)
        padded[np.arange(lengths.max()) < lengths[:, None]] = frames
        inputs[name] = padded


def _add_mrope(batch: Batch, keys: Keys, *, packed: bool) -> None:
    """Put the three positions of each token in place of ``position_ids``, or after it."""
    mrope = batch.pop(_MROPE).astype(np.int64).transpose(2, 0, 1)
    own = [batch["position_ids"][None]] if packed or keys == "verl" else []
    positions = np.concatenate([*own, mrope])
    batch["position_ids"] = np.ascontiguousarray(positions.swapaxes(0, 1)) if keys == "verl" else positions


def _columns_of(document: Any) -> Any:
    sample = document.sample if isinstance(document, Document) else document
    return getattr(sample, "columns", None)


def _value(document: Any, column: Column) -> Any:
    return (_columns_of(document) or {}).get(column.name)


def _of_tokens(document: Any, column: Column, shift: str) -> Integers:
    """The values of a document's tokens; padding, if it lacks the column."""
    value: Integers | None = _value(document, column)
    num_tokens = len(document.tokens)
    if value is None and column.name == _MROPE:  # a text: all three count its tokens
        return np.repeat(np.arange(num_tokens, dtype=column.numpy)[:, None], 3, 1)

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
