"""Makes rows of packs, without gaps, and the boundaries that variable-length attention needs.

:class:`XTunerCollator` gives the same rows in the shape of XTuner v1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from asyncdata.batching.collators import (
    IGNORE,
    Batch,
    Document,
    Integers,
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
from asyncdata.batching.torch_tensors import sequence_context, to_torch
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import Description


class _Layout(NamedTuple):
    """The segments of a row.

    :ivar segments: int64 of shape (num_segments,): what attention takes as one sequence each: the documents, with the
        padding of ``segment_multiple_of`` after each, and then the padding of the row.
    :ivar lengths: the same without the padding of ``segment_multiple_of``.
    """

    segments: Integers
    lengths: Integers
    num_documents: int
    num_padding: int
    is_token: Integers


class PackedCollator(Description, frozen=True, kw_only=True):
    """Makes a row of each pack, a list of documents.

    Calling it with the packs of a batch gives a dict:

    - ``input_ids``, int64 of shape (num_packs, width): the documents end to end, then padding.
    - ``labels``, of the same shape and dtype: each trained token at its own place, -100 elsewhere and at the first of
      each document, so that no document predicts the next one. Models of transformers, and their ``Trainer``, take
      them as they are: they shift by themselves. With ``shift`` it is ``shifted_labels`` instead, and there are no
      ``labels``: ``shifted_labels[i]`` is what ``input_ids[i]`` is to predict.
    - ``position_ids``, of the same shape and dtype: from 0 in each segment.
    - ``seq_idx``, int32 of the same shape: the document's number in its row; -1 for padding.
    - ``cu_seqlens``, int32 of shape (num_segments + 1,): where segments begin in the rows laid end to end; the first is
      0, the last ``num_packs * width``, and no segment is empty. Padding is segments too, after the documents.
    - ``max_seqlen``: tokens of the longest segment.
    - ``num_padding``: tokens of padding after the documents, of all rows.
    - ``cu_seqlens_padded``, with ``segment_multiple_of``: where segments begin. ``cu_seqlens`` then counts what
      documents have without their padding, as TransformerEngine asks for.
    - ``num_dropped_tokens``, with ``truncate_packs``.
    - ``source_ids``, with ``source_names``, int32 of the shape of ``input_ids``: the number of the part of the mixture
      that a token is of, as counted there; -1 for padding. A model does not take it: take it out before the call.

    With ``keys="transformers"`` the dict is what a call of a model of transformers takes, and nothing else:
    ``input_ids``, ``labels``, ``position_ids`` and ``seq_idx`` as above, ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32
    of shape (num_segments + 1,), and ``max_length_q`` and ``max_length_k``, integers. A segment is a document with its
    own padding there. Items of columns are left out where no document has any, and their counts always.

    With the column ``mrope`` of Qwen's models ``position_ids`` are of shape (4, num_packs, width): those above, by
    which a model tells documents apart, and the three of the column.

    :ivar max_length: the longest allowed pack, and the width of every row. None: in a loader the ``max_length`` of its
        packing, and room for ``dummy``; elsewhere no limit.
    :ivar pad_to_max_length: False: rows are only as wide as the longest pack.
    :ivar pad_id: the token of the padding.
    :ivar pad_chunk: padding segments have at most so many tokens: one long segment would cost as much as a document.
    :ivar pad_to_multiple_of: rows that are not padded to ``max_length`` are that wide, or a multiple of it.
    :ivar segment_multiple_of: each document is filled up to a multiple of this, for context parallelism.
    :ivar shift: ``none``; ``document``: labels are shifted within each document, -100 at its last token; ``pack``: as
        XTuner, shifted over the boundaries, and the pack's last token is left out.
    :ivar keys: ``flash_attn``, the names above; or ``transformers``.
    :ivar truncate_packs: a pack of more than ``max_length`` tokens is cut, as in XTuner: documents are dropped from the
        end, or the only one is cut. Otherwise it is an error.
    :ivar dummy: a sample with items, such as a small picture. It is put at the end of the shortest pack, without a
        token that is trained, if the documents of a batch have no item of a column of its items: ranks that shard a
        model's vision tower must all run it, or they wait for each other for ever.
    :ivar source_names: the parts of the mixture, for a loss for each: ``source_ids`` are their numbers here, from 0.
    :raises ConfigError: for a setting that cannot work; when called, AD450 for a pack that is too long, AD451 and AD452
        for something that is not a document, or of no part that is named.
    """

    takes_packs: ClassVar[bool] = True

    max_length: Positive | None = None
    pad_to_max_length: bool = True
    pad_id: int = 0
    pad_chunk: Positive = 256
    pad_to_multiple_of: Positive = 1
    segment_multiple_of: Positive = 1
    shift: Literal["none", "document", "pack"] = "none"
    truncate_packs: bool = False
    keys: Literal["flash_attn", "transformers"] = "flash_attn"
    dummy: Any = None
    source_names: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that rows and padding are multiples of a segment, and that ``keys`` has a name for each value."""
        if self.keys == "transformers" and (self.shift != "none" or self.truncate_packs):
            raise ConfigError(
                f'PackedCollator: with keys="transformers" a batch is a call of a model, which shifts labels by itself '
                f"and takes no count of dropped tokens; leave out shift={self.shift!r} and "
                f"truncate_packs={self.truncate_packs} (a packing drops and truncates, and counts it)"
            )

        if self.dummy is not None and (not filled_items([self.dummy]) or self.truncate_packs):
            raise ConfigError(
                "PackedCollator: dummy is a Sample with items, as a loader delivers it for a row with a small picture, "
                "and needs truncate_packs=False, as truncating would drop it"
            )

        multiple = self.segment_multiple_of
        if multiple > 1 and self.shift == "pack":
            raise ConfigError('PackedCollator: shift="pack" is what XTuner does, which knows no segment_multiple_of')

        if self.pad_chunk % multiple or (self.max_length or 0) % multiple:
            raise ConfigError(
                f"PackedCollator: max_length={self.max_length} and pad_chunk={self.pad_chunk} must be multiples of "
                f"segment_multiple_of={multiple}"
            )

    def __call__(self, packs: Sequence[Sequence[Document]]) -> Batch:
        """The batch of these packs, one a row."""
        if not packs:
            raise ConfigError("AD451 a batch needs a pack")

        fitting = [self._fitting(pack) for pack in self._with_dummy(packs)]
        shape = len(packs), self._width([pack for pack, _ in fitting])
        batch: Batch = {
            "input_ids": np.full(shape, self.pad_id, np.int64),
            "labels" if self.shift == "none" else "shifted_labels": np.full(shape, IGNORE, np.int64),
            "position_ids": np.empty(shape, np.int64),
            "seq_idx": np.empty(shape, np.int32),
        }
        rows = [self._fill(pack, *(array[row] for array in batch.values())) for row, (pack, _) in enumerate(fitting)]
        segments = np.concatenate([row.segments for row in rows])
        if self.keys == "transformers":
            batch |= _flash_attention_kwargs(_boundaries(segments), int(segments.max()))
        else:
            batch["cu_seqlens"] = _boundaries(np.concatenate([row.lengths for row in rows]))
            batch["max_seqlen"] = int(segments.max())
            batch["num_padding"] = sum(row.num_padding for row in rows)
            if self.segment_multiple_of > 1:
                batch["cu_seqlens_padded"] = _boundaries(segments)
            if self.truncate_packs:
                batch["num_dropped_tokens"] = sum(num_dropped for _, num_dropped in fitting)
        if self.source_names:
            rows_ids = [source_ids(pack, self.source_names, self.dummy) for pack, _ in fitting]
            batch["source_ids"] = np.stack([ids[row] for ids, row in zip(rows_ids, batch["seq_idx"], strict=True)])
        kept, is_token = [pack for pack, _ in fitting], np.stack([row.is_token for row in rows])
        keys: Keys = "transformers" if self.keys == "transformers" else "all"
        add_columns(batch, kept, is_token, self.shift, keys=keys, packed=True)
        return batch

    def _with_dummy(self, packs: Sequence[Sequence[Document]]) -> list[Sequence[Document]]:
        """The packs; with the dummy, if the documents lack a kind of its items."""
        found = list(packs)
        dummies = needed_dummy(self.dummy, [document for pack in packs for document in pack])
        if not dummies:
            return found

        totals = [sum(self._sizes(pack)) for pack in packs]
        shortest = int(np.argmin(totals))
        found[shortest] = [*packs[shortest], *dummies]
        if self.max_length is not None and sum(self._sizes(found[shortest])) > self.max_length:
            num_tokens = len(self.dummy.tokens)
            raise ConfigError(
                f"AD450 packs of {min(totals)} tokens and more leave no room for the dummy of {num_tokens} in rows of "
                f"{self.max_length}; give the collator a max_length that is larger by that than that of the packing"
            )

        return found

    def _sizes(self, pack: Sequence[Document]) -> list[int]:
        multiple = self.segment_multiple_of
        return [-(-len(document.tokens) // multiple) * multiple for document in pack]

    def _width(self, packs: list[Sequence[Document]]) -> int:
        if self.max_length is not None and self.pad_to_max_length:
            return self.max_length

        multiple = int(np.lcm(self.pad_to_multiple_of, self.segment_multiple_of))
        longest = max(sum(self._sizes(pack)) for pack in packs) - (self.shift == "pack")
        return -(-longest // multiple) * multiple

    def _fitting(self, pack: Sequence[Document]) -> tuple[Sequence[Document], int]:
        """The pack, and how many tokens had to be dropped from it."""
        sizes = self._sizes(pack)
        if self.max_length is None or sum(sizes) <= self.max_length:
            return pack, 0

        if not self.truncate_packs:
            raise ConfigError(
                f"AD450 a pack of {sum(sizes)} tokens does not fit a row of {self.max_length}; give packing and "
                "collator the same max_length and segment_multiple_of"
            )

        num_kept = max(int(np.searchsorted(np.cumsum(sizes), self.max_length, side="right")), 1)
        kept = [_cut(document, self.max_length) for document in pack[:num_kept]]
        return kept, sum(len(document.tokens) for document in pack) - sum(len(document.tokens) for document in kept)

    def _fill(
        self, pack: Sequence[Document], input_ids: Integers, labels: Integers, position_ids: Integers, seq_idx: Integers
    ) -> _Layout:
        """Write a pack into its row of each array."""
        tokens, targets = joined_tokens(pack), joined_labels(pack)
        lengths = np.array([len(document.tokens) for document in pack])
        if self.shift == "pack":
            tokens, targets = tokens[:-1], targets[1:]
            lengths[-1] -= 1
            lengths = lengths[lengths > 0]
        layout = self._layout(lengths, len(input_ids))
        starts = np.cumsum(layout.segments) - layout.segments
        np.subtract(np.arange(len(input_ids)), np.repeat(starts, layout.segments), out=position_ids)
        numbers = np.arange(len(starts), dtype=np.int32)
        numbers[layout.num_documents :] = -1
        seq_idx[:] = np.repeat(numbers, layout.segments)
        place = np.arange(len(input_ids)) < len(tokens)
        if self.segment_multiple_of > 1:
            place = position_ids < np.repeat(layout.lengths * (numbers >= 0), layout.segments)
            seq_idx[~place] = -1
        input_ids[place], labels[place] = tokens, targets
        if self.shift != "pack":
            labels[starts] = IGNORE
        if self.shift == "document":
            labels[:-1] = labels[1:]
            labels[-1] = IGNORE
        return layout._replace(is_token=place)

    def _layout(self, lengths: Integers, width: int) -> _Layout:
        multiple = self.segment_multiple_of
        documents = -(-lengths // multiple) * multiple
        num_padding = width - int(documents.sum())
        num_chunks, rest = divmod(num_padding, self.pad_chunk)
        pads = np.array([self.pad_chunk] * num_chunks + [rest] * (rest > 0), np.int64)
        if not len(documents) + len(pads):
            raise ConfigError('AD451 shift="pack" leaves nothing of a pack of one token; drop it, or pad to max_length')

        segments = np.concatenate([documents, pads]), np.concatenate([lengths, pads])
        return _Layout(*segments, len(documents), num_padding, np.empty(0, np.bool_))


class XTunerCollator(Description, frozen=True, kw_only=True):
    """What XTuner's ``sft_llm_collator`` gives: for each pack ``{"seq_ctx": ..., "shifted_labels": ...}``.

    ``seq_ctx`` has ``input_ids`` and ``position_ids``, int64 of shape (1, width); ``cu_seq_lens_q`` and
    ``cu_seq_lens_k``, int32 of shape (num_segments + 1,); ``max_length_q``, ``max_length_k`` and ``num_padding``,
    integers. ``shifted_labels`` is int64 of shape (1, width). The columns of
    :class:`~asyncdata.xtuner.XTunerTokenizeFn` for pictures are in ``seq_ctx``, as in ``qwen3_vl_sft_collator`` and
    ``intern_s1_vl_sft_collator``: ``pixel_values`` and ``image_grid_thw``, if there are any, ``num_img_tokens``, a
    list for each document, and ``position_ids`` of shape (3, 1, width). Other columns are beside it.

    :ivar max_length: its ``pack_max_length``. None: in a loader that of its packing.
    :ivar pad_id: its ``padding_token_idx``.
    :ivar pad_to_max_length: its ``pack_to_max_length``.
    :ivar pad_chunk: its ``pad_chunk_size``.
    :ivar shift: ``document``: labels are shifted within documents, and no token is left out. ``pack``: as XTuner, over
        their boundaries, so that a document predicts the first label of the next.
    :ivar truncate_packs: cut packs of more than ``max_length`` tokens, as XTuner does; what is dropped then is in
        ``num_dropped_tokens``. Otherwise they are an error.
    :ivar output: ``arrays``: dicts of numpy arrays. ``tensors``: dicts of torch tensors. ``sequence_context``: XTuner's
        own class; it must be installed.
    :raises ConfigError: as :class:`PackedCollator`.
    """

    takes_packs: ClassVar[bool] = True

    max_length: Positive | None = None
    pad_id: int = 0
    pad_to_max_length: bool = True
    pad_chunk: Positive = 256
    shift: Literal["document", "pack"] = "document"
    truncate_packs: bool = False
    output: Literal["arrays", "tensors", "sequence_context"] = "arrays"

    def __call__(self, packs: Sequence[Sequence[Document]]) -> list[dict[str, Any]]:
        """One item for each pack."""
        settings = msgspec.structs.asdict(self)
        output, collator = settings.pop("output"), PackedCollator(**settings)
        names = {column.name for pack in packs for column in columns_in(pack)}
        return [_item(collator([pack]), output, names | {f"{name}_counts" for name in names}) for pack in packs]


def _item(batch: Batch, output: str, names: set[str]) -> dict[str, Any]:
    """XTuner's item of a batch of one pack, with the columns ``names``."""
    positions = batch["position_ids"]
    fields = {
        "input_ids": batch["input_ids"],
        **_flash_attention_kwargs(batch["cu_seqlens"], batch["max_seqlen"]),
        "num_padding": batch["num_padding"],
        "position_ids": positions[1:] if positions.ndim == 3 else positions,
        **_media(batch),
    }
    item: dict[str, Any] = {"seq_ctx": fields, "shifted_labels": batch["shifted_labels"]}
    item |= {name: batch[name] for name in sorted(names & batch.keys())}
    if "num_dropped_tokens" in batch:
        item["num_dropped_tokens"] = batch["num_dropped_tokens"]
    if output == "arrays":
        return item

    item = to_torch(item)
    if output == "sequence_context":
        item["seq_ctx"] = sequence_context(fields)
    return item


def _media(batch: Batch) -> Batch:
    """What XTuner's own object has of a pack's pictures, taken out of the batch."""
    found: Batch = {}
    for name in ("pixel_values", "image_grid_thw", "num_img_tokens"):
        counts = batch.pop(f"{name}_counts", None)
        if counts is None:
            continue

        values = batch.pop(name)
        if name == "num_img_tokens":
            parts = np.split(values, np.cumsum(counts)[:-1])
            found[name] = [part.tolist() or [0] for part in parts]  # 0 is what XTuner has for a text
        elif len(values):
            found[name] = values
    return found


def _flash_attention_kwargs(ends: Integers, longest: int) -> Batch:
    """With the names of transformers, which has the same boundaries for queries and keys, padding included."""
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _boundaries(segments: Integers) -> Integers:
    """Where segments begin, and where the last one ends: int32 of shape (num_segments + 1,)."""
    result = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(segments, out=result[1:])
    return result


def _cut(document: Document, length: int) -> Document:
    """The document's first ``length`` tokens."""
    labels, loss_mask = (None if each is None else each[:length] for each in (document.labels, document.loss_mask))
    return document._replace(tokens=document.tokens[:length], labels=labels, loss_mask=loss_mask)
