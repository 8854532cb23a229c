"""Batches in the shape of XTuner v1: for each pack a sequence context and its shifted labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from asyncdata.batching.collators.packed import PackedCollator
from asyncdata.batching.collators.torch_tensors import sequence_context, to_torch
from asyncdata.core.settings import Description

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.batching.collators.base import Document

__all__ = ("XTunerCollator",)

Positive = Annotated[int, msgspec.Meta(ge=1)]


class XTunerCollator(Description, frozen=True, kw_only=True):
    """What XTuner's ``sft_llm_collator`` gives: for each pack ``{"seq_ctx": ..., "shifted_labels": ...}``.

    ``seq_ctx`` has ``input_ids`` and ``position_ids``, int64 of shape (1, width); ``cu_seq_lens_q`` and
    ``cu_seq_lens_k``, int32 of shape (num_segments + 1,); ``max_length_q``, ``max_length_k`` and ``num_padding``,
    integers. ``shifted_labels`` is int64 of shape (1, width).

    :ivar max_length: its ``pack_max_length``.
    :ivar pad_id: its ``padding_token_idx``.
    :ivar pad_to_max_length: its ``pack_to_max_length``.
    :ivar pad_chunk: its ``pad_chunk_size``.
    :ivar shift: ``document``: labels are shifted within documents, and no token is left out. ``pack``: as XTuner, over
        their boundaries, so that a document predicts the first label of the next.
    :ivar overlong: ``error``, or ``truncate`` as XTuner; what is dropped then is in ``num_dropped_tokens``.
    :ivar output: ``arrays``: dicts of numpy arrays. ``tensors``: dicts of torch tensors. ``sequence_context``: XTuner's
        own class; it must be installed.
    :raises ConfigError: as :class:`~asyncdata.batching.collators.packed.PackedCollator`.
    """

    takes_packs: ClassVar[bool] = True

    max_length: Positive
    pad_id: int = 0
    pad_to_max_length: bool = True
    pad_chunk: Positive = 256
    shift: Literal["document", "pack"] = "document"
    overlong: Literal["error", "truncate"] = "error"
    output: Literal["arrays", "tensors", "sequence_context"] = "arrays"

    def __call__(self, packs: Sequence[Sequence[Document]]) -> list[dict[str, Any]]:
        """One item for each pack."""
        return [self._item(pack) for pack in packs]

    def _item(self, pack: Sequence[Document]) -> dict[str, Any]:
        collator = PackedCollator(
            max_length=self.max_length,
            pad_to_max_length=self.pad_to_max_length,
            pad_id=self.pad_id,
            pad_chunk=self.pad_chunk,
            shift=self.shift,
            overlong=self.overlong,
        )
        batch = collator([pack])
        fields = {
            "input_ids": batch["input_ids"],
            "cu_seq_lens_q": batch["cu_seqlens"],
            "cu_seq_lens_k": batch["cu_seqlens"],
            "max_length_q": batch["max_seqlen"],
            "max_length_k": batch["max_seqlen"],
            "num_padding": batch["num_padding"],
            "position_ids": batch["position_ids"],
        }
        item: dict[str, Any] = {"seq_ctx": fields, "shifted_labels": batch["shifted_labels"]}
        if self.overlong == "truncate":
            item["num_dropped_tokens"] = batch["num_dropped_tokens"]
        if self.output == "arrays":
            return item

        item = to_torch(item)
        if self.output == "sequence_context":
            item["seq_ctx"] = sequence_context(fields)
        return item
